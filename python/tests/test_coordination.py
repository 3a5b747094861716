"""Lighthouse, manager servers and their clients."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import jobs
import oxccl

LIMIT = 60.0


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Makes the calls at the same time, each on a thread, and gives what they return or raise."""
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
        assert not thread.is_alive()
    return found


class Replica:
    """A replica of one rank."""

    def __init__(self, name: str, lighthouse: oxccl.Lighthouse, **options: Any) -> None:
        self.server = oxccl.ManagerServer(f"{name}:1", lighthouse.address, store_address=f"store-of-{name}:1", **options)
        self.client = oxccl.ManagerClient(self.server.address)

    def quorum(self, step: int = 0, **options: Any) -> oxccl.QuorumResult:
        return self.client.quorum(0, step, checkpoint_metadata=f"from {self.server.replica_id}", timeout=LIMIT, **options)


def test_replicas_meet_vote_and_go_on_without_one_that_left() -> None:
    with oxccl.Lighthouse(min_replicas=1, initial_replicas=2) as lighthouse:
        a, b = Replica("a", lighthouse), Replica("b", lighthouse)
        first = together(a.quorum, b.quorum)
        assert [q.replica_rank for q in first] == [0, 1], first
        assert {q.replica_world_size for q in first} == {2}
        assert {q.quorum_id for q in first} == {first[0].quorum_id}
        assert first[0].replica_ids == ["a:1", "b:1"]
        assert {q.store_address for q in first} == {"store-of-a:1"}
        # At step 0 all take the state of one.
        assert [q.heal for q in first] == [False, True]
        assert first[1].recover_src_manager_address == a.server.address
        source = oxccl.ManagerClient(first[1].recover_src_manager_address)
        assert source.checkpoint_metadata(0) == "from a:1"
        epoch = first[0].quorum_id
        assert a.client.should_commit(0, 0, True, quorum_id=epoch) is True
        assert b.client.should_commit(0, 0, False, quorum_id=epoch) is False
        with oxccl.LighthouseClient(lighthouse.address) as client:
            status = client.status()
            assert [p["replica_id"] for p in status["participants"]] == ["a:1", "b:1"]
            assert status["quorum_id"] == epoch
        with a.client.watch(0) as watch:
            with b.server:
                pass
            alone = a.quorum(1)
            # It left: to the others that is no death, which would have ended their epoch.
            assert watch.next(timeout=0.5) is None
        assert (alone.replica_world_size, alone.replica_ids) == (1, ["a:1"])
        assert alone.quorum_id > epoch
        a.server.shutdown()


def test_all_ranks_of_a_replica_vote_and_one_no_is_a_no() -> None:
    with oxccl.Lighthouse() as lighthouse, oxccl.ManagerServer("r:1", lighthouse.address, store_address="r:2", world_size=2) as server:
        ranks = [oxccl.ManagerClient(server.address) for _ in range(2)]
        found = together(*(partial(ranks[n].quorum, n, 0, timeout=LIMIT) for n in range(2)))
        epoch = {q.quorum_id for q in found}.pop()
        for votes in [(True, True), (True, False), (False, True)]:
            step = 1 + sum(votes) + votes[0]
            calls = [partial(ranks[n].should_commit, n, step, votes[n], quorum_id=epoch, timeout=LIMIT) for n in range(2)]
            said = together(*calls)
            assert said == [all(votes)] * 2
        with pytest.raises(oxccl.Timeout, match="1"):
            ranks[0].should_commit(0, 9, True, quorum_id=epoch, timeout=0.2)


def test_a_death_ends_the_epoch_of_the_others_and_names_the_dead() -> None:
    with oxccl.Lighthouse(initial_replicas=2) as lighthouse:
        a, b = Replica("a", lighthouse), Replica("b", lighthouse)
        with a.client.watch(0) as watch:
            found = together(a.quorum, b.quorum)
            assert watch.next(timeout=0) is None
            # Without leaving: the lighthouse takes it for a death.
            b.server.shutdown()
            event = watch.next(timeout=LIMIT)
            assert event is not None
            assert (event.kind, event.quorum_id, event.departed) == ("abort_epoch", found[0].quorum_id, ["b:1"])
            waiting = threading.Thread(target=watch.next)
            waiting.start()
        waiting.join(LIMIT)
        assert not waiting.is_alive()
        a.server.shutdown()


