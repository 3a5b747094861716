"""Reductions under management: their errors count in the vote, and are not raised."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import oxccl
from oxccl.torch import _work


class Work(dist.Work):
    """A reduction of this step. Its outcome counts in the vote also if it is not waited for."""

    def __init__(self, work: oxccl.Work | None, tensor: Any, before: Callable[[], None], after: Callable[[], None], error: Exception | None) -> None:
        super().__init__()
        self._inner = None if work is None else _work.Work(work, [tensor])
        self._tensor = tensor
        self._before = before
        self._after = after
        self._error = error
        self._is_settled = work is None
        self._settling = threading.Lock()

    def _settle(self) -> None:
        """The result goes to where the caller wants it, once. It is there for each that returns from here: a future's thread may come, too."""
        with self._settling:
            if not self._is_settled:
                self._is_settled = True
                if self._error is None:
                    self._after()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the end. False if it failed: `Manager.errored` says why, and the vote will be no. Raises `oxccl.Timeout` if it goes on."""
        if self._inner is None:
            return False
        self._before()
        try:
            self._inner.wait(timeout)
        except oxccl.Error as error:
            if not self._inner.is_completed():
                raise
            self._error = error
        self._settle()
        return self._error is None

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Tells whether it has ended."""
        return self._inner is None or self._inner.is_completed()

    def is_success(self) -> bool:
        """Tells whether it has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """The error of a reduction that failed."""
        return self._error if self._inner is None or self._error is not None else self._inner.exception()

    def result(self) -> list[Any]:
        """The tensor."""
        return [self._tensor]

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensor, which after an error holds no result: the vote will be no."""
        done: torch.futures.Future[Any] = torch.futures.Future()
        if self._inner is None:
            done.set_result(self._tensor)
            return done
        self._before()

        def settle(ended: torch.futures.Future[Any]) -> None:
            try:
                ended.value()
            except Exception as error:
                self._error = error
            self._settle()
            done.set_result(self._tensor)

        self._inner.get_future().add_done_callback(settle)
        return done
