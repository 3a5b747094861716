"""One device's part of a torch process group: what C++ code of torch calls, and what a group for several devices has for the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import oxccl
from oxccl.torch._calls import Calls


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

    def split(self, store: dist.Store, ranks: Sequence[int], opts: Any = None) -> Backend | None:
        """The backend of a group of `ranks`; ``None`` on other ranks."""
        if self._group.rank not in ranks:
            return None
        options = opts or self._options
        rank = list(ranks).index(self._group.rank)
        group = connect(store, rank, len(ranks), options.group_name, options._timeout, self._given)
        return Backend(group, options.group_name, options._timeout, self._given)
