"""A torch process group over a group of oxccl, and its registration with ``torch.distributed``.

A group for the CPU alone is a `ProcessGroup`: its operations are reached from Python without a way through C++, and it has a `Backend` for code
that asks for one. In a group for several devices (``"cpu:oxccl,cuda:nccl"``) there is a `Backend` only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import oxccl
from oxccl.torch._backend import Backend, connect
from oxccl.torch._calls import Calls, alloc

_CPU = torch.device("cpu")
_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM
# Groups with one of these beside oxccl have its type, and not that of a custom backend.
_BUILT_IN = ("cuda", "xpu", "mps")
_HOOKED_BY = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_DIST_NAN_CHECK")


class ProcessGroup(dist.ProcessGroup):
    """A process group whose operations go through torch's hooks (flight recorder, NaN check) and then to its `Backend`."""

    def __init__(self, store: dist.Store, backend: Backend, name: str, timeout: timedelta) -> None:
        group = backend._group
        dist.ProcessGroup.__init__(self, store, group.rank, group.world_size)
        self._group = group
        self._backend = backend
        self._limit_of_new = timeout
        self._set_default_backend(_CUSTOM)
        self._register_backend(_CPU, _CUSTOM, backend)
        self._set_group_name(name)

    # Not reached through C++, which loses what a receive is told, or has no such method.
    recv_anysource = Calls.recv_anysource
    monitored_barrier = Calls.monitored_barrier
    _noted = Calls._noted
    _batch = Calls._batch

    def getBackendName(self) -> str:
        """``oxccl``."""
        return "oxccl"

    def set_timeout(self, timeout: timedelta) -> None:
        """How long an operation may take whose call names no time."""
        self._backend.set_timeout(timeout)

    def abort(self) -> None:
        """Ends all operations in flight and refuses further ones; peers are told. Returns at once."""
        self._backend.abort()

    def shutdown(self) -> None:
        """Ends the group. Returns at once: what is in flight is cut short."""
        self._backend.shutdown()

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """A group of `new_ranks`; ``None`` on other ranks."""
        if self.rank() not in new_ranks:
            return None
        name = group_name or f"{self.group_name}:split:{'-'.join(map(str, new_ranks))}"
        store = dist.PrefixStore(f"{name}/", self.get_group_store())
        rank = list(new_ranks).index(self.rank())
        made = make(store, rank, len(new_ranks), name, timeout or self._limit_of_new, self._backend._given)
        if group_desc is not None:
            made._set_group_desc(group_desc)
        return made


class Direct(Calls, ProcessGroup):
    """A process group without hooks: calls from Python go straight to oxccl."""

    set_timeout = ProcessGroup.set_timeout
    abort = ProcessGroup.abort
    shutdown = ProcessGroup.shutdown

    def register_pre_hook(self, hook_id: int, hook: Callable[..., None]) -> None:
        """Has `hook` called before every operation, which goes another way from now on."""
        self.__class__ = ProcessGroup
        self.register_pre_hook(hook_id, hook)

    def register_post_hook(self, hook_id: int, hook: Callable[..., None]) -> None:
        """Has `hook` called after every operation, which goes another way from now on."""
        self.__class__ = ProcessGroup
        self.register_post_hook(hook_id, hook)


def make(store: dist.Store, rank: int, size: int, name: str, timeout: timedelta, options: Mapping[str, Any] | None = None) -> ProcessGroup:
    """A process group of the ranks that find each other in `store`."""
    backend = Backend(connect(store, rank, size, name, timeout, options), name, timeout, options)
    is_hooked = any(os.environ.get(variable, "0") not in ("", "0") for variable in _HOOKED_BY)
    return (ProcessGroup if is_hooked else Direct)(store, backend, name, timeout)


def _create(opts: Any, backend_options: Any) -> ProcessGroup | Backend:
    """What ``torch.distributed`` calls for each group."""
    accelerator = torch.accelerator.current_accelerator()
    is_ours_alone = opts.process_group._get_backend_name() == "custom" and (accelerator is None or accelerator.type in _BUILT_IN)
    if isinstance(backend_options, c10d.Backend.Options) and (not is_ours_alone or backend_options.backend == "oxccl"):
        # Those of the other device's backend, or ours, which say nothing that `opts` does not.
        backend_options = None
    if is_ours_alone:
        return make(opts.store, opts.group_rank, opts.group_size, opts.group_id, opts.timeout, backend_options)
    group = connect(opts.store, opts.group_rank, opts.group_size, opts.group_id, opts.timeout, backend_options)
    return Backend(group, opts.group_id, opts.timeout, backend_options)


def empty(*size: Any, dtype: Any = None, group: Any = None) -> Any:
    """A tensor, zeros at first, in memory that the other ranks of this host read in place where a copy would be sent of any other.

    Use it, and views and slices of it, as any tensor: ``dist.all_reduce(t)`` gives the same result in less time. It outlives the group. It is for
    what is used again and again, such as a buffer for gradients: each page costs something when it is first written.

    Args:
        size: as for `torch.empty`.
        dtype: by default torch's.
        group: a process group with oxccl for the CPU; by default that of all ranks.

    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("there is no process group: call torch.distributed.init_process_group first, or give one")
    found = getattr(group, "_backend", None) or group._get_backend(_CPU)
    if not isinstance(found, Backend):
        raise oxccl.Unsupported(f"the group's backend for the CPU is {found.name()}, not oxccl")
    dims = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    return alloc(found._group, list(dims), dtype or torch.get_default_dtype())


def register() -> None:
    """Makes ``oxccl`` known to ``torch.distributed``, which calls this by itself."""
    if not hasattr(dist.Backend, "OXCCL"):
        dist.Backend.register_backend("oxccl", _create, extended_api=True, devices=["cpu"])
