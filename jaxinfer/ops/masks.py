"""Which cache slots a new token attends to."""

import jax.numpy as jnp

from jaxinfer.notation import Array, Bool, Int
from pallas_kernels.window import Chunk, Window, oldest, widest

__all__ = ["Chunk", "Window", "causal_ancestors", "in_window", "node_depths", "visible_slots", "widest"]


def causal_ancestors(num_tokens: int) -> Bool[Array, "T T"]:
    """Return the ancestor relation of a chain: every token descends from itself and from all tokens before it."""
    return jnp.tril(jnp.ones((num_tokens, num_tokens), bool))


def node_depths(ancestors_BTA: Bool[Array, "B T A"]) -> Int[Array, "B T"]:
    """Return each new token's depth below the first one: the number of its ancestors, without itself."""
    return jnp.sum(ancestors_BTA, axis=-1, dtype=jnp.int32) - 1


def in_window(query_BT: Int[Array, "#B T"], key_BS: Int[Array, "#B S"], window: Window | None) -> Bool[Array, "#B T S"]:
    """Return which keys are in the window that ends with each query's position; later keys are not masked."""
    if window is None:
        return jnp.ones((1, query_BT.shape[1], key_BS.shape[1]), bool)
    return key_BS[:, None, :] >= oldest(window, query_BT)[:, :, None]


def visible_slots(
    start_B: Int[Array, " B"],
    ancestors_BTA: Bool[Array, "#B T A"],
    num_slots: int,
    window: Window | None = None,
    first_slot: Int[Array, ""] | int = 0,
) -> Bool[Array, "B T S"]:
    """Return what each new token attends to: all slots before ``start``, its ancestors and itself.

    A tokens of a tree, of which the last T are new, stand in the slots from ``start_B[b]`` on, parents before their
    children. ``ancestors_BTA[b, i, j]`` is true if token ``j`` is the ``i``-th new one or an ancestor of it. A
    ``window`` hides what is further back; a token's position is ``start`` plus its depth. The columns are the slots
    from ``first_slot`` on.
    """
    num_new, num_tokens = ancestors_BTA.shape[1:]
    slot_S = first_slot + jnp.arange(num_slots, dtype=start_B.dtype)
    offset_BS = slot_S[None, :] - start_B[:, None]
    is_new_BS = (offset_BS >= 0) & (offset_BS < num_tokens)
    index_B1S = jnp.clip(offset_BS, 0, num_tokens - 1)[:, None, :]
    old_BTS = jnp.broadcast_to((offset_BS < 0)[:, None, :], (start_B.shape[0], num_new, num_slots))
    if window is not None:
        depth_BT = node_depths(ancestors_BTA).astype(start_B.dtype)
        position_BT = start_B[:, None] + depth_BT
        old_BTS &= in_window(position_BT, slot_S[None, :], window)
        if num_new == num_tokens:
            is_near_BTA = in_window(position_BT, position_BT, window)
        else:
            # A path's tokens stand in its order, so an ancestor's depth is the number of those before it.
            depth_BTA = jnp.cumsum(ancestors_BTA, axis=-1, dtype=start_B.dtype) - 1
            is_near_BTA = start_B[:, None, None] + depth_BTA >= oldest(window, position_BT)[..., None]
        ancestors_BTA = ancestors_BTA & is_near_BTA
    ancestors_BTA = jnp.broadcast_to(ancestors_BTA, (start_B.shape[0], num_new, num_tokens))
    seen_BTS = jnp.take_along_axis(ancestors_BTA, index_B1S, axis=2)
    return old_BTS | (is_new_BS[:, None, :] & seen_BTS)
