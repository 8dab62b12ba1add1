"""Random arguments for a case."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Case


def random_arguments(case: Case, seed: int = 0) -> tuple[jax.Array, ...]:
    """Return arguments of a case's shapes; those with given values are returned unchanged."""
    rng = np.random.default_rng(seed)
    found = []
    for argument in case.arguments:
        if not isinstance(argument, jax.ShapeDtypeStruct):
            found.append(jnp.asarray(argument))
            continue
        numbers = jnp.asarray(_draw(rng, argument, case))
        if case.byte_heads is not None and argument.dtype == jnp.int8:
            heads, head_dim = case.byte_heads
            # Scales from a 128th to a 64th: their lower bytes are of any numbers but negative ones.
            upper = slice(heads * head_dim, heads * (head_dim + 1))
            lower = slice(upper.stop, upper.stop + heads)
            numbers = numbers.at[..., upper].set(0x3C).at[..., lower].set(abs(numbers[..., lower]))
        is_cache = case.lanes is not None and len(argument.shape) == 4 and argument.shape[-1] > case.lanes
        # Lanes past a cache's heads are zeros, by contract.
        found.append(numbers.at[..., case.lanes :].set(0) if is_cache else numbers)
    return tuple(found)


def random_trees(rng: np.random.Generator, batch: int, nodes: int) -> np.ndarray:
    """Return the ancestors ``[B, M, M]`` of random trees: every node but the first descends from an earlier one."""
    ancestors = np.zeros((batch, nodes, nodes), bool)
    for row in range(batch):
        for node in range(nodes):
            if node:
                ancestors[row, node] = ancestors[row, rng.integers(max(0, node - 4), node)]
            ancestors[row, node, node] = True
    return ancestors


def _draw(rng: np.random.Generator, argument: jax.ShapeDtypeStruct, case: Case) -> Any:
    dtype, shape = jnp.dtype(argument.dtype), argument.shape
    if dtype == jnp.bool_:
        return random_trees(rng, shape[0], shape[1])
    if dtype == jnp.uint8:  # exponents of powers of two up to 1
        return jnp.asarray(rng.integers(118, 128, shape, np.uint8))
    if dtype == jnp.uint4:
        return jnp.asarray(rng.integers(0, 16, shape, np.int8)).astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        most = min(jnp.iinfo(dtype).max, 127)
        drawn = rng.integers(-most, most + 1, shape, np.int8)
        # The bytes of -1 and 127 are no numbers where codes are floats of 8 bits.
        drawn[(drawn == -1) | (drawn == 127)] = 1
        return jnp.asarray(drawn).astype(dtype)
    if dtype == jnp.float32 and any(_is_quantized(other) for other in case.arguments):
        return rng.uniform(0.005, 0.02, shape).astype(np.float32)
    return rng.standard_normal(shape, np.float32).astype(dtype)


def _is_quantized(argument: Any) -> bool:
    return jnp.dtype(argument.dtype) in (jnp.int8, jnp.int4, jnp.uint4)
