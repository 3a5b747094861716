"""A peer of `oxccl bench`: PyTorch's Gloo all-reduce of f32 sums, measured by the same rule.

    python allreduce.py RANKS WARMUP ITERS BYTES...

Each call begins behind a barrier; its time is that of its slowest rank. One line of standard output for each size:
    bytes median_us min_us max_us
"""

import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_main(rank, ranks, store, warmup, iters, sizes):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=ranks)
    for size in sizes:
        data = torch.zeros(size // 4)
        own = []
        for call in range(-warmup, iters):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(data)
            if call >= 0:
                own.append(time.perf_counter() - begin)
        data.fill_(float(rank + 1))
        dist.all_reduce(data)
        if not bool((data == ranks * (ranks + 1) / 2).all()):
            raise SystemExit("wrong result")
        slowest = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if rank == 0:
            times = [t * 1e6 for t in slowest.tolist()]
            print(f"{size} {statistics.median(times):.3f} {min(times):.3f} {max(times):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, warmup, iters, *sizes = (int(a) for a in sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, os.path.join(folder, "store"), warmup, iters, sizes)
        mp.spawn(rank_main, args=arguments, nprocs=ranks)
