"""The backend of ``torch.distributed``: how groups come to be, messages, works and futures, and how it all ends."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import torchjobs

SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("{backend}")
for times in range({times}, 0, -1):
    x = torch.ones(3) * (dist.get_rank() + 1)
    dist.all_reduce(x)
    assert x.tolist() == [3.0, 3.0, 3.0], x
    found = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    os.write(1, b"{backend} is " + found.getBackendName().encode() + b"\\n")
    dist.destroy_process_group()
    if times > 1:
        # The same store of torchrun's agent, in which the first group met.
        dist.init_process_group("{backend}")
"""


@pytest.mark.parametrize("backend", ["oxccl", "cpu:oxccl,cuda:gloo"])
def test_a_script_under_torchrun_needs_one_word_changed_and_no_import(backend: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # Gloo cannot be made twice in the store of one run, alone or beside ours.
    times = 1 if "gloo" in backend else 2
    script.write_text(SCRIPT.format(backend=backend, times=times))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(launcher, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{backend} is oxccl") == 2 * times


def messages(dist: Any) -> list[str]:
    """Tags, any source, batches and objects."""
    import torch

    rank, ranks = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    wrong = []

    def check(what: str, found: Any, wanted: Any) -> None:
        if found != wanted:
            wrong.append(f"{what}: {found} instead of {wanted}")

    # Sent as 1, 2, received as 2, 1.
    sent = [dist.isend(torch.tensor([10.0 * rank + tag]), right, tag=tag) for tag in (1, 2)]
    x = torch.zeros(1)
    for tag in (2, 1):
        dist.recv(x, left, tag=tag)
        check(f"tag {tag}", x.item(), 10.0 * left + tag)
    for work in sent:
        work.wait()
    if rank:
        dist.send(torch.tensor([float(rank)]), 0, tag=3)
    else:
        sources = sorted(dist.recv(x, tag=3) for _ in range(ranks - 1))
        check("sources", sources, list(range(1, ranks)))
    got = torch.zeros(2)
    pair = [dist.P2POp(dist.irecv, got, left, tag=4), dist.P2POp(dist.isend, torch.full((2,), float(rank)), right, tag=4)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    check("batch", got.tolist(), [float(left)] * 2)

    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, {"rank": rank, "long": "x" * (rank * 1000)})
    check("all_gather_object", [g["rank"] for g in gathered], list(range(ranks)))
    listed = [rank, "root's"]
    dist.broadcast_object_list(listed, 1)
    check("broadcast_object_list", listed, [1, "root's"])
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(ranks)], 0)
    check("scatter_object_list", mine, [f"for {rank}"])
    if rank == 0:
        dist.send_object_list(["a", 2], 1)
    elif rank == 1:
        some: list[Any] = [None, None]
        dist.recv_object_list(some, 0)
        check("recv_object_list", some, ["a", 2])
    return wrong


def test_messages_go_by_tag_from_any_source_in_batches_and_as_objects() -> None:
    assert torchjobs.run(3, messages) == [[], [], []]


def groups(dist: Any) -> list[str]:
    """Groups made from groups, meshes, functional collectives, coalescing."""
    import torch
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh

    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong = []

    def total(what: str, group: Any, wanted: float) -> None:
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=group)
        if x.item() != wanted:
            wrong.append(f"{what}: {x.item()} instead of {wanted}")

    evens = dist.new_group([0, 2])
    if rank in (0, 2):
        total("new_group", evens, 2.0)
    half = dist.split_group(split_ranks=[[0, 1], [2, 3]], group_desc="halves")
    total("split_group", half, 1.0 if rank < 2 else 5.0)
    assert half.group_desc == "halves"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    total("mesh, inner", mesh["inner"].get_group(), 1.0 if rank < 2 else 5.0)
    total("mesh, outer", mesh["outer"].get_group(), 2.0 if rank % 2 == 0 else 4.0)

    x = functional.all_reduce(torch.tensor([float(rank)]), "sum", (mesh, 1))
    y = functional.all_gather_single(torch.tensor([float(rank)]), 0, (mesh, 1))
    z = functional.reduce_scatter_single(torch.arange(2.0), "sum", 0, (mesh, 1))
    first = rank - rank % 2
    if [x.item(), y.tolist(), z.tolist()] != [2.0 * first + 1, [float(first), first + 1.0], [2.0 * (rank % 2)]]:
        wrong.append(f"functional: {x} {y} {z}")
    a, b = torch.ones(2), torch.ones(3)
    with dist._coalescing_manager(async_ops=True) as together:
        dist.all_reduce(a)
        dist.all_reduce(b)
    together.wait()
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as together:
        dist.all_reduce(a)
        dist.broadcast(b, 1)
    together.wait()
    parts, wholes = [torch.full((n,), float(rank)) for n in (1, 2)], [torch.zeros(n * ranks) for n in (1, 2)]
    with dist._coalescing_manager():
        for whole, part in zip(wholes, parts, strict=True):
            dist.all_gather_into_tensor(whole, part)
    if [a.tolist(), b.tolist(), wholes[1].tolist()] != [[16.0] * 2, [4.0] * 3, [float(r) for r in range(4) for _ in range(2)]]:
        wrong.append(f"coalescing: {a} {b} {wholes}")
    return wrong


