"""Operations in flight, as ``torch.distributed`` waits for them.

A future that was asked for is completed by a thread of this module, which learns from the groups' threads what has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import oxccl
from oxccl import _oxccl

_completions: _oxccl._Completions | None = None
_pending: dict[int, Work] = {}
_numbers = itertools.count()
_lock = threading.Lock()


_threads: set[threading.Thread] = set()
_idle = 0
_SPARE = 2
"""Threads that wait for the next end: one would do, if no continuation waited for another operation's future."""


def _complete_all(completions: _oxccl._Completions) -> None:
    global _idle
    while (number := completions.next()) is not None:
        with _lock:
            _idle -= 1
            if _idle == 0:
                _start_thread(completions)
        work = _pending.pop(number, None)
        if work is not None:
            work._complete()
        with _lock:
            if _idle >= _SPARE:
                _threads.discard(threading.current_thread())
                return
            _idle += 1


def _start_thread(completions: _oxccl._Completions) -> None:
    """With the lock held."""
    global _idle
    _idle += 1
    thread = threading.Thread(target=_complete_all, args=(completions,), name="ox-py-futures", daemon=True)
    _threads.add(thread)
    thread.start()


def _queue() -> _oxccl._Completions:
    """The queue of ended operations; its threads start with the first future."""
    global _completions
    with _lock:
        if _completions is None:
            completions = _completions = _oxccl._Completions()
            for _ in range(_SPARE):
                _start_thread(completions)

            def end() -> None:
                # Threads that complete futures while the interpreter ends would abort the process.
                completions.close()
                until = time.monotonic() + 5
                for thread in list(_threads):
                    thread.join(max(until - time.monotonic(), 0))

            atexit.register(end)
        return _completions


def _settled(future: torch.futures.Future[Any]) -> None:
    """Returns once `future` is complete, which another thread may be about to do."""
    if not future.done():
        with contextlib.suppress(Exception):
            future.wait()


class Work(dist.Work):
    """An operation in flight."""

    def __init__(self, work: oxccl.Work, tensors: Sequence[Any]) -> None:
        super().__init__()
        self._work = work
        self._tensors = tensors
        self._future: torch.futures.Future[Any] | None = None
        self._is_told = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the operation has ended; raises its error. A future of it is complete then."""
        try:
            self._work.wait(timeout)
        finally:
            if self._future is not None and self._work.done():
                self._complete()
                _settled(self._future)
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Tells whether the operation has ended."""
        return self._work.done()

    def is_success(self) -> bool:
        """Tells whether the operation has ended without an error."""
        return self._work.done() and self._work.error is None

    def exception(self) -> Exception | None:
        """The error of an operation that failed."""
        return self._work.error

    def result(self) -> list[Any]:
        """The tensors that the operation wrote."""
        return list(self._tensors)

    def _source_rank(self) -> int:
        source = self._work.source
        if source is None:
            raise RuntimeError("only a receive that has ended, and was waited for, has a source")
        return source

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors that the operation writes."""
        with _lock:
            future = self._future
            if future is not None:
                return future
            future = self._future = torch.futures.Future()
        if self._work.done():
            self._complete()
        else:
            number = next(_numbers)
            _pending[number] = self
            self._work._tell(_queue(), number)
        return future

    def _complete(self) -> None:
        """Completes the future, once; the operation has ended."""
        with _lock:
            future, is_told = self._future, self._is_told
            if future is None or is_told:
                return
            self._is_told = True
        try:
            self._work.wait(0)
        except oxccl.Error as error:
            future.set_exception(error)
        else:
            future.set_result(list(self._tensors))


class Works(dist.Work):
    """Several operations in flight that are waited for as one; of none, what ran on the calling thread and has ended."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for all."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Tells whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Tells whether all have ended without an error."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        """The first error."""
        return next((e for work in self._works if (e := work.exception()) is not None), None)

    def result(self) -> list[Any]:
        """The tensors that the operations wrote."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of all tensors."""
        futures: list[torch.futures.Future[Any]] = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda done: [tensor for one in done.value() for tensor in one.value()])
