"""Groups of some ranks, their ends, and what they say about themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import oxccl
from jobs import alone, ends, run, script


def groups(world: oxccl.World) -> None:
    """Makes groups and works in them."""
    pair = world.new_group([3, 1])
    if world.rank in (1, 3):
        assert pair is not None
        assert (pair.rank, pair.world_size) == ([3, 1].index(world.rank), 2)
        x = np.full(2, float(world.rank))
        pair.all_reduce(x)
        assert (x == 4).all()
        assert not isinstance(pair, oxccl.World)
        pair.shutdown()
    else:
        assert pair is None
    half = world.split_group([[0, 1], [2, 3]], timeout=60)
    assert half is not None
    x = np.full(1, float(world.rank))
    half.all_reduce(x)
    assert x[0] == (1 if world.rank < 2 else 5)
    world.barrier()


def test_groups_of_some_ranks_are_made_from_the_world() -> None:
    run(4, groups)


def differ(world: oxccl.World) -> None:
    """Makes groups with a name, options, a time-out and a backend of their own; what cannot be had is refused on all ranks."""
    pair = world.new_group([1, 0], backend="cpu:gloo", options={"transport": "tcp"}, timeout=5, name="pair")
    assert pair is not None
    assert pair.name == "pair"
    x = np.full(1, float(world.rank))
    pair.all_reduce(x)
    assert x[0] == 1
    # The options reach the backend, which refuses what it does not know and names what it does.
    with pytest.raises(oxccl.Error, match=r"colour.*transport"):
        world.new_group([0, 1], options={"colour": "red"})
    with pytest.raises(oxccl.Error, match="nonsense"):
        world.split_group([[0, 1]], backend="nonsense")
    half = world.split_group([[0], [1]], options={"connections": 2}, name="half", timeout=5)
    assert half is not None
    assert (half.name, half.world_size) == ("half", 1)
    # Its operations have its time-out: rank 1 does not come to this one.
    late = world.new_group([0, 1], timeout=0.2)
    assert late is not None
    if world.rank == 0:
        with pytest.raises(oxccl.Timeout, match="waiting for rank 1"):
            late.all_reduce(x)
    world.barrier()


def test_groups_have_a_backend_options_a_time_out_and_a_name_of_their_own() -> None:
    run(2, differ)


def says_what_it_is(world: oxccl.World) -> None:
    """Properties, capabilities and traffic."""
    assert (world.backend, world.name, world.device, world.epoch) == ("gloo", "world", "cpu", 1)
    assert repr(world) == f"World(rank {world.rank} of 2, gloo, epoch 1)"
    can = world.capabilities()
    assert {"abort", "mismatch_detection"} <= set(can.features)
    assert "all_reduce" in can.ops
    assert "bf16" in can.dtypes
    assert can.devices == ["cpu"]
    assert can.reduces("band").count("i32") == 1
    assert can.reduces("nonsense") == []
    before = world.traffic()
    world.all_reduce(np.ones(1000))
    after = world.traffic()
    assert after.sent - before.sent >= 8000
    assert after.received - before.received >= 8000


def test_a_group_says_what_it_is_can_and_moved() -> None:
    run(2, says_what_it_is)


def someone_is_missing(world: oxccl.World) -> str:
    """Rank 2 does not come to the barrier."""
    if world.rank == 2:
        with pytest.raises(oxccl.Error):
            world.recv(np.zeros(1), 0, 9, timeout=60)
        return "2"
    with pytest.raises(oxccl.Error) as caught:
        world.monitored_barrier(wait_all=True, timeout=0.5)
    return str(caught.value)


def test_a_monitored_barrier_names_who_is_missing() -> None:
    for text in run(3, someone_is_missing):
        assert "2" in text


def leaves(world: oxccl.World) -> str | None:
    """Rank 0 leaves in good order; rank 1 hears of that, not of a death."""
    if world.rank == 0:
        with world as same:
            assert same is world
            world.barrier()
        with pytest.raises(oxccl.Error):
            world.barrier()
        return None
    world.barrier()
    with pytest.raises(oxccl.PeerLost) as caught:
        world.all_reduce(np.zeros(1), timeout=60)
    return str(caught.value)


def test_a_rank_that_leaves_is_not_taken_for_dead() -> None:
    assert "left the group" in run(2, leaves)[1]


def test_leaving_a_block_by_an_exception_aborts() -> None:
    world = alone()
    with pytest.raises(KeyError), world:
        raise KeyError("x")
    world = alone()
    with world:
        pass
    world.shutdown()


def test_backends_are_listed_with_the_reason_why_one_cannot_be_used() -> None:
    known = dict(oxccl.backends())
    assert known["gloo"] is None
    assert {"xccl", "nccl"} <= set(known)


def works_by_device(world: oxccl.World) -> str:
    """A group with a backend for each device."""
    x = np.ones(3)
    world.all_reduce(x)
    assert (x == 2).all()
    return world.backend


def test_a_backend_for_each_device_is_taken() -> None:
    for name in run(2, works_by_device, backend="cpu:gloo"):
        assert "gloo" in name


def is_isolated(world: oxccl.World) -> int:
    """The backend runs in a child of this process."""
    x = np.ones(1000)
    world.all_reduce(x)
    work = world.all_reduce(x, async_op=True)
    work.wait()
    assert (x == 4).all()
    children = [child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()]
    world.shutdown()
    return len(children)


def test_a_backend_may_run_in_a_child_process() -> None:
    for children in run(2, is_isolated, isolated=True):
        assert children >= 1


LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "open-mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_variables_of_a_launcher_are_enough(launcher: str, tmp_path: Path) -> None:
    rank, size, local = LAUNCHERS[launcher]
    text = f"""
os.environ.update({{"{rank}": "0", "{size}": "1", "{local}": "0", "MASTER_ADDR": "127.0.0.1"}})
import socket
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
world = oxccl.init()
print(world.rank, world.world_size, world.local_rank)
"""
    clean = {name: "" for names in LAUNCHERS.values() for name in names}
    assert ends(script(text, 1, tmp_path, **clean)) == [(0, "0 1 0\n", "")]
