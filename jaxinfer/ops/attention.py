"""Grouped-query attention of new tokens against flat keys and values, by XLA or by the CPU kernels."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Bool, Float, Num
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels.attention import Order, attend_to_seen, attends
from jaxinfer.ops.each_device import on_each_device
from jaxinfer.ops.rows_in_bytes import holds_bytes, to_numbers

# A TPU's matrix unit takes as long to load a tile of keys as to multiply it by this many rows.
_FREE_ROWS = 256


class Sinks(NamedTuple):
    """Keys at shifted positions: the first ``count`` slots use their own query."""

    query_BTNH: Any
    count: int


class Layer(NamedTuple):
    """The first ``extent`` slots of one layer of stacked keys or values: ``stack[layer, :, :extent]``, not copied.

    With a table the stack holds pages ``[L, P, Z, F]``: slot s of row b is slot ``s % Z`` of page ``table_BX[b, s //
    Z]``.
    """

    stack_LBSF: Any
    layer: Any
    extent: int
    table_BX: Any = None

    @property
    def dtype(self) -> Any:
        """The dtype of keys or values."""
        return self.stack_LBSF.dtype

    @property
    def num_lanes(self) -> int:
        """The number of lanes per slot."""
        return int(self.stack_LBSF.shape[3])

    def copied(self) -> Any:
        """Return the slots as an array ``[B, S, F]``."""
        if self.table_BX is None:
            return self.stack_LBSF[self.layer, :, : self.extent]
        pages_BXZF = self.stack_LBSF[self.layer, self.table_BX]
        return pages_BXZF.reshape(pages_BXZF.shape[0], -1, self.num_lanes)[:, : self.extent]


def values_of(keys: Any, values: Any) -> Any:
    """Return the values of slots, each an array or a `Layer`: where these have no lanes, the keys are values too."""
    lanes = values.num_lanes if isinstance(values, Layer) else values.shape[-1]
    return values if lanes else keys


def attend(
    query_BTNH: Float[Array, "B T N H"],
    keys_BSKH: Num[Array, "B S KH"] | Layer,
    values_BSKH: Num[Array, "B S _"] | Layer,
    mask_BTS: Bool[Array, "B T S"],
    scale: float,
    backend: Backend,
    softcap: float | None = None,
    sinks: Sinks | None = None,
    num_kv_heads: int | None = None,
    order: Order | None = None,
    sink_logits_N: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attend with softmax in float32 or wider; a query whose mask is empty gets the mean of all values.

    Keys and values hold the heads of a slot side by side: ``K * H`` lanes, and possibly more if ``num_kv_heads`` gives
    the number of heads, or rows in bytes, which needs it. Values without lanes are the keys. ``N`` is a multiple of
    ``K``. A ``softcap`` c bounds each scaled score x by ``c * tanh(x / c)`` (Gemma 2, 2408.00118). ``order`` says in
    which order slots hold the sequence (None: as they stand); sums are in that order where the CPU kernels attend,
    whose first ``near_slots`` are the sinks. ``sink_logits_N`` are scores without a key or a
    value: they take a part of the weights (gpt-oss, 2508.10925).

    For few rows on a TPU, each query head is padded with zeros to the lanes of all key/value heads. Then one product
    over all lanes reads the cache in its layout. One product per head would make the compiler rearrange a layer's keys
    and values first, at five times the cycles and 4.5 layers' slices of memory.
    """
    head_dim, values_BSKH = query_BTNH.shape[3], values_of(keys_BSKH, values_BSKH)
    kernels = backend.cpu_kernels and query_BTNH.size and values_BSKH.dtype == keys_BSKH.dtype
    kernels = kernels and attends(keys_BSKH.dtype, head_dim)
    keys, values = (_layer(held, num_kv_heads, head_dim, backend, not kernels) for held in (keys_BSKH, values_BSKH))
    if kernels:
        heads = num_kv_heads or keys.num_lanes // head_dim
        return _attend_by_kernels(
            query_BTNH, keys, values, mask_BTS, scale, backend, softcap or 0.0, sinks, heads, order, sink_logits_N
        ).astype(backend.compute_dtype)
    weighted_BCRTI, largest_BCRT1, totals_BCRT1, joined = _weigh(
        query_BTNH, keys, values, mask_BTS, scale, backend, softcap, sinks, num_kv_heads
    )
    if sink_logits_N is not None:
        sinks_CR11 = sink_logits_N.reshape(weighted_BCRTI.shape[1], -1, 1, 1)
        weighted_BCRTI, _, totals_BCRT1 = _with_sinks(weighted_BCRTI, largest_BCRT1, totals_BCRT1, sinks_CR11)
    return _by_head(weighted_BCRTI / totals_BCRT1, query_BTNH, joined).astype(backend.compute_dtype)


