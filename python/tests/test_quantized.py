"""Reductions in fewer bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import jobs
import oxccl

COUNT = 1 << 16
FORMATS = {"f16": 1e-6, "bf16": 1e-4, "int8": 1e-3, "int8-b32": 1e-3, "int4": 0.1, "int4-b64": 0.1, "fp8": 1e-2, "auto": 1e-3}


def _values(rank: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(rank).standard_normal(COUNT).astype(np.float32)


def _sums(world: oxccl.World, format: str) -> tuple[bytes, str, int]:
    with oxccl.QuantizedGroup(format) as group:
        assert world.connect(group)
        assert (group.rank, group.world_size) == (world.rank, world.world_size)
        x = _values(world.rank)
        before = group.traffic().sent
        group.all_reduce(x, "avg")
        return x.tobytes(), group.format, group.traffic().sent - before


@pytest.mark.parametrize("format", FORMATS)
def test_an_average_is_close_the_same_everywhere_and_smaller(format: str) -> None:
    for ranks in (2, 3):
        found = jobs.run(ranks, _sums, format)
        assert len({x for x, _, _ in found}) == 1
        exact = np.mean([_values(rank) for rank in range(ranks)], axis=0)
        error = np.square(np.frombuffer(found[0][0], np.float32) - exact).sum() / np.square(exact).sum()
        assert 0 < error < FORMATS[format], error
        # In f32 each of two ranks sends all of its values, and each of three two thirds of them twice.
        full = COUNT * 4 * (1 if ranks == 2 else 4 / 3)
        assert found[0][2] < full * 0.6, found[0][2]


def _feedback(world: oxccl.World, keeps: bool) -> float:
    group = oxccl.QuantizedGroup("int4-b64", error_feedback=keeps)
    world.connect(group)
    total = np.zeros(64, np.float64)
    for step in range(32):
        # Too small beside the first value for any code of its own.
        x = np.full(64, 0.01, np.float32)
        x[0] = 1.0
        if keeps:
            group.begin("step")
        group.all_reduce(x)
        if keeps and step == 7:
            group.rollback()
            continue
        if keeps:
            group.commit()
        total += x
    return float(total[1:].mean())


def test_error_feedback_delivers_what_rounding_took() -> None:
    lost = jobs.run(2, _feedback, False)
    kept = jobs.run(2, _feedback, True)
    assert lost == [0.0, 0.0]
    # 31 steps counted, of two ranks and a hundredth each; one code (a seventh of each rank) may still be owed.
    assert kept[0] == pytest.approx(31 * 2 * 0.01, abs=0.3)
    assert kept[0] == kept[1]


def _differs(world: oxccl.World) -> tuple[str, str]:
    group = oxccl.QuantizedGroup("int8" if world.rank == 0 else "int4")
    with pytest.raises(oxccl.Error) as error:
        world.connect(group)
    return error.value.kind, str(error.value)


def test_ranks_with_different_formats_are_told_both() -> None:
    for kind, text in jobs.run(2, _differs):
        assert kind == "Mismatch", text
        assert "int8-b64" in text, text
        assert "int4-h128" in text, text


def _some(world: oxccl.World) -> tuple[bool, float]:
    group = oxccl.QuantizedGroup("int8", over=oxccl.unconfigured(backend="gloo", timeout=30), accuracy="best", moves="quantized", seed=7)
    is_in = world.connect(group, [2, 0])
    if not is_in:
        with pytest.raises(oxccl.Error, match="not configured"):
            group.all_reduce(np.zeros(1, np.float32))
        return False, 0.0
    group.start_round(3)
    x = np.full(4, world.rank + 1.0, np.float32)
    group.broadcast(x, 0)
    assert group.rank == (1 if world.rank == 0 else 0)
    return True, float(x[0])


def test_a_group_of_some_ranks_has_its_own_options() -> None:
    found = jobs.run(3, _some)
    assert [is_in for is_in, _ in found] == [True, False, True]
    # All ranks hold the decoded value, the sender too.
    assert found[0] == found[2]
    assert found[0][1] == pytest.approx(3.0, rel=0.02)


def test_what_is_wrong_is_told_by_name() -> None:
    with pytest.raises(oxccl.InvalidArgument, match="int3"):
        oxccl.QuantizedGroup("int3")
    with pytest.raises(oxccl.InvalidArgument, match="error_feedback"):
        oxccl.QuantizedGroup("int2")
    with pytest.raises(oxccl.InvalidArgument, match="accuracy is 'good'"):
        oxccl.QuantizedGroup("int8", accuracy="good")  # type: ignore[arg-type]
    with pytest.raises(oxccl.InvalidArgument, match="moves is 'fast'"):
        oxccl.QuantizedGroup("int8", moves="fast")  # type: ignore[arg-type]
    with pytest.raises(oxccl.Error, match="error_feedback=True"):
        oxccl.QuantizedGroup("int8").begin()
    with jobs.alone() as world:
        with pytest.raises(oxccl.InvalidArgument, match=r"world\.connect"):
            oxccl.QuantizedGroup("int8", over=world)
        group = oxccl.QuantizedGroup("int8")
        assert world.connect(group)
        with pytest.raises(oxccl.Unsupported, match="max"):
            group.all_reduce(np.zeros(1, np.float32), "max")
