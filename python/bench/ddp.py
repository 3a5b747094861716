"""Data-parallel training of a model of 25 million parameters: samples per second of oxccl and of Gloo, in the same processes by turns.

``python bench/ddp.py [ROUNDS [RANKS [BATCH]]]`` prints a row for each. The share hidden is that of the communication's time, measured alone, by which
a step with it is not longer than one without. The least of the rounds counts for each time: what else runs only adds.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

WIDTH = 1024
LAYERS = 24
STEPS = 2
"""In one measurement."""
BUCKET = 25 << 18
"""Elements that DDP reduces at once: 25 MiB of f32."""


def train(rank: int, ranks: int, rounds: int, batch: int, address: str) -> None:
    """One rank; the first one prints."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("oxccl", init_method=address, rank=rank, world_size=ranks)
    groups = {"oxccl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    x = torch.randn(batch, WIDTH)
    models, gradients = {}, torch.zeros(LAYERS * (WIDTH + 1) * WIDTH)
    for name, group in groups.items():
        torch.manual_seed(0)
        layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        models[name] = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), process_group=group)

    def step(model: Any) -> None:
        model(x).square().mean().backward()

    def alone(model: Any) -> None:
        with model.no_sync():
            step(model)

    def reduce(group: Any) -> None:
        for part in gradients.split(BUCKET):
            dist.all_reduce(part, group=group)

    def seconds(call: Callable[[Any], None], of: Any) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(STEPS):
            call(of)
        dist.barrier()
        return (time.perf_counter() - begin) / STEPS

    found: dict[tuple[str, str], list[float]] = {}
    # The first round warms up.
    for n in range(rounds + 1):
        for name, group in groups.items():
            for what, call, of in (("alone", alone, models[name]), ("reduce", reduce, group), ("both", step, models[name])):
                took = seconds(call, of)
                if n:
                    found.setdefault((name, what), []).append(took)
    if rank == 0:
        print("| backend | samples/s | step | without communication | communication alone | hidden |\n|---|---:|---:|---:|---:|---:|")
        compute = min(min(found[name, "alone"]) for name in groups)
        for name in groups:
            both, reduce_alone = min(found[name, "both"]), min(found[name, "reduce"])
            hidden = min(max(1 - (both - compute) / reduce_alone, 0), 1)
            times = " | ".join(f"{took * 1e3:.0f} ms" for took in (both, compute, reduce_alone))
            print(f"| {name} | {ranks * batch / both:.0f} | {times} | {hidden:.0%} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    import torch.multiprocessing as mp

    rounds, ranks, batch = [*(int(text) for text in sys.argv[1:]), *(6, 2, 64)[len(sys.argv) - 1 :]]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (ranks, rounds, batch, f"file://{folder}/meeting"), nprocs=ranks, start_method="spawn")


if __name__ == "__main__":
    main()
