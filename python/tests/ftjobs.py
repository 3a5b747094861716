"""Jobs of replicas for tests of `oxccl.ft`: processes over a lighthouse of the test's, which may be killed and started again."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(os.environ.get("OXCCL_TEST_NO_TORCH", "torch is not installed"), allow_module_level=True)

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


class Job:
    """Replicas of one program, by name."""

    def __init__(self, lighthouse: str, body: str, folder: Path) -> None:
        self.lighthouse = lighthouse
        self.body = HEAD + body
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.lives = 0
        self.logs: dict[str, Path] = {}

    def start(self, name: str, *arguments: Any, **environment: str) -> None:
        """Starts a life of replica `name`."""
        self._start(name, self.body, *arguments, **environment)

    def start_also(self, name: str, body: str, *arguments: Any) -> None:
        """Starts another program beside the replicas."""
        self._start(name, HEAD + body, *arguments)

    def _start(self, name: str, body: str, *arguments: Any, **environment: str) -> None:
        self.lives += 1
        log = self.folder / f"{name}.{self.lives}"
        with open(log, "wb") as out, open(f"{log}.err", "wb") as err:
            command = [sys.executable, "-X", "faulthandler", "-c", body, name, self.lighthouse, *map(str, arguments)]
            self.running[name] = subprocess.Popen(command, stdout=out, stderr=err, env={**os.environ, **environment})
        self.logs[name] = log

    def said(self, name: str) -> list[dict[str, Any]]:
        """What the present life of `name` told so far."""
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
            assert {process.poll() for process in self.running.values()} <= {None, 0}, self.errors()
            time.sleep(0.005)
        raise AssertionError(f"{name} did not tell a {key} of {least}: {self.said(name)[-3:]}\n{self.errors()}")

    def kill(self, name: str) -> float:
        """Kills it; when, by the monotonic clock."""
        at = time.monotonic()
        self.running[name].kill()
        self.running.pop(name).wait()
        return at

    def dies(self, name: str) -> None:
        """Waits until it has killed itself."""
        assert self.running[name].wait(LIMIT) == -signal.SIGKILL, self.errors()
        del self.running[name]

    def ends(self) -> dict[str, dict[str, Any]]:
        """Waits for all that run; the last that each told."""
        until = time.monotonic() + LIMIT
        for process in self.running.values():
            try:
                process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"a replica does not end\n{self.errors()}") from None
        assert {p.returncode for p in self.running.values()} == {0}, self.errors()
        return {name: self.said(name)[-1] for name in self.running}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
