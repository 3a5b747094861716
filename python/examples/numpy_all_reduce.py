"""Least squares over all ranks with NumPy alone: each rank has rows of its own, and the sums of their products are reduced.

Run it under torchrun, mpirun or srun, or by hand::

    export MASTER_ADDR=127.0.0.1 WORLD_SIZE=2
    RANK=0 python numpy_all_reduce.py & RANK=1 python numpy_all_reduce.py
"""

import numpy as np

import oxccl

TRUE = np.array([3.0, -1.0, 0.5])

with oxccl.init() as world:
    random = np.random.default_rng(world.rank)
    rows = random.standard_normal((10_000, 3))
    values = rows @ TRUE + random.standard_normal(10_000)

    # The normal equations of all rows are the sums of each rank's.
    products, targets = rows.T @ rows, rows.T @ values
    world.all_reduce([products, targets])
    found = np.linalg.solve(products, targets)

    # All ranks hold bitwise the same sums, and so the same answer.
    print(f"rank {world.rank} of {world.world_size}: {found.tolist()}")
