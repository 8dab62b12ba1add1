"""Gradients of causal attention, one block of slots at a time, in plain JAX.

From the forward kernel's log-sum-exp, the weights of each block are computed again (FlashAttention-2, 2307.08691,
algorithm 2). Memory grows with T times a block, not with T times S. There is no kernel for this: in XLA, five products
per block keep the matrix unit as busy. A kernel would save only the scores' round trips to memory, which are small
beside the traffic of the optimiser and the other layers, because training processes prompts in chunks.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_attention import ScoreRule
from pallas_kernels.window import Window, oldest


def attention_gradients(
    query_BTNH: jax.Array,
    keys_BSF: jax.Array,
    values_BSF: jax.Array,
    start_B: jax.Array,
    length_B: jax.Array,
    mixed_BTNH: jax.Array,
    logsumexp_BNT: jax.Array,
    gradient_BTNH: jax.Array,
    rule: ScoreRule,
    window: Window | None,
    block_slots: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of queries ``[B, T, N, H]``, keys and values ``[B, S, K*H]`` in float32.

    ``logsumexp_BNT`` is in base 2, as from the forward kernel.
    """
    batch, tokens, _, head_dim = query_BTNH.shape
    num_slots, width = keys_BSF.shape[1:]
    num_kv_heads = width // head_dim
    exact = lax.Precision.HIGHEST if query_BTNH.dtype == jnp.float32 else lax.Precision.DEFAULT

    def by_group(array_BTNH: jax.Array) -> jax.Array:
        return array_BTNH.reshape(batch, tokens, num_kv_heads, -1, head_dim)

    def product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
        operands = (left.astype(query_BTNH.dtype), right.astype(query_BTNH.dtype))
        return jnp.einsum(equation, *operands, precision=exact, preferred_element_type=jnp.float32)

    query, gradient = by_group(query_BTNH), by_group(gradient_BTNH)
    logsumexp_BKGT1 = logsumexp_BNT.reshape(batch, num_kv_heads, -1, tokens, 1)
    inner_BTN = jnp.sum(mixed_BTNH.astype(jnp.float32) * gradient_BTNH.astype(jnp.float32), axis=-1)
    inner_BKGT1 = inner_BTN.transpose(0, 2, 1).reshape(logsumexp_BKGT1.shape)
    token_T = jnp.arange(tokens)
    own_BT1 = (start_B[:, None] + token_T)[..., None]
    is_token_BT1 = (token_T < length_B[:, None])[..., None]
    end_B1 = (start_B + length_B)[:, None]

    def block_gradients(first: jax.Array | int, keys_BCF: jax.Array, values_BCF: jax.Array) -> tuple[jax.Array, ...]:
        slot_C = first + jnp.arange(keys_BCF.shape[1])
        seen_BTC = (slot_C <= own_BT1) & is_token_BT1
        if window is not None:
            seen_BTC &= slot_C >= oldest(window, own_BT1)
        # Slots past the end may hold NaN, and zero times NaN is NaN.
        is_held_BC1 = (slot_C < end_B1)[..., None]
        keys, values = (
            jnp.where(is_held_BC1, array, 0).reshape(batch, -1, num_kv_heads, head_dim)
            for array in (keys_BCF, values_BCF)
        )
        products = product("BTKGH,BCKH->BKGTC", query, keys)
        scores, pull_back = jax.vjp(rule.in_base_2, products)
        weights = jnp.where(seen_BTC[:, None, None], jnp.exp2(scores - logsumexp_BKGT1), 0.0)
        of_weights = product("BTKGH,BCKH->BKGTC", gradient, values)
        (of_products,) = pull_back(weights * (of_weights - inner_BKGT1) * math.log(2))
        # A hidden slot's score may be so large that the soft-cap's slope is NaN.
        of_products = jnp.where(seen_BTC[:, None, None], of_products, 0.0)
        return (
            product("BKGTC,BCKH->BTKGH", of_products, keys),
            product("BKGTC,BTKGH->BCKH", of_products, query).reshape(batch, -1, width),
            product("BKGTC,BTKGH->BCKH", weights, gradient).reshape(batch, -1, width),
        )

    blocks = -(-num_slots // block_slots)
    padding = ((0, 0), (0, blocks * block_slots - num_slots), (0, 0))
    keys_BSF, values_BSF = jnp.pad(keys_BSF, padding), jnp.pad(values_BSF, padding)

    def step(of_query: jax.Array, index: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        first = index * block_slots
        held = (lax.dynamic_slice_in_dim(array, first, block_slots, axis=1) for array in (keys_BSF, values_BSF))
        added, of_keys, of_values = block_gradients(first, *held)
        return of_query + added, (of_keys, of_values)

    of_query, of_blocks = lax.scan(step, jnp.zeros(query.shape, jnp.float32), jnp.arange(blocks))
    of_keys_BSF, of_values_BSF = (array.swapaxes(0, 1).reshape(batch, -1, width)[:, :num_slots] for array in of_blocks)
    return of_query.reshape(query_BTNH.shape), of_keys_BSF, of_values_BSF
