"""The process group for torchft's own manager: torchft's tests of groups, and its manager over a quorum that changes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torchjobs  # noqa: F401 (skips where there is no torch)

if importlib.util.find_spec("torchft") is None:
    pytest.skip("torchft is not installed", allow_module_level=True)

TESTS = Path(__file__).parent
# torchft's tests of Gloo and of wrappers; "baby" ones run Gloo in a child process, which is not replaced.
THEIRS = "(gloo or Gloo or functional or swallow or wrapper or managed) and not baby and not Baby"


def theirs(module: str, folder: Path, *options: str) -> tuple[int, str]:
    """Runs a test file of torchft's wheel with our classes in the place of its own: how many passed, and the output."""
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    empty = folder / "pytest.ini"
    empty.write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "torchft_swap", "-c", str(empty), "--color=no", *options, found.origin],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    return int(passed[1]), done.stdout


def test_torchfts_own_tests_of_process_groups_pass(tmp_path: Path) -> None:
    passed, said = theirs("torchft.process_group_test", tmp_path, "-k", THEIRS)
    assert passed >= 22, said


def test_torchfts_own_tests_of_its_manager_pass_with_our_servers(tmp_path: Path) -> None:
    # Left out: the one that wants the words of a time-out in torchft's client. Our server answers first, and says which rank is missing.
    passed, said = theirs("torchft.manager_integ_test", tmp_path, "-p", "torchft_servers", "-k", "not test_quorum_timeout")
    assert passed >= 6, said
    servers = re.search(r"manager servers of oxccl: (\d+)", said)
    assert servers is not None
    assert int(servers[1]) >= 12, said


REPLICA = """
import os, sys, torch
from datetime import timedelta
from torch.distributed import TCPStore
from torchft import Manager
from oxccl.torchft import ProcessGroupOxccl

name, until = sys.argv[1], int(sys.argv[2])
model = torch.nn.Linear(4, 2, bias=False)
torch.nn.init.zeros_(model.weight)
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
state = lambda: {k: v.clone() for k, v in model.state_dict().items()}
manager = Manager(
    pg=ProcessGroupOxccl(timeout=timedelta(seconds=20)), min_replica_size=1, replica_id=name,
    load_state_dict=lambda s: model.load_state_dict(s), state_dict=state, use_async_quorum=False,
    store_addr="localhost", store_port=store.port, rank=0, world_size=1,
    timeout=timedelta(seconds=20), quorum_timeout=timedelta(seconds=60), hostname="localhost",
)
most, met = 0, None
# So many steps after both have met, whichever came first.
while met is None or manager.current_step() < met + until:
    manager.start_quorum()
    grad = torch.full((2, 4), float(manager.current_step() + 1))
    manager.allreduce(grad).wait()
    if manager.should_commit():
        most = max(most, manager.num_participants())
        if met is None and most > 1:
            met = manager.current_step()
        with torch.no_grad():
            model.weight -= 0.1 * grad
    print("step", manager.current_step(), flush=True)
    if name == "short" and met is not None and manager.current_step() >= met + 3:
        os._exit(9)
print("done", most, manager.current_step(), model.weight.sum().item(), flush=True)
manager.shutdown(wait=False)
os._exit(0)
"""


def test_torchfts_manager_trains_on_after_a_replica_has_died() -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=1500)
    port = lighthouse.address().rsplit(":", 1)[1]
    environment: dict[str, Any] = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
    replicas = [
        subprocess.Popen([sys.executable, "-c", REPLICA, name, "12"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name in ("long", "short")
    ]
    try:
        said = [replica.communicate(timeout=150)[0] for replica in replicas]
    finally:
        for replica in replicas:
            replica.kill()
        lighthouse.shutdown()
    assert replicas[1].returncode == 9, said[1]
    assert replicas[0].returncode == 0, said[0]
    most, steps, total = re.findall(r"done (\d+) (\d+) (\S+)", said[0])[0]
    assert int(most) == 2, said[0]
    # Each step changes eight weights by a tenth of its number.
    assert float(total) == pytest.approx(-0.1 * 8 * sum(range(1, int(steps) + 1)), rel=1e-4), said[0]
