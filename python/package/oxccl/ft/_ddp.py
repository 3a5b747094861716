"""Data parallel over the replicas of a job, in the shape of torch's DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import oxccl
from oxccl.ft._manager import Manager
from oxccl.ft._work import Work
from oxccl.torch._calls import alloc

_FIRST_MB = 1.0
"""Small, so that gradients begin to travel early."""


class _Bucket:
    """Gradients of one element type that travel together. `own` are this replica's, `sent` what travels and comes back as averages.

    Replicas on this host read `sent` in place.
    """

    def __init__(self, manager: Manager, parameters: list[Any]) -> None:
        self.parameters = parameters
        dtype = parameters[0].dtype
        self.own = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype)
        self.sent = alloc(manager._pg, self.own.numel(), dtype)
        self.views = [self._shaped(self.own), self._shaped(self.sent)]
        self.missing = len(parameters)
        self.work: Work | None = None

    def _shaped(self, flat: Any) -> list[Any]:
        parts = flat.split([p.numel() for p in self.parameters])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def begin(self) -> None:
        self.missing = len(self.parameters)
        self.work = None
        # A parameter that this pass does not reach has what earlier ones added up, or counts as zero.
        with torch.no_grad():
            for p, own in zip(self.parameters, self.views[0], strict=True):
                own.zero_() if p.grad is None else own.copy_(p.grad)

    def send(self, manager: Manager) -> None:
        self.sent.copy_(self.own)
        self.work = manager._reduce(self.sent)

    def take(self) -> None:
        """The averages become the gradients."""
        for p, average in zip(self.parameters, self.views[1], strict=True):
            if p.grad is None:
                p.grad = average.to(p.device, copy=True)
            else:
                p.grad.copy_(average)


class DistributedDataParallel(nn.Module):
    """Averages the gradients of `module` over the replicas while the backward pass makes them.

    After ``backward()`` the gradients are the averages. If a replica dies meanwhile, the reductions are done again among those that are left, with
    the gradients that were computed, so that no batch is lost. A replica of several processes leaves the batch out instead, and so does a step with
    reductions of its own (`Manager.allreduce`) or with several backward passes that reduce.

    Args:
        manager: the replica.
        module: the model, the same on all replicas; `Manager` sees to equal parameters at the start.
        bucket_cap_mb: the size of a bucket; the first one has 1 MiB at most.
        find_unused_parameters: taken as torch does, and always so.

    """

    def __init__(self, manager: Manager, module: nn.Module, *, bucket_cap_mb: float = 25.0, find_unused_parameters: bool = True) -> None:
        super().__init__()
        if isinstance(manager._pg, oxccl.QuantizedGroup) and manager._pg.has_error_feedback:
            raise oxccl.Unsupported("this group keeps residuals (error_feedback=True), which here only LocalSGD and DiLoCo carry; leave it off")
        self.module = module
        self._manager = manager
        self._buckets = [_Bucket(manager, parameters) for parameters in _deal(module, bucket_cap_mb)]
        self._home = {p: (b, n) for b in self._buckets for n, p in enumerate(b.parameters)}
        self._next = 0
        self._is_running = False
        self._seen: set[Any] = set()
        self._syncs = True
        self._versions: list[int] = []
        for p in self._home:
            p.register_post_accumulate_grad_hook(self._on_gradient)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Calls the model."""
        # A backward pass that an exception ended has no end of its own.
        self._is_running = False
        return self.module(*arguments, **options)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes only add up their gradients."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def _on_gradient(self, p: Any) -> None:
        if not self._syncs:
            return
        if p.grad.layout != torch.strided:
            raise oxccl.Unsupported("a gradient is sparse; dense ones are averaged: make the embedding with sparse=False")
        if not self._is_running:
            self._is_running = True
            self._seen.clear()
            self._next = 0
            self._manager._begins_pass(self)
            for bucket in self._buckets:
                bucket.begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._at_end)
        if p in self._seen:
            # Its first part may be on its way already, and the average would take the place of the rest.
            raise oxccl.Unsupported(
                "a parameter got its gradient twice in one backward pass, as with torch.utils.checkpoint(use_reentrant=True): use use_reentrant=False"
            )
        self._seen.add(p)
        bucket, n = self._home[p]
        bucket.views[0][n].copy_(p.grad)
        bucket.missing -= 1
        # In one order on all replicas.
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._buckets[self._next].send(self._manager)
            self._next += 1

    def _at_end(self) -> None:
        """At the end of a backward pass."""
        self._is_running = False
        for bucket in self._buckets[self._next :]:
            bucket.send(self._manager)
        while not self._collect():
            if not self._manager._may_repeat():
                # The vote leaves this batch out.
                return
            self._manager.should_commit()
            self._manager._start_again(self)
            self._send_again()
        self._versions = [p.grad._version for p in self._home]

    def _collect(self) -> bool:
        """Waits for the reductions. True if all went well: the gradients are the averages then."""
        ends = [bucket.work is not None and bucket.work.wait() for bucket in self._buckets]
        if not all(ends) or self._manager.errored() is not None:
            return False
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.take()
        return True

    def _send_again(self) -> None:
        for bucket in self._buckets:
            bucket.send(self._manager)

    def _is_whole(self) -> bool:
        """What the caller did to the averages, as clipping them, would be lost if they were sent again: then the step is left out."""
        return [None if p.grad is None else p.grad._version for p in self._home] == self._versions

    def _again(self) -> bool:
        """See `Manager._repeat`."""
        self._send_again()
        if self._collect():
            self._versions = [p.grad._version for p in self._home]
        return True


def _deal(module: nn.Module, bucket_cap_mb: float) -> list[list[Any]]:
    """Parameters by bucket: those that come last in the model get their gradients first."""
    if bucket_cap_mb <= 0:
        raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}; it is a size in MiB, larger than 0")
    full: list[list[Any]] = []
    open_: dict[Any, tuple[list[Any], int]] = {}
    for p in reversed([p for p in module.parameters() if p.requires_grad]):
        bucket, size = open_.get(p.dtype, ([], 0))
        bucket.append(p)
        size += p.numel() * p.element_size()
        cap = min(_FIRST_MB, bucket_cap_mb) if not full else bucket_cap_mb
        if size >= cap * 2**20:
            full.append(bucket)
            open_.pop(p.dtype, None)
        else:
            open_[p.dtype] = (bucket, size)
    full.extend(bucket for bucket, _ in open_.values())
    if not full:
        raise ValueError("the model has no parameters that require gradients")
    return full
