"""EAGLE drafters in the layouts in which they are published, and what such modules compute, in NumPy."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

THETA, EPSILON = 10000.0, 1e-5
HEADS, KV_HEADS, HEAD_DIM, FFN = 2, 1, 16, 48
_OF_THE_LAYER = (
    *(
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_hidden_layers",
    ),
    *("rms_norm_eps", "rope_theta", "max_position_embeddings", "vocab_size"),
)


def write_published(
    folder: Path,
    width: int,
    vocab_size: int,
    num_features: int | None,
    ids: Sequence[int] = (),
    *,
    extras: Sequence[str] = (),
    seed: int = 0,
    ffn: int = FFN,
    tensors: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a random drafter: EAGLE-3 over so many features and a draft vocabulary, or EAGLE-1 where that is None.

    ``extras`` are ``qk_norm`` and ``bias``, ``fc_norm`` or ``input_norm`` of features, and ``speculators``, the format
    of that library; ``tensors`` take the place of some, or leave those out that are None.
    """
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    def vector(size: int, about: float = 1.0) -> np.ndarray:
        return (about + 0.2 * rng.standard_normal(size)).astype(np.float32)

    layer = "layers.0." if num_features is None else "midlayer."
    inputs = width if num_features is None else 2 * width
    made: dict[str, Any] = {"fc.weight": matrix(width, 2 * width if num_features is None else num_features * width)}
    for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
        made[f"{layer}self_attn.{name}.weight"] = 2 * matrix(heads * HEAD_DIM, inputs)
        if "bias" in extras:
            made[f"{layer}self_attn.{name}.bias"] = vector(heads * HEAD_DIM, 0.0)
    made[f"{layer}self_attn.o_proj.weight"] = matrix(width, HEADS * HEAD_DIM)
    if "qk_norm" in extras:
        made |= {f"{layer}self_attn.{name}_norm.weight": vector(HEAD_DIM) for name in "qk"}
    for name, sizes in (("gate", (ffn, width)), ("up", (ffn, width)), ("down", (width, ffn))):
        made[f"{layer}mlp.{name}_proj.weight"] = matrix(*sizes)
    made[f"{layer}post_attention_layernorm.weight"] = vector(width)
    if num_features is None:
        made["fc.bias"] = vector(width, 0.0)
    else:
        made |= {f"{layer}{name}.weight": vector(width) for name in ("input_layernorm", "hidden_norm")}
        if "fc_norm" in extras:
            made |= {f"fc_norm.{at}.weight": vector(width) for at in range(num_features)}
        if "input_norm" in extras:
            made["input_norm.weight"] = vector(num_features * width)
        made |= {"norm.weight": vector(width), "lm_head.weight": 12 * matrix(len(ids) or vocab_size, width)}
        if len(ids):
            made["d2t"] = np.asarray(ids, np.int64) - np.arange(len(ids))
            made["t2d"] = np.isin(np.arange(vocab_size), ids)
    made = {name: array for name, array in {**made, **(tensors or {})}.items() if array is not None}
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "max_position_embeddings": 2048,
        "vocab_size": vocab_size,
        **({} if num_features is None else {"draft_vocab_size": len(ids) or vocab_size}),
        **changes,
    }
    if "speculators" in extras:
        described = {name: settings.pop(name) for name in list(settings) if name in _OF_THE_LAYER}
        settings |= {"model_type": "speculators", "transformer_layer_config": {"model_type": "llama", **described}}
        made = {f"model.{name}" if name[0] in "mf" else name: array for name, array in made.items()}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({name: np.ascontiguousarray(array) for name, array in made.items()}, folder / "model.safetensors")
    return folder


