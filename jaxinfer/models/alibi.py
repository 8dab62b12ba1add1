"""Scores that fall with the distance (ALiBi; Press et al., 2108.12409), as further lanes of keys.

The bias of head n is slope_n * (j - i) for a query at i and a key at j. Of that, slope_n * i is one number for all keys
of the query, which softmax drops; the rest, slope_n * j, is a number of the key alone. So a key has it in lanes behind
its own, and every query has one and the same number there: caches, masks, kernels and meshes see a wider head, and
nothing else. Where lanes have 16 bits, three of them are the parts of a number of 24.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.models.cache_rows import alibi_lanes, cached_width
from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.backend import Backend

# What a query has in these lanes: a key's number is smaller by as much, so that float16 has it.
_QUERY_LANE = 64.0
_BFLOAT16 = {"exponent_bits": 8, "mantissa_bits": 7}


def key_lanes(
    config: DecoderConfig, backend: Backend, positions_BT: Int[Array, "B T"]
) -> Float[Array, "B T N P"] | None:
    """Return the further lanes of keys at these positions, None if scores do not fall with the distance."""
    alibi = config.alibi
    if alibi is None:
        return None
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    wide = jnp.promote_types(backend.compute_dtype, jnp.float32)
    slopes_N, positions_BT1 = jnp.asarray(np.array(alibi.slopes), wide), positions_BT[..., None].astype(wide)
    if alibi.rounded:
        slopes_N, positions_BT1 = (lax.reduce_precision(each, **_BFLOAT16) for each in (slopes_N, positions_BT1))
        biases_BTN = lax.reduce_precision(slopes_N * positions_BT1, **_BFLOAT16)
    else:
        biases_BTN = slopes_N * positions_BT1 * (1 / scale)
    rest_BTN, parts = biases_BTN / _QUERY_LANE, []
    for _ in range(alibi_lanes(config, backend) - 1):
        # A conversion there and back might be left out.
        parts.append(lax.reduce_precision(rest_BTN, **_BFLOAT16))
        rest_BTN = rest_BTN - parts[-1]
    return jnp.stack([*parts, rest_BTN], axis=-1).astype(backend.compute_dtype)


def widened(
    config: DecoderConfig,
    backend: Backend,
    lanes_BTNP: Float[Array, "B T N P"],
    query_BTNH: Float[Array, "B T N H"],
    keys_BTNH: Float[Array, "B T N H"],
    values_BTNH: Float[Array, "B T N H"],
) -> tuple[Float[Array, "B T N W"], Float[Array, "B T N W"], Float[Array, "B T N W"]]:
    """Return queries and keys with their further lanes, and values with as many zeros."""
    same = jnp.full_like(lanes_BTNP, _QUERY_LANE).astype(query_BTNH.dtype)
    query = jnp.concatenate([query_BTNH, same], axis=-1)
    keys = jnp.concatenate([keys_BTNH, lanes_BTNP.astype(keys_BTNH.dtype)], axis=-1)
    width = cached_width(config, backend)

    def filled(heads: Array) -> Array:
        return jnp.pad(heads, ((0, 0), (0, 0), (0, 0), (0, width - heads.shape[-1])))

    return filled(query), filled(keys), filled(values_BTNH)
