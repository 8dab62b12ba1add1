"""Any decoder by its definition: one text, no cache, no batch, in NumPy's float64."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.models.config import DecoderConfig, Rope
from jaxinfer.models.rope_frequencies import long_frequencies, static_frequencies
from jaxinfer.notation import Params
from tests.models.dense_latent import latent_attention
from tests.models.restack import at

_erf = np.vectorize(math.erf)
_ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "relu": lambda x: np.maximum(x, 0),
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
}


def dense_logits(config: DecoderConfig, params: Params, tokens: Sequence[int]) -> np.ndarray:
    """Return ``[T, V]`` of one text; the parameters are those of separate blocks."""
    hidden_TD = _array(params, "embed.embedding")[list(tokens)]
    if config.embedding_scale is not None:
        hidden_TD = hidden_TD * np.float32(config.embedding_scale)
    if config.embedding_norm:
        hidden_TD = _norm(config, params.get("embed_norm", {}), hidden_TD)
    if config.embedding_dim is not None:
        hidden_TD = hidden_TD @ _array(params, "project_in.kernel").T
    if config.learned_positions is not None:
        first = config.learned_positions
        hidden_TD = hidden_TD + _array(params, "positions.embedding")[first : first + len(tokens)]
    if config.sinusoids is not None:
        half, places_T = config.model_dim // 2, config.sinusoids + np.arange(len(tokens))
        angles_TR = places_T[:, None] * np.exp(-np.arange(half) * math.log(10000) / (half - 1))
        hidden_TD = hidden_TD + np.concatenate([np.sin(angles_TR), np.cos(angles_TR)], axis=1)
    for layer in range(config.num_layers):
        hidden_TD = _block(config, params["blocks"][f"layer_{layer}"], layer, hidden_TD)
    if config.final_norm:
        hidden_TD = _norm(config, params.get("final_norm", {}), hidden_TD)
    if config.embedding_dim is not None:
        hidden_TD = hidden_TD @ _array(params, "project_out.kernel").T
    logits_TV = hidden_TD @ _array(params, "embed.embedding" if config.tied_embeddings else "head.kernel").T
    if config.head_bias:
        logits_TV = logits_TV + _array(params, "head_bias.bias")
    return _capped(logits_TV * (config.logit_scale or 1.0), config.final_softcap)


def _block(config: DecoderConfig, block: Params, layer: int, hidden_TD: np.ndarray) -> np.ndarray:
    def norm(name: str, inputs_TD: np.ndarray) -> np.ndarray:
        return _norm(config, block.get(name, {}), inputs_TD)

    scale = config.residual_scale or 1.0
    if config.block == "post_norm":
        hidden_TD = norm("attention_norm", hidden_TD + _attention(config, block["attention"], layer, hidden_TD))
        return norm("mlp_norm", hidden_TD + _mlp(config, block["mlp"], hidden_TD))
    inputs_TD = hidden_TD if config.block == "output_norm" else norm("attention_norm", hidden_TD)
    mixed_TD = _attention(config, block["attention"], layer, inputs_TD)
    if config.block == "parallel":
        return hidden_TD + scale * (mixed_TD + _mlp(config, block["mlp"], inputs_TD))
    if config.block == "parallel_norms":
        return hidden_TD + scale * (mixed_TD + _mlp(config, block["mlp"], norm("mlp_norm", hidden_TD)))
    is_normed = config.block in ("sandwich", "output_norm")
    hidden_TD = hidden_TD + scale * (norm("attention_post_norm", mixed_TD) if is_normed else mixed_TD)
    fed_TD = _mlp(config, block["mlp"], hidden_TD if config.block == "output_norm" else norm("mlp_norm", hidden_TD))
    return hidden_TD + scale * (norm("mlp_post_norm", fed_TD) if is_normed else fed_TD)


def _attention(config: DecoderConfig, attention: Params, layer: int, inputs_TD: np.ndarray) -> np.ndarray:
    kind, count = config.layers[layer], len(inputs_TD)
    if config.latent is not None:
        return latent_attention(config, attention, inputs_TD, _linear, partial(_rotated, kind.rope))

    def bounded(heads_TNH: np.ndarray) -> np.ndarray:
        return heads_TNH if config.clip_qkv is None else np.clip(heads_TNH, -config.clip_qkv, config.clip_qkv)

    def heads(name: str) -> np.ndarray:
        heads_TNH = _linear(attention[name], inputs_TD).reshape(count, -1, config.head_dim)
        if name == "value":
            return bounded(heads_TNH)
        if config.qk_norm not in (None, "rotated_heads") and not config.norm_after_rotation:
            heads_TNH = _head_norm(config, attention[f"{name}_norm"], heads_TNH)
        heads_TNH = bounded(heads_TNH)
        if kind.rope is None:
            return heads_TNH
        heads_TNH = _rotated(kind.rope, heads_TNH)
        if config.norm_after_rotation:
            heads_TNH = _head_norm(config, attention[f"{name}_norm"], heads_TNH)
        if config.qk_norm == "rotated_heads":
            heads_TNH = heads_TNH / np.sqrt((heads_TNH**2).mean(axis=-1, keepdims=True) + config.norm_eps)
        return heads_TNH

    query_TNH, keys_TKH, values_TKH = heads("query"), heads("key"), heads("value")
    if kind.sharpening is not None:
        intervals_T = np.floor((np.arange(count) + kind.sharpening.ahead) / kind.sharpening.interval)
        query_TNH = query_TNH * (1 + kind.sharpening.strength * np.log(1 + intervals_T))[:, None, None]
    keys_TNH, values_TNH = (np.repeat(each, config.query_heads_per_kv_head, axis=1) for each in (keys_TKH, values_TKH))
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    scores_NTS = np.einsum("tnh,snh->nts", query_TNH, keys_TNH) * scale / (layer + 1 if config.scores_by_depth else 1)
    distance_TS = np.arange(count)[:, None] - np.arange(count)
    if config.alibi is not None:
        scores_NTS = scores_NTS + _biases(config, scale, count)
    is_seen_TS = (distance_TS >= 0) & (distance_TS < (kind.window or count))
    if kind.chunked:
        chunk_T = np.arange(count) // kind.window
        is_seen_TS = (distance_TS >= 0) & (chunk_T[:, None] == chunk_T)
    scores_NTS = np.where(is_seen_TS, _capped(scores_NTS, config.attention_softcap), -np.inf)
    weights_NTS = np.exp(scores_NTS - scores_NTS.max(axis=-1, keepdims=True))
    totals_NT1 = weights_NTS.sum(axis=-1, keepdims=True)
    if config.attention_sinks:
        totals_NT1 += np.exp(_array(attention, "sink_logits")[:, None, None] - scores_NTS.max(axis=-1, keepdims=True))
    weights_NTS /= totals_NT1
    mixed_TNH = np.einsum("nts,snh->tnh", weights_NTS, values_TNH)
    mixed = mixed_TNH.reshape(count, -1)
    if config.attention_gate:
        mixed = mixed / (1 + np.exp(-_linear(attention["gate"], inputs_TD)))
    return _linear(attention["output"], _norm(config, attention["inner_norm"], mixed) if config.inner_norms else mixed)


def _biases(config: DecoderConfig, scale: float, count: int) -> np.ndarray:
    """Return ``[N, T, S]``: what a distance takes from scores, or what Falcon adds for a position."""
    assert config.alibi is not None
    slopes_N11, places_S = np.array(config.alibi.slopes)[:, None, None], np.arange(count)
    if not config.alibi.rounded:
        return -slopes_N11 * (places_S[:, None] - places_S)
    slopes_N11, places_S = (each.astype(ml_dtypes.bfloat16).astype(float) for each in (slopes_N11, places_S))
    return (slopes_N11 * places_S).astype(ml_dtypes.bfloat16).astype(float) * scale


def _rotated(rope: Rope, heads_TNH: np.ndarray) -> np.ndarray:
    """Rotate a whole text for its whole length."""
    frequencies_R, factor = static_frequencies(rope)
    scaling, count = rope.scaling, len(heads_TNH)
    stretch = 1.0 if scaling is None else count / scaling.original_max_position
    if scaling is not None and scaling.kind == "longrope" and stretch > 1:
        frequencies_R = long_frequencies(rope)
    if scaling is not None and scaling.kind == "dynamic" and stretch > 1:
        base = rope.theta * (scaling.factor * stretch - scaling.factor + 1) ** (rope.dim / (rope.dim - 2))
        frequencies_R = base ** -(np.arange(0, rope.dim, 2) / rope.dim)
    angles_T1R = np.arange(count)[:, None, None] * frequencies_R
    cosines_T1R, sines_T1R = factor * np.cos(angles_T1R), factor * np.sin(angles_T1R)
    first, second, rest = np.split(heads_TNH, [rope.dim // 2, rope.dim], axis=-1)
    turned = (first * cosines_T1R - second * sines_T1R, second * cosines_T1R + first * sines_T1R)
    return np.concatenate([*turned, rest], axis=-1)


def _mlp(config: DecoderConfig, mlp: Params, inputs_TD: np.ndarray) -> np.ndarray:
    if "experts" in mlp:
        return np.stack([_mixture(config, mlp, inputs_D) for inputs_D in inputs_TD])
    inner_TF = _linear(mlp["gate" if config.gated_mlp else "up"], inputs_TD)
    inner_TF = _xielu(mlp, inner_TF) if config.activation == "xielu" else _ACTIVATIONS[config.activation](inner_TF)
    if config.gated_mlp:
        inner_TF = inner_TF * _linear(mlp["up"], inputs_TD)
    if config.inner_norms:
        inner_TF = _norm(config, mlp["inner_norm"], inner_TF)
    return _linear(mlp["down"], inner_TF)


def _xielu(mlp: Params, inputs: np.ndarray) -> np.ndarray:
    slope = _array(mlp, "activation.slope")
    above, below = (np.log1p(np.exp(_array(mlp, f"activation.{name}"))) for name in ("curvature", "saturation"))
    negative = (slope + below) * (np.expm1(np.minimum(inputs, 0)) - inputs)
    return slope * inputs + np.where(inputs > 0, above * inputs**2, negative)


def _mixture(config: DecoderConfig, mlp: Params, inputs_D: np.ndarray) -> np.ndarray:
    """Return the weighted sum of one token's experts, of which no other is computed."""
    experts = config.experts
    assert experts is not None
    logits_E = _array(mlp["router"], "weights") @ inputs_D
    logits_E = logits_E + (_array(mlp["router"], "bias") if experts.bias else 0)
    scores_E = logits_E
    if experts.scoring == "sigmoid":
        scores_E = 1 / (1 + np.exp(-logits_E))
    elif experts.scoring == "softmax":
        scores_E = _normed_powers(logits_E)
    choice_E = scores_E + (_array(mlp["router"], "correction") if experts.correction_bias else 0)
    if experts.scoring == "sparse_mixer":
        return _sparse_mixture(config, mlp, inputs_D, logits_E)
    if experts.groups > 1:
        grouped_GX = np.sort(choice_E.reshape(experts.groups, -1))
        best_G = grouped_GX[:, -1] + (grouped_GX[:, -2] if experts.group_score == "two_best" else 0)
        kept = np.argsort(-best_G, kind="stable")[: experts.kept_groups]
        group_E = np.arange(experts.num_experts) // grouped_GX.shape[1]
        choice_E = np.where(np.isin(group_E, kept), choice_E, -np.inf)
    chosen = np.argsort(-choice_E, kind="stable")[: experts.per_token]
    weights = scores_E[chosen]
    weights = _normed_powers(weights) if experts.scoring == "chosen_softmax" else weights
    weights = 1 / (1 + np.exp(-weights)) if experts.scoring == "chosen_sigmoid" else weights
    weights = experts.scale * (weights / weights.sum() if experts.normalised else weights)
    total_D = np.zeros_like(inputs_D)
    for expert, weight in zip(chosen, weights):
        inner, outer = (weight, 1) if experts.scales_inputs else (1, weight)
        total_D = total_D + outer * _one_expert(config, mlp, expert, inner * inputs_D)
    if experts.shared_dim:
        shared_D = _mlp(config, mlp["shared"], inputs_D)
        if experts.shared_gate:
            shared_D = shared_D / (1 + np.exp(-_array(mlp["shared_gate"], "weights") @ inputs_D))
        total_D = total_D + shared_D
    return total_D


