"""Latent attention by its definition: the keys and values of every head are made, and no cache is."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Params


def latent_attention(
    config: DecoderConfig,
    attention: Params,
    inputs_TD: np.ndarray,
    linear: Callable[[Params, np.ndarray], np.ndarray],
    rotated: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Return ``[T, D]`` of one text; ``linear`` applies a linear layer, ``rotated`` turns ``[T, N, P]``."""
    latent, count = config.latent, len(inputs_TD)
    assert latent is not None

    def heads(name: str, inputs: np.ndarray) -> np.ndarray:
        return linear(attention[name], inputs).reshape(count, config.num_heads, -1)

    own = inputs_TD
    if latent.query_rank is not None:
        own = _normed(attention["query_norm"], linear(attention["query_latent"], inputs_TD))
    content_TNH, turning_TNP = heads("content", own), rotated(heads("query", own))
    latent_TR = _normed(attention["latent_norm"], linear(attention["latent"], inputs_TD))
    shared_T1P = rotated(linear(attention["key"], inputs_TD)[:, None])
    keys_NRH, values_NVR = (np.asarray(attention[name]["weights"], np.float64) for name in ("key_heads", "value_heads"))
    keys_TNH = np.einsum("tr,nrh->tnh", latent_TR, keys_NRH)
    values_TNV = np.einsum("tr,nvr->tnv", latent_TR, values_NVR)
    scores_NTS = np.einsum("tnh,snh->nts", content_TNH, keys_TNH) + np.einsum(
        "tnp,sp->nts", turning_TNP, shared_T1P[:, 0]
    )
    is_seen_TS = np.arange(count)[:, None] >= np.arange(count)
    scores_NTS = np.where(is_seen_TS, scores_NTS * config.attention_scale, -np.inf)
    weights_NTS = np.exp(scores_NTS - scores_NTS.max(axis=-1, keepdims=True))
    weights_NTS /= weights_NTS.sum(axis=-1, keepdims=True)
    mixed_TNV = np.einsum("nts,snv->tnv", weights_NTS, values_TNV)
    return linear(attention["output"], mixed_TNV.reshape(count, -1))


def _normed(norm: Any, rows: np.ndarray) -> np.ndarray:
    return rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + 1e-6) * np.asarray(norm["scale"], np.float64)
