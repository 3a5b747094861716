"""Data parallel in JAX on CPUs: the gradients of all ranks are averaged from where JAX keeps them, through DLPack, without a copy.

JAX's arrays are read-only, so the all-reduce is made of its halves: a reduce-scatter out of JAX's memory, and an all-gather into NumPy's.

Run it under torchrun, mpirun or srun, or by hand::

    export MASTER_ADDR=127.0.0.1 WORLD_SIZE=2
    RANK=0 python jax_data_parallel.py & RANK=1 python jax_data_parallel.py
"""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import oxccl

jax.config.update("jax_platforms", "cpu")
STEPS, RATE = 300, 0.1


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """How well a small network squares."""
    hidden = jnp.tanh(x @ params["inner"] + params["bias"])
    return jnp.mean((hidden @ params["outer"] - jnp.mean(x * x, 1, keepdims=True)) ** 2)


with oxccl.init() as world:
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"inner": jax.random.normal(keys[0], (8, 64)) / 3, "bias": jnp.zeros(64), "outer": jax.random.normal(keys[1], (64, 1)) / 8}
    flat, as_tree = ravel_pytree(params)
    # Each rank has a part of the same size.
    part = np.empty(-(-flat.size // world.world_size), np.float32)
    missing = part.size * world.world_size - flat.size

    @jax.jit
    def gradient(flat: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Loss and gradient of this rank's batch, in one piece."""
        value, slope = jax.value_and_grad(lambda flat: loss(as_tree(flat), x))(flat)
        return value, jnp.pad(slope, (0, missing))

    @jax.jit
    def step(flat: jax.Array, average: jax.Array) -> jax.Array:
        """One step of gradient descent."""
        return flat - RATE * average[: flat.size]

    draw = jax.random.key(1 + world.rank)
    for n in range(STEPS):
        value, slope = gradient(flat, jax.random.normal(jax.random.fold_in(draw, n), (64, 8)))
        world.reduce_scatter_into(slope, part, "avg")
        average = np.empty(part.size * world.world_size, np.float32)
        world.all_gather_into(part, average)
        flat = step(flat, average)
        if n % 50 == 0 or n == STEPS - 1:
            print(f"rank {world.rank} step {n} loss {value:.4f}", flush=True)

    # All ranks hold bitwise the same parameters.
    print(f"rank {world.rank} parameters {hashlib.sha256(np.asarray(flat).tobytes()).hexdigest()[:16]}", flush=True)