def _attend_by_kernels(
    query_BTNH: jax.Array,
    keys: Layer,
    values: Layer,
    mask_BTS: jax.Array,
    scale: float,
    backend: Backend,
    softcap: float,
    sinks: Sinks | None,
    num_kv_heads: int,
    order: Order | None,
    sink_logits_N: jax.Array | None,
) -> jax.Array:
    """Attend by the CPU kernels, each device from its tokens and heads to all slots of its rows."""
    if sinks is not None:
        order = order or Order(sinks.count, jnp.full(query_BTNH.shape[:1], sinks.count), keys.extent)

    def run(
        query: Any,
        near: Any,
        keys: Any,
        values: Any,
        layer: Any,
        mask_BTS: Any,
        turn_B: Any,
        table_BX: Any,
        logits_N: Any,
    ) -> Any:
        own_heads = num_kv_heads // backend.kv_shards

        def scaled(query_BTNH: Any) -> Any:
            return _by_kv_head(query_BTNH.astype(jnp.float32) * scale, own_heads)

        own_order = None if order is None else order._replace(turn_B=turn_B)
        near = None if near is None else scaled(near)
        logits_CR = None if logits_N is None else logits_N.astype(jnp.float32).reshape(own_heads, -1)
        held = keys, values, layer
        mixed_BCRTH = attend_to_seen(scaled(query), *held, mask_BTS, softcap, near, own_order, table_BX, logits_CR)
        return _by_head(mixed_BCRTH, query, joined=1)

    near_BTNH = None if sinks is None else sinks.query_BTNH
    turn_B = None if order is None else order.turn_B
    held = keys.stack_LBSF, values.stack_LBSF, jnp.asarray(keys.layer)
    run = on_each_device(run, backend, "qqccamrrn" if keys.table_BX is None else "qqppamrrn", "q")
    return run(query_BTNH, near_BTNH, *held, mask_BTS, turn_B, keys.table_BX, sink_logits_N)


class Partial(NamedTuple):
    """Attention to some of the slots: values weighted by ``exp(score - largest)``, and the sums of these weights.

    ``weighted_BTNH``, ``largest_BTN`` and ``totals_BTN`` are float32 or wider. A part without visible slots has no
    weight beside any other part.
    """

    weighted_BTNH: Any
    largest_BTN: Any
    totals_BTN: Any

    def scaled_to(self, largest_BTN: Any) -> "Partial":
        """Return the same with another largest score."""
        factor_BTN = jnp.exp(self.largest_BTN - largest_BTN)
        return Partial(self.weighted_BTNH * factor_BTN[..., None], largest_BTN, self.totals_BTN * factor_BTN)

    def joined_with(self, other: "Partial") -> "Partial":
        """Return attention to the slots of both."""
        largest_BTN = jnp.maximum(self.largest_BTN, other.largest_BTN)
        one, two = self.scaled_to(largest_BTN), other.scaled_to(largest_BTN)
        return Partial(one.weighted_BTNH + two.weighted_BTNH, largest_BTN, one.totals_BTN + two.totals_BTN)

    def with_sinks(self, sink_logits_N: Any) -> "Partial":
        """Return attention whose weights have a part without values; None is no such part."""
        if sink_logits_N is None:
            return self
        largest_BTN1, totals_BTN1 = self.largest_BTN[..., None], self.totals_BTN[..., None]
        parts = _with_sinks(self.weighted_BTNH, largest_BTN1, totals_BTN1, sink_logits_N[:, None])
        return Partial(parts[0], *(part[..., 0] for part in parts[1:]))

    def none(self) -> "Partial":
        """Return attention to no slots, for the same queries."""
        lowest = jnp.finfo(self.largest_BTN.dtype).min
        zeros = jnp.zeros_like(self.weighted_BTNH), jnp.zeros_like(self.totals_BTN)
        return Partial(zeros[0], jnp.full_like(self.largest_BTN, lowest), zeros[1])

    def mean_BTNH(self) -> Any:
        """Return the weighted means of the values."""
        return self.weighted_BTNH / self.totals_BTN[..., None]


