"""Jobs for tests of the backend of torch: importing this skips a module of tests where there is no torch."""

from __future__ import annotations

import atexit
import importlib.util
import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any

import pytest

import jobs

if importlib.util.find_spec("torch") is None:
    pytest.skip(os.environ.get("OXCCL_TEST_NO_TORCH", "torch is not installed"), allow_module_level=True)

# Ranks are forked off a process that has imported torch, which takes seconds, and made no group.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint", "oxccl.torch"])
# It takes a while to end, and the tests' end is the parent's.
atexit.register(getattr(forkserver, "_forkserver")._stop)  # noqa: B009


def start(address: str, *, rank: int, world_size: int, backend: str) -> Any:
    """``torch.distributed`` with its default group over `backend`."""
    # In the ranks only.
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    return dist


def run(ranks: int, body: Callable[..., Any], *arguments: Any, backend: str = "oxccl") -> list[Any]:
    """Calls ``body(torch.distributed, *arguments)`` on each rank."""
    return jobs.run_with(start, ranks, body, *arguments, backend=backend, context=_CONTEXT)
