"""Grouped-query attention of new tokens against flat keys and values, in plain XLA."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Bool, Float
from jaxinfer.ops.backend import Backend

# A TPU's matrix unit takes as long to load a tile of keys as to multiply this many rows by it.
_FREE_ROWS = 256


class Sinks(NamedTuple):
    """Keys that stand nearer than the text has them: those of the first ``count`` slots meet a query of their own."""

    query_BTNH: Any
    count: int


def attend(
    query_BTNH: Float[Array, "B T N H"],
    keys_BSKH: Float[Array, "B S KH"],
    values_BSKH: Float[Array, "B S KH"],
    mask_BTS: Bool[Array, "B T S"],
    scale: float,
    backend: Backend,
    softcap: float | None = None,
    sinks: Sinks | None = None,
    num_kv_heads: int | None = None,
) -> Float[Array, "B T N H"]:
    """Attend with softmax in float32 or wider; a query whose mask is empty gets the mean of all values.

    Keys and values hold the heads of a slot side by side (``K * H`` lanes, and any after them where ``num_kv_heads``
    says how many heads there are). ``N`` is a multiple of ``K``. A ``softcap``
    c bounds each scaled score x by ``c * tanh(x / c)`` (Gemma 2, 2408.00118).

    Where few rows meet many lanes on a TPU, a query is put among zeros, each head's numbers in the lanes of its
    key/value head: one product over all lanes reads the cache as it lies. A product for each head would have the
    compiler rearrange a layer's keys and values first, at five times the cycles and 4.5 layers' slices of memory.
    """
    weighted_BCRTI, _, totals_BCRT1, joined = _weigh(
        query_BTNH, keys_BSKH, values_BSKH, mask_BTS, scale, backend, softcap, sinks, num_kv_heads
    )
    return _by_head(weighted_BCRTI / totals_BCRT1, query_BTNH, joined).astype(backend.compute_dtype)


class Partial(NamedTuple):
    """Attention to some of what is seen: values weighted by ``exp(score - largest)``, and the sums of these weights.

    ``weighted_BTNH``, ``largest_BTN`` and ``totals_BTN`` are float32 or wider. Nothing seen counts for nothing beside
    anything that is.
    """

    weighted_BTNH: Any
    largest_BTN: Any
    totals_BTN: Any

    def scaled_to(self, largest_BTN: Any) -> "Partial":
        """Return the same as if the greatest score were another."""
        factor_BTN = jnp.exp(self.largest_BTN - largest_BTN)
        return Partial(self.weighted_BTNH * factor_BTN[..., None], largest_BTN, self.totals_BTN * factor_BTN)

    def joined_with(self, other: "Partial") -> "Partial":
        """Return attention to what either attends to."""
        largest_BTN = jnp.maximum(self.largest_BTN, other.largest_BTN)
        one, two = self.scaled_to(largest_BTN), other.scaled_to(largest_BTN)
        return Partial(one.weighted_BTNH + two.weighted_BTNH, largest_BTN, one.totals_BTN + two.totals_BTN)

    def none(self) -> "Partial":
        """Return attention to nothing, for the same queries."""
        lowest = jnp.finfo(self.largest_BTN.dtype).min
        zeros = jnp.zeros_like(self.weighted_BTNH), jnp.zeros_like(self.totals_BTN)
        return Partial(zeros[0], jnp.full_like(self.largest_BTN, lowest), zeros[1])

    def mean_BTNH(self) -> Any:
        """Return the values' weighted means."""
        return self.weighted_BTNH / self.totals_BTN[..., None]


def attend_partially(
    query_BTNH: Float[Array, "B T N H"],
    keys_BSKH: Float[Array, "B S KH"],
    values_BSKH: Float[Array, "B S KH"],
    mask_BTS: Bool[Array, "#B T S"],
    scale: float,
    backend: Backend,
    softcap: float | None = None,
    num_kv_heads: int | None = None,
) -> Partial:
    """Attend as `attend` does, to slots that are not all there are."""
    weighted_BCRTI, largest_BCRT1, totals_BCRT1, joined = _weigh(
        query_BTNH, keys_BSKH, values_BSKH, mask_BTS, scale, backend, softcap, None, num_kv_heads
    )
    largest_BTN, totals_BTN = (
        jnp.moveaxis(each[..., 0], 3, 1).reshape(query_BTNH.shape[:3]) for each in (largest_BCRT1, totals_BCRT1)
    )
    return Partial(_by_head(weighted_BCRTI, query_BTNH, joined), largest_BTN, totals_BTN)


