"""Jobs for tests of the backend of torch: importing this skips a module of tests where there is no torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import jobs

if importlib.util.find_spec("torch") is None:
    pytest.skip(os.environ.get("OXCCL_TEST_NO_TORCH", "torch is not installed"), allow_module_level=True)

# The first optimizer that is made imports `_dynamo`, which takes longer than the rest of a test.
TORCH = ["_dynamo", "distributed.algorithms.ddp_comm_hooks.powerSGD_hook", "distributed.checkpoint", "distributed.fsdp", "distributed.optim"]
TORCH += ["distributed.pipelining", "distributed.tensor.parallel", "utils.data"]
jobs.FORKS.set_forkserver_preload([*jobs.PRELOAD, *(f"torch.{name}" for name in TORCH), "oxccl.torch", "oxccl.ft"])


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
    return jobs.run_with(start, ranks, body, *arguments, backend=backend)
