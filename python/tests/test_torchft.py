"""The process group for torchft's own manager: torchft's tests of groups, and its manager over a quorum that changes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from ftjobs import Job  # skips where there is no torch

if importlib.util.find_spec("torchft") is None:
    pytest.skip("torchft is not installed", allow_module_level=True)

TESTS = Path(__file__).parent
# torchft's tests of Gloo and of wrappers; "baby" ones run Gloo in a child process, which is not replaced.
THEIRS = "(gloo or Gloo or functional or swallow or wrapper or managed) and not baby and not Baby"


def run_theirs(folder: Path, module: str, *options: str) -> tuple[int, str]:
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


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[tuple[int, str]]]]:
    """Both files at once: they wait more than they compute."""
    files = {
        "groups": ("torchft.process_group_test", "-k", THEIRS),
        # Left out: the one that wants the words of a time-out in torchft's client. Our server answers first, and says which rank is missing.
        "manager": ("torchft.manager_integ_test", "-p", "torchft_servers", "-k", "not test_quorum_timeout"),
    }
    with ThreadPoolExecutor() as pool:
        yield {name: pool.submit(run_theirs, tmp_path_factory.mktemp(name), *file) for name, file in files.items()}


def test_torchfts_own_tests_of_process_groups_pass(theirs: dict[str, Future[tuple[int, str]]]) -> None:
    passed, said = theirs["groups"].result()
    assert passed >= 22, said


def test_a_time_out_that_is_set_later_holds_for_configuring_too() -> None:
    from torch.distributed import TCPStore

    import oxccl
    from oxccl.torchft import ProcessGroupOxccl

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupOxccl(timeout=timedelta(seconds=300))
    group.set_timeout(timedelta(milliseconds=50))
    begun = time.monotonic()
    with pytest.raises(oxccl.Timeout, match="waiting for rank 1 of 2"):
        group.configure(f"localhost:{store.port}/alone", "0", 0, 2)
    assert time.monotonic() - begun < 60


def test_torchfts_own_tests_of_its_manager_pass_with_our_servers(theirs: dict[str, Future[tuple[int, str]]]) -> None:
    passed, said = theirs["manager"].result()
    assert passed >= 6, said
    servers = re.search(r"manager servers of oxccl: (\d+)", said)
    assert servers is not None
    assert int(servers[1]) >= 12, said


# A step takes a while, as a real one does: alone a replica would do a thousand in a second.
REPLICA = """
from datetime import timedelta
from torch.distributed import TCPStore
from torchft import Manager
from oxccl.torchft import ProcessGroupOxccl

stop = sys.argv[3]
model = torch.nn.Linear(4, 2, bias=False)
torch.nn.init.zeros_(model.weight)
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupOxccl(timeout=timedelta(seconds=20)), min_replica_size=1, replica_id=name,
    load_state_dict=model.load_state_dict, state_dict=lambda: {k: v.clone() for k, v in model.state_dict().items()}, use_async_quorum=False,
    store_addr="localhost", store_port=store.port, rank=0, world_size=1, lighthouse_addr=lighthouse,
    timeout=timedelta(seconds=20), quorum_timeout=timedelta(seconds=60), hostname="localhost",
)
last = most = 0
while not last or manager.current_step() < last:
    time.sleep(0.01)
    if os.path.exists(stop):
        last = int(open(stop).read())
    manager.start_quorum()
    grad = torch.full((2, 4), float(manager.current_step() + 1))
    manager.allreduce(grad).wait()
    if manager.should_commit():
        with torch.no_grad():
            model.weight -= 0.1 * grad
        members = manager.num_participants()
        most = max(most, members)
        tell(step=manager.current_step(), members=members, left_alone=most - members)
    else:
        tell(lost=manager.current_step(), error=str(manager.errored()))
tell(done=manager.current_step(), total=model.weight.sum().item())
manager.shutdown(wait=False)
os._exit(0)
"""


@pytest.mark.parametrize("first", ["survives", "dies"])
def test_torchfts_manager_trains_on_after_a_replica_has_died(first: str, tmp_path: Path) -> None:
    from torchft.coordination import LighthouseServer

    stop = tmp_path / "stop"
    second = "dies" if first == "survives" else "survives"
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=1500)
    port = lighthouse.address().rsplit(":", 1)[1]
    try:
        with Job(f"http://127.0.0.1:{port}", REPLICA, tmp_path) as job:
            job.start(first, stop)
            job.until(first, "step", 1)
            job.start(second, stop)
            for name in (first, second):
                job.until(name, "members", 2)
            job.kill("dies")
            alone = job.until("survives", "left_alone", 1)["step"]
            (tmp_path / "new").write_text(str(alone + 5))
            (tmp_path / "new").rename(stop)
            ended = job.ends()["survives"]
    finally:
        lighthouse.shutdown()
    assert ended["done"] >= alone + 5
    # Each step changes eight weights by a tenth of its number: none was lost, and none counted twice.
    assert ended["total"] == pytest.approx(-0.1 * 8 * sum(range(1, ended["done"] + 1)), rel=1e-4)