class PublishedDrafter:
    """A drafter over one text: the target's features ``[T, F]`` of its first T tokens, of which one more is known.

    ``rounded`` is what becomes of rows before they are multiplied by a matrix.
    """

    def __init__(
        self,
        tensors: Mapping[str, np.ndarray],
        table_VD: np.ndarray,
        features_TF: np.ndarray,
        text: Sequence[int],
        settings: Mapping[str, Any] | None = None,
        rounded: Callable[[Any], np.ndarray] = np.asarray,
    ) -> None:
        self._tensors, self._settings, self._rounded = {}, settings or {}, rounded
        for name, array in tensors.items():
            short = name.removeprefix("model.").removeprefix("midlayer.").removeprefix("layers.0.")
            self._tensors[short] = array
        self._fuses, self._table_VD = "hidden_norm.weight" in self._tensors, table_VD
        length = len(text) - 1
        features_TF = self._before_fc(features_TF)
        inputs_TD = self._times("fc", features_TF[:length]) if self._fuses else features_TF[:length]
        self._keys, self._values = np.zeros((0, KV_HEADS, HEAD_DIM)), np.zeros((0, KV_HEADS, HEAD_DIM))
        self._length, self._last_D = length, np.zeros(0)
        for at in range(length):
            self._last_D, *held = self._run(text[at + 1], inputs_TD[at], at, self._keys, self._values)
            self._keys, self._values = held

    def _times(self, name: str, rows: Any) -> np.ndarray:
        return self._rounded(rows) @ self._tensors[f"{name}.weight"].T

    def _before_fc(self, features_TF: np.ndarray) -> np.ndarray:
        if "input_norm.weight" in self._tensors:
            return _normed(features_TF, self._tensors["input_norm.weight"])
        if "fc_norm.0.weight" not in self._tensors:
            return features_TF
        parts = np.split(features_TF, 3, axis=-1)
        normed = [_normed(part, self._tensors[f"fc_norm.{at}.weight"]) for at, part in enumerate(parts)]
        return np.concatenate(normed, axis=-1)

    def output_after(self, path: Sequence[int]) -> np.ndarray:
        """Return the output that the next token is drafted from, after the text and a path of drafted tokens."""
        output_D, keys, values = self._last_D, self._keys, self._values
        for depth, token in enumerate(path):
            output_D, keys, values = self._run(token, output_D, self._length + depth, keys, values)
        is_normed = not self._fuses or self._settings.get("norm_output")
        return output_D if is_normed else _normed(output_D, self._tensors["norm.weight"])

    def _run(self, token: int, input_D: Any, position: int, keys: Any, values: Any) -> tuple[Any, Any, Any]:
        found, embedded_D = self._tensors, self._table_VD[token]
        if self._fuses:
            parts = (
                _normed(embedded_D, found["input_layernorm.weight"]),
                _normed(input_D, found["hidden_norm.weight"]),
            )
            read = np.concatenate(parts)
            residual_D = parts[1] if self._settings.get("norm_before_residual") else input_D
        else:
            read = residual_D = self._times("fc", np.concatenate([embedded_D, input_D])) + found["fc.bias"]

        def heads(name: str, norm: str | None) -> np.ndarray:
            flat = self._times(f"self_attn.{name}_proj", read) + found.get(f"self_attn.{name}_proj.bias", 0)
            split = flat.reshape(-1, HEAD_DIM)
            if norm is None:
                return split
            return _turned(_normed(split, found.get(norm)) if norm in found else split, position)

        query_NH = heads("q", "self_attn.q_norm.weight")
        keys = np.concatenate([keys, heads("k", "self_attn.k_norm.weight")[None]])
        values = np.concatenate([values, heads("v", None)[None]])
        mixed = []
        for head, query_H in enumerate(query_NH):
            group = head * KV_HEADS // HEADS
            scores_S = keys[:, group] @ query_H * HEAD_DIM**-0.5
            weights_S = np.exp(scores_S - scores_S.max())
            mixed.append(weights_S @ values[:, group] / weights_S.sum())
        hidden_D = residual_D + self._times("self_attn.o_proj", np.concatenate(mixed))
        normed_D = _normed(hidden_D, found["post_attention_layernorm.weight"])
        gate_F = self._times("mlp.gate_proj", normed_D)
        inner_F = gate_F / (1 + np.exp(-gate_F)) * self._times("mlp.up_proj", normed_D)
        output_D = hidden_D + self._times("mlp.down_proj", inner_F)
        if self._settings.get("norm_output"):
            output_D = _normed(output_D, found["norm.weight"])
        return output_D, keys, values


def _normed(values: np.ndarray, scale: Any) -> np.ndarray:
    return values / np.sqrt(np.mean(np.square(values), axis=-1, keepdims=True) + EPSILON) * scale


def _turned(heads_NH: np.ndarray, position: int) -> np.ndarray:
    angles = position * THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cosines, sines = np.cos(np.concatenate([angles, angles])), np.sin(np.concatenate([angles, angles]))
    first, second = np.split(heads_NH, 2, axis=-1)
    return heads_NH * cosines + np.concatenate([-second, first], axis=-1) * sines
