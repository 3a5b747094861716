"""What fails raises an exception that says what, where and because of which rank."""

from __future__ import annotations

import os
import pickle
import signal
import time
from typing import Any

import numpy as np
import pytest

import oxccl
from jobs import alone, run


def fields(error: oxccl.Error) -> tuple[Any, ...]:
    """What a caller decides by."""
    return (type(error).__name__, error.kind, error.op, error.rank, error.peer)


def other_counts(world: oxccl.World) -> tuple[Any, ...]:
    """Ranks that call with other counts."""
    with pytest.raises(oxccl.Error) as caught:
        world.all_reduce(np.zeros(3 + world.rank))
    assert caught.value.seq is not None
    assert world.error is not None
    with pytest.raises(oxccl.Error) as later:
        world.all_reduce(np.zeros(3))
    assert later.value.kind == "Poisoned"
    return fields(caught.value)


def test_ranks_that_call_with_other_counts_are_told() -> None:
    kinds = {(f[0], f[1], f[2]) for f in run(2, other_counts)}
    assert ("Error", "Mismatch", "all_reduce") in kinds


def other_dtypes(world: oxccl.World) -> tuple[Any, ...]:
    """Ranks that call with other element types."""
    with pytest.raises(oxccl.Error) as caught:
        world.all_reduce(np.zeros(4, ["f4", "i4"][world.rank]))
    return fields(caught.value)


def test_ranks_that_call_with_other_element_types_are_told() -> None:
    found = run(2, other_dtypes)
    assert any(f[1] == "Mismatch" and f[4] == 1 - f[3] for f in found), found


def nobody_comes(world: oxccl.World) -> tuple[Any, ...]:
    """A rank that waits for one that does not call."""
    if world.rank == 1:
        with pytest.raises(oxccl.Error):
            world.recv(np.zeros(1), 0, 3, timeout=60)
        return ()
    with pytest.raises(oxccl.Timeout) as caught:
        world.all_reduce(np.zeros(4), timeout=0.2)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.retryable
    assert caught.value.advice
    return fields(caught.value)


def test_a_rank_that_nobody_joins_hears_of_the_deadline() -> None:
    assert run(2, nobody_comes)[0][:4] == ("Timeout", "Timeout", "all_reduce", 0)


def one_is_killed(world: oxccl.World) -> tuple[Any, ...]:
    """Rank 1 dies while rank 0 waits for it."""
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(oxccl.PeerLost) as caught:
        world.all_reduce(np.zeros(4), timeout=60)
    assert time.monotonic() - begin < 20
    assert isinstance(caught.value, ConnectionError)
    return fields(caught.value)


one_is_killed.dies = True  # type: ignore[attr-defined]


def test_the_death_of_a_rank_is_reported_with_its_number() -> None:
    assert run(2, one_is_killed)[0] == ("PeerLost", "PeerLost", "all_reduce", 0, 1)


def test_an_exception_goes_to_another_process_whole() -> None:
    world = alone()
    with pytest.raises(oxccl.InvalidArgument) as caught:
        world.broadcast(np.zeros(3), 5)
    error = caught.value
    assert "root 5 does not exist in a world of 1" in str(error)
    same = pickle.loads(pickle.dumps(error))
    assert fields(same) == fields(error)
    assert (str(same), same.count, same.dtype) == (str(error), 3, "f64")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda w: w.all_reduce(np.zeros(1), "median"), "'median' is no reduction"),
        (lambda w: w.all_reduce(np.zeros(1), "band"), "does not reduce f64 with band"),
        (lambda w: w.all_reduce(np.zeros(1), timeout=-1), "a time-out of -1 seconds"),
        (lambda w: w.all_reduce(np.zeros(1), timeout=float("nan")), "a time-out of NaN seconds"),
        (lambda w: w.all_gather(np.zeros(1), np.zeros(1)), "outputs is no list or tuple"),
        (lambda w: w.all_gather(np.zeros(1), []), "outputs has 0 tensors"),
        (lambda w: w.all_gather_into(np.zeros(1), [np.zeros(1)]), "two tensors or two lists"),
        (lambda w: w.all_gather_into([np.zeros(1)], []), "1 inputs and 0 outputs"),
        (lambda w: w.all_gather_into(np.zeros(2), np.zeros(3)), "output"),
        (lambda w: w.batch([np.zeros(1)]), "ops[0] is neither Send nor Recv"),
        (lambda w: w.send(np.zeros(1), 3), "3"),
        (lambda w: w.new_group([0, 4]), "rank 4 does not exist"),
        (lambda w: w.new_group([]), "no ranks"),
    ],
)
def test_wrong_arguments_are_named(call: Any, says: str) -> None:
    world = alone()
    with pytest.raises((oxccl.InvalidArgument, oxccl.Unsupported)) as caught:
        call(world)
    assert says in str(caught.value)
    assert caught.value.op is not None
    assert world.error is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "no launcher says which rank this is"),
        ({"address": "tcp://127.0.0.1:1"}, "rank is missing"),
        ({"address": "tcp://127.0.0.1:1", "rank": 0}, "rank and world_size go together"),
        ({"rank": 0, "world_size": 1}, "rank and world_size go together"),
        ({"address": "tcp://127.0.0.1:1", "rank": 3, "world_size": 2}, "rank 3 does not exist"),
        ({"address": "udp://x", "rank": 0, "world_size": 1}, "'udp' is not known"),
        ({"address": "file:///x", "rank": 0, "world_size": 1, "backend": "glooo"}, "glooo"),
        ({"address": "file:///x", "rank": 0, "world_size": 1, "device": "cpu:x"}, "is no device"),
        ({"address": "file:///x", "rank": 0, "world_size": 1, "options": {"warp": "9"}}, "warp"),
        ({"address": "file:///x", "rank": 0, "world_size": 1, "options": {"min_ctas": "x"}}, "min_ctas is 'x'"),
    ],
)
def test_a_wrong_beginning_is_named(arguments: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(oxccl.Error, match=r".*") as caught:
        oxccl.init(**arguments)
    assert says in str(caught.value)


def test_ranks_that_do_not_come_are_named_when_the_time_is_up(tmp_path: Any) -> None:
    with pytest.raises(oxccl.Timeout) as caught:
        oxccl.init(f"file://{tmp_path}/meeting", rank=0, world_size=3, timeout=0.5)
    assert "1, 2" in str(caught.value)
