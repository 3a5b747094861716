"""Where the time of a small ``torch.distributed`` call goes: with one rank, so that nothing is waited for.

Usage: ``python bench/layers.py``. Prints the least of many rounds, in microseconds: torch's own part (over a process group that does nothing), this
package's Python, and its Rust.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any


def least(call: Callable[[], Any], calls: int = 2000, rounds: int = 60) -> float:
    """Microseconds for each call in the best round."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - begin) / calls * 1e6)
    return min(found)


def main() -> None:
    """Times each layer."""
    import torch
    import torch.distributed as dist

    from oxccl.torch._calls import _DONE
    from oxccl.torch._group import Direct

    operations = ("allreduce", "all_to_all_single", "alltoall_base", "reduce_scatter_single", "_reduce_scatter_base")
    nothing = type("Nothing", (Direct,), dict.fromkeys(operations, lambda *given: _DONE))

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("oxccl", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    group = dist.group.WORLD
    x, y = torch.zeros(1), torch.zeros(1)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "all_reduce": (lambda: dist.all_reduce(x), lambda: group._group.all_reduce(x)),
        "all_to_all": (lambda: dist.all_to_all_single(y, x), lambda: group._group.all_to_all_into(x, y)),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(y, x), lambda: group._group.reduce_scatter_into(x, y)),
    }
    print("| operation | all | torch | our Python | our Rust |\n|---|---:|---:|---:|---:|")
    for name, (whole, rust) in calls.items():
        all_of_it, ours = least(whole), least(rust)
        group.__class__ = nothing
        torchs = least(whole)
        group.__class__ = Direct
        print(f"| {name} | {all_of_it:.1f} | {torchs:.1f} | {all_of_it - torchs - ours:.1f} | {ours:.1f} |", flush=True)


if __name__ == "__main__":
    main()
