"""Every operation on NumPy arrays, against what NumPy computes, blocking and asynchronous."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import oxccl
from jobs import run

DTYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"]
COUNT = 37


def data(rank: int, count: int = COUNT, dtype: Any = "f4") -> np.ndarray[Any, Any]:
    """Small numbers that differ between ranks and places, and sum up without rounding."""
    return ((np.arange(count) * 7 + rank * 3) % 11).astype(dtype)


def done(work: oxccl.Work | int | None) -> oxccl.Work | int | None:
    """Waits for an asynchronous operation; others are over."""
    if isinstance(work, oxccl.Work):
        work.wait()
        assert work.done()
    return work


def every_operation(world: oxccl.World, flag: bool) -> list[str]:
    """Calls each operation and compares; gives what is wrong."""
    rank, size = world.rank, world.world_size
    ranks = range(size)
    wrong = []

    def check(name: str, got: Any, wanted: Any) -> None:
        if not np.array_equal(np.asarray(got), np.asarray(wanted)):
            wrong.append(f"{name}: {got} instead of {wanted}")

    def kw() -> dict[str, Any]:
        return {"async_op": flag}

    def total(parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = np.sum(parts, axis=0, dtype="f4")
        return found

    x = data(rank)
    done(world.all_reduce(x, **kw()))
    check("all_reduce", x, total([data(r) for r in ranks]))

    pair = [data(rank), data(rank, 5)]
    done(world.all_reduce(pair, **kw()))
    check("all_reduce of two", pair[0], total([data(r) for r in ranks]))
    check("all_reduce of two", pair[1], total([data(r, 5) for r in ranks]))

    x = data(rank)
    done(world.all_reduce(x, oxccl.PremulSum(0.5), **kw()))
    check("premul_sum", x, total([data(r) for r in ranks]) * np.float32(0.5))

    x = data(rank)
    done(world.all_reduce(x, "avg", contribute=rank != 0, **kw()))
    check("avg without rank 0", x, total([data(r) for r in ranks if r]) / np.float32(size - 1))

    x = data(rank)
    done(world.broadcast(x, 1, **kw()))
    check("broadcast", x, data(1))

    x = data(rank)
    done(world.reduce(x, 1, "max", **kw()))
    check("reduce", x, np.max([data(r) for r in ranks], axis=0) if rank == 1 else data(rank))

    outs = [np.zeros(r + 1, "f4") for r in ranks]
    done(world.all_gather(data(rank, rank + 1), outs, **kw()))
    for r in ranks:
        check("all_gather", outs[r], data(r, r + 1))

    out = np.zeros(COUNT * size, "f4")
    done(world.all_gather_into(data(rank), out, **kw()))
    check("all_gather_into", out, np.concatenate([data(r) for r in ranks]))

    two = [np.zeros(COUNT * size, "f4"), np.zeros(3 * size, "f4")]
    done(world.all_gather_into([data(rank), data(rank, 3)], two, **kw()))
    check("all_gather_into of two", two[1], np.concatenate([data(r, 3) for r in ranks]))

    whole = np.zeros(COUNT * size, "f4")
    whole[rank * COUNT : (rank + 1) * COUNT] = data(rank)
    done(world.all_gather_in_place(whole, **kw()))
    check("all_gather_in_place", whole, np.concatenate([data(r) for r in ranks]))

    outs = [np.zeros(COUNT, "f4") for _ in ranks]
    done(world.gather(data(rank), outs if rank == 0 else None, root=0, **kw()))
    if rank == 0:
        check("gather", outs, [data(r) for r in ranks])

    out = np.zeros(COUNT, "f4")
    done(world.scatter([data(10 + r) for r in ranks] if rank == 1 else None, output=out, root=1, **kw()))
    check("scatter", out, data(10 + rank))

    ins = [data(rank + r, r + 2) for r in ranks]
    before = [i.copy() for i in ins]
    out = np.zeros(rank + 2, "f4")
    done(world.reduce_scatter(ins, out, **kw()))
    check("reduce_scatter", out, total([data(r + rank, rank + 2) for r in ranks]))
    check("inputs of reduce_scatter", np.concatenate(ins), np.concatenate(before))

    whole = data(rank, COUNT * size)
    out = np.zeros(COUNT, "f4")
    done(world.reduce_scatter_into(whole, out, "sum", **kw()))
    check("reduce_scatter_into", out, total([data(r, COUNT * size) for r in ranks])[rank * COUNT : (rank + 1) * COUNT])
    check("input of reduce_scatter_into", whole, data(rank, COUNT * size))

    whole = data(rank, COUNT * size)
    done(world.reduce_scatter_in_place(whole, "sum", **kw()))
    own = slice(rank * COUNT, (rank + 1) * COUNT)
    check("reduce_scatter_in_place", whole[own], total([data(r, COUNT * size) for r in ranks])[own])

    ins = [data(rank * size + r, rank + r + 1) for r in ranks]
    outs = [np.zeros(rank + r + 1, "f4") for r in ranks]
    done(world.all_to_all(ins, outs, **kw()))
    for r in ranks:
        check("all_to_all", outs[r], data(r * size + rank, rank + r + 1))

    out = np.zeros(2 * size, "f4")
    done(world.all_to_all_into(data(rank, 2 * size), out, **kw()))
    check("all_to_all_into", out, np.concatenate([data(r, 2 * size)[2 * rank : 2 * rank + 2] for r in ranks]))

    out = np.zeros((rank + 1) * size, "f4")
    splits = [r + 1 for r in ranks]
    at, length = sum(splits[:rank]), sum(splits)
    done(world.all_to_all_into(data(rank, length), out, input_splits=splits, output_splits=[rank + 1] * size, **kw()))
    check("all_to_all_into with splits", out, np.concatenate([data(r, length)[at : at + rank + 1] for r in ranks]))

    right, left = (rank + 1) % size, (rank - 1) % size
    x = np.zeros(COUNT, "f4")
    sent = world.send(data(rank), right, 5, async_op=True)
    got = done(world.recv(x, left, 5, **kw()))
    check("source", got.source if isinstance(got, oxccl.Work) else got, left)
    sent.wait()
    check("recv", x, data(left))

    sent = world.send(data(rank), right, 6, async_op=True)
    got = done(world.recv(x, tag=6, **kw()))
    check("source of recv from any", got.source if isinstance(got, oxccl.Work) else got, left)
    sent.wait()

    x = np.zeros(COUNT, "f4")
    done(world.batch([oxccl.Send(data(rank, dtype="f4"), right, 1), oxccl.Recv(x, left, 1)], **kw()))
    check("batch", x, data(left))

    done(world.barrier(**kw()))
    world.monitored_barrier()
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("flag", [False, True], ids=["blocking", "asynchronous"])
def test_every_operation_gives_what_numpy_computes(ranks: int, flag: bool) -> None:
    assert run(ranks, every_operation, flag) == [[]] * ranks


def every_dtype(world: oxccl.World) -> list[str]:
    """Reduces and moves each element type that the group says it can."""
    ranks = range(world.world_size)
    wrong = []
    reductions: dict[Any, Any] = {"sum": np.sum, "max": np.max, "min": np.min, "product": np.prod}
    names = {np.dtype(d).name: d for d in DTYPES}
    ours = {"f8": "f64", "f4": "f32", "f2": "f16", "i8": "i64", "i4": "i32", "i2": "i16", "i1": "i8"}
    ours.update({"u8": "u64", "u4": "u32", "u2": "u16", "u1": "u8", "?": "bool"})
    for code in names.values():
        for op, numpys in reductions.items():
            assert ours[code] in world.capabilities().reduces(op)
            x = data(world.rank, dtype=code)
            wanted = numpys([data(r, dtype=code) for r in ranks], axis=0).astype(code)
            world.all_reduce(x, op)
            if not np.array_equal(x, wanted):
                wrong.append(f"{op} of {code}: {x} instead of {wanted}")
    for small in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        x = data(world.rank, dtype=small)
        world.broadcast(x, 1)
        if not np.array_equal(x.astype("f4"), data(1, dtype=small).astype("f4")):
            wrong.append(f"broadcast of {small}: {x}")
    x = data(world.rank, dtype=ml_dtypes.bfloat16)
    world.all_reduce(x)
    if not np.array_equal(x.astype("f4"), sum(data(r) for r in ranks)):
        wrong.append(f"sum of bfloat16: {x}")
    return wrong


def test_every_element_type_of_numpy_is_reduced_and_moved() -> None:
    assert run(2, every_dtype) == [[], []]


def large(world: oxccl.World) -> bool:
    """Two tensors in flight at once, larger than any buffer on the way."""
    a, b = data(world.rank, 1 << 21), data(world.rank + 5, 1 << 21, "i4")
    works = [world.all_reduce(a, async_op=True), world.all_reduce(b, async_op=True)]
    for work in reversed(works):
        work.wait()
        assert work.contributors == world.world_size
        assert (work.seconds or 0) > 0
    ranks = range(world.world_size)
    return bool(np.array_equal(a, sum(data(r, 1 << 21) for r in ranks)) and np.array_equal(b, sum(data(r + 5, 1 << 21, "i4") for r in ranks)))


def test_large_tensors_in_flight_together_are_right() -> None:
    assert run(2, large) == [True, True]
