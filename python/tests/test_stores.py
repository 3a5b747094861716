"""Stores, and groups that meet in one."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import oxccl


def together(groups: list[oxccl.Group], store: object, epoch: int) -> list[float]:
    """Configures the groups, as ranks of one, and sums their ranks + 1."""
    sums = [np.full(1, rank + 1.0) for rank in range(len(groups))]

    def rank(number: int) -> None:
        groups[number].configure(store, number, len(groups), epoch=epoch, timeout=60)
        groups[number].all_reduce(sums[number])

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [float(x[0]) for x in sums]


def test_a_group_is_configured_again_for_each_epoch_with_other_ranks(tmp_path: Path) -> None:
    server = oxccl.StoreServer()
    groups = [oxccl.unconfigured(timeout=60) for _ in range(3)]
    with pytest.raises(oxccl.Error, match="configure"):
        groups[0].all_reduce(np.zeros(1))
    assert together(groups, oxccl.TcpStore(server.address), 1) == [6.0] * 3
    groups[2].abort("this rank leaves")
    assert together(groups[:2], oxccl.PrefixStore("again", oxccl.TcpStore(server.address)), 2) == [3.0] * 2
    assert groups[0].epoch == 2
    assert together([groups[1], groups[0]], oxccl.FileStore(tmp_path / "store"), 3) == [3.0] * 2
    assert groups[0].rank == 1
    with pytest.raises(oxccl.InvalidArgument, match="epoch"):
        groups[0].configure(oxccl.FileStore(tmp_path / "store"), 0, 1, epoch=3)
    server.shutdown()


def test_a_store_keeps_what_it_is_given_and_names_what_it_lacks() -> None:
    server = oxccl.StoreServer()
    store = oxccl.TcpStore(server.address)
    below = oxccl.PrefixStore("below", store)
    below.set("a", b"\x00\xff")
    assert store.get("below/a") == b"\x00\xff"
    assert [below.add("n", 2), below.add("n", 3)] == [2, 5]
    assert below.compare_set("a", b"other", b"new") == b"\x00\xff"
    assert store.check(["below/a"])
    assert not store.check(["below/a", "b"])
    assert store.delete("below/a")
    store.barrier("all", 1)
    with pytest.raises(oxccl.Timeout, match="'b'"):
        store.wait(["b"], timeout=0.1)
    with pytest.raises(TypeError, match="dict is no store"):
        oxccl.PrefixStore("p", {})
    server.shutdown()
