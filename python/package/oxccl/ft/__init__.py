"""Training that survives the death of replicas, for models of torch.

Each replica is a process, or several, that trains the whole model; a `Manager` in it agrees with the others on who takes part in a step. A
replica that comes back takes its state over from one that is well::

    manager = ft.Manager(load_state_dict=load, state_dict=save, replica_id="a", lighthouse_addr="http://…")
    model = ft.DistributedDataParallel(manager, model)
    optimizer = ft.Optimizer(manager, torch.optim.AdamW(model.parameters()))
    while manager.current_step() < 1000:
        optimizer.zero_grad()       # begins a step
        loss(model(batch())).backward()
        optimizer.step()            # ends it

The names are torchft's where they mean the same.
"""

from __future__ import annotations

from oxccl.ft._data import DistributedSampler
from oxccl.ft._ddp import DistributedDataParallel
from oxccl.ft._local_sgd import Checkpoints, DiLoCo, LocalSGD
from oxccl.ft._manager import Manager, ProcessGroupGloo, WorldSizeMode
from oxccl.ft._mesh import ManagedDeviceMesh, ManagedProcessGroup, ft_init_device_mesh, fully_shard
from oxccl.ft._optim import Optimizer
from oxccl.ft._work import Work

__all__ = [
    "Checkpoints",
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedSampler",
    "LocalSGD",
    "ManagedDeviceMesh",
    "ManagedProcessGroup",
    "Manager",
    "Optimizer",
    "ProcessGroupGloo",
    "Work",
    "WorldSizeMode",
    "ft_init_device_mesh",
    "fully_shard",
]
