"""Operations in flight: waiting, awaiting, dropping, ending."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oxccl
from jobs import ends, run, script


def waits_with_a_time_out(world: oxccl.World) -> None:
    """A wait that gives up leaves the operation in flight."""
    peer = 1 - world.rank
    x = np.zeros(3)
    work = world.recv(x, peer, async_op=True)
    assert not work.done()
    assert (work.op, work.source, work.error) == ("recv", None, None)
    for seconds in (0, 0.05):
        with pytest.raises(oxccl.Timeout):
            work.wait(seconds)
    world.barrier()
    world.send(np.full(3, world.rank, "f8"), peer)
    work.wait(60)
    work.wait()
    assert (x == peer).all()
    assert (work.source, work.done()) == (peer, True)
    assert "recv, succeeded" in repr(work)


def test_a_wait_that_gives_up_leaves_the_operation_in_flight() -> None:
    run(2, waits_with_a_time_out)


def is_awaited(world: oxccl.World) -> list[str]:
    """Awaits operations, while the loop goes on with other things."""
    peer = 1 - world.rank
    seen: list[str] = []

    async def main() -> None:
        x, y = np.ones(5), np.zeros(2)
        late = world.recv(y, peer, 1, async_op=True)

        async def beside() -> None:
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append("beside")
            # The other rank is waited for only once this one has run.
            await world.send(np.full(2, 7.0), peer, 1, async_op=True)

        await asyncio.gather(late, beside(), world.all_reduce(x, async_op=True))
        assert (x == 2).all()
        assert (y == 7).all()
        assert late.source == peer
        # One that has ended needs no loop.
        await late
        with pytest.raises(oxccl.Timeout):
            await world.recv(y, peer, 2, timeout=0.1, async_op=True)

    asyncio.run(main())
    return seen


def test_operations_are_awaited_without_blocking_the_loop() -> None:
    assert run(2, is_awaited) == [["beside"] * 3] * 2


def is_cancelled(world: oxccl.World) -> None:
    """A task that is cancelled while it awaits leaves the operation in flight."""
    peer = 1 - world.rank
    y = np.zeros(2)
    work = world.recv(y, peer, 1, async_op=True)

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(waits(work), 0.1)

    async def waits(work: oxccl.Work) -> None:
        await work

    asyncio.run(main())
    world.barrier()
    world.send(np.full(2, 7.0), peer, 1)
    work.wait()
    assert (y == 7).all()


def test_a_task_that_is_cancelled_leaves_its_operation_in_flight() -> None:
    run(2, is_cancelled)


def ends_by_abort(world: oxccl.World) -> tuple[str, str]:
    """An abort from another thread ends a blocking call and what is in flight."""
    work = world.recv(np.zeros(1), 1 - world.rank, 5, async_op=True)
    if world.rank == 0:
        timer = threading.Timer(0.2, lambda: world.abort("enough of it"))
        timer.start()
    with pytest.raises(oxccl.Error) as caught:
        world.recv(np.zeros(1), 1 - world.rank, 6)
    with pytest.raises(oxccl.Error):
        work.wait()
    assert work.error is not None
    assert world.error is not None
    assert "failed" in repr(work)
    return caught.value.kind, str(caught.value)


def test_an_abort_ends_what_all_ranks_wait_for_and_says_why() -> None:
    ours, peers = run(2, ends_by_abort)
    assert ours[0] == "Aborted"
    assert "enough of it" in ours[1]
    assert "enough of it" in peers[1]


def threads_call_together(world: oxccl.World) -> None:
    """Several threads wait for operations of one group, and the others run meanwhile."""
    peer = 1 - world.rank
    got: list[Any] = [None] * 8

    def receive(n: int) -> None:
        x = np.zeros(3)
        world.recv(x, peer, n)
        got[n] = x[0]

    threads = [threading.Thread(target=receive, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for n in reversed(range(8)):
        world.send(np.full(3, float(n)), peer, n)
    for thread in threads:
        thread.join(60)
    assert got == list(range(8))


def test_threads_that_block_leave_the_others_running() -> None:
    run(2, threads_call_together)


def is_dropped(world: oxccl.World) -> None:
    """Works that are not kept run to their ends all the same."""
    x = np.ones(100)
    for _ in range(50):
        world.all_reduce(x, async_op=True)
        gc.collect(0)
        x /= 1
    world.barrier()
    y = np.ones(3)
    world.all_reduce(y)
    assert (y == 2).all()


def test_works_that_are_dropped_run_to_their_ends() -> None:
    run(2, is_dropped)


def test_the_end_of_an_owner_may_ask_the_operation_that_had_its_memory(tmp_path: Path) -> None:
    body = """
import weakref
world = init()
inside, asked = threading.Event(), threading.Event()
def final():
    inside.set()
    print("asked" if asked.wait(20) else "not asked")
x = np.ones(3)
weakref.finalize(x, final)
work = world.all_reduce(x, async_op=True)
del x
def ask():
    inside.wait(20)
    work.source
    asked.set()
asking = threading.Thread(target=ask)
asking.start()
work.wait()
asking.join()
"""
    [ended] = ends(script(body, 1, tmp_path), timeout=60)
    assert ended[:2] == (0, "asked\n"), ended


def test_an_operation_that_ends_after_its_await_was_given_up_spares_a_program_that_leaves_sigpipe_alone(tmp_path: Path) -> None:
    body = """
import asyncio
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
world = init()
work = world.recv(np.zeros(2), 1 - rank, 1, async_op=True)
async def main():
    try:
        await asyncio.wait_for(work, 0.05)
    except asyncio.TimeoutError:
        print("given up")
asyncio.run(main())
world.barrier()
world.send(np.ones(2), 1 - rank, 1)
work.wait(60)
world.barrier()
"""
    assert [(status, out) for status, out, _ in ends(script(body, 2, tmp_path))] == [(0, "given up\n")] * 2
