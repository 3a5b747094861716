"""Training over the backend of ``torch.distributed`` gives what it gives over Gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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


def values(parameters: Any) -> list[float]:
    """All parameters in one list."""
    return [value for p in parameters for value in p.flatten().tolist()]


def ddp(dist: Any) -> list[list[float]]:
    """Parameters after data-parallel training: plain, with small buckets and a hook that compresses."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    found = []
    for hook in (None, default_hooks.bf16_compress_hook):
        wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.001, find_unused_parameters=hook is None)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        train(wrapped, dist.get_rank())
        found.append(values(wrapped.parameters()))
    return found


def test_ddp_trains_bitwise_as_over_gloo() -> None:
    ours, gloos = torchjobs.run(2, ddp), torchjobs.run(2, ddp, backend="gloo")
    assert ours[0] == ours[1]
    assert ours == gloos


def power_sgd(dist: Any) -> tuple[list[float], list[float]]:
    """Losses and parameters with a hook whose continuations wait for other operations."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    # One bucket: with several, the order of operations that continuations begin would differ between ranks, whatever the backend.
    wrapped = DistributedDataParallel(model())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    losses = train(wrapped, dist.get_rank())
    assert state.compression_stats()[0] > 1
    return losses, values(wrapped.parameters())


def test_ddp_with_power_sgd_trains_bitwise_as_over_gloo() -> None:
    ours = torchjobs.run(2, power_sgd)
    assert ours[0][1] == ours[1][1]
    assert ours == torchjobs.run(2, power_sgd, backend="gloo")


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
    return [*losses, *values(p.full_tensor() for p in whole.parameters())]


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
    return [*losses, *product.flatten().tolist(), *values(found)]


def test_dtensor_and_tensor_parallelism_compute_as_over_gloo() -> None:
    ours = torchjobs.run(2, tensor_parallel)
    assert ours == torchjobs.run(2, tensor_parallel, backend="gloo")


def loaded(dist: Any) -> list[float]:
    """Parameters after data-parallel training on batches that forked workers load, while operations are in flight."""
    import warnings

    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    # Newer versions of Python warn of a fork beside threads: the workers call no operation.
    warnings.simplefilter("ignore", DeprecationWarning)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    sampler: Any = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    pending = dist.irecv(torch.zeros(1), 1 - dist.get_rank(), tag=5)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            (wrapped(inputs) - targets).square().mean().backward()
            optimizer.step()
    dist.send(torch.ones(1), 1 - dist.get_rank(), tag=5)
    pending.wait()
    return values(wrapped.parameters())


def test_workers_of_a_data_loader_are_forked_beside_operations_in_flight() -> None:
    ours = torchjobs.run(2, loaded)
    assert ours == torchjobs.run(2, loaded, backend="gloo")


def sharded_optimizer(dist: Any) -> list[float]:
    """Parameters after training whose optimizer state is dealt out to the ranks."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        x = torch.randn(4, 8, generator=draw)
        optimizer.zero_grad()
        (wrapped(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    optimizer.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["state"]) == 6
    return values(wrapped.parameters())


def test_zero_redundancy_trains_bitwise_as_over_gloo() -> None:
    ours = torchjobs.run(2, sharded_optimizer)
    assert ours[0] == ours[1]
    assert ours == torchjobs.run(2, sharded_optimizer, backend="gloo")


def joined(dist: Any) -> list[float]:
    """Parameters after training on uneven numbers of batches."""
    import torch
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(dist.get_rank())
    with Join([wrapped]):
        for _ in range(4 + 3 * dist.get_rank()):
            x = torch.randn(4, 8, generator=draw)
            optimizer.zero_grad()
            (wrapped(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    return values(wrapped.parameters())


def test_ranks_with_fewer_batches_join_as_over_gloo() -> None:
    ours = torchjobs.run(2, joined)
    assert ours[0] == ours[1]
    assert ours == torchjobs.run(2, joined, backend="gloo")


def pipelined(dist: Any, schedule: str) -> list[float]:
    """Losses of the last stage and parameters of this one after training in two stages."""
    import torch
    from torch.distributed import pipelining

    rank = dist.get_rank()
    whole = model()
    stage_model = whole[:2] if rank == 0 else whole[2:]
    stage = pipelining.PipelineStage(stage_model, rank, 2, torch.device("cpu"))
    run = getattr(pipelining, schedule)(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD(stage_model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(7)
    found: list[float] = []
    for _ in range(4):
        x = torch.randn(16, 8, generator=draw)
        optimizer.zero_grad()
        if rank == 0:
            run.step(x)
        else:
            losses: list[Any] = []
            run.step(target=x.sum(1, keepdim=True), losses=losses)
            found += [loss.item() for loss in losses]
        optimizer.step()
    return [*found, *values(stage_model.parameters())]


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_a_pipeline_trains_bitwise_as_over_gloo(schedule: str) -> None:
    ours = torchjobs.run(2, pipelined, schedule)
    # The last stage has four losses of four steps.
    assert len(ours[1]) == 4 * 4 + sum(p.numel() for p in model()[2:].parameters())
    assert ours == torchjobs.run(2, pipelined, schedule, backend="gloo")


def compiled(dist: Any) -> list[float]:
    """What a compiled function with collectives gives, and parameters after training a compiled model under DDP."""
    import torch
    import torch.distributed._functional_collectives as functional
    from torch.nn.parallel import DistributedDataParallel

    def mixed(x: Any) -> Any:
        total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        parts = functional.all_gather_single(x, 0, dist.group.WORLD)
        return total + parts.sum()

    whole = torch.compile(mixed, backend="aot_eager", fullgraph=True)
    found: list[float] = whole(torch.arange(3.0) + dist.get_rank()).tolist()
    wrapped = torch.compile(DistributedDataParallel(model()), backend="aot_eager")
    return [*found, *train(wrapped, dist.get_rank(), 4), *values(wrapped.parameters())]


def test_compiled_functions_and_models_compute_as_over_gloo() -> None:
    ours = torchjobs.run(2, compiled)
    # Twice 0, 1, 2 and 1, 2, 3, and the sum of both.
    assert ours[0][:3] == [2.0 + 9.0, 6.0 + 9.0, 10.0 + 9.0]
    assert ours == torchjobs.run(2, compiled, backend="gloo")


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
