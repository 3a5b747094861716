"""Robustness by numbers: programs of two ranks that end, fork, are interrupted or fail in every awkward way, each many times over.

``python bench/campaign.py [RUNS [PART OF A NAME]]`` prints a table: how often each program ended as it should, crashed, hung, or ended otherwise; for
Ctrl-C also the milliseconds until the interrupted call raised, at the median and at most. What goes wrong is printed to stderr: of a program that
hangs, where each of its threads stands.
"""

from __future__ import annotations

import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import jobs
from test_endings import EXITS, FORKS
from test_interrupts import CALLS, WAITS

CALLBACKS = {
    "asyncio": """
import asyncio
world = init()
peer = 1 - rank
async def main():
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    def fails(_):
        raise RuntimeError("a callback of the program's own")
    tasks = [asyncio.ensure_future(asyncio.wait_for(world.all_reduce(np.zeros(1 << 12), async_op=True), 60)) for _ in range(20)]
    for task in tasks:
        task.add_done_callback(fails)
    await asyncio.gather(*tasks)
asyncio.run(main())
world.barrier()
""",
}
TORCH_HEAD = """
import warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("oxccl", init_method=address, rank=rank, world_size=ranks)
peer = 1 - rank
"""
TORCH = {
    "callback that raises": """
def fails(_):
    raise RuntimeError("a callback of the program's own")
for n in range(20):
    x = torch.ones(1 << 12)
    work = dist.all_reduce(x, async_op=True)
    derived = work.get_future().then(fails)
    work.wait()
    try:
        derived.wait()
    except RuntimeError as e:
        assert "own" in str(e)
    assert x[0] == 2
dist.barrier()
dist.destroy_process_group()
""",
    "exit in flight": """
works = [dist.irecv(torch.zeros(100), peer, tag=n) for n in range(5)]
futures = [work.get_future().then(lambda done: done.value()[0] * 2) for work in works]
if rank == 0:
    works.append(dist.all_reduce(torch.zeros(1 << 21), async_op=True))
together()
""",
    "tensors freed in flight": """
for n in range(20):
    x = torch.ones(1 << 16)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    del x, work, future
    y = torch.zeros(1 << 16)
    del y
dist.barrier()
dist.destroy_process_group()
""",
    "group destroyed in flight": """
half = dist.new_group([0, 1])
works = [dist.irecv(torch.zeros(100), peer, group=group, tag=n) for n in range(5) for group in (None, half)]
future = works[0].get_future()
together()
dist.destroy_process_group()
for work in works:
    try:
        work.wait()
    except RuntimeError:
        pass
""",
    "daemon threads call on": """
def call(n):
    while True:
        try:
            dist.irecv(torch.zeros(100), peer, tag=n).wait() if n % 2 else dist.recv(torch.zeros(100), peer, tag=n)
        except (RuntimeError, ValueError):
            pass
for n in range(4):
    threading.Thread(target=call, args=(n,), daemon=True).start()
together()
""",
}
PROGRAMS = {
    **{f"exit: {name}": (text, False) for name, text in EXITS.items()},
    "fork": (FORKS, False),
    **{f"Ctrl-C: {name}": (WAITS.format(call=call), True) for name, call in CALLS.items()},
    **{f"callback that raises: {name}": (text, False) for name, text in CALLBACKS.items()},
    **{f"torch: {name}": (TORCH_HEAD + text, False) for name, text in TORCH.items()},
}
LIMIT = 120.0
"""Seconds; on a machine that is busy with much else the import of torch alone takes more than ten."""


def stand(process: subprocess.Popen[str]) -> str:
    """Where the threads of a program stand; it is ended."""
    process.send_signal(signal.SIGABRT)
    return process.communicate(timeout=30)[1][-8000:]


def verdict(name: str, text: str, is_interrupted: bool, folder: Path, took: list[float]) -> str:
    """How one run ended. Appends how long an interrupt took."""
    processes = jobs.script(text, 2, folder)
    if is_interrupted:
        out = processes[0].stdout
        assert out is not None
        out.readline()
        time.sleep(random.uniform(0, 0.1))
        processes[0].send_signal(signal.SIGINT)
        begin = time.monotonic()
        out.readline()
        took.append(time.monotonic() - begin)
    ended = []
    until = time.monotonic() + LIMIT
    try:
        for process in processes:
            _, err = process.communicate(timeout=max(until - time.monotonic(), 0.1))
            ended.append((process.returncode, err[-2000:]))
    except subprocess.TimeoutExpired:
        for rank, process in enumerate(processes):
            if process.poll() is None:
                print(f"{name}: rank {rank} hangs\n{stand(process)}", file=sys.stderr, flush=True)
        return "hung"
    finally:
        jobs.end_programs()
    if any(status < 0 or "Fatal Python error" in err or "panicked" in err for status, err in ended):
        print(name, ended, file=sys.stderr, flush=True)
        return "crashed"
    wanted = int(name == "exit: exception")
    if any(status != wanted for status, _ in ended):
        print(name, ended, file=sys.stderr, flush=True)
        return "ended otherwise"
    return "as it should"


def main() -> None:
    """Prints the table."""
    # A shell starts what it runs in the background with SIGINT ignored, and the programs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    part = sys.argv[2] if len(sys.argv) > 2 else ""
    ends = ("as it should", "crashed", "hung", "ended otherwise")
    print("| program | " + " | ".join(ends) + " | ms to the interrupt |\n|---|" + "---:|" * (len(ends) + 1), flush=True)
    for name, (text, is_interrupted) in PROGRAMS.items():
        if part in name:
            found: Counter[str] = Counter()
            took: list[float] = []
            for _ in range(runs):
                with tempfile.TemporaryDirectory() as folder:
                    found[verdict(name, text, is_interrupted, Path(folder), took)] += 1
            times = f"{statistics.median(took) * 1e3:.0f}, {max(took) * 1e3:.0f}" if took else ""
            print(f"| {name} | " + " | ".join(str(found[end]) for end in ends) + f" | {times} |", flush=True)


main()