def _sparse_mixture(config: DecoderConfig, mlp: Params, inputs_D: np.ndarray, logits_E: np.ndarray) -> np.ndarray:
    """Return the sum of experts that are chosen one after another, each by a softmax of those near the best."""
    experts, chosen, total_D = config.experts, [], np.zeros_like(inputs_D)
    assert experts is not None
    for _ in range(experts.per_token):
        left = [expert for expert in range(experts.num_experts) if expert not in chosen]
        best = max(left, key=lambda expert: logits_E[expert])
        top = logits_E[best]
        near = [each for each in left if top - logits_E[each] <= experts.spread * max(abs(logits_E[each]), top)]
        weight = 1 / sum(np.exp(logits_E[each] - top) for each in near)
        total_D = total_D + weight * _one_expert(config, mlp, best, inputs_D)
        chosen.append(best)
    return total_D


def _one_expert(config: DecoderConfig, mlp: Params, expert: int, inputs_D: np.ndarray) -> np.ndarray:
    experts = config.experts
    assert experts is not None

    def product(name: str, inputs: np.ndarray) -> np.ndarray:
        outputs = np.asarray(mlp["experts"][name][expert], np.float64) @ inputs
        return outputs + (_array(mlp["expert_biases"], name)[expert] if experts.bias else 0)

    gate_F, up_F = product("gate", inputs_D), product("up", inputs_D)
    if experts.limit is not None:
        gate_F, up_F = np.minimum(gate_F, experts.limit), np.clip(up_F, -experts.limit, experts.limit) + 1
    return product("down", _ACTIVATIONS[config.activation](gate_F) * up_F)