def test_a_report_ends_the_epoch_for_all_and_an_order_reaches_its_replica() -> None:
    with oxccl.Lighthouse(initial_replicas=2) as lighthouse:
        a, b = Replica("a", lighthouse), Replica("b", lighthouse)
        with a.client.watch(0) as watch, oxccl.LighthouseClient(lighthouse.address) as operator:
            epoch = together(a.quorum, b.quorum)[0].quorum_id
            b.client.report(epoch, "a link broke")
            event = watch.next(timeout=LIMIT)
            assert event is not None
            assert (event.kind, event.quorum_id, event.departed) == ("abort_epoch", epoch, [])
            assert "a link broke" in event.reason
            with pytest.raises(oxccl.Error, match="a:1") as known:
                operator.drain("c")
            assert known.value.kind == "NotFound"
            assert operator.drain("a", "for a test") == ["a:1"]
            last = together(lambda: a.quorum(1), lambda: b.quorum(1))
            assert [q.draining for q in last] == [True, False]
        a.server.shutdown()
        b.server.shutdown()


def test_training_that_moves_is_not_taken_for_dead_and_one_that_stands_is() -> None:
    with oxccl.Lighthouse(initial_replicas=2, join_timeout=0.1) as lighthouse:
        a, b = (Replica(name, lighthouse, progress_timeout=1.5) for name in "ab")
        epoch = together(a.quorum, b.quorum)[0].quorum_id
        with a.client.watch(0) as watch, a.client.progress(0, every=0.05) as progress:
            moves = threading.Event()

            def move() -> None:
                while not moves.wait(0.05):
                    progress.moved()

            thread = threading.Thread(target=move)
            thread.start()
            event = watch.next(timeout=LIMIT)
            moves.set()
            thread.join()
            assert event is not None
            assert (event.quorum_id, event.departed) == (epoch, ["b:1"])
        a.server.shutdown()
        b.server.shutdown()


def test_what_is_wrong_is_told_by_name() -> None:
    with oxccl.Lighthouse() as lighthouse:
        address = lighthouse.address.removeprefix("http://")
        with pytest.raises(oxccl.Error) as taken:
            oxccl.Lighthouse(address)
        assert taken.value.kind == "Conflict"
        with pytest.raises(oxccl.InvalidArgument, match="min_replicas"):
            oxccl.Lighthouse(min_replicas=0)
        with pytest.raises(oxccl.InvalidArgument, match="initial_replicas"):
            oxccl.Lighthouse(min_replicas=2, initial_replicas=1)
        with pytest.raises(oxccl.InvalidArgument, match="time-out"):
            oxccl.Lighthouse(join_timeout=-1)
        with pytest.raises(oxccl.InvalidArgument, match="address is ''"), oxccl.LighthouseClient(lighthouse.address) as client:
            client.quorum("a:1", address="", store_address="r:2")
        with pytest.raises(oxccl.InvalidArgument, match="replica_id"):
            oxccl.ManagerServer("", lighthouse.address, store_address="r:2")
        with pytest.raises(oxccl.InvalidArgument, match="no-such-folder"):
            oxccl.Lighthouse(credentials="no-such-folder")
        client = oxccl.LighthouseClient(lighthouse.address)
        client.close()
        client.close()
        with pytest.raises(oxccl.Error, match="shut down") as closed:
            client.status()
        assert closed.value.kind == "InvalidState"
        lighthouse.shutdown()
        lighthouse.shutdown()
    with pytest.raises(oxccl.Error) as gone:
        oxccl.ManagerServer("a:1", lighthouse.address, store_address="r:2", connect_timeout=0.3)
    assert gone.value.kind == "Unavailable"
    with pytest.raises(oxccl.Error):
        oxccl.LighthouseClient(lighthouse.address, timeout=0.3)
    # The port is free again.
    host, port = address.rsplit(":", 1)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))


def test_a_quorum_that_does_not_form_says_whom_it_waits_for() -> None:
    with oxccl.Lighthouse(min_replicas=2) as lighthouse, oxccl.LighthouseClient(lighthouse.address) as client:
        with pytest.raises(oxccl.Timeout, match="2"):
            client.quorum("alone:1", address="http://a:1", store_address="r:2", timeout=0.3)
        names = [f"r{n}:1" for n in range(2)]
        about: dict[str, Any] = {"address": "http://a:1", "store_address": "r:2", "step": 3, "data": '{"a": 1}', "timeout": LIMIT}
        found = together(*(partial(client.quorum, name, **about) for name in names))
        assert [[m.replica_id for m in q.participants] for q in found] == [names] * 2
        assert (found[0].participants[0].step, found[0].participants[0].data) == (3, '{"a": 1}')
        client.leave(names[0], "the test ends")


