"""Jobs for tests: ranks as processes of their own, each with a world."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import oxccl

LIMIT = 120.0
"""Seconds that a job may take; far more than any needs."""


PRELOAD = ["numpy", "ml_dtypes", "pytest", "oxccl"]
# A rank computes on one thread.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
# Ranks are forked off a process that has imported what takes its time, and made no group.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(PRELOAD)
# It takes a while to end, and the tests' end is the parent's.
atexit.register(getattr(forkserver, "_forkserver")._stop)  # noqa: B009

_started: list[subprocess.Popen[str]] = []


def program(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """Starts a program, which does not outlive the test (`conftest.py`)."""
    process = subprocess.Popen(command, text=True, **options)
    _started.append(process)
    return process


def end_programs() -> None:
    """Ends what still runs, and closes its pipes."""
    while _started:
        process = _started.pop()
        process.kill()
        with process:
            pass


def run(ranks: int, body: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """Calls ``body(world, *arguments)`` on each rank of a new job and gives what they return, by rank."""
    return run_with(oxccl.init, ranks, body, *arguments, **options)


def run_with(
    start: Callable[..., Any],
    ranks: int,
    body: Callable[..., Any],
    *arguments: Any,
    context: Any = None,
    **options: Any,
) -> list[Any]:
    """As `run`, where ``start(address, rank=, world_size=, **options)`` gives what `body` gets first, and `context` starts the processes."""
    context = context or FORKS
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/meeting"
        processes = []
        results: dict[Connection, int] = {}
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(theirs, start, body, address, rank, ranks, arguments, options))
            process.start()
            theirs.close()
            processes.append(process)
            results[ours] = rank
        found: list[Any] = [None] * ranks
        failures: list[str] = []
        until = time.monotonic() + LIMIT
        try:
            while results:
                ready = wait(list(results), timeout=until - time.monotonic())
                if not ready:
                    raise AssertionError(f"ranks {sorted(results.values())} gave no result within {LIMIT} s")
                for connection in ready:
                    assert isinstance(connection, Connection)
                    rank = results.pop(connection)
                    try:
                        is_ok, value = connection.recv()
                    except EOFError:
                        is_ok, value = True, None
                        if not getattr(body, "dies", False):
                            failures.append(f"rank {rank} ended without a result")
                    if is_ok:
                        found[rank] = value
                    else:
                        failures.append(f"rank {rank}:\n{value}")
        finally:
            for process in processes:
                process.join(10 if not results else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
        assert not failures, "\n".join(failures)
        return found


def _rank(
    result: Connection,
    start: Callable[..., Any],
    body: Callable[..., Any],
    address: str,
    rank: int,
    ranks: int,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    # What was imported before the fork stays: no collection need look through it.
    gc.freeze()
    try:
        world = start(address, rank=rank, world_size=ranks, **options)
        value = body(world, *arguments)
    except BaseException:
        result.send((False, traceback.format_exc()))
    else:
        result.send((True, value))


def alone(**options: Any) -> oxccl.World:
    """A world of this process only."""
    folder = tempfile.TemporaryDirectory()
    # The world's store stays in use as long as the world.
    atexit.register(folder.cleanup)
    return oxccl.init(f"file://{folder.name}/meeting", rank=0, world_size=1, **options)


def script(text: str, ranks: int, folder: Path, **environment: str) -> list[subprocess.Popen[str]]:
    """Starts a program on each rank. It has ``init()``, ``together()``, which waits once for all ranks without any group, and the usual modules."""
    head = (
        "import os, sys, time, signal, threading, gc\nimport numpy as np\nimport oxccl\n"
        f"rank = int(sys.argv[1])\nranks = {ranks}\naddress = 'file://{folder}/meeting'\n"
        "def init(**options):\n    return oxccl.init(address, rank=rank, world_size=ranks, **options)\n"
        "def together():\n"
        f"    open('{folder}/ready' + str(rank), 'w').close()\n"
        f"    while not all(os.path.exists('{folder}/ready' + str(r)) for r in range(ranks)):\n        time.sleep(0.001)\n"
    )
    return [
        program(
            [sys.executable, "-X", "faulthandler", "-c", head + text, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        for rank in range(ranks)
    ]


def ends(processes: list[subprocess.Popen[str]], timeout: float = LIMIT) -> list[tuple[int, str, str]]:
    """Waits for programs: exit status, output and errors of each. A program that takes too long is ended and fails the test."""
    until = time.monotonic() + timeout
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(until - time.monotonic(), 0.1))
            ended.append((process.returncode, out, err))
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.communicate()
    return ended