def test_groups_meshes_functional_collectives_and_coalescing_work() -> None:
    assert torchjobs.run(4, groups) == [[]] * 4


def futures(dist: Any) -> list[str]:
    """A future is complete when `wait` returns, and continuations run."""
    import torch

    wrong = []
    for size in (1, 1 << 16):
        for _ in range(50):
            x = torch.ones(size)
            work = dist.all_reduce(x, async_op=True)
            future = work.get_future()
            doubled = future.then(lambda done: done.value()[0] * 2)
            work.wait()
            if not future.done():
                wrong.append("not complete after wait")
            if doubled.wait().flatten()[0].item() != 2.0 * dist.get_world_size():
                wrong.append(f"continuation: {doubled.value()}")
            assert work.is_completed()
            assert work.is_success()
    store = dist.distributed_c10d._get_default_store()
    late = dist.barrier(async_op=True)
    late.wait()
    late.get_future().wait()
    if dist.get_rank() == 0:
        # Else the abort might overtake the end of the barrier there.
        store.wait(["passed"], timedelta(seconds=60))
        lost = dist.irecv(torch.zeros(1), 1, tag=9)
        failing = lost.get_future()
        dist.group.WORLD.abort()
        with pytest.raises(RuntimeError, match="abort"):
            failing.wait()
        with pytest.raises(RuntimeError, match="abort"):
            lost.wait()
        store.set("aborted", "1")
    else:
        store.set("passed", "1")
        # Else rank 0 might hear first that this one has left.
        store.wait(["aborted"], timedelta(seconds=60))
    return wrong


def test_futures_are_complete_after_wait_and_carry_results_and_errors() -> None:
    assert torchjobs.run(2, futures) == [[], []]


def nested(dist: Any) -> float:
    """A continuation that waits for the future of another operation, as PowerSGD's hook has it."""
    import torch

    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        for tag in range(3):
            store.wait([f"waits{tag}"], timedelta(seconds=60))
            dist.send(torch.full((1,), float(tag + 1)), 0, tag=tag)
        return 6.0

    def receive(tag: int) -> Any:
        x = torch.zeros(1)
        future = dist.irecv(x, 1, tag=tag).get_future()
        if tag < 2:
            future = future.then(lambda done: done.value()[0] + receive(tag + 1).wait()[0])
        # Not before there is a future that has to wait.
        store.set(f"waits{tag}", "1")
        return future

    return float(receive(0).wait().item())


def test_a_continuation_may_wait_for_another_operation() -> None:
    assert torchjobs.run(2, nested) == [6.0, 6.0]


def missing(dist: Any) -> str:
    """A rank that does not come to a monitored barrier."""
    if dist.get_rank() == 1:
        # Not before rank 0 is done.
        dist.distributed_c10d._get_default_store().wait(["done"], timedelta(seconds=60))
        return ""
    with pytest.raises(TimeoutError) as caught:
        dist.monitored_barrier(timeout=timedelta(seconds=0.5))
    dist.distributed_c10d._get_default_store().set("done", "1")
    return str(caught.value)


def test_a_monitored_barrier_names_the_rank_that_is_missing() -> None:
    assert "1" in torchjobs.run(2, missing)[0].split("rank 0", 1)[1]


def cut_short(dist: Any, how: str) -> float:
    """Seconds until a call ends in which rank 0 waits for a peer."""
    import threading

    import torch

    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["done"], timedelta(seconds=60))
        return 0.0
    group = dist.group.WORLD
    ended: list[float] = []

    def receive() -> None:
        with pytest.raises(RuntimeError):
            dist.recv(torch.zeros(1), 1)
        ended.append(time.monotonic())

    thread = threading.Thread(target=receive)
    thread.start()
    while not thread.is_alive():
        pass
    work = dist.irecv(torch.zeros(1), 1, tag=2)
    assert not work.is_completed()
    begin = time.monotonic()
    if how == "abort":
        group.abort()
    else:
        dist.destroy_process_group()
    took = time.monotonic() - begin
    with pytest.raises(RuntimeError):
        work.wait()
    thread.join(30)
    assert not thread.is_alive()
    store.set("done", "1")
    return max(took, ended[0] - begin)


