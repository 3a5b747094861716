"""Replicas of several ranks that shard the model among them, with averages across replicas that die and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import oxccl
import torchjobs
from ftjobs import Job

# Two replicas of two ranks; `run` names the stores in which the ranks of one run of a replica meet.
TRAIN = """
import torch.distributed as dist
import oxccl
rank, run, steps, stop = int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), sys.argv[6]
place, together = 2 * "ab".index(name[0]) + rank, stop == "none"
dist.init_process_group("oxccl", init_method=f"file://{run}.ranks", rank=rank, world_size=2)
torch.manual_seed(0 if together else "ab".index(name[0]))
net = nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.Linear(33, 33), nn.GELU(), nn.Linear(33, 1))

def save():
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict()}

def load(state):
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])

with ft.Manager(None, load, save, min_replica_size=1, rank=rank, world_size=2, store=oxccl.FileStore(f"{run}.manager"), init_sync=not together,
                timeout=30, quorum_timeout=60, replica_id=name[0], lighthouse_addr=lighthouse if rank == 0 else None) as manager:
    mesh = ft.ft_init_device_mesh("cpu", (2, 2), ("replicate", "shard"), 0, manager)
    for layer in (net[0], net[2], net[4], net):
        ft.fully_shard(layer, mesh=mesh["replicate", "shard"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    stepper = ft.Optimizer(manager, optimizer)
    while manager.current_step() < steps:
        if os.path.exists(stop):
            steps = int(open(stop).read())
        step = manager.current_step()
        stepper.zero_grad()
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + place))
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        stepper.step()
        part = manager._participation()
        tell(step=manager.current_step(), members=part.replica_world_size, healed=part.healed_bytes or 0, loss=loss.item(), size=mesh.size())
    moments = [s["exp_avg"].to_local().sum().item() for s in optimizer.state.values()]
    tell(done=manager.current_step(), bits=bits(p.full_tensor() for p in net.parameters()), moments=moments)
