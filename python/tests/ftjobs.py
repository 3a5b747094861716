"""Jobs of replicas for tests of `oxccl.ft`: processes over a lighthouse of the test's, which may be killed and started again."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torchjobs  # noqa: F401 (skips where there is no torch)
from jobs import FORKS

LIMIT = 120.0
"""Seconds that a job may take; far more than any needs."""

HEAD = """
import json, os, sys, time
import torch
from torch import nn
from oxccl import ft
torch.set_num_threads(1)
name, lighthouse = sys.argv[1:3]
def tell(**what):
    print(json.dumps({"at": time.monotonic(), **what}), flush=True)
def bits(parameters):
    return [v for p in parameters for v in p.detach().flatten().view(torch.int32).tolist()]
"""


def _live(body: str, log: str, arguments: list[str], environment: dict[str, str]) -> None:
    """An incarnation of a replica, in a process of its own that has imported torch already."""
    for number, path in ((1, log), (2, f"{log}.err")):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    faulthandler.enable()
    gc.freeze()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    exec(compile(body, "replica", "exec"), {"__name__": "__main__"})


class Job:
    """Replicas of one program, by name."""

    def __init__(self, lighthouse: str, body: str, folder: Path) -> None:
        self.lighthouse = lighthouse
        self.body = HEAD + body
        self.folder = folder
        self.running: dict[str, BaseProcess] = {}
        self.incarnations = 0
        self.logs: dict[str, Path] = {}

    def start(self, name: str, *arguments: Any, **environment: str) -> None:
        """Starts an incarnation of replica `name`."""
        self._start(name, self.body, *arguments, **environment)

    def start_also(self, name: str, body: str, *arguments: Any) -> None:
        """Starts another program beside the replicas."""
        self._start(name, HEAD + body, *arguments)

    def _start(self, name: str, body: str, *arguments: Any, **environment: str) -> None:
        self.incarnations += 1
        log = self.folder / f"{name}.{self.incarnations}"
        for path in (log, Path(f"{log}.err")):
            path.touch()
        process = FORKS.Process(target=_live, args=(body, str(log), [name, self.lighthouse, *map(str, arguments)], environment))
        process.start()
        self.running[name] = process
        self.logs[name] = log

    def said(self, name: str) -> list[dict[str, Any]]:
        """What the present incarnation of `name` told so far."""
        lines = self.logs[name].read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def errors(self) -> str:
        """What the replicas wrote to standard error, the end of each."""
        return "\n".join(f"{log}: {Path(f'{log}.err').read_text()[-2000:]}" for log in self.logs.values())

    def until(self, name: str, key: str, least: float) -> dict[str, Any]:
        """Waits until `name` tells a `key` of at least `least`."""
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            found = next((line for line in self.said(name) if line.get(key, least - 1) >= least), None)
            if found is not None:
                return found
            # Who ends wrongly is the cause of whatever does not come.
            assert {process.exitcode for process in self.running.values()} <= {None, 0}, self.errors()
            time.sleep(0.005)
        raise AssertionError(f"{name} did not tell a {key} of {least}: {self.said(name)[-3:]}\n{self.errors()}")

    def kill(self, name: str) -> float:
        """Kills it; when, by the monotonic clock."""
        at = time.monotonic()
        process = self.running.pop(name)
        process.kill()
        process.join()
        return at

    def dies(self, name: str) -> None:
        """Waits until it has killed itself."""
        assert self._end(name) == -signal.SIGKILL, self.errors()

    def fails(self, name: str) -> None:
        """Waits until it has ended with an exception."""
        assert self._end(name) == 1, self.errors()

    def _end(self, name: str) -> int | None:
        process = self.running.pop(name)
        process.join(LIMIT)
        return process.exitcode

    def ends(self) -> dict[str, dict[str, Any]]:
        """Waits for all that run; the last that each told."""
        until = time.monotonic() + LIMIT
        for process in self.running.values():
            process.join(max(until - time.monotonic(), 0.1))
            assert not process.is_alive(), f"a replica does not end\n{self.errors()}"
        assert {p.exitcode for p in self.running.values()} == {0}, self.errors()
        return {name: self.said(name)[-1] for name in self.running}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
            process.join()
