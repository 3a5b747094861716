"""The ``oxccl`` command that the package brings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import jobs
import oxccl

LIMIT = 120


def run(*arguments: str, program: tuple[str, ...] = (sys.executable, "-m", "oxccl")) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=LIMIT, check=False)


def test_the_script_and_the_module_are_the_command() -> None:
    script = os.path.join(sysconfig.get_path("scripts"), "oxccl")
    for program in [(script,), (sys.executable, "-m", "oxccl")]:
        done = run("--version", program=program)
        assert (done.returncode, done.stdout) == (0, f"oxccl {oxccl.__version__}\n"), done.stderr
        assert run("no-such-command", program=program).returncode == 2


def test_it_starts_itself_again_for_its_ranks_and_probes() -> None:
    done = run("bench", "--ranks", "2", "--sizes", "1K", "--check", "--iters", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1] if done.stdout.startswith("#") else done.stdout)
    # The children of isolated groups are another program than the ranks.
    done = run("bench", "--ranks", "2", "--sizes", "1K", "--check", "--iters", "2", "--isolated")
    assert done.returncode == 0, done.stderr
    done = run("backends")
    assert done.returncode == 0, done.stderr
    assert any(line.startswith("gloo") and "yes" in line for line in done.stdout.splitlines()), done.stdout


def test_it_launches_replicas_with_a_lighthouse_of_its_own(tmp_path: Path) -> None:
    body = "import os, oxccl; print(oxccl.LighthouseClient(os.environ['OXCCL_LIGHTHOUSE']).status()['leads'], flush=True)"
    done = run("launch", "--replicas", "2", "--run-dir", str(tmp_path / "run"), "--", sys.executable, "-c", body)
    assert done.returncode == 0, done.stderr
    logs = [path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert sum("True" in log for log in logs) >= 2, logs


def test_a_lighthouse_ends_in_order_when_it_is_interrupted() -> None:
    process = jobs.program([sys.executable, "-m", "oxccl", "lighthouse", "--bind", "127.0.0.1:0"], stderr=subprocess.PIPE)
    assert process.stderr is not None
    line = next(line for line in process.stderr if "lighthouse at" in line)
    url = line.split("lighthouse at ")[1].split()[0]
    assert oxccl.LighthouseClient(url).status()["leads"]
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, rest
    assert "Traceback" not in rest
