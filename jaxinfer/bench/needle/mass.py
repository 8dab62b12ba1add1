"""How much of the attention a few of the keys hold, layer by layer: what a cache that reads few of them can keep."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.recording import RecordingCache
from jaxinfer.decoding.step import forward_prompt
from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.cache_rows import cached_width
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.model import Model
from jaxinfer.ops.masks import causal_ancestors
from jaxinfer.ops.rows_in_bytes import holds_bytes

_CHUNK = 512


def attention_mass(lm: LanguageModel, tokens: Sequence[int], share: float, queries: int) -> tuple[float, ...]:
    """Return by layer what part of the attention the best ``share`` of the keys hold, each head and query its own.

    It is the mean over all heads and the last ``queries`` tokens of the text. Raises InvalidOption for models whose
    layers do not all see the whole text.
    """
    check_counted(lm)
    before, length = len(tokens) - queries, len(tokens)
    padded = -(-before // _CHUNK) * _CHUNK if before > _CHUNK else before
    ids_BT = np.zeros((1, padded), np.int32)
    ids_BT[0, :before] = tokens[:before]
    arguments = lm.params, jnp.asarray(ids_BT), jnp.asarray([tokens[before:]], jnp.int32)
    count = math.ceil(share * length)
    run = partial(_mass, lm.programs.decoder, before, count)
    return tuple(np.asarray(lm.programs.run(("mass", length, count, queries), run, (), *arguments)).tolist())


def check_counted(lm: LanguageModel) -> None:
    """Refuse models whose layers do not all see the whole text, and caches in bytes."""
    config = lm.config
    is_plain = len(config.kinds) == 1 and config.kinds[0].window is None and config.attention_softcap is None
    if not is_plain or config.latent is not None or lm.programs.partitioner.mesh is not None:
        raise InvalidOption(
            f"attention is counted where all layers see the whole text by plain scores, without a mesh: {config.family}"
        )
    if holds_bytes(lm.backend.cache_dtype):
        raise InvalidOption(f"attention is not counted in a cache of {lm.backend.cache_dtype}: leave that out")


def _mass(decoder: Decoder, before: int, count: int, params: Any, text_BT: Any, last_BT: Any) -> Any:
    config, backend, queries = decoder.config, decoder.backend, last_BT.shape[1]
    cache, model = create_cache(config, 1, text_BT.shape[1] + queries, backend), Model(decoder, params)
    before_B = jnp.full((1,), before, jnp.int32)
    _, cache = forward_prompt(model, text_BT, before_B, cache, _CHUNK)
    shape = config.num_layers, 1, queries, config.num_heads, cached_width(config, backend)
    recording = RecordingCache(cache.parts[0], jnp.zeros(shape, backend.compute_dtype))
    cache = cache.with_part(0, recording)
    positions_BT = before_B[:, None] + jnp.arange(queries)
    placements = cache.place(before_B, causal_ancestors(queries)[None])
    _, cache = model.forward(last_BT, positions_BT, cache, placements, before_B + queries)
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    part: Any = cache.parts[0]
    seen_TS = placements[0].mask_BTS[0]

    def of_layer(layer: Any) -> Any:
        keys_SKH = part.cache.keys[layer, 0, :, : config.num_kv_heads * shape[-1]]
        keys_SKH = keys_SKH.reshape(-1, config.num_kv_heads, shape[-1]).astype(jnp.float32)
        query_TKGH = part.queries_LBTNH[layer, 0].reshape(queries, config.num_kv_heads, -1, shape[-1])
        scores_TKGS = scale * jnp.einsum("tkgh,skh->tkgs", query_TKGH.astype(jnp.float32), keys_SKH)
        weights_TKGS = jax.nn.softmax(jnp.where(seen_TS[:, None, None], scores_TKGS, -jnp.inf))
        return jnp.mean(jnp.sum(jax.lax.top_k(weights_TKGS, count)[0], axis=-1))

    return jax.lax.map(of_layer, jnp.arange(config.num_layers))