def _with_sinks(weighted: Any, largest: Any, totals: Any, sink_logits: Any) -> tuple[Any, Any, Any]:
    """Return sums of weighted values, largest scores and sums of weights after a score without a value."""
    sink_logits = sink_logits.astype(largest.dtype)
    highest = jnp.maximum(largest, sink_logits)
    factor = jnp.exp(largest - highest)
    return weighted * factor, highest, totals * factor + jnp.exp(sink_logits - highest)


def attend_partially(
    query_BTNH: Float[Array, "B T N H"],
    keys_BSKH: Num[Array, "B S KH"],
    values_BSKH: Num[Array, "B S _"],
    mask_BTS: Bool[Array, "#B T S"],
    scale: float,
    backend: Backend,
    softcap: float | None = None,
    num_kv_heads: int | None = None,
) -> Partial:
    """Attend as `attend` does, to some of the slots."""
    shape, values_BSKH = (num_kv_heads, query_BTNH.shape[3]), values_of(keys_BSKH, values_BSKH)
    held = _layer(keys_BSKH, *shape, backend), _layer(values_BSKH, *shape, backend)
    weighted_BCRTI, largest_BCRT1, totals_BCRT1, joined = _weigh(
        query_BTNH, *held, mask_BTS, scale, backend, softcap, None, num_kv_heads
    )
    largest_BTN, totals_BTN = (
        jnp.moveaxis(each[..., 0], 3, 1).reshape(query_BTNH.shape[:3]) for each in (largest_BCRT1, totals_BCRT1)
    )
    return Partial(_by_head(weighted_BCRTI, query_BTNH, joined), largest_BTN, totals_BTN)


def _layer(
    held_BSF: jax.Array | Layer, num_kv_heads: int | None, head_dim: int, backend: Backend, widens: bool = True
) -> Layer:
    """Return slots; if it ``widens``, rows in bytes, or floats that a CPU keeps short, are of the compute dtype."""
    if widens and holds_bytes(held_BSF.dtype):
        assert num_kv_heads is not None
        rows_BSF = held_BSF.copied() if isinstance(held_BSF, Layer) else held_BSF
        held_BSF = to_numbers(rows_BSF, num_kv_heads, head_dim, backend.kv_shards, backend.compute_dtype)
    elif widens and backend.platform == "cpu" and held_BSF.dtype != backend.compute_dtype:
        rows_BSF = held_BSF.copied() if isinstance(held_BSF, Layer) else held_BSF
        held_BSF = rows_BSF.astype(backend.compute_dtype)
    return held_BSF if isinstance(held_BSF, Layer) else Layer(held_BSF[None], 0, held_BSF.shape[1])


def _weigh(
    query_BTNH: jax.Array,
    keys: Layer,
    values: Layer,
    mask_BTS: jax.Array,
    scale: float,
    backend: Backend,
    softcap: float | None,
    sinks: Sinks | None,
    num_kv_heads: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array, int]:
    """Return the values weighted by the softmax's numerators, the largest scores, the denominators, and J."""
    _, new_tokens, num_heads, head_dim = query_BTNH.shape
    num_kv_heads = num_kv_heads or keys.num_lanes // head_dim
    joined = _joined_heads(new_tokens, num_heads, num_kv_heads, backend)
    groups = num_kv_heads // joined
    scores_BCRTS = _scores(query_BTNH, keys, groups, joined, backend)
    if sinks is not None:
        nearer = keys._replace(extent=sinks.count)
        at_sinks_BCRTS = _scores(sinks.query_BTNH, nearer, groups, joined, backend)
        scores_BCRTS = jnp.concatenate([at_sinks_BCRTS, scores_BCRTS[..., sinks.count :]], axis=-1)
    accumulator = scores_BCRTS.dtype
    # Finite: a query without visible keys must give an average, because NaN would spread.
    lowest = jnp.finfo(accumulator).min
    scores_BCRTS = scores_BCRTS * scale
    if softcap is not None:
        scores_BCRTS = softcap * jnp.tanh(scores_BCRTS / softcap)
    scores_BCRTS = jnp.where(mask_BTS[:, None, None], scores_BCRTS, lowest)
    largest_BCRT1 = jnp.max(scores_BCRTS, axis=-1, keepdims=True)
    weights_BCRTS = jnp.exp(scores_BCRTS - largest_BCRT1)
    totals_BCRT1 = jnp.sum(weights_BCRTS, axis=-1, keepdims=True)
    weights_BCXS = weights_BCRTS.reshape(*scores_BCRTS.shape[:2], -1, values.extent)
    lanes = joined * head_dim
    # Written out like the scores: XLA's CPU backend keeps this order of operands, and transposes no weights.
    weighted_BCXI = jax.lax.dot_general(
        weights_BCXS.astype(values.dtype),
        _by_groups(values, groups, lanes),
        (((3,), (1,)), ((0, 1), (0, 2))),
        precision=backend.precision,
        preferred_element_type=accumulator,
    )
    return weighted_BCXI.reshape(*scores_BCRTS.shape[:-1], -1), largest_BCRT1, totals_BCRT1, joined