def _normed_powers(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def _head_norm(config: DecoderConfig, norm: Params, heads_TNH: np.ndarray) -> np.ndarray:
    shape = heads_TNH.shape
    if config.qk_norm == "all_heads":
        return _norm(config, norm, heads_TNH.reshape(len(heads_TNH), -1)).reshape(shape)
    scale = _array(norm, "scale")
    scale = scale.reshape(shape[1:]) if config.qk_norm == "own_head" else scale
    return _norm(config, {**norm, "scale": scale}, heads_TNH)


def _norm(config: DecoderConfig, norm: Params, inputs: np.ndarray) -> np.ndarray:
    if config.norm in ("layer", "layer_plus_one", "scaled_layer", "plain_layer"):
        inputs = inputs - inputs.mean(axis=-1, keepdims=True)
    normed = inputs / np.sqrt((inputs**2).mean(axis=-1, keepdims=True) + config.norm_eps)
    if config.norm in ("plain_layer", "plain_rms"):
        return normed
    scale = _array(norm, "scale") + 1 - config.neutral_scale
    return normed * scale + (_array(norm, "bias") if "bias" in norm else 0)


def _linear(linear: Params, inputs: np.ndarray) -> np.ndarray:
    outputs = inputs @ _array(linear, "kernel").T
    return outputs + _array(linear, "bias") if "bias" in linear else outputs


def _capped(values: np.ndarray, cap: float | None) -> np.ndarray:
    return values if cap is None else cap * np.tanh(values / cap)


def _array(params: Any, name: str) -> np.ndarray:
    return np.asarray(at(params, name), np.float64)
