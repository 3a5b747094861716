"""The end of a process that has groups."""

from __future__ import annotations

import multiprocessing
from multiprocessing import util

from oxccl import _oxccl


def end_with_process() -> None:
    """Has groups end in good order where `atexit` is not enough: children of `multiprocessing` that were forked never come to it."""
    if multiprocessing.parent_process() is not None:
        util.Finalize(None, _oxccl._end, exitpriority=0)
