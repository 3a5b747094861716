"""A backend of ``torch.distributed`` for tensors on the CPU.

``torch.distributed.init_process_group("oxccl")`` needs no import of this module, and ``"cpu:oxccl,cuda:nccl"`` leaves tensors on a GPU to NCCL.
Everything that `torch.distributed` offers goes over a group of oxccl: collectives, messages, new groups, DDP, FSDP, DTensor.
"""

from __future__ import annotations

from oxccl.torch._backend import Backend
from oxccl.torch._group import ProcessGroup, register
from oxccl.torch._work import Work

__all__ = ["Backend", "ProcessGroup", "Work", "register"]
