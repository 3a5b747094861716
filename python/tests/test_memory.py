"""Which memory is taken, what is refused and under which name, and when memory is given back."""

from __future__ import annotations

import array
import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest

import oxccl
from jobs import alone, run


@pytest.fixture(scope="module")
def world() -> oxccl.World:
    """A world of one rank: operations check their arguments as in any other."""
    return alone()


class OnlyDlpack:
    """What torch and JAX look like from here: no buffer, only DLPack."""

    def __init__(self, array: np.ndarray[Any, Any], *, old: bool = False) -> None:
        self.array = array
        self.old = old

    def __dlpack__(self, **wishes: Any) -> Any:
        """A capsule of version 1 if asked for, or only the old kind."""
        if self.old and wishes:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**wishes)


@pytest.mark.parametrize(
    "memory",
    [
        bytearray(8),
        array.array("d", [1, 2]),
        memoryview(bytearray(8)),
        np.zeros((2, 3), "f4"),
        np.zeros((), "i8"),
        np.zeros(0, "f4"),
        np.zeros((3, 0), "f4"),
        np.zeros((4, 1), "f4")[:, :],
        np.zeros(8, "<i4"),
        OnlyDlpack(np.zeros((2, 2), "f4")),
        OnlyDlpack(np.zeros(5, "i2"), old=True),
        OnlyDlpack(np.zeros(0, "f4")),
    ],
    ids=lambda m: type(m).__name__,
)
def test_contiguous_memory_of_any_kind_is_taken(world: oxccl.World, memory: Any) -> None:
    world.all_reduce(memory)
    world.all_reduce([memory], async_op=True).wait()


