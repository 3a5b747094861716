"""How long a death holds up data parallel: from SIGKILL to the next step that the others commit, over many kills.

``python bench/kills.py [KILLS [seconds per step]]``: three replicas, of which one is killed and started again.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import oxccl
from ftjobs import Job
from test_ft_ddp import TRAIN


def main() -> None:
    """Prints the median and the extremes."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    pause = sys.argv[2] if len(sys.argv) > 2 else "0.005"
    took = []
    with (
        tempfile.TemporaryDirectory() as folder,
        oxccl.Lighthouse(min_replicas=2, initial_replicas=3) as lighthouse,
        Job(lighthouse.address, TRAIN, Path(folder)) as job,
    ):
        arguments = (10**6, True, pause, f"{folder}/stop")
        for name in ("a", "b", "c"):
            job.start(name, *arguments)
        job.until("c", "step", 20)
        for _ in range(kills):
            at = job.kill("c")
            step = job.said("a")[-1]["step"]
            job.until("a", "step", step + 3)
            # The step that the death broke is the first one of the next epoch.
            after = [line for line in job.said("a") if line["at"] > at]
            epoch = after[-1]["epoch"]
            took.append(next(line["at"] for line in after if line["epoch"] == epoch) - at)
            job.start("c", *arguments)
            job.until("c", "members", 3)
    took = sorted(1000 * seconds for seconds in took)
    print(f"{kills} kills, to the next commit: p50 {statistics.median(took):.0f} ms, from {took[0]:.0f} to {took[-1]:.0f} ms")


# Replicas are processes that import this file.
if __name__ == "__main__":
    main()
