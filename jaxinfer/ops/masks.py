"""Which cache slots a new token may see."""

import jax.numpy as jnp

from jaxinfer.notation import Array, Bool, Int


def causal_ancestors(num_tokens: int) -> Bool[Array, "T T"]:
    """Return the ancestor relation of a chain: every token descends from itself and all before it."""
    return jnp.tril(jnp.ones((num_tokens, num_tokens), bool))


def visible_slots(
    start_B: Int[Array, " B"], ancestors_BTT: Bool[Array, "#B T T"], num_slots: int
) -> Bool[Array, "B T S"]:
    """Return what each new token sees: all slots before ``start``, and of the new ones its ancestors and itself.

    New token ``i`` of row ``b`` stands in slot ``start_B[b] + i``; ``ancestors_BTT[b, i, j]`` is true where token ``j``
    is ``i`` or an ancestor of ``i``.
    """
    num_tokens = ancestors_BTT.shape[-1]
    offset_BS = jnp.arange(num_slots)[None, :] - start_B[:, None]
    is_new_BS = (offset_BS >= 0) & (offset_BS < num_tokens)
    index_B1S = jnp.clip(offset_BS, 0, num_tokens - 1)[:, None, :]
    ancestors_BTT = jnp.broadcast_to(ancestors_BTT, (start_B.shape[0], num_tokens, num_tokens))
    seen_BTS = jnp.take_along_axis(ancestors_BTT, index_B1S, axis=2)
    return (offset_BS < 0)[:, None, :] | (is_new_BS[:, None, :] & seen_BTS)
