"""A process group for torchft's own ``Manager``: ``Manager(pg=ProcessGroupOxccl(), …)``.

It is configured again for each quorum, ends what waits when it is aborted, and hears of a lost peer at once, not at a time-out.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c10d
from torchft.process_group import ProcessGroup

import oxccl
from oxccl.torch._calls import Calls

__all__ = ["ProcessGroupOxccl"]


class ProcessGroupOxccl(Calls, ProcessGroup):
    """Collectives between the replicas of a job, on tensors of the CPU. `timeout` is that of configuring and of operations that name none."""

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        ProcessGroup.__init__(self, 0, 1)
        self._timeout = timeout.total_seconds()
        self._epoch = 0
        self._group = oxccl.unconfigured(timeout=self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """The time-out of configuring and of operations that name none, from now on."""
        self._timeout = timeout.total_seconds()
        Calls.set_timeout(self, timeout)

    _set_default_timeout = set_timeout

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Meets the other replicas of the quorum at `store_addr` (``host:port/prefix``)."""
        address, _, prefix = store_addr.partition("/")
        limit = self._timeout or 60.0
        epoch = 1 if quorum_id is None else quorum_id + 1
        if epoch <= self._epoch:
            # A lighthouse that began anew, or a caller that counts no quorums.
            self._group.abort("configured again")
            self._group = oxccl.unconfigured(timeout=limit)
        self._epoch = epoch
        store = oxccl.PrefixStore(prefix, oxccl.TcpStore(address, timeout=limit))
        self._group.configure(store, rank, world_size, epoch=epoch, name=f"torchft {replica_id}", timeout=limit)

    def allreduce(self, tensors: list[Any], opts: Any = None) -> Any:
        """As in torch; `opts` may be a reduction alone."""
        return Calls.allreduce(self, tensors, _options(opts, c10d.AllreduceOptions))

    def allreduce_coalesced(self, tensors: list[Any], opts: Any = None) -> Any:
        """As in torch; `opts` may be a reduction alone."""
        return Calls.allreduce_coalesced(self, tensors, _options(opts, c10d.AllreduceCoalescedOptions))

    def barrier(self, opts: Any = None) -> Any:
        """Waits for all replicas."""
        return Calls.barrier(self, opts or c10d.BarrierOptions())

    def errored(self) -> Exception | None:
        """What failed since the group was configured."""
        return self._group.error

    def abort(self, errored: bool = True) -> None:
        """Ends all operations in flight; the next `configure` gives a working group. Returns at once."""
        self._group.abort("aborted by torchft")

    def shutdown(self) -> None:
        """Ends the group. Returns at once: what is in flight is cut short."""
        with contextlib.suppress(oxccl.Timeout):
            self._group.shutdown(0)

    def rank(self) -> int:
        """The replica's rank in the quorum."""
        return self._group.rank

    def size(self) -> int:
        """The number of replicas in the quorum."""
        return self._group.world_size

    def getBackendName(self) -> str:
        """``torchft-oxccl``."""
        return "torchft-oxccl"


def _options(given: Any, kind: Any) -> Any:
    """`given`, if it is of `kind`, or such options with its reduction."""
    if isinstance(given, kind):
        return given
    options = kind()
    if given is not None:
        options.reduceOp = getattr(given, "reduceOp", given)
    return options