def _by_head(output_BCRTI: jax.Array, query_BTNH: jax.Array, joined: int) -> jax.Array:
    """Rearrange an output like the queries."""
    output_BTCRI = jnp.moveaxis(output_BCRTI, 3, 1)
    if joined > 1:
        output_BTCRI = _gather(output_BTCRI, joined)
    return output_BTCRI.reshape(query_BTNH.shape)


def _scores(
    query_BTNH: Float[Array, "B T N H"], keys: Layer, groups: int, joined: int, backend: Backend
) -> Float[Array, "B C R T S"]:
    """Multiply queries by keys: C groups of J joined key/value heads, R = J * G query heads over I = J * H lanes."""
    batch, new_tokens, _, head_dim = query_BTNH.shape
    query_BCRTI = _by_kv_head(query_BTNH.astype(keys.dtype), groups, joined)
    query_BCXI = query_BCRTI.reshape(batch, groups, -1, joined * head_dim)
    scores_BCXS = jax.lax.dot_general(
        query_BCXI,
        _by_groups(keys, groups, joined * head_dim),
        (((3,), (3,)), ((0, 1), (0, 2))),
        precision=backend.precision,
        preferred_element_type=jnp.promote_types(keys.dtype, jnp.float32),
    )
    return scores_BCXS.reshape(batch, groups, -1, new_tokens, keys.extent)


def _by_kv_head(query_BTNH: Float[Array, "B T N H"], groups: int, joined: int = 1) -> Float[Array, "B C R T I"]:
    """Rearrange queries by the C groups of key/value heads that they attend to."""
    batch, new_tokens, _, head_dim = query_BTNH.shape
    query_BTCRI = query_BTNH.reshape(batch, new_tokens, groups, -1, head_dim)
    if joined > 1:
        query_BTCRI = _spread(query_BTCRI, joined)
    return jnp.moveaxis(query_BTCRI, 1, 3)


def _by_groups(held: Layer, groups: int, lanes: int) -> Float[Array, "B S C I"]:
    """Return slots as an array, their lanes in groups, without the lanes after the heads."""
    held_BSF = held.copied()
    return held_BSF[..., : groups * lanes].reshape(*held_BSF.shape[:2], groups, lanes)


def _joined_heads(new_tokens: int, num_heads: int, num_kv_heads: int, backend: Backend) -> int:
    """Return how many key/value heads share a product: all of a device's heads, or one."""
    joined = num_kv_heads // backend.kv_shards
    rows = new_tokens * joined * (num_heads // num_kv_heads)
    return joined if backend.platform == "tpu" and rows <= _FREE_ROWS else 1


def _spread(query_BTCRH: Float[Array, "B T C R H"], joined: int) -> Float[Array, "B T C R JH"]:
    """Put each query head in the lanes of its key/value head, and zeros in the lanes of the others."""
    *lead, rows, head_dim = query_BTCRH.shape
    query_BTCJGH = query_BTCRH.reshape(*lead, joined, -1, head_dim)
    own_JJ = jnp.eye(joined, dtype=query_BTCRH.dtype)
    spread = query_BTCJGH[..., None, :] * own_JJ[:, None, :, None]
    return spread.reshape(*lead, rows, joined * head_dim)


def _gather(output_BTCRI: Float[Array, "B T C R JH"], joined: int) -> Float[Array, "B T C R H"]:
    """Take the lanes of its key/value head from each query head's row."""
    *lead, rows, lanes = output_BTCRI.shape
    output = output_BTCRI.reshape(*lead, joined, rows // joined, joined, lanes // joined)
    return jnp.einsum("btcjgjh->btcjgh", output).reshape(*lead, rows, lanes // joined)
