"""Replicas of several ranks that shard the model among them: FSDP2 inside a replica, averages of the manager across replicas.

The ranks of a replica are a `DeviceMesh` of torch, whose ranks never change. The dimension across replicas is the manager's: who is in it is decided
anew in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from oxccl.ft._manager import Manager
from oxccl.ft._work import Work


class ManagedProcessGroup(dist.ProcessGroup):
    """The replicas of a step as a group of torch: ``torch.distributed.all_reduce`` over it is `Manager.allreduce`.

    Rank r reduces with rank r of the others. What happens to another replica is not raised: it shows in `Manager.errored` and in the vote.
    """

    def __init__(self, manager: Manager) -> None:
        super().__init__(0, 1)
        self._manager = manager

    def allreduce(self, tensors: list[Any], opts: Any = None) -> Work:
        """Reduces one tensor in place; `opts` are torch's, or a reduction alone."""
        if len(tensors) != 1:
            raise ValueError(f"{len(tensors)} tensors; an all-reduce over replicas takes one")
        op = dist.ReduceOp.AVG if opts is None else getattr(opts, "reduceOp", opts)
        return self._manager.allreduce(tensors[0], reduce_op=op)

    def size(self) -> int:
        """The number of replicas that contribute to this step."""
        return self._manager.num_participants()

    def rank(self) -> int:
        """This replica's place among them; 0 for one that does not contribute."""
        return self._manager.participating_rank() or 0

    def getBackendName(self) -> str:
        """``oxccl-ft``."""
        return "oxccl-ft"


class ManagedDeviceMesh:
    """A mesh of which one dimension are the replicas of a step, and the others, in `mesh`, the ranks of this replica.

    ``mesh["shard"]`` is a `DeviceMesh` of torch, ``mesh["replicate", "shard"]`` one of this class.
    """

    def __init__(self, mesh: Any, mesh_dim_names: tuple[str, ...], replicate: str, group: ManagedProcessGroup) -> None:
        self.mesh = mesh
        """The `DeviceMesh` of this replica's ranks; None in a slice without them."""
        self.mesh_dim_names = mesh_dim_names
        self._replicate = replicate
        self._group = group

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.mesh_dim_names)

    def _name(self, mesh_dim: int | str | None) -> str:
        if mesh_dim is None:
            if self.ndim != 1:
                raise ValueError(f"the mesh has the dimensions {self.mesh_dim_names}: name one")
            mesh_dim = 0
        name = self.mesh_dim_names[mesh_dim] if isinstance(mesh_dim, int) else mesh_dim
        if name not in self.mesh_dim_names:
            raise KeyError(f"the mesh has no dimension '{name}'; it has {self.mesh_dim_names}")
        return name

    def __getitem__(self, names: str | tuple[str, ...]) -> Any:
        """The mesh of some dimensions."""
        wanted = tuple(self._name(name) for name in ((names,) if isinstance(names, str) else names))
        own = tuple(name for name in wanted if name != self._replicate)
        mesh = self.mesh[own] if own else None
        return mesh if own == wanted else ManagedDeviceMesh(mesh, wanted, self._replicate, self._group)

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """The group of a dimension."""
        name = self._name(mesh_dim)
        return self._group if name == self._replicate else self.mesh.get_group(name)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """The size of a dimension, or the product of all; across replicas it is that of this step."""
        if mesh_dim is None:
            return self._group.size() * (1 if self.mesh is None else int(self.mesh.size()))
        return int(self.get_group(mesh_dim).size())

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's place in a dimension."""
        return int(self.get_group(mesh_dim).rank())

    def __repr__(self) -> str:
        return f"ManagedDeviceMesh({self.mesh_dim_names}, '{self._replicate}' across replicas)"


def ft_init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str], replicate_dim: int, manager: Manager
) -> ManagedDeviceMesh:
    """Makes a mesh whose dimension `replicate_dim` are the replicas, and whose others are the ranks of this replica.

    ``torch.distributed`` has the ranks of this replica alone, in the order of the manager's. States with `DTensor`s of this mesh travel to other
    replicas: rank r heals from rank r.

    Args:
        device_type: as for `torch.distributed.device_mesh.init_device_mesh`.
        mesh_shape: the sizes of all dimensions; that of the replicas is not used, since it changes.
        mesh_dim_names: their names.
        replicate_dim: which of them are the replicas.
        manager: this replica.

    """
    from torch.distributed.device_mesh import init_device_mesh

    names = tuple(mesh_dim_names)
    if len(mesh_shape) != len(names) or not 0 <= replicate_dim < len(names):
        raise ValueError(
            f"{len(mesh_shape)} sizes and {len(names)} names for the dimensions, of which {replicate_dim} are the replicas; give one for each"
        )
    own = [n for n in range(len(names)) if n != replicate_dim]
    mesh = init_device_mesh(device_type, tuple(mesh_shape[n] for n in own), mesh_dim_names=tuple(names[n] for n in own)) if own else None
    if mesh is not None:
        manager._states.meshes.append(mesh)
    return ManagedDeviceMesh(mesh, names, names[replicate_dim], ManagedProcessGroup(manager))


def fully_shard(module: Any, *, mesh: ManagedDeviceMesh, **options: Any) -> Any:
    """As ``torch.distributed.fsdp.fully_shard``, over a mesh of the replicas and one dimension of this replica's ranks.

    Gradients are averaged over the replica's ranks, which each keep a shard, and each shard over the replicas. A step that is lost because of another
    replica is left out.
    """
    # It takes a second to import.
    from torch.distributed import fsdp

    if not isinstance(mesh, ManagedDeviceMesh) or mesh.ndim != 2 or mesh.mesh is None:
        raise ValueError(f"the mesh is {mesh}; give two dimensions of ft_init_device_mesh, the replicas' and one to shard over")
    sharded = fsdp.fully_shard(module, mesh=mesh.mesh, **options)
    group = mesh._group

    def average(shard: Any) -> None:
        group.allreduce([shard]).wait()

    sharded.set_all_reduce_hook(average)
    return sharded
