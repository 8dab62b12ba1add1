"""Speculative streams by their definition: one text, no cache, no batch, in NumPy's float64."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.models.adapters import adapter_shapes
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.layers import put
from jaxinfer.notation import Params
from tests.models.restack import at
from tests.toys import rope_of


class Dense(NamedTuple):
    """Logits after every token of a text: the model's, each stream's, and the early exit's."""

    main_TV: np.ndarray
    streams_TJV: np.ndarray
    exit_TV: np.ndarray


def dense_streams(config: DecoderConfig, params: Params, own: Params, num_layers: int, tokens: Sequence[int]) -> Dense:
    """Run a llama of separate blocks over a whole text, streams through its last ``num_layers`` layers."""
    count, num_streams = len(tokens), len(own["identifiers"])
    ahead_J = np.arange(1, num_streams + 1)
    main_TD = _array(params, "embed.embedding")[list(tokens)]
    streams_TJD = np.zeros((count, num_streams, config.model_dim))
    exit_TD = main_TD
    for layer in range(config.num_layers):
        block = params["blocks"][f"layer_{layer}"]
        if layer == config.num_layers - num_layers:
            exit_TD = _through(own, "exit", main_TD)
            streams_TJD = _through(own, "init", main_TD)[:, None] + _array(own, "identifiers")
        query_TNH, keys_TKH, values_TKH = _heads(config, block, main_TD, np.arange(count))
        mixed_TD = [_mix(query_TNH[t], keys_TKH[: t + 1], values_TKH[: t + 1]) for t in range(count)]
        if layer >= config.num_layers - num_layers:
            mixed_TJD = np.zeros_like(streams_TJD)
            adapted = _merged(block, own.get("blocks", {}), layer - config.num_layers + num_layers)
            for t in range(count):
                queries_JNH, own_keys_JKH, own_values_JKH = _heads(config, adapted, streams_TJD[t], t + ahead_J)
                for j in range(num_streams):
                    keys = np.concatenate([keys_TKH[: t + 1], own_keys_JKH[: j + 1]])
                    values = np.concatenate([values_TKH[: t + 1], own_values_JKH[: j + 1]])
                    mixed_TJD[t, j] = _mix(queries_JNH[j], keys, values) @ _array(adapted, "attention.output.kernel").T
            streams_TJD = _feed(config, adapted, streams_TJD + mixed_TJD)
        main_TD = _feed(config, block, main_TD + np.stack(mixed_TD) @ _array(block, "attention.output.kernel").T)

    def logits(hidden: np.ndarray) -> np.ndarray:
        return _norm(config, _array(params, "final_norm.scale"), hidden) @ _array(params, "head.kernel").T

    return Dense(logits(main_TD), logits(streams_TJD), logits(exit_TD))


def random_adapters(config: DecoderConfig, num_layers: int, rank: int = 3, size: float = 0.5) -> Params:
    """Draw adapters of the last layers; with a ``size`` of 1 they add as much as the kernels give."""
    rng, blocks = np.random.default_rng(4), {}
    for path, shape in adapter_shapes(config, num_layers, rank).items():
        put(blocks, path, (size**0.5 * rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32))
    return blocks


def random_streams(width: int, num_streams: int = 3, rank: int = 4, exit_rank: int = 5, seed: int = 3) -> Params:
    """Draw parameters that are as large as what they are added to."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Any:
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    return {
        "init": {"down": draw(rank, width), "up": draw(width, rank)},
        "identifiers": draw(num_streams, width),
        "exit": {"down": draw(exit_rank, width), "up": draw(width, exit_rank)},
    }


def _heads(config: DecoderConfig, block: Params, hidden_XD: np.ndarray, positions_X: np.ndarray) -> list[np.ndarray]:
    inputs_XD = _norm(config, _array(block, "attention_norm.scale"), hidden_XD)
    rope = rope_of(config)
    angles_X1R = positions_X[:, None, None] * rope.theta ** (-np.arange(0, rope.dim, 2) / rope.dim)
    found = []
    for name in ("query", "key", "value"):
        heads_XNH = (inputs_XD @ _array(block, f"attention.{name}.kernel").T).reshape(
            len(inputs_XD), -1, config.head_dim
        )
        if name != "value":
            first, second = np.split(heads_XNH, 2, axis=-1)
            cosines, sines = np.cos(angles_X1R), np.sin(angles_X1R)
            heads_XNH = np.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
        found.append(heads_XNH)
    return found


def _mix(query_NH: np.ndarray, keys_SKH: np.ndarray, values_SKH: np.ndarray) -> np.ndarray:
    group = len(query_NH) // keys_SKH.shape[1]
    scores_NS = np.einsum("nh,snh->ns", query_NH, np.repeat(keys_SKH, group, axis=1)) * query_NH.shape[1] ** -0.5
    weights_NS = np.exp(scores_NS - scores_NS.max(axis=1, keepdims=True))
    weights_NS /= weights_NS.sum(axis=1, keepdims=True)
    return np.einsum("ns,snh->nh", weights_NS, np.repeat(values_SKH, group, axis=1)).reshape(-1)


def _feed(config: DecoderConfig, block: Params, hidden: np.ndarray) -> np.ndarray:
    inputs = _norm(config, _array(block, "mlp_norm.scale"), hidden)
    gate = inputs @ _array(block, "mlp.gate.kernel").T
    inner = gate / (1 + np.exp(-gate)) * (inputs @ _array(block, "mlp.up.kernel").T)
    return hidden + inner @ _array(block, "mlp.down.kernel").T


def _norm(config: DecoderConfig, scale: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    return hidden / np.sqrt((hidden**2).mean(axis=-1, keepdims=True) + config.norm_eps) * scale


def _through(own: Params, name: str, hidden: np.ndarray) -> np.ndarray:
    return hidden + hidden @ _array(own, f"{name}.down").T @ _array(own, f"{name}.up").T


def _merged(block: Params, adapters: Params, index: int) -> Params:
    """Return a block whose kernels do what they and their adapters do."""
    merged = dict(block)
    for name, own in adapters.items():
        if "adapter" in own:
            down, up = (np.asarray(own["adapter"][part][index], np.float64) for part in ("down", "up"))
            merged[name] = {**block[name], "kernel": _array(block, f"{name}.kernel") + up @ down}
        else:
            merged[name] = _merged(block[name], own, index)
    return merged


def _array(params: Params, name: str) -> np.ndarray:
    return np.asarray(at(params, name), np.float64)
