"""Every operation of ``torch.distributed``, on every element type, gives what Gloo gives, and what arithmetic says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import torchjobs

SUMS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
BITS = ("BAND", "BOR", "BXOR")
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool")
SMALL = ("float8_e4m3fn", "float8_e5m2")
COUNT = 6

Case = tuple[str, Callable[[Any, bool], list[Any]], list[Any]]
"""A name, a call over a group that gives its outputs, and what they should be."""


def reduced(name: str, values: list[Any]) -> Any:
    """What the reduction `name` of `values` is, in their element type."""
    import torch

    dtype = values[0].dtype
    exact = torch.float64 if dtype.is_floating_point else torch.int64
    wide = [v.to(exact) for v in values]
    if dtype == torch.bool:
        together = functools.reduce(torch.logical_and if name in ("PRODUCT", "MIN", "BAND") else torch.logical_or, values)
        return functools.reduce(torch.logical_xor, values) if name == "BXOR" else together
    by = {"SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}
    by |= {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    if name == "AVG":
        total = functools.reduce(torch.add, wide)
        return (total / len(values) if dtype.is_floating_point else torch.div(total, len(values), rounding_mode="trunc")).to(dtype)
    return functools.reduce(by[name], wide).to(dtype)


def cases(dist: Any, dtype: Any, reductions: list[str]) -> Iterator[Case]:
    """All of them for one element type."""
    import torch

    rank, ranks = dist.get_rank(), dist.get_world_size()
    everyone = range(ranks)

    def data(of: int, count: int = COUNT, start: int = 0) -> Any:
        return ((torch.arange(count) + start + of) % 3 + 1).to(torch.float32).to(dtype)

    def zeros(count: int = COUNT) -> Any:
        return torch.zeros(count, dtype=torch.float32).to(dtype)

    def finish(work: Any, outputs: list[Any]) -> list[Any]:
        if work is not None:
            work.wait()
        return outputs

    root = ranks - 1
    for name in reductions:
        op = getattr(dist.ReduceOp, name)
        whole = reduced(name, [data(r) for r in everyone])

        def all_reduce(group: Any, flag: bool, op: Any = op) -> list[Any]:
            x = data(rank)
            return finish(dist.all_reduce(x, op, group, flag), [x])

        def reduce(group: Any, flag: bool, op: Any = op) -> list[Any]:
            x = data(rank)
            work = dist.reduce(x, root, op, group, flag)
            return finish(work, [x] if rank == root else [])

        def reduce_scatter(group: Any, flag: bool, op: Any = op) -> list[Any]:
            x = zeros()
            return finish(dist.reduce_scatter(x, [data(rank, start=part) for part in everyone], op, group, flag), [x])

        def reduce_scatter_single(group: Any, flag: bool, op: Any = op) -> list[Any]:
            x = zeros()
            parts = torch.cat([data(rank, start=part).view(torch.uint8) for part in everyone]).view(dtype)
            return finish(dist.reduce_scatter_tensor(x, parts, op, group, flag), [x])

        part = reduced(name, [data(r, start=rank) for r in everyone])
        yield f"all_reduce {name}", all_reduce, [whole]
        yield f"reduce {name}", reduce, [whole] if rank == root else []
        yield f"reduce_scatter {name}", reduce_scatter, [part]
        yield f"reduce_scatter_tensor {name}", reduce_scatter_single, [part]

    def broadcast(group: Any, flag: bool) -> list[Any]:
        x = data(rank)
        return finish(dist.broadcast(x, root, group, flag), [x])

    def all_gather(group: Any, flag: bool) -> list[Any]:
        xs = [zeros() for _ in everyone]
        return finish(dist.all_gather(xs, data(rank), group, flag), xs)

    def all_gather_single(group: Any, flag: bool) -> list[Any]:
        x = zeros(COUNT * ranks)
        return finish(dist.all_gather_into_tensor(x, data(rank), group, flag), list(x.view(torch.uint8).chunk(ranks)))

    def gather(group: Any, flag: bool) -> list[Any]:
        xs = [zeros() for _ in everyone] if rank == root else None
        return finish(dist.gather(data(rank), xs, root, group, flag), xs or [])

    def scatter(group: Any, flag: bool) -> list[Any]:
        x = zeros()
        parts = [data(root, start=part) for part in everyone] if rank == root else None
        return finish(dist.scatter(x, parts, root, group, flag), [x])

    def all_to_all(group: Any, flag: bool) -> list[Any]:
        xs = [zeros() for _ in everyone]
        return finish(dist.all_to_all(xs, [data(rank, start=to) for to in everyone], group, flag), xs)

    def uneven(group: Any, flag: bool) -> list[Any]:
        """Rank r sends r + 1 rows of two to each."""
        x = zeros(2 * sum(r + 1 for r in everyone)).view(-1, 2)
        mine = data(rank, 2 * (rank + 1) * ranks).view(-1, 2)
        work = dist.all_to_all_single(x, mine, [r + 1 for r in everyone], [rank + 1] * ranks, group, flag)
        return finish(work, [x.reshape(-1)])

    def message(group: Any, flag: bool) -> list[Any]:
        x = zeros()
        sent = dist.isend(data(rank), (rank + 1) % ranks, group, tag=5)
        left = (rank - 1) % ranks
        if flag:
            dist.irecv(x, left, group, tag=5).wait()
        else:
            assert dist.recv(x, left, group, tag=5) == left
        return finish(sent, [x])

    yield "broadcast", broadcast, [data(root)]
    yield "all_gather", all_gather, [data(r) for r in everyone]
    yield "all_gather_into_tensor", all_gather_single, [data(r).view(torch.uint8) for r in everyone]
    yield "gather", gather, [data(r) for r in everyone] if rank == root else []
    yield "scatter", scatter, [data(root, start=rank)]
    yield "all_to_all", all_to_all, [data(r, start=rank) for r in everyone]
    rows = [data(r, 2 * (r + 1) * ranks)[2 * (r + 1) * rank : 2 * (r + 1) * (rank + 1)] for r in everyone]
    yield "all_to_all_single", uneven, [torch.cat([row.view(torch.uint8) for row in rows]).view(dtype)]
    yield "send and recv", message, [data((rank - 1) % ranks)]


def table(dist: Any) -> tuple[int, int, list[str]]:
    """How many cases were compared, how many of them with Gloo too, and what differed."""
    import torch

    ours = dist.new_group(backend="oxccl")
    count, with_gloo, wrong = 0, 0, []

    def differs(found: list[Any], wanted: list[Any]) -> bool:
        return len(found) != len(wanted) or not all(torch.equal(f.view(torch.uint8), w.view(torch.uint8)) for f, w in zip(found, wanted, strict=True))

    for dtype_name in (*DTYPES, *SMALL):
        dtype = getattr(torch, dtype_name)
        bits = [] if dtype.is_floating_point else list(BITS)
        reductions = [] if dtype_name in SMALL else [*SUMS, *bits]
        if dtype == torch.bool:
            reductions = ["PRODUCT", "MIN", "MAX", *BITS]
        for name, call, wanted in cases(dist, dtype, reductions):
            for flag in (False, True):
                count += 1
                where = f"{name} of {dtype_name}, {'asynchronous' if flag else 'synchronous'}"
                found = call(ours, flag)
                if differs(found, wanted):
                    wrong.append(f"{where}: {found} instead of {wanted}")
                try:
                    theirs = call(None, flag)
                except (RuntimeError, ValueError):
                    continue
                with_gloo += 1
                if differs(found, theirs):
                    wrong.append(f"{where}: {found}, Gloo {theirs}")
    dist.barrier(ours)
    return count, with_gloo, wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_operation_on_every_element_type_gives_what_gloo_gives(ranks: int) -> None:
    for count, with_gloo, wrong in torchjobs.run(ranks, table, backend="gloo"):
        assert not wrong, "\n".join(wrong)
        assert count > 800
        assert with_gloo > 300


def strided(dist: Any) -> list[str]:
    """What each operation says of memory that is not contiguous; the group works on afterwards."""
    import torch

    import oxccl

    ranks = dist.get_world_size()
    whole = torch.zeros(4 * ranks, 4)
    x = whole.t()[:, :ranks]
    ok = torch.zeros(4, ranks)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "all_gather": lambda: dist.all_gather([ok.clone() for _ in range(ranks)], x),
        "all_gather output": lambda: dist.all_gather([x] * ranks, ok),
        "gather": lambda: dist.gather(x, [ok.clone() for _ in range(ranks)] if dist.get_rank() == 0 else None),
        "scatter": lambda: dist.scatter(x, [ok] * ranks if dist.get_rank() == 0 else None),
        "reduce_scatter": lambda: dist.reduce_scatter(x, [ok] * ranks),
        "all_to_all": lambda: dist.all_to_all([x] * ranks, [ok] * ranks),
        "send": lambda: dist.send(x, 1 - dist.get_rank()),
        "recv": lambda: dist.recv(x, 1 - dist.get_rank()),
    }
    silent = []
    for name, call in calls.items():
        try:
            call()
            silent.append(f"{name} took it")
        except (oxccl.InvalidArgument, ValueError, RuntimeError) as error:
            if "contiguous" not in str(error):
                silent.append(f"{name}: {error}")
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == ranks
    return silent


def test_memory_that_is_not_contiguous_is_refused_by_name_and_the_group_works_on() -> None:
    assert torchjobs.run(2, strided) == [[], []]


def shared(dist: Any) -> list[str]:
    """Inputs that lie in outputs, and inputs that are one."""
    import torch

    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong = []

    def check(what: str, found: Any, wanted: list[float]) -> None:
        if found.tolist() != wanted:
            wrong.append(f"{what}: {found.tolist()} instead of {wanted}")

    everyone = [float(r + 1) for r in range(ranks)]
    x = torch.zeros(ranks)
    x[rank] = rank + 1
    dist.all_gather_into_tensor(x, x[rank : rank + 1])
    check("all_gather_into_tensor", x, everyone)
    x = torch.zeros(ranks)
    x[rank] = rank + 1
    dist.all_gather(list(x.chunk(ranks)), x[rank : rank + 1])
    check("all_gather", x, everyone)
    x = torch.arange(float(ranks))
    dist.reduce_scatter_tensor(x[rank : rank + 1], x)
    check("reduce_scatter_tensor", x[rank : rank + 1], [float(rank * ranks)])
    one, y = torch.ones(1), torch.zeros(1)
    dist.reduce_scatter(y, [one] * ranks)
    check("reduce_scatter", y, [float(ranks)])
    parts = list(torch.arange(float(ranks)).chunk(ranks)) if rank == 0 else None
    mine = parts[0] if parts else torch.zeros(1)
    dist.scatter(mine, parts, 0)
    check("scatter", mine, [float(rank)])
    return wrong


def test_inputs_may_lie_in_outputs_as_fsdp_has_it() -> None:
    assert torchjobs.run(2, shared) == [[], []]
