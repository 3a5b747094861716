"""The measurements that the documents name run: each once, small, so that their figures mean nothing here. They take minutes: ``OXCCL_LONG=1``."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
BENCH = ROOT / "python" / "bench"

RUN = {
    "against_gloo.py": ("1", "all_reduce"),
    "against_rust.py": ("PEER 1", "times"),
    "campaign.py": ("1", "as it should"),
    "ddp.py": ("1 2 8", "oxccl"),
    "in_place.py": ("1", "ratio"),
    "kills.py": ("2 0.02", "2 kills"),
    "layers.py": ("", "our Rust"),
}
"""What each is given, and a part of what it prints; ``PEER`` is the Rust program beside it."""


def peer() -> str:
    """The Rust program that a measurement compares with, built with the profile of the tests."""
    build = ["cargo", "build", "--quiet", "--profile", "tested", "--example", "all_reduce", "--message-format", "json"]
    done = subprocess.run(build, cwd=ROOT / "python", capture_output=True, text=True, timeout=900, check=True)
    built = (json.loads(line).get("executable") for line in done.stdout.splitlines())
    return next(str(path) for path in built if path)


def test_every_measurement_of_the_documents_is_run_here() -> None:
    named = {name for path in (ROOT / "docs").rglob("*.md") for name in re.findall(r"bench/(\w+\.py)", path.read_text(encoding="utf-8"))}
    assert named >= {"against_gloo.py", "kills.py"}
    assert named == set(RUN)


@pytest.mark.skipif("OXCCL_LONG" not in os.environ, reason="takes minutes: OXCCL_LONG=1 runs it")
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason=os.environ.get("OXCCL_TEST_NO_TORCH", "torch is not installed"))
@pytest.mark.parametrize("name", RUN)
def test_measurement(name: str) -> None:
    arguments, part = RUN[name]
    words = [peer() if word == "PEER" else word for word in arguments.split()]
    done = subprocess.run([sys.executable, str(BENCH / name), *words], capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and part in said, said
