"""A backend of ``torch.distributed`` for tensors on the CPU.

``torch.distributed.init_process_group("oxccl")`` needs no import of this module, and ``"cpu:oxccl,cuda:nccl"`` leaves tensors on a GPU to NCCL.
Everything that `torch.distributed` offers goes over a group of oxccl: collectives, messages, new groups, DDP, FSDP, DTensor.
"""

from __future__ import annotations

import types

from torch._C import _dynamo

from oxccl.torch import _backend, _calls, _group, _work
from oxccl.torch._backend import Backend
from oxccl.torch._group import ProcessGroup, empty, register
from oxccl.torch._work import Work

__all__ = ["Backend", "ProcessGroup", "Work", "empty", "register"]


def _leave_to_python() -> None:
    """Has ``torch.compile`` run this package's functions as they are: it cannot trace through a process group, and calls reach it from C++ too."""
    frames = _dynamo.eval_frame
    # These functions, and what they call.
    skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for module in (_backend, _calls, _group, _work):
        owners = [module, *(kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__)]
        for owner in owners:
            for found in vars(owner).values():
                function = found.fget if isinstance(found, property) else found
                if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                    frames.set_code_exec_strategy(function.__code__, skipped)


_leave_to_python()
