"""StreamingLLM as a dense forward over the whole text, in NumPy and float64: what the streaming cache must equal.

Query t attends to the sinks and the last W tokens; it and every key are rotated by their index in the cache at time t.
"""

from typing import Any

import numpy as np

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.layers import stored_kernel


def streamed_logits(config: DecoderConfig, params: Any, tokens: list[int], sinks: int, window: int) -> np.ndarray:
    """Return ``[T, V]`` for Llama-like and Gemma-like models whose layers are all of one kind."""
    hidden_TD = _float64(params["embed"]["embedding"])[np.asarray(tokens)] * (config.embedding_scale or 1.0)
    for layer in range(config.num_layers):
        block = params["blocks"][f"layer_{layer}"]
        mixed_TD = _attention(
            config, block["attention"], _norm(config, block["attention_norm"], hidden_TD), sinks, window
        )
        if config.block == "sandwich":
            hidden_TD = hidden_TD + _norm(config, block["attention_post_norm"], mixed_TD)
            mixed_TD = _mlp(config, block["mlp"], _norm(config, block["mlp_norm"], hidden_TD))
            hidden_TD = hidden_TD + _norm(config, block["mlp_post_norm"], mixed_TD)
        else:
            hidden_TD = hidden_TD + mixed_TD
            hidden_TD = hidden_TD + _mlp(config, block["mlp"], _norm(config, block["mlp_norm"], hidden_TD))
    head = params["embed"]["embedding"] if config.tied_embeddings else params["head"]["kernel"]
    return _capped(_norm(config, params["final_norm"], hidden_TD) @ _float64(head).T, config.final_softcap)


def kept_positions(position: int, sinks: int, window: int) -> list[int]:
    """Return what a cache holds when the token at a position has been written, in the cache's order."""
    if position < sinks + window:
        return list(range(position + 1))
    return [*range(sinks), *range(position - window + 1, position + 1)]


def _attention(config: DecoderConfig, params: Any, inputs_TD: np.ndarray, sinks: int, window: int) -> np.ndarray:
    def heads(name: str, count: int) -> np.ndarray:
        return (inputs_TD @ _float64(stored_kernel(params[name])).T).reshape(-1, count, config.head_dim)

    query_TNH, keys_TKH = heads("query", config.num_heads), heads("key", config.num_kv_heads)
    values_TKH = heads("value", config.num_kv_heads)
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    mixed_TNH = np.zeros_like(query_TNH)
    for position in range(len(inputs_TD)):
        kept = kept_positions(position, sinks, window)
        keys_SKH = np.stack([_rotated(config, keys_TKH[at], index) for index, at in enumerate(kept)])
        query_NH = _rotated(config, query_TNH[position], len(kept) - 1)
        for head in range(config.num_heads):
            shared = head // config.query_heads_per_kv_head
            scores_S = _capped(keys_SKH[:, shared] @ query_NH[head] * scale, config.attention_softcap)
            weights_S = np.exp(scores_S - scores_S.max())
            mixed_TNH[position, head] = weights_S @ values_TKH[kept, shared] / weights_S.sum()
    return mixed_TNH.reshape(len(inputs_TD), -1) @ _float64(stored_kernel(params["output"])).T


def _rotated(config: DecoderConfig, heads_NH: np.ndarray, index: int) -> np.ndarray:
    rope = config.kinds[0].rope
    assert rope is not None
    assert rope.scaling is None
    half = rope.dim // 2
    angles_R = index * rope.theta ** (-np.arange(half) / half)
    turned = (heads_NH[:, :half] + 1j * heads_NH[:, half : rope.dim]) * np.exp(1j * angles_R)
    return np.concatenate([turned.real, turned.imag, heads_NH[:, rope.dim :]], axis=-1)


def _mlp(config: DecoderConfig, params: Any, inputs_TD: np.ndarray) -> np.ndarray:
    gate_TF, up_TF = (inputs_TD @ _float64(stored_kernel(params[name])).T for name in ("gate", "up"))
    if config.activation == "silu":
        active_TF = gate_TF / (1 + np.exp(-gate_TF))
    else:
        assert config.activation == "gelu_tanh"
        active_TF = gate_TF * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate_TF + 0.044715 * gate_TF**3))) / 2
    return (active_TF * up_TF) @ _float64(stored_kernel(params["down"])).T


def _norm(config: DecoderConfig, params: Any, inputs_TD: np.ndarray) -> np.ndarray:
    offset = {"rms": 0.0, "rms_plus_one": 1.0}[config.norm]
    size_T1 = np.sqrt(np.mean(inputs_TD**2, axis=-1, keepdims=True) + config.norm_eps)
    return inputs_TD / size_T1 * (_float64(params["scale"]) + offset)


def _capped(scores: np.ndarray, cap: float | None) -> np.ndarray:
    return scores if cap is None else cap * np.tanh(scores / cap)


def _float64(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)
