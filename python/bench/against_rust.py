"""Compares a blocking all_reduce of this package with the same call in Rust, over 2 ranks of this machine, by turns.

Usage: ``cargo build --release --example all_reduce`` in ``python/``, then ``python bench/against_rust.py PATH_OF_THE_EXAMPLE [ROUNDS]``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

import numpy as np

import oxccl

SIZES = [(1, 20_000), (1 << 18, 200)]
"""Elements of f32, and calls for each round; as in ``all_reduce.rs``."""


def rank(meeting: str, number: int) -> None:
    """Does what ``all_reduce.rs`` does."""
    with oxccl.init(meeting, rank=number, world_size=2) as world:
        for count, calls in SIZES:
            data = np.zeros(count, np.float32)

            def run(calls: int, data: np.ndarray = data) -> int:
                begin = time.perf_counter_ns()
                for _ in range(calls):
                    world.all_reduce(data)
                return (time.perf_counter_ns() - begin) // calls

            run(calls // 10)
            print(run(calls))


def measure(program: list[str]) -> list[int]:
    """Nanoseconds for each call on rank 0, size by size."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [subprocess.Popen([*program, f"file://{folder}/meeting", str(r)], stdout=subprocess.PIPE, text=True) for r in range(2)]
        said = [process.communicate(timeout=120)[0] for process in ranks]
    return [int(line) for line in said[0].split()]


def main() -> None:
    """Prints the ratio of the least times for each size: other programs on the machine only add to a time."""
    if sys.argv[1].startswith("file:"):
        rank(sys.argv[1], int(sys.argv[2]))
        return
    rust, python = [sys.argv[1]], [sys.executable, __file__]
    rounds = [(measure(rust), measure(python)) for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 7)]
    for at, (count, _) in enumerate(SIZES):
        ours = min(p[at] for _, p in rounds)
        theirs = min(r[at] for r, _ in rounds)
        print(f"{4 * count:>8} B: Rust {theirs / 1e3:.2f} us, Python {ours / 1e3:.2f} us, {ours / theirs:.2f} times: {(ours - theirs) / 1e3:+.2f} us")


if __name__ == "__main__":
    main()