def test_the_record_goes_on_after_a_restart(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    ids: list[int] = []
    for _ in range(2):
        with oxccl.Lighthouse(state_file=record) as lighthouse:
            replica = Replica("a", lighthouse)
            ids.append(replica.quorum(len(ids)).quorum_id)
            with replica.server:
                pass
    assert record.exists()
    assert ids[1] > ids[0]


INTERRUPTED = """
lighthouse = oxccl.Lighthouse(min_replicas=2)
server = oxccl.ManagerServer("a:1", lighthouse.address, store_address="r:2")
client = oxccl.ManagerClient(server.address)
print("ready", flush=True)
try:
    client.quorum(0, 0, timeout=100)
except KeyboardInterrupt:
    print("interrupted", flush=True)
# The same rank asks again, and hears of its own time-out.
try:
    client.quorum(0, 0, timeout=0.3)
except oxccl.Timeout:
    print("asked again", flush=True)
"""


def test_an_interrupt_ends_the_wait_for_a_quorum(tmp_path: Path) -> None:
    (process,) = jobs.script(INTERRUPTED, 1, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    # Again, should the first come before the call.
    heard = threading.Event()

    def interrupt() -> None:
        process.send_signal(signal.SIGINT)
        heard.set()

    threading.Timer(0.3, interrupt).start()
    ((status, out, err),) = jobs.ends([process])
    assert heard.is_set()
    assert (status, out) == (0, "interrupted\nasked again\n"), err


def _in_a_child(lighthouse: oxccl.Lighthouse, result: Any) -> None:
    try:
        lighthouse.shutdown()
    except oxccl.Error as error:
        result.send((error.kind, str(error)))
    else:
        result.send(("no error", ""))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_leaves_the_servers_of_its_parent_alone() -> None:
    with oxccl.Lighthouse() as lighthouse:
        replica = Replica("a", lighthouse)
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_in_a_child, args=(lighthouse, theirs))
        child.start()
        kind, text = ours.recv()
        child.join(LIMIT)
        assert child.exitcode == 0
        assert kind == "InvalidState"
        assert "the lighthouse belongs to the process" in text
        assert replica.quorum().replica_world_size == 1
        replica.server.shutdown()


KILLED = """
import warnings
warnings.simplefilter("ignore")
server = oxccl.ManagerServer("b:1", os.environ["LIGHTHOUSE"], store_address="store-of-b:1")
client = oxccl.ManagerClient(server.address)
client.quorum(0, 0, checkpoint_metadata="from b:1", timeout=60)
child = os.fork()
if child == 0:
    os.read(0, 1)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_child_that_lives_on_does_not_hide_the_death_of_a_replica(tmp_path: Path) -> None:
    with oxccl.Lighthouse(initial_replicas=2, heartbeat_timeout=60) as lighthouse:
        (killed,) = jobs.script(KILLED, 1, tmp_path, LIGHTHOUSE=lighthouse.address)
        a = Replica("a", lighthouse)
        with a.client.watch(0) as watch:
            a.quorum()
            assert killed.stdout is not None
            child = int(killed.stdout.readline())
            event = watch.next(timeout=20)
            assert event is not None
            assert event.departed == ["b:1"]
        # The child waits for the end of its input.
        os.kill(child, 0)
        assert jobs.ends([killed]) == [(-signal.SIGKILL, "", "")]
        a.server.shutdown()


def test_only_the_members_of_a_job_are_served(tmp_path: Path) -> None:
    folder = tmp_path / "job1"
    made = subprocess.run([sys.executable, "-m", "oxccl", "credentials", "new", str(folder)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert "OXCCL_CREDENTIALS" not in os.environ
    with oxccl.Lighthouse(credentials=folder) as lighthouse:
        assert lighthouse.address.startswith("https://")
        with (
            oxccl.ManagerServer("a:1", lighthouse.address, store_address="r:2", credentials=folder) as server,
            oxccl.ManagerClient(server.address, credentials=folder, replica_id="a:1") as client,
        ):
            assert client.quorum(0, 0).replica_ids == ["a:1"]
        with oxccl.LighthouseClient(lighthouse.address, credentials=folder) as operator:
            assert operator.status()["leads"]
        with pytest.raises(oxccl.Error):
            oxccl.LighthouseClient(lighthouse.address, timeout=1).status(timeout=1)
        with pytest.raises(oxccl.Error):
            oxccl.ManagerServer("b:1", lighthouse.address, store_address="r:2", connect_timeout=1)
