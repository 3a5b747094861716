"""Training over the backend of ``torch.distributed`` gives what it gives over Gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torchjobs


def model() -> Any:
    """The same on every rank."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))


def train(wrapped: Any, rank: int, steps: int = 8) -> list[float]:
    """Losses of a few steps on data of this rank's own."""
    import torch

    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 8, generator=draw)
        loss = (wrapped(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp(dist: Any) -> tuple[list[float], list[float]]:
    """Parameters after data-parallel training: plain, with small buckets and a hook that compresses."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    found = []
    for hook in (None, default_hooks.bf16_compress_hook):
        wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.001, find_unused_parameters=hook is None)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        train(wrapped, dist.get_rank())
        found.append([value for p in wrapped.parameters() for value in p.flatten().tolist()])
    return found[0], found[1]


def test_ddp_trains_bitwise_as_over_gloo() -> None:
    ours, gloos = torchjobs.run(2, ddp), torchjobs.run(2, ddp, backend="gloo")
    assert ours[0] == ours[1]
    assert ours == gloos


def fsdp(dist: Any) -> list[float]:
    """All parameters after FSDP2 training, and losses."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in whole:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    losses = train(whole, dist.get_rank())
    return [*losses, *(value for p in whole.parameters() for value in p.full_tensor().flatten().tolist())]


def test_fsdp2_trains_bitwise_as_over_gloo() -> None:
    ours = torchjobs.run(2, fsdp)
    assert ours == torchjobs.run(2, fsdp, backend="gloo")


def tensor_parallel(dist: Any) -> list[float]:
    """DTensors that are sharded, replicated and partial, and a model cut by columns and rows."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(24.0).view(4, 6)
    rows, columns = distribute_tensor(whole, mesh, [Shard(0)]), distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    product = (rows @ columns.redistribute(mesh, [Replicate()])).full_tensor()
    partial = distribute_tensor(whole, mesh, [Shard(1)]) @ columns
    assert torch.equal(product, partial.full_tensor())
    cut = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    losses = train(cut, 0)
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in cut.parameters()]
    return [*losses, *product.flatten().tolist(), *(value for p in found for value in p.flatten().tolist())]


def test_dtensor_and_tensor_parallelism_compute_as_over_gloo() -> None:
    ours = torchjobs.run(2, tensor_parallel)
    assert ours == torchjobs.run(2, tensor_parallel, backend="gloo")


def checkpoint(dist: Any, folder: str) -> bool:
    """Saves a sharded state in the background while other collectives go on, and loads it."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"sharded": distribute_tensor(torch.arange(64.0), mesh, [Shard(0)]), "step": 7}
    saving = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group())
    for _ in range(20):
        x = torch.ones(100)
        dist.all_reduce(x)
        assert x[0].item() == dist.get_world_size()
    saving.result(timeout=60)
    dist.barrier()
    loaded = {"sharded": distribute_tensor(torch.zeros(64), mesh, [Shard(0)]), "step": 0}
    dcp.load(loaded, checkpoint_id=folder)
    return loaded["step"] == 7 and bool(torch.equal(loaded["sharded"].full_tensor(), torch.arange(64.0)))


def test_a_checkpoint_is_saved_in_the_background_and_loaded(tmp_path: Path) -> None:
    assert torchjobs.run(2, checkpoint, str(tmp_path / "saved")) == [True, True]