dist.destroy_process_group()
"""

ALONE = """
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.Linear(33, 33), nn.GELU(), nn.Linear(33, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
for step in range(int(sys.argv[3])):
    halves = []
    for first in (0, 2):
        optimizer.zero_grad()
        for place in (first, first + 1):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + place))
            (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
        halves.append([p.grad / 2 for p in net.parameters()])
    for p, one, other in zip(net.parameters(), *halves):
        p.grad = (one + other) / 2
    optimizer.step()
tell(done=1, bits=bits(net.parameters()))
"""

RANKS = ("a0", "a1", "b0", "b1")


def start(job: Job, folder: Path, replica: str, run: int, *arguments: object) -> None:
    for rank in range(2):
        job.start(f"{replica}{rank}", rank, folder / f"{replica}{run}", *arguments)


def test_sharding_inside_and_averages_across_train_as_one_process_does(tmp_path: Path) -> None:
    with oxccl.Lighthouse(min_replicas=1, initial_replicas=2) as lighthouse, Job(lighthouse.address, TRAIN, tmp_path) as job:
        for replica in "ab":
            start(job, tmp_path, replica, 1, 8, "none")
        job.start_also("alone", ALONE, 8)
        ended = job.ends()
        said = job.said("b1")
    assert {line["size"] for line in said if "size" in line} == {4}
    # Sums of two, and halves.
    assert [ended[name]["bits"] for name in RANKS] == [ended["alone"]["bits"]] * 4


@pytest.mark.parametrize("dies", [("b0", "b1"), ("b1",)], ids=["replica", "rank"])
def test_a_replica_that_is_killed_heals_its_shards_and_all_end_equal(dies: tuple[str, ...], tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with oxccl.Lighthouse(min_replicas=1, initial_replicas=2) as lighthouse, Job(lighthouse.address, TRAIN, tmp_path) as job:
        for replica in "ab":
            start(job, tmp_path, replica, 1, 10**6, stop)
        job.until("a0", "step", 10)
        for name in dies:
            job.kill(name)
        # The other rank of a replica does not outlive it.
        for name in {"b0", "b1"} - set(dies):
            job.fails(name)
        # The others go on alone.
        job.until("a0", "step", job.said("a0")[-1]["step"] + 5)
        assert job.said("a0")[-1]["members"] == 1
        start(job, tmp_path, "b", 2, 10**6, stop)
        for rank in range(2):
            job.until(f"b{rank}", "members", 2)
        second = job.said("b1")
        # A step that all have yet to begin: they go in lockstep.
        last = job.said("a0")[-1]["step"] + 50
        (tmp_path / "new").write_text(str(last))
        (tmp_path / "new").rename(stop)
        ended = job.ends()
    assert second[0]["healed"] > 0
    assert {line["done"] for line in ended.values()} == {last}
    assert len({str(line["bits"]) for line in ended.values()}) == 1
    for rank in range(2):
        assert ended[f"a{rank}"]["moments"] == ended[f"b{rank}"]["moments"]


def test_a_mesh_of_replicas_alone_is_a_group_of_torch_and_others_are_refused() -> None:
    import torch
    import torch.distributed as dist

    from oxccl import ft

    with oxccl.Lighthouse() as lighthouse, ft.Manager(lighthouse_addr=lighthouse.address) as manager:
        mesh = ft.ft_init_device_mesh("cpu", (3,), ("replicate",), 0, manager)
        manager.start_quorum()
        assert (mesh.size(), mesh.size("replicate"), mesh.get_local_rank(), mesh.ndim) == (1, 1, 0, 1)
        x = torch.ones(2)
        dist.all_reduce(x, group=mesh.get_group("replicate"), op=dist.ReduceOp.AVG)
        assert x.tolist() == [1, 1]
        with pytest.raises(ValueError, match="2 sizes and 1 names"):
            ft.ft_init_device_mesh("cpu", (2, 2), ("replicate",), 0, manager)
        with pytest.raises(KeyError, match="no dimension 'shard'"):
            mesh["replicate", "shard"]
        with pytest.raises(ValueError, match="give two dimensions"):
            ft.fully_shard(torch.nn.Linear(1, 1), mesh=mesh)


def dtensors(dist: Any) -> list[str]:
    """What is said of DTensors that do not travel; and one that does, to itself."""
    import torch
    from torch.distributed.tensor import DTensor, Partial, Shard, init_device_mesh

    from oxccl.ft import _state

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    other = init_device_mesh("cpu", (1,), mesh_dim_names=("other",))
    x = torch.arange(6.0).reshape(2, 3)
    said = []
    for meshes, value in [
        ([], DTensor.from_local(x, mesh, [Shard(0)])),
        ([mesh], DTensor.from_local(x, other, [Shard(0)])),
        ([mesh], DTensor.from_local(x, mesh, [Partial()])),
    ]:
        with pytest.raises(TypeError) as raised:
            _state.encode({"m": {"w": value}}, meshes=meshes)
        said.append(str(raised.value))
    tensors, tree = _state.encode({"m": {"w": DTensor.from_local(x, mesh, [Shard(1)])}}, meshes=[mesh])
    loaded = [(name, "f32", shape, bytearray(memory.numpy().tobytes())) for name, shape, memory in tensors]
    found = _state.decode(loaded, tree, meshes=[other, mesh])["m"]["w"]
    assert found.placements == (Shard(1),) and found.device_mesh == mesh and found.full_tensor().equal(x)
    with pytest.raises(TypeError, match="no mesh of ft_init_device_mesh has here"):
        _state.decode(loaded, tree, meshes=[other])
    return said


def test_a_dtensor_travels_if_its_mesh_is_the_managers() -> None:
    (said,) = torchjobs.run(1, dtensors)
    assert all(text.startswith("m/w is a DTensor") for text in said)
    assert ["no mesh of ft_init_device_mesh" in text for text in said] == [True, True, False]
