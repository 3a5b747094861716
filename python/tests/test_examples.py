"""The examples, as a user runs them."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import jobs
import oxccl

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, ranks: int) -> list[str]:
    """Runs an example on `ranks` ranks by hand; what each prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    processes = [
        jobs.program([sys.executable, str(EXAMPLES / name)], env={**shared, "RANK": str(rank)}, stdout=subprocess.PIPE) for rank in range(ranks)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, said
    return said


@pytest.mark.parametrize("ranks", [1, 3])
def test_numpy_all_reduce(ranks: int) -> None:
    said = run("numpy_all_reduce.py", ranks)
    answers = {line.split(": ")[1] for line in said}
    assert len(answers) == 1
    found = [float(x) for x in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", answers.pop())]
    assert found == pytest.approx([3.0, -1.0, 0.5], abs=0.1)
    assert sorted(line.split(":")[0] for line in said) == [f"rank {r} of {ranks}" for r in range(ranks)]


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason=os.environ.get("OXCCL_TEST_NO_TORCH", "torch is not installed"))


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason=os.environ.get("OXCCL_TEST_NO_JAX", "JAX is not installed"))
def test_jax_data_parallel() -> None:
    said = "".join(run("jax_data_parallel.py", 2))
    digests = re.findall(r"rank \d parameters (\w{16})", said)
    assert len(digests) == 2 and len(set(digests)) == 1, said
    first, last = (sum(float(x) for x in re.findall(rf"step {n} loss (\S+)", said)) for n in (0, 299))
    assert last < first / 4, said


@needs_torch
def test_ft_transformer() -> None:
    said = subprocess.run([sys.executable, str(EXAMPLES / "ft_transformer.py")], stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout
    ends = re.findall(r"^(\w): done: parameters (\w+)$", said, re.MULTILINE)
    assert [name for name, _ in ends] == ["a", "b", "c"], said
    assert len({digest for _, digest in ends}) == 1, said
    participants = [int(n) for n in re.findall(r"participants (\d)", said)]
    assert 2 in participants[20:] and participants[-1] == 3, said
    losses = [float(x) for x in re.findall(r"loss (\S+)", said)]
    assert losses[-1] < 3.5 < losses[0], said


@needs_torch
def test_ft_hsdp() -> None:
    said = subprocess.run([sys.executable, str(EXAMPLES / "ft_hsdp.py")], stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout
    ends = re.findall(r"^(\w): done: parameters (\w+)$", said, re.MULTILINE)
    assert [name for name, _ in ends] == ["a", "a", "b", "b"], said
    assert len({digest for _, digest in ends}) == 1, said
    participants = [int(n) for n in re.findall(r"participants (\d)", said)]
    assert 1 in participants[20:] and participants[-1] == 2, said
    losses = [float(x) for x in re.findall(r"loss (\S+)", said)]
    assert losses[-1] < losses[0] / 10, said


@needs_torch
def test_ft_diloco() -> None:
    said = subprocess.run([sys.executable, str(EXAMPLES / "ft_diloco.py")], stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout
    # Two processes print, so a line may begin before another one's end.
    ends = re.findall(r"(\w): done: parameters (\w{16}), sent (\d+) bytes", said)
    assert sorted(name for name, _, _ in ends) == ["a", "b"], said
    assert len({digest for _, digest, _ in ends}) == 1, said
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d{4})", said)]
    assert sum(losses[-8:]) < sum(losses[:8]) / 2, said


def pages_scripts() -> list[str]:
    """The programs at the head of the page on this package: that for torch and the one without it."""
    page = Path(__file__).parent.parent.parent / "docs" / "python.md"
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[:2]


@needs_torch
def test_the_script_at_the_head_of_the_page_trains_under_torchrun(tmp_path: Path) -> None:
    text = pages_scripts()[0]
    assert sum(line.strip() != "" for line in text.splitlines()) <= 11
    (tmp_path / "train.py").write_text(text)
    # A file for each rank: what two of them print at once is not in lines.
    logs = tmp_path / "logs"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--log-dir", str(logs), "--redirects", "1", str(tmp_path / "train.py")]
    done = subprocess.run(launcher, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said = [file.read_text() for file in sorted(logs.rglob("stdout.log"))]
    assert [re.findall(r"^(\d) \d+\.\d+$", text, re.MULTILINE) for text in said] == [["0"], ["1"]], said


def test_the_script_of_the_page_without_torch_sums(tmp_path: Path) -> None:
    (tmp_path / "sum.py").write_text(pages_scripts()[1])
    said = run(str(tmp_path / "sum.py"), 2)
    assert said == [f"rank {r} of 2: [1. 1. 1. 1.]\n" for r in range(2)]


@needs_torch
def test_the_script_of_the_page_on_fault_tolerance_trains(tmp_path: Path) -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "python-ft.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    tells = "print(manager.current_step(), [float(p.detach().sum()) for p in model.parameters()])\n"
    text = blocks[0].replace("current_step() < 1000", "current_step() < 20").replace("manager.shutdown()", f"{tells}manager.shutdown()")
    with oxccl.Lighthouse(min_replicas=1, initial_replicas=2) as lighthouse:
        for name in ("a", "b"):
            own = text.replace('replica_id="a"', f'replica_id="{name}"').replace("http://127.0.0.1:29510", lighthouse.address)
            (tmp_path / f"{name}.py").write_text(own)
        replicas = [jobs.program([sys.executable, str(tmp_path / f"{name}.py")], stdout=subprocess.PIPE) for name in ("a", "b")]
        said = [replica.communicate(timeout=120)[0] for replica in replicas]
    assert [replica.returncode for replica in replicas] == [0, 0], said
    assert said[0].startswith("20 [") and said[0] == said[1], said


def test_examples_are_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 80, path
