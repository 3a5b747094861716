"""Robustness by numbers: programs of two ranks that end, fork, are interrupted or fail in every awkward way, each many times over.

``python bench/campaign.py [RUNS [PART OF A NAME]]`` prints a table: how often each program ended as it should, crashed, hung, or ended otherwise.
"""

from __future__ import annotations

import random
import signal
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
    "torch": """
import torch, torch.distributed as dist
dist.init_process_group("oxccl", init_method=address, rank=rank, world_size=ranks)
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
}
# Beyond what the tests ask: threads that never stop calling come back to an interpreter that ends.
ENDLESS = {
    "daemon_threads_call_on": """
class Slow:
    def __del__(self, sleep=time.sleep): sleep(0.2)
# The interpreter's end takes a while, and threads come back to it meanwhile.
sys.modules["slow"] = Slow()
world = init()
def call(n):
    while True:
        try:
            if n % 2: world.recv(bytearray(800), 1 - rank)
            else: world.recv(bytearray(800), 1 - rank, 5 + n, async_op=True).wait()
        except oxccl.Error:
            pass
for n in range(4):
    threading.Thread(target=call, args=(n,), daemon=True).start()
together()
""",
}
PROGRAMS = {
    **{f"exit: {name}": (text, False) for name, text in (EXITS | ENDLESS).items()},
    "fork": (FORKS, False),
    **{f"Ctrl-C: {name}": (WAITS.format(call=call), True) for name, call in CALLS.items()},
    **{f"callback that raises: {name}": (text, False) for name, text in CALLBACKS.items()},
}
LIMIT = 60.0


def verdict(name: str, text: str, is_interrupted: bool, folder: Path) -> str:
    """How one run ended."""
    processes = jobs.script(text, 2, folder)
    if is_interrupted:
        out = processes[0].stdout
        assert out is not None
        out.readline()
        time.sleep(random.uniform(0, 0.1))
        processes[0].send_signal(signal.SIGINT)
    try:
        ended = jobs.ends(processes, LIMIT)
    except subprocess.TimeoutExpired:
        return "hung"
    finally:
        jobs.end_programs()
    if any(status < 0 or "Fatal Python error" in err or "panicked" in err for status, _, err in ended):
        print(name, [(status, err[-2000:]) for status, _, err in ended], file=sys.stderr)
        return "crashed"
    wanted = int(name == "exit: exception")
    if any(status != wanted for status, _, _ in ended):
        print(name, [(status, err[-2000:]) for status, _, err in ended], file=sys.stderr)
        return "ended otherwise"
    return "as it should"


def main() -> None:
    """Prints the table."""
    # A shell starts what it runs in the background with SIGINT ignored, and the programs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    part = sys.argv[2] if len(sys.argv) > 2 else ""
    ends = ("as it should", "crashed", "hung", "ended otherwise")
    print("| program | " + " | ".join(ends) + " |\n|---|" + "---:|" * len(ends), flush=True)
    for name, (text, is_interrupted) in PROGRAMS.items():
        if part in name:
            found: Counter[str] = Counter()
            for _ in range(runs):
                with tempfile.TemporaryDirectory() as folder:
                    found[verdict(name, text, is_interrupted, Path(folder))] += 1
            print(f"| {name} | " + " | ".join(str(found[end]) for end in ends) + " |", flush=True)


main()