def _weigh(
    query_BTNH: jax.Array,
    keys_BSKH: jax.Array,
    values_BSKH: jax.Array,
    mask_BTS: jax.Array,
    scale: float,
    backend: Backend,
    softcap: float | None,
    sinks: Sinks | None,
    num_kv_heads: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array, int]:
    """Return values weighted by their softmax's numerators, the greatest scores, the denominators, and J."""
    batch, new_tokens, num_heads, head_dim = query_BTNH.shape
    slots = keys_BSKH.shape[1]
    num_kv_heads = num_kv_heads or keys_BSKH.shape[2] // head_dim
    keys_BSKH, values_BSKH = (held[..., : num_kv_heads * head_dim] for held in (keys_BSKH, values_BSKH))
    joined = _joined_heads(new_tokens, num_heads, num_kv_heads, backend)
    scores_BCRTS = _scores(query_BTNH, keys_BSKH, joined, backend)
    if sinks is not None:
        at_sinks_BCRTS = _scores(sinks.query_BTNH, keys_BSKH[:, : sinks.count], joined, backend)
        scores_BCRTS = jnp.concatenate([at_sinks_BCRTS, scores_BCRTS[..., sinks.count :]], axis=-1)
    accumulator = scores_BCRTS.dtype
    # Finite, so that a query without any visible key gives an average and not NaN, which would spread.
    lowest = jnp.finfo(accumulator).min
    scores_BCRTS = scores_BCRTS * scale
    if softcap is not None:
        scores_BCRTS = softcap * jnp.tanh(scores_BCRTS / softcap)
    scores_BCRTS = jnp.where(mask_BTS[:, None, None], scores_BCRTS, lowest)
    largest_BCRT1 = jnp.max(scores_BCRTS, axis=-1, keepdims=True)
    weights_BCRTS = jnp.exp(scores_BCRTS - largest_BCRT1)
    totals_BCRT1 = jnp.sum(weights_BCRTS, axis=-1, keepdims=True)
    # Spelt out as in the scores: XLA's CPU backend keeps to an order of operands that needs no transposed weights.
    weighted_BCXI = jax.lax.dot_general(
        weights_BCRTS.astype(values_BSKH.dtype).reshape(batch, num_kv_heads // joined, -1, slots),
        values_BSKH.reshape(batch, slots, num_kv_heads // joined, -1),
        (((3,), (1,)), ((0, 1), (0, 2))),
        precision=backend.precision,
        preferred_element_type=accumulator,
    )
    return weighted_BCXI.reshape(*scores_BCRTS.shape[:-1], -1), largest_BCRT1, totals_BCRT1, joined


def _by_head(output_BCRTI: jax.Array, query_BTNH: jax.Array, joined: int) -> jax.Array:
    """Lay an output out as the queries are."""
    output_BTCRI = jnp.moveaxis(output_BCRTI, 3, 1)
    if joined > 1:
        output_BTCRI = _gather(output_BTCRI, joined)
    return output_BTCRI.reshape(query_BTNH.shape)


def _scores(
    query_BTNH: Float[Array, "B T N H"], keys_BSKH: Float[Array, "B S KH"], joined: int, backend: Backend
) -> Float[Array, "B C R T S"]:
    """Multiply queries by keys: C groups of J joined key/value heads, R = J * G query heads over I = J * H lanes."""
    batch, new_tokens, _, head_dim = query_BTNH.shape
    slots, lanes = keys_BSKH.shape[1:]
    groups = lanes // head_dim // joined
    query_BTCRI = query_BTNH.reshape(batch, new_tokens, groups, -1, head_dim).astype(keys_BSKH.dtype)
    if joined > 1:
        query_BTCRI = _spread(query_BTCRI, joined)
    query_BCRTI = jnp.moveaxis(query_BTCRI, 1, 3)
    scores_BCXS = jax.lax.dot_general(
        query_BCRTI.reshape(batch, groups, -1, query_BCRTI.shape[-1]),
        keys_BSKH.reshape(batch, slots, groups, -1),
        (((3,), (3,)), ((0, 1), (0, 2))),
        precision=backend.precision,
        preferred_element_type=jnp.promote_types(keys_BSKH.dtype, jnp.float32),
    )
    return scores_BCXS.reshape(batch, groups, -1, new_tokens, slots)


def _joined_heads(new_tokens: int, num_heads: int, num_kv_heads: int, backend: Backend) -> int:
    """Return how many key/value heads share a product: all of a device's, or one."""
    joined = num_kv_heads // backend.kv_shards
    rows = new_tokens * joined * (num_heads // num_kv_heads)
    return joined if backend.platform == "tpu" and rows <= _FREE_ROWS else 1


def _spread(query_BTCRH: Float[Array, "B T C R H"], joined: int) -> Float[Array, "B T C R JH"]:
    """Put each query head's numbers in the lanes of its key/value head, and zeros in those of the others."""
    *lead, rows, head_dim = query_BTCRH.shape
    query_BTCJGH = query_BTCRH.reshape(*lead, joined, -1, head_dim)
    own_JJ = jnp.eye(joined, dtype=query_BTCRH.dtype)
    spread = query_BTCJGH[..., None, :] * own_JJ[:, None, :, None]
    return spread.reshape(*lead, rows, joined * head_dim)


def _gather(output_BTCRI: Float[Array, "B T C R JH"], joined: int) -> Float[Array, "B T C R H"]:
    """Take from each query head's row the lanes of its key/value head."""
    *lead, rows, lanes = output_BTCRI.shape
    output = output_BTCRI.reshape(*lead, joined, rows // joined, joined, lanes // joined)
    return jnp.einsum("btcjgjh->btcjgh", output).reshape(*lead, rows, lanes // joined)
