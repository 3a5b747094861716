"""A peer of `oxccl bench`: the operations of PyTorch's Gloo on f32, measured by the same rule.

    python collectives.py --ranks N [--warmup N] [--iters N] [--budget-ms N] --op OP BYTES... [--op OP BYTES...]...

Each call begins behind a barrier; its time is that of its slowest rank. Options hold for what stands behind them. Where so
many calls would take longer than the budget, there are fewer, at least five. BYTES is the size of the larger tensor of a
rank, 0 for a barrier. One line of standard output for each size, of ping_pong half the round trip:
    op bytes median_us min_us max_us
An operation that this PyTorch does not have is a line `op skipped` with the reason.
"""

import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LEAST = 5


def ping_pong(rank, data, out):
    if rank == 0:
        dist.send(data, 1)
        dist.recv(out, 1)
    elif rank == 1:
        dist.recv(out, 0)
        dist.send(out, 0)


# The calls. Where an operation has one tensor only, `data` and `out` are the same.
OPS = {
    "all_reduce": lambda rank, data, out: dist.all_reduce(out),
    "all_gather_into": lambda rank, data, out: dist.all_gather_into_tensor(out, data),
    "reduce_scatter_into": lambda rank, data, out: dist.reduce_scatter_tensor(out, data),
    "all_to_all_into": lambda rank, data, out: dist.all_to_all_single(out, data),
    "broadcast": lambda rank, data, out: dist.broadcast(out, 0),
    "barrier": lambda rank, data, out: dist.barrier(),
    "ping_pong": ping_pong,
    "all_reduce_async": lambda rank, data, out: dist.all_reduce(out, async_op=True).wait(),
}


def values(rank, count):
    return torch.arange(count) % 5 + float(rank + 1)


def prepared(op, rank, ranks, count):
    """What goes in, where it comes out, and what it must be then."""
    part = count // ranks
    inputs = [values(r, part if op == "all_gather_into" else count) for r in range(ranks)]
    mine = inputs[rank].clone()
    own = slice(rank * part, (rank + 1) * part)
    if op in ("all_reduce", "all_reduce_async"):
        return mine, mine, sum(inputs)
    if op == "all_gather_into":
        return mine, torch.zeros(count), torch.cat(inputs)
    if op == "reduce_scatter_into":
        return mine, torch.zeros(part), sum(i[own] for i in inputs)
    if op == "all_to_all_into":
        return mine, torch.zeros(count), torch.cat([i[own] for i in inputs])
    if op == "broadcast":
        return mine, mine, inputs[0]
    return mine, torch.zeros(count), inputs[0] if rank < 2 else torch.zeros(count)


def measure(op, rank, ranks, size, warmup, iters, budget):
    call = OPS[op]

    def once(data, out):
        dist.barrier()
        begin = time.perf_counter()
        call(rank, data, out)
        return time.perf_counter() - begin

    # Checked first, with known data: sums in place change what is there.
    data, out, expected = prepared(op, rank, ranks, size // 4)
    once(data, out)
    if not torch.equal(out, expected):
        raise SystemExit(f"{op} of {size} bytes: wrong result")
    del expected
    data.zero_()
    out.zero_()

    # The first warm-ups say how long a call takes, with its barrier.
    first = min(warmup, LEAST)
    took = []
    for _ in range(first):
        begin = time.perf_counter()
        once(data, out)
        took.append(time.perf_counter() - begin)
    if took:
        slowest = torch.tensor([min(took)], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        warmup = min(warmup, max(first, int(budget / 4 / slowest.item())))
        iters = min(iters, max(LEAST, int(budget / slowest.item())))
    for _ in range(first, warmup):
        once(data, out)
    slowest = torch.tensor([once(data, out) for _ in range(iters)], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        times = [t * (0.5e6 if op == "ping_pong" else 1e6) for t in slowest.tolist()]
        print(f"{op} {size} {statistics.median(times):.3f} {min(times):.3f} {max(times):.3f}", flush=True)


def lacking(op, rank, ranks):
    """Why this PyTorch cannot do it, found out with one element for each rank; every rank finds the same."""
    data, out, _ = prepared(op, rank, ranks, ranks)
    try:
        OPS[op](rank, data, out)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return None


def rank_main(rank, ranks, store, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=ranks)
    options = {"--warmup": 5, "--iters": 20, "--budget-ms": 1000}
    op = why = None
    words = iter(arguments)
    for word in words:
        if word in options:
            options[word] = int(next(words))
        elif word == "--op":
            op = next(words)
            if op not in OPS:
                raise SystemExit(f"no operation {op}")
            why = lacking(op, rank, ranks)
            if why and rank == 0:
                print(f"{op} skipped {why}", flush=True)
        elif not why:
            warmup, iters, budget = options.values()
            measure(op, rank, ranks, int(word), warmup, iters, budget / 1000)
    dist.destroy_process_group()


if __name__ == "__main__":
    flag, count, *arguments = sys.argv[1:]
    if flag != "--ranks":
        raise SystemExit("--ranks comes first")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(int(count), os.path.join(folder, "store"), arguments), nprocs=int(count))
