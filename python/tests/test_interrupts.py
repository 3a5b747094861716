"""Ctrl-C and other signals while a call waits."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import IO

import pytest

from jobs import ends, script

SOON = 10.0
"""Far less than the minute that the calls would wait, far more than the 100 ms that an interrupt takes."""


def line(process: subprocess.Popen[str]) -> str:
    """The next line of a program."""
    out = process.stdout
    assert out is not None
    return out.readline().strip()


def interrupt(processes: list[subprocess.Popen[str]], pause: float = 0.3) -> float:
    """Waits until rank 0 says that it is about to wait, interrupts it, and gives the moment."""
    said = line(processes[0])
    assert said == "waits", said + _errors(processes[0].stderr)
    # It is inside the call a moment later; an interrupt before it is inside ends it as well.
    time.sleep(pause)
    processes[0].send_signal(signal.SIGINT)
    return time.monotonic()


def _errors(stream: IO[str] | None) -> str:
    return stream.read() if stream else ""


CALLS = {
    "blocking": "world.recv(np.zeros(1), 1)",
    "collective": "world.all_reduce(np.zeros(1))",
    "large": "world.all_reduce(np.zeros(1 << 22))",
    "barrier": "world.barrier()",
    "wait": "world.recv(np.zeros(1), 1, async_op=True).wait()",
    "new_group": "world.new_group([0, 1])",
}

WAITS = """
world = init()
if rank == 0:
    world.barrier()
    try:
        # Inside, since the interrupt may come at once.
        print("waits", flush=True)
        {call}
    except KeyboardInterrupt:
        print("interrupted", world.error, flush=True)
else:
    world.barrier()
    try:
        world.recv(np.zeros(1), 0, 99)
    except oxccl.Error as e:
        print(e, flush=True)
"""


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("pause", [0.0, 0.3])
def test_an_interrupt_ends_a_call_that_waits(call: str, pause: float, tmp_path: Path) -> None:
    processes = script(WAITS.format(call=CALLS[call]), 2, tmp_path)
    begin = interrupt(processes, pause)
    said = line(processes[0])
    assert time.monotonic() - begin < SOON
    assert said.startswith("interrupted"), said
    if call == "wait":
        assert said == "interrupted None", "a work goes on"
    (ours, _, errors), (theirs, heard, _) = ends(processes)
    assert (ours, theirs, errors) == (0, 0, "")
    assert heard


def test_an_interrupt_ends_the_wait_for_other_ranks(tmp_path: Path) -> None:
    text = """
print("waits", flush=True)
try:
    init()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    processes = script(text, 2, tmp_path)[:]
    processes[1].kill()
    begin = interrupt(processes)
    assert line(processes[0]) == "interrupted"
    assert time.monotonic() - begin < SOON
    assert ends(processes)[0][0] == 0


def test_an_interrupt_after_other_handlers_came_and_went_ends_a_call(tmp_path: Path) -> None:
    text = """
import asyncio
world = init()
async def main():
    await world.all_reduce(np.zeros(1), async_op=True)
asyncio.run(main())
signal.signal(signal.SIGINT, lambda *_: None)
world.barrier()
signal.signal(signal.SIGINT, signal.default_int_handler)
if rank == 0:
    print("waits", flush=True)
    try:
        world.barrier()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
else:
    try:
        world.recv(np.zeros(1), 0)
    except oxccl.Error:
        pass
"""
    processes = script(text, 2, tmp_path)
    begin = interrupt(processes)
    assert line(processes[0]) == "interrupted"
    assert time.monotonic() - begin < SOON
    assert [e[0] for e in ends(processes)] == [0, 0]


def test_a_handler_of_the_programs_own_does_not_end_the_call(tmp_path: Path) -> None:
    text = """
world = init()
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
x = np.zeros(1)
if rank == 0:
    print("waits", flush=True)
    world.recv(x, 1)
    print(x[0], seen, flush=True)
    world.barrier()
else:
    sys.stdin.readline()
    world.send(np.ones(1), 0)
    world.barrier()
"""
    processes = script(text, 2, tmp_path)
    interrupt(processes)
    stdin = processes[1].stdin
    assert stdin is not None
    stdin.write("go\n")
    stdin.flush()
    assert line(processes[0]) == "1.0 [1]"
    assert [e[0] for e in ends(processes)] == [0, 0]


def test_an_interrupt_that_a_program_caught_ends_no_later_call(tmp_path: Path) -> None:
    text = """
world = init()
x = np.ones(1)
for n in range(300):
    if rank == 0:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass
    world.barrier()
print(world.error)
"""
    assert ends(script(text, 2, tmp_path)) == [(0, "None\n", "")] * 2
