"""Tensors of `oxccl.torch.empty`, and those that this package makes itself: the other ranks of the host read them in place."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

import oxccl
import torchjobs
from ftjobs import Job

COUNT = 1 << 18
"""Elements of f32: 1 MiB, which is read in place where it can be."""


def neighbours() -> int:
    """How many other processes' tensors this one has mapped, which it does when it first reads one in place."""
    with open("/proc/self/maps") as file:
        return sum("memfd:oxccl-tensors" in line and " r--s " in line for line in file)


def results(dist: Any) -> list[str]:
    """Operations on tensors of both kinds, of views and slices, mixed between ranks; what differs."""
    import torch

    import oxccl.torch

    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    values = torch.randn(2 * COUNT)
    wrong = []

    def check(what: str, call: Any, *, mixed: bool = False) -> None:
        ordinary = values.clone()
        shared = values.clone() if mixed and rank else oxccl.torch.empty(2 * COUNT).copy_(values)
        for x in (ordinary, shared):
            call(x)
        if not torch.equal(ordinary, shared):
            wrong.append(what)

    check("nothing yet", lambda x: None)
    dist.all_reduce(values.clone())
    if neighbours():
        wrong.append("ordinary tensors were read in place")
    check("all_reduce", dist.all_reduce)
    if neighbours() != ranks - 1:
        wrong.append(f"{neighbours()} of {ranks - 1} neighbours were read in place")
    check("all_reduce of a slice", lambda x: dist.all_reduce(x[COUNT // 2 :]))
    check("all_reduce of a view", lambda x: dist.all_reduce(x.view(2, COUNT)[1]))
    check("all_reduce, async", lambda x: dist.all_reduce(x, async_op=True).wait())
    check("all_reduce, mixed", dist.all_reduce, mixed=True)
    check("broadcast", lambda x: dist.broadcast(x, ranks - 1))
    check("all_gather", lambda x: dist.all_gather_into_tensor(x, x.chunk(ranks)[rank].clone()))
    check("reduce_scatter", lambda x: dist.reduce_scatter_tensor(x[: 2 * COUNT // ranks].clone(), x))
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("backend", ["oxccl", "cpu:oxccl,cuda:gloo"])
def test_results_are_those_of_ordinary_tensors_and_no_copy_is_sent(ranks: int, backend: str) -> None:
    for wrong in torchjobs.run(ranks, results, backend=backend):
        assert not wrong, wrong


def shapes(dist: Any) -> None:
    """What `empty` gives and refuses."""
    import torch

    import oxccl.torch

    for dtype, _ in oxccl.torch._calls._DTYPES:
        x = oxccl.torch.empty(3, 4, dtype=dtype)
        assert (x.dtype, tuple(x.shape), x.is_contiguous()) == (dtype, (3, 4), True)
        assert not x.view(torch.uint8).any()
    assert oxccl.torch.empty([2, 3]).stride() == (3, 1)
    assert oxccl.torch.empty(()).dim() == 0
    assert oxccl.torch.empty(2, 0).numel() == 0
    assert oxccl.torch.empty(1, group=dist.new_group([dist.get_rank()], use_local_synchronization=True)).numel() == 1
    with pytest.raises(oxccl.Unsupported, match=r"torch\.complex64"):
        oxccl.torch.empty(1, dtype=torch.complex64)
    with pytest.raises(oxccl.Unsupported, match="gloo, not oxccl"):
        oxccl.torch.empty(1, group=dist.new_group(backend="gloo"))
    with pytest.raises(oxccl.InvalidArgument, match="do not fit in memory"):
        oxccl.torch.empty(1 << 40, 1 << 40)


def test_shapes_and_types_are_torchs_and_others_are_refused() -> None:
    torchjobs.run(2, shapes)


def outlives(dist: Any) -> None:
    """A view is all that is left; then nothing is."""
    import oxccl.torch

    x = oxccl.torch.empty(2 * COUNT)
    x.fill_(1)
    part = x[COUNT:].view(-1, 2)
    other = oxccl.torch.empty(2 * COUNT).fill_(7)
    dist.all_reduce(x)
    work = dist.all_reduce(part, async_op=True)
    del x
    work.wait()
    dist.destroy_process_group()
    del work, dist
    gc.collect()
    assert (part == 4).all() and (other == 7).all()
    part.add_(other[COUNT:].view(-1, 2))
    assert (part == 11).all()


def test_the_memory_outlives_its_tensor_and_the_group() -> None:
    torchjobs.run(2, outlives)


def given_back(dist: Any) -> int:
    """In how many places the tensors are, each of which is dropped before the next."""
    import torch

    import oxccl.torch

    places = set()
    for _ in range(40):
        x = oxccl.torch.empty(2 << 30, dtype=torch.uint8)
        x[-1] = 1
        places.add(x.data_ptr())
    return len(places)


def test_the_memory_is_given_back_with_the_last_view() -> None:
    # While one is made, the one before is still there.
    assert torchjobs.run(1, given_back) == [2]


def sharded(dist: Any) -> list[str]:
    """FSDP that takes its buffers from the group, against one that does not."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    wrong = []
    found = []
    for from_group in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in net:
            fully_shard(layer, mesh=mesh).set_allocate_memory_from_process_group_for_comm(from_group)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            net(torch.full((4, 512), dist.get_rank() + step + 1.0)).square().mean().backward()
            optimizer.step()
        found.append([p.to_local().clone() for p in net.parameters()])
        if bool(neighbours()) != from_group:
            wrong.append(f"from_group={from_group}, and {neighbours()} neighbours were read in place")
    if not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
        wrong.append("the parameters differ")
    return wrong


def test_fsdp_takes_its_buffers_from_the_group_where_it_is_told_to() -> None:
    for wrong in torchjobs.run(2, sharded):
        assert not wrong, wrong


HEAD = """
def read():
    maps = open("/proc/self/maps").read().splitlines()
    return sum("memfd:oxccl-tensors" in line and " r--s " in line for line in maps)
net = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
"""
DDP = """
with ft.Manager(None, net.load_state_dict, net.state_dict, timeout=30, replica_id=name, lighthouse_addr=lighthouse) as manager:
    model = ft.DistributedDataParallel(manager, net)
    optimizer = ft.Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.01))
    while manager.current_step() < 3:
        optimizer.zero_grad()
        model(torch.ones(4, 512)).square().mean().backward()
        optimizer.step()
    tell(read=read(), bits=hash(tuple(bits(net.parameters()))))
"""
DILOCO = """
with ft.Manager(None, lambda state: None, lambda: {}, timeout=30, replica_id=name, lighthouse_addr=lighthouse) as manager:
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    diloco = ft.DiLoCo(manager, [net], inner, torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True), sync_every=2)
    with diloco:
        for _ in range(4):
            inner.zero_grad()
            net(torch.ones(4, 512)).square().mean().backward()
            inner.step()
    # The group's end ends it.
    found = read()
    diloco.finish()
    tell(read=found, bits=hash(tuple(bits(net.parameters()))))
"""


@pytest.mark.parametrize("body", [DDP, DILOCO], ids=["ddp", "diloco"])
def test_what_the_package_reduces_in_itself_is_read_in_place(body: str, tmp_path: Path) -> None:
    with oxccl.Lighthouse(min_replicas=2, initial_replicas=2) as lighthouse, Job(lighthouse.address, HEAD + body, tmp_path) as job:
        for name in ("a", "b"):
            job.start(name)
        ended = job.ends()
    assert ended["a"]["bits"] == ended["b"]["bits"]
    assert ended["a"]["read"] == ended["b"]["read"] == 1