def read_only(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same array, not writable."""
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        (np.zeros(8, "f4")[::2], "tensor of shape [4] with strides [2] is not contiguous"),
        (np.zeros(8, "f4")[::-1], "with strides [-1] is not contiguous"),
        (np.zeros((2, 3), "f4").T, "tensor of shape [3, 2] with strides [1, 3] is not contiguous"),
        (np.asfortranarray(np.zeros((2, 3))), "is not contiguous"),
        (np.zeros(4, [("a", "f4"), ("b", "i1")])["a"], "is not contiguous"),
        (OnlyDlpack(np.zeros((2, 3), "f4").T), "tensor of shape [3, 2] with strides [1, 3] is not contiguous"),
        (read_only(np.zeros(3)), "tensor is read-only, and the operation writes to it"),
        (OnlyDlpack(read_only(np.zeros(3))), "tensor is read-only, and the operation writes to it"),
        (b"bytes", "tensor is read-only"),
        ("text", "tensor is of type str, which lends no memory"),
        (None, "tensor is of type NoneType, which lends no memory"),
        (7, "tensor is of type int"),
        ([np.zeros(2), "x"], "tensors[1] is of type str"),
        ([np.zeros(2), read_only(np.zeros(2))], "tensors[1] is read-only"),
        ([], "list of tensors is empty"),
        ([np.zeros(2), np.zeros(2, "f4")], "tensor 1 is f32, tensor 0 is f64"),
    ],
)
def test_other_memory_is_refused_by_name(world: oxccl.World, memory: Any, says: str) -> None:
    for flag in (False, True):
        with pytest.raises(oxccl.InvalidArgument) as caught:
            world.all_reduce(memory, async_op=flag)
        assert says in str(caught.value)
        assert (caught.value.kind, caught.value.op, caught.value.rank) == ("InvalidArgument", "all_reduce", 0)
        assert isinstance(caught.value, ValueError)
    # A refusal is no failure of the group.
    assert world.error is None
    world.all_reduce(np.zeros(1))


@pytest.mark.parametrize("dtype", ["c8", ">f4", "M8[s]", "S3", "O", "g"])
def test_element_types_that_no_operation_takes_are_refused(world: oxccl.World, dtype: str) -> None:
    with pytest.raises((oxccl.Unsupported, ValueError)):
        world.all_reduce(np.zeros(3, dtype))
    world.all_reduce(np.zeros(1))


def test_memory_that_overlaps_is_refused(world: oxccl.World) -> None:
    x = np.zeros(8)
    with pytest.raises(oxccl.InvalidArgument, match="share memory"):
        world.all_reduce([x[:5], x[4:]])


def test_a_capsule_that_was_used_is_refused_and_one_that_is_none(world: oxccl.World) -> None:
    class Twice:
        def __init__(self) -> None:
            self.capsule = np.zeros(3).__dlpack__()

        def __dlpack__(self) -> Any:
            return self.capsule

    class Nothing:
        def __dlpack__(self) -> Any:
            return 5

    class Raising:
        def __dlpack__(self) -> Any:
            raise BufferError("this one requires gradient")

    twice = Twice()
    world.all_reduce(twice)
    with pytest.raises(oxccl.InvalidArgument, match="used before"):
        world.all_reduce(twice)
    with pytest.raises(oxccl.InvalidArgument, match="no capsule"):
        world.all_reduce(Nothing())
    with pytest.raises(BufferError, match="requires gradient"):
        world.all_reduce(Raising())


def inputs_are_only_read(world: oxccl.World, count: int) -> None:
    """Passes read-only pages as every kind of input: a write would end the process."""
    import mmap

    def page(value: float, n: int) -> np.ndarray[Any, Any]:
        whole = np.full(n, value, "f4").tobytes()
        import tempfile

        with tempfile.TemporaryFile() as file:
            file.write(whole)
            file.flush()
            return np.frombuffer(mmap.mmap(file.fileno(), len(whole), prot=mmap.PROT_READ), "f4")

    size, ranks = world.world_size, range(world.world_size)
    x, out = page(2, count), np.zeros(count, "f4")
    world.reduce_scatter_into(page(3, count * size), out)
    assert (out == 3 * size).all()
    world.reduce_scatter([page(3, count) for _ in ranks], out)
    assert (out == 3 * size).all()
    world.all_gather(x, [np.zeros(count, "f4") for _ in ranks])
    world.all_gather_into(x, np.zeros(count * size, "f4"))
    world.gather(x, [np.zeros(count, "f4") for _ in ranks] if world.rank == 0 else None, root=0)
    world.scatter([page(r, count) for r in ranks] if world.rank == 0 else None, output=out, root=0)
    assert (out == world.rank).all()
    world.all_to_all([page(r, count) for r in ranks], [np.zeros(count, "f4") for _ in ranks])
    world.all_to_all_into(page(1, count * size), np.zeros(count * size, "f4"))
    world.broadcast(x if world.rank == 0 else out, 0)
    assert world.rank == 0 or (out == 2).all()
    other = 1 - world.rank
    world.batch([oxccl.Send(x, other), oxccl.Recv(out, other)])


def test_inputs_are_never_written() -> None:
    for count in (5, 300_000):
        run(2, inputs_are_only_read, count)


def lent_memory_is_given_back(world: oxccl.World) -> None:
    """Counts references and exports before and after operations of every ending."""
    import torch

    import oxccl.torch

    assert oxccl.torch
    peer = 1 - world.rank
    x = np.ones(1000)
    count = sys.getrefcount(x)
    world.all_reduce(x)
    work = world.all_reduce(x, async_op=True)
    work.wait()
    with pytest.raises(oxccl.InvalidArgument):
        world.all_reduce(x, "min-max")  # type: ignore[call-overload]
    assert sys.getrefcount(x) == count

    grown = bytearray(8)
    work = world.recv(grown, peer, async_op=True)
    with pytest.raises(BufferError):
        grown.append(1)
    world.send(bytes(8), peer)
    work.wait()
    grown.append(1)

    # A message that is not received yet, and both its work and its memory are let go.
    big = np.ones(4 << 20)
    alive = weakref.ref(big)
    late = world.recv(np.zeros(4 << 20), peer, 7, async_op=True)
    del late
    world.send(big, peer, 7, async_op=True)
    del big
    gc.collect()
    world.barrier()
    until_gone(alive)

    # A tensor that is given other memory meanwhile, as by `module.half()`.
    owner = np.ones(10)
    alive = weakref.ref(owner)
    tensor = torch.from_numpy(owner)
    del owner
    work = world.recv(tensor, peer, 8, async_op=True)
    tensor.data = torch.empty(0)
    gc.collect()
    assert alive() is not None, "memory in flight is kept"
    world.send(np.ones(10), peer, 8)
    work.wait()
    del work
    until_gone(alive)

    # What fails gives back, too.
    pending = np.ones(10)
    alive = weakref.ref(pending)
    work = world.recv(pending, peer, 9, async_op=True)
    del pending
    gc.collect()
    assert alive() is not None, "memory in flight is kept"
    world.barrier()
    world.abort("the test ends it")
    with pytest.raises(oxccl.Error):
        work.wait()
    until_gone(alive)


def until_gone(alive: weakref.ref[Any]) -> None:
    """Waits until what a thread of the group let go has been given back."""
    import time

    until = time.monotonic() + 60
    while alive() is not None:
        assert time.monotonic() < until, "memory was never given back"
        time.sleep(0.001)


def test_memory_in_flight_is_kept_and_then_given_back() -> None:
    run(2, lent_memory_is_given_back)


def resident() -> int:
    """Bytes of memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def many_operations(world: oxccl.World) -> int:
    """How much memory 100,000 operations leave behind."""
    x, small = np.ones(64), OnlyDlpack(np.ones(64))

    def rounds(n: int) -> None:
        for _ in range(n):
            world.all_reduce(x)
            world.all_reduce([small, x], "max", async_op=True).wait()

    rounds(5_000)
    before = resident()
    rounds(50_000)
    return resident() - before


def test_no_memory_is_left_behind_by_many_operations() -> None:
    for growth in run(2, many_operations):
        assert growth < 1 << 20, f"{growth} bytes more after 100,000 operations"


def memory_of_the_group(world: oxccl.World) -> None:
    """Arrays over what `Group.alloc` gives."""
    memory = world.alloc((2, 1 << 17))
    assert (memory.shape, memory.dtype, repr(memory)) == ((2, 1 << 17), "f32", "Memory([2, 131072], 'f32')")
    x = np.from_dlpack(memory)
    assert x.shape == (2, 1 << 17) and not x.any()
    x[:] = world.rank + 1
    world.all_reduce(x)
    assert (x == 3).all()
    # As it is, and a part of it.
    world.all_reduce(memory)
    world.all_reduce(x[1])
    assert (x[0] == 6).all() and (x[1] == 12).all()
    with open("/proc/self/maps") as file:
        maps = file.readlines()
    # The other rank's, which this one maps when it first reads there.
    assert sum(" r--s " in line and "memfd:oxccl-tensors" in line for line in maps) == 1
    part = x[1, 5:]
    world.shutdown()
    del x, memory, world
    gc.collect()
    assert (part == 12).all()


def test_memory_of_the_group_is_read_in_place_and_outlives_it() -> None:
    run(2, memory_of_the_group)


def test_what_memory_of_a_group_may_be_asked_for(world: oxccl.World) -> None:
    assert np.from_dlpack(world.alloc(3, "i16")).tolist() == [0, 0, 0]
    assert np.from_dlpack(world.alloc(())).shape == ()
    assert np.from_dlpack(world.alloc((2, 0, 3))).shape == (2, 0, 3)
    # An array over it before the group is connected.
    assert np.from_dlpack(oxccl.unconfigured().alloc(2)).tolist() == [0, 0]
    memory = world.alloc(4)
    assert not memory._is_lent()
    # Not taken over by anything.
    del (capsule := [memory.__dlpack__(), memory.__dlpack__(max_version=(1, 0))])[:]
    assert not capsule and not memory._is_lent()
    view = np.from_dlpack(memory)[2:]
    assert memory._is_lent()
    del view
    gc.collect()
    assert not memory._is_lent()
    with pytest.raises(BufferError, match="without a copy"):
        memory.__dlpack__(copy=True)
    refused: list[tuple[Any, str, str]] = [
        (1 << 62, "f32", "do not fit in memory"),
        ((1 << 40, 1 << 40), "u8", "do not fit"),
        (3, "complex64", "complex64"),
    ]
    for shape, dtype, says in refused:
        with pytest.raises(oxccl.InvalidArgument, match=says) as caught:
            world.alloc(shape, dtype)
        assert caught.value.op == "alloc"
    with pytest.raises((TypeError, OverflowError)):
        world.alloc(-1)
