"""One device's part of a torch process group: what C++ code of torch calls, and what a group for several devices has for the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import oxccl
from oxccl.torch._calls import Calls, memory


def connect(store: dist.Store, rank: int, size: int, name: str, timeout: timedelta, options: Mapping[str, Any] | None = None) -> oxccl.Group:
    """A group of the ranks that find each other in torch's `store`."""
    group = oxccl.unconfigured(timeout=timeout, options=options)
    # A job may make its group, destroy it and make it again in the same store.
    epoch = store.add(f"oxccl/rank/{rank}", 1)
    group.configure(store, rank, size, epoch=epoch, name=name, timeout=timeout)
    return group


class Backend(Calls, c10d.Backend):
    """The backend of tensors on the CPU."""

    def __init__(self, group: oxccl.Group, name: str, timeout: timedelta, given: Mapping[str, Any] | None = None) -> None:
        c10d.Backend.__init__(self, group.rank, group.world_size)
        self._group = group
        self._given = given
        self._options = c10d.Backend.Options("oxccl", timeout)
        self._options.group_name = name
        self._kept: dict[tuple[int, Any], list[oxccl.Memory]] = {}
        """What `allocate_tensor` gave, by size and type."""

    @property
    def options(self) -> Any:
        """The time-out and the group's name."""
        return self._options

    @property
    def supports_splitting(self) -> bool:
        """True."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """False: messages in flight progress together without it."""
        return False

    def supports_tensor_alloc(self, device: Any) -> bool:
        """True for the CPU. C++ asks by a number, and has no way to hand the call on to Python."""
        return not isinstance(device, int) and torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: Any, device: Any = None) -> Any:
        """A tensor that the other ranks of this host read in place. FSDP asks for its buffers here, if it is told to.

        It may have what an earlier one held: such memory is used again once no view of it is left, since new pages cost more than the copy they save.
        """
        kept = self._kept.setdefault((size, dtype), [])
        found = next((m for m in kept if not m._is_lent()), None)
        if found is None:
            found = memory(self._group, size, dtype)
            kept.append(found)
        return torch.from_dlpack(found)

    def split(self, store: dist.Store, ranks: Sequence[int], opts: Any = None) -> Backend | None:
        """The backend of a group of `ranks`; ``None`` on other ranks."""
        if self._group.rank not in ranks:
            return None
        options = opts or self._options
        rank = list(ranks).index(self._group.rank)
        group = connect(store, rank, len(ranks), options.group_name, options._timeout, self._given)
        return Backend(group, options.group_name, options._timeout, self._given)
