"""Compares ``torch.distributed`` over this package with the same calls over Gloo of the same torch, by turns in one run.

Beside them, the time in which all ranks together copy such a tensor once: an all-to-all reads and writes as many bytes, and the others no fewer.

Usage: ``python bench/against_gloo.py [ROUNDS]``. Both groups are made by the same processes; each round times one after the other, size by size.
"""

from __future__ import annotations

import functools
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

SIZES = [(4, 400), (1 << 10, 400), (64 << 10, 200), (1 << 20, 40), (64 << 20, 2)]
"""Bytes of f32, and calls for each round."""
RANKS = (2, 4)


def rank(folder: str, number: int, ranks: int, rounds: int, results: Any) -> None:
    """Times both groups; rank 0 tells microseconds for each call as {(operation, bytes, backend): [of each round]}."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=ranks)
    groups = {"gloo": dist.new_group(backend="gloo"), "oxccl": dist.new_group(backend="oxccl")}
    found: dict[tuple[str, int, str], list[float]] = {}
    for size, calls in SIZES:
        data = torch.zeros(size // 4)
        whole = torch.zeros(max(size // 4 // ranks, 1) * ranks)
        other = torch.zeros_like(whole)
        part = torch.zeros(whole.numel() // ranks)
        operations: dict[str, Callable[..., Any]] = {
            "all_reduce": functools.partial(dist.all_reduce, data),
            "all_to_all": functools.partial(dist.all_to_all_single, other, whole),
            "reduce_scatter": functools.partial(dist.reduce_scatter_tensor, part, whole),
        }
        for name, call in operations.items():
            for turn in range(rounds + 1):
                for backend, group in groups.items():
                    dist.barrier(group)
                    begin = time.perf_counter()
                    for _ in range(calls):
                        call(group=group)
                    took = (time.perf_counter() - begin) / calls * 1e6
                    if turn:
                        found.setdefault((name, size, backend), []).append(took)
                dist.barrier(groups["gloo"])
                begin = time.perf_counter()
                for _ in range(calls):
                    other.copy_(whole)
                found.setdefault((name, size, "copy"), []).append((time.perf_counter() - begin) / calls * 1e6)
    if number == 0:
        results.send(found)
    dist.barrier(groups["gloo"])


def main() -> None:
    """Prints medians and ratios: on a machine that is busy with other work only the ratios say something."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    context = multiprocessing.get_context("spawn")
    print("| ranks | operation | bytes | Gloo, us | oxccl, us | ratio | copy, us |\n|---:|---|---:|---:|---:|---:|---:|")
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            take, give = context.Pipe(duplex=False)
            processes = [context.Process(target=rank, args=(folder, n, ranks, rounds, give)) for n in range(ranks)]
            for process in processes:
                process.start()
            give.close()
            try:
                found = take.recv()
            finally:
                for process in processes:
                    process.join(60)
                    process.kill()
        for name, size in dict.fromkeys((name, size) for name, size, _ in found):
            gloo, ours, copy = (statistics.median(found[name, size, backend]) for backend in ("gloo", "oxccl", "copy"))
            print(f"| {ranks} | {name} | {size} | {gloo:.1f} | {ours:.1f} | {gloo / ours:.1f} | {copy:.1f} |", flush=True)


if __name__ == "__main__":
    main()
