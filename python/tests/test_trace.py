"""PyTorch's own flight-recorder analyser reads what ``oxccl trace merge --torch`` writes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jobs

LIMIT = 120

DIVERGES = """
world = init()
x = np.ones(4, dtype=np.float32)
world.all_reduce(x)
try:
    world.all_reduce(np.ones(8, dtype=np.float32)) if world.rank == 0 else world.broadcast(x, 0)
except oxccl.Error as error:
    print(error)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason=os.environ.get("OXCCL_TEST_NO_TORCH", "torch is not installed"))
def test_pytorchs_analyser_names_the_rank_that_called_another_collective(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    for code, out, err in jobs.ends(jobs.script(DIVERGES, 2, tmp_path, OXCCL_FLIGHT_RECORDER_DIR=str(records))):
        assert code == 0, err
        assert "different collectives" in out, out
    files = sorted(str(path) for path in records.iterdir())
    assert len(files) == 2, files
    merged = run("oxccl", "trace", "merge", *files, "--torch", str(tmp_path / "for-torch"))
    assert merged.returncode == 1, merged.stderr
    assert "rank 1 entered broadcast" in merged.stdout, merged.stdout
    read = run("torch.distributed.flight_recorder.fr_trace", str(tmp_path / "for-torch"))
    said = read.stdout + read.stderr
    assert read.returncode == 0, said
    assert "Culprit rank 1" in said, said
    assert "COLLECTIVE_TYPE_MISMATCH" in said, said
    # The operation before it agrees, and is no finding.
    assert said.count("has errors") == 1, said
