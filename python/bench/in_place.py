"""An all-reduce of two ranks through ``torch.distributed``: of an ordinary tensor, and of one of `oxccl.torch.empty`, which the ranks read in place.

Usage: ``python bench/in_place.py [ROUNDS]``. The same processes and group; each round times one after the other, size by size.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from typing import Any

SIZES = [(64 << 10, 200), (1 << 20, 80), (4 << 20, 30), (16 << 20, 10), (64 << 20, 3)]
"""Bytes of f32, and calls for each round."""
RANKS = 2


def rank(folder: str, number: int, rounds: int, results: Any) -> None:
    """Rank 0 tells microseconds for each call as {(bytes, kind): [of each round]}."""
    import torch
    import torch.distributed as dist

    import oxccl.torch

    torch.set_num_threads(1)
    dist.init_process_group("oxccl", init_method=f"file://{folder}/meeting", rank=number, world_size=RANKS)
    found: dict[tuple[int, str], list[float]] = {}
    for size, calls in SIZES:
        tensors = {"ordinary": torch.empty(size // 4).fill_(0), "in place": oxccl.torch.empty(size // 4).fill_(0)}
        for turn in range(rounds + 1):
            for kind, tensor in tensors.items():
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(calls):
                    dist.all_reduce(tensor)
                took = (time.perf_counter() - begin) / calls * 1e6
                if turn:
                    found.setdefault((size, kind), []).append(took)
    if number == 0:
        results.send(found)
    dist.barrier()


def main() -> None:
    """Prints medians, least times and ratios of the medians."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        take, give = context.Pipe(duplex=False)
        processes = [context.Process(target=rank, args=(folder, n, rounds, give)) for n in range(RANKS)]
        for process in processes:
            process.start()
        give.close()
        try:
            found = take.recv()
        finally:
            for process in processes:
                process.join(60)
                process.kill()
    print("| bytes | ordinary, us (least) | in place, us (least) | ratio |\n|---:|---:|---:|---:|")
    for size, _ in SIZES:
        times = [found[size, kind] for kind in ("ordinary", "in place")]
        ordinary, ours = (f"{statistics.median(t):.1f} ({min(t):.1f})" for t in times)
        print(f"| {size} | {ordinary} | {ours} | {statistics.median(times[0]) / statistics.median(times[1]):.2f} |")


if __name__ == "__main__":
    main()