@pytest.mark.parametrize("how", ["abort", "destroy"])
def test_abort_and_shutdown_return_at_once_and_end_what_waits(how: str) -> None:
    assert torchjobs.run(2, cut_short, how)[0] < 5


def hooked(dist: Any) -> list[Any]:
    """What the flight recorder and a hook saw."""
    import os

    import torch

    seen: list[Any] = []
    x = torch.ones(1)
    dist.all_reduce(x)
    group = dist.group.WORLD
    group.register_pre_hook(7, lambda arguments: seen.append("before"))
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    dist.barrier()
    group.unregister_pre_hook(7)
    os.environ["TORCH_FR_BUFFER_SIZE"] = "20"
    recorded = dist.new_group()
    dist.all_reduce(x, group=recorded)
    return [len(seen), x.item(), type(recorded).__name__]


def test_hooks_see_every_operation() -> None:
    assert torchjobs.run(2, hooked) == [[3, 16.0, "ProcessGroup"]] * 2


def with_options(dist: Any) -> tuple[list[float], list[str]]:
    """A sum over a group with options of its own, and what unknown options are told."""
    import torch

    group = dist.new_group(pg_options={"transport": "tcp", "connections": 2, "lenient": False})
    x = torch.ones(1 << 16)
    dist.all_reduce(x, group=group)
    parts = dist.split_group(dist.group.WORLD, [[0, 1]])
    dist.all_reduce(x, group=parts)
    said = []
    for options in ({"no_such": "1"}, {"transport": "pigeon"}, {"transport": None}, "transport=tcp"):
        try:
            dist.new_group(pg_options=options)
        except (RuntimeError, ValueError, TypeError) as error:
            said.append(str(error))
    return [x[0].item(), x[-1].item()], said


def test_options_reach_the_group_and_unknown_ones_are_refused_with_those_that_are_known() -> None:
    for total, (unknown, value, kind, text) in torchjobs.run(2, with_options):
        assert total == [4.0, 4.0]
        assert "no_such" in unknown
        assert "transport" in unknown
        assert "connections" in unknown
        assert "pigeon" in value
        assert "option transport is a NoneType" in kind
        assert "not a str" in text


def times_out(dist: Any) -> list[float]:
    """Seconds until a receive without a sender ends: by the time-out of a group, one that was set later, and a call's own."""
    import torch

    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group(timeout=timedelta(seconds=1))
    later, long = dist.new_group(), dist.new_group()
    took = []
    if dist.get_rank() == 0:
        later.set_timeout(timedelta(seconds=1))
        for over, limit in ((group, None), (later, None), (long, timedelta(seconds=0.5))):
            begin = time.monotonic()
            with pytest.raises(TimeoutError):
                work = dist.irecv(torch.zeros(1), 1, group=over)
                work.wait() if limit is None else work.wait(limit)
            took.append(time.monotonic() - begin)
        store.set("done", "1")
    store.wait(["done"], timedelta(seconds=60))
    return took


def test_a_time_out_is_that_of_the_call_or_of_the_group() -> None:
    by_group, by_setting, by_wait = torchjobs.run(2, times_out)[0]
    assert 1 <= by_group < 20
    assert 1 <= by_setting < 20
    assert 0.5 <= by_wait < 20


def refused(dist: Any) -> list[str]:
    """Types and devices that no operation takes, by name."""
    import torch

    said = []
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.zeros(2, dtype=torch.complex64), dist.ReduceOp.MAX),
        lambda: dist.broadcast(torch.zeros(2, device="meta"), 0),
        lambda: dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (2,))),
        lambda: dist.all_reduce(torch.zeros(2, dtype=torch.float8_e4m3fnuz)),
    ]
    for call in calls:
        try:
            call()
            said.append("nothing")
        except (RuntimeError, ValueError, NotImplementedError) as error:
            said.append(str(error))
    x = torch.tensor([1 + 2j])
    dist.all_reduce(x)
    assert x.item() == 2 + 4j
    return said


def test_what_no_operation_takes_is_refused_by_name_and_complex_sums_work() -> None:
    for complexes, device, sparse, fp8 in torchjobs.run(2, refused):
        assert "complex" in complexes
        assert "meta" in device
        assert "sparse" in sparse.lower() or "storage" in sparse
        assert "float8_e4m3fnuz" in fp8
