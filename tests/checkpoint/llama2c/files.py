"""Small llama2.c files, written by the tests as llama2.c's exporter lays them out."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

MAGIC = 0x616B3432
GROUP_SIZE = 16


@dataclass(frozen=True)
class Sizes:
    """The seven integers of a header; the groups of ``w2`` run over the ends of its rows at this hidden_dim."""

    dim: int = 32
    hidden_dim: int = 40
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    vocab_size: int = 300
    seq_len: int = 64

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def pack(self, vocab_sign: int = 1) -> bytes:
        fields = (self.dim, self.hidden_dim, self.n_layers, self.n_heads, self.n_kv_heads)
        return struct.pack("<7i", *fields, vocab_sign * self.vocab_size, self.seq_len)


def hf_tensors(sizes: Sizes, shared: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw float32 tensors under Hugging Face names, in Hugging Face's row order, with logits of a sharp model."""
    rng = np.random.default_rng(seed)
    keys = sizes.n_kv_heads * sizes.head_dim

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (1.5 * rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.3 * rng.standard_normal(sizes.dim)).astype(np.float32)

    made = {"model.embed_tokens.weight": matrix(sizes.vocab_size, sizes.dim), "model.norm.weight": norm()}
    if not shared:
        made["lm_head.weight"] = matrix(sizes.vocab_size, sizes.dim)
    for layer in range(sizes.n_layers):
        block = f"model.layers.{layer}"
        made[f"{block}.input_layernorm.weight"] = norm()
        made[f"{block}.post_attention_layernorm.weight"] = norm()
        for name, rows in (("q", sizes.dim), ("k", keys), ("v", keys), ("o", sizes.dim)):
            made[f"{block}.self_attn.{name}_proj.weight"] = matrix(rows, sizes.dim)
        for name in ("gate", "up"):
            made[f"{block}.mlp.{name}_proj.weight"] = matrix(sizes.hidden_dim, sizes.dim)
        made[f"{block}.mlp.down_proj.weight"] = matrix(sizes.dim, sizes.hidden_dim)
    return made


def interleave(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Put row i of a head's first half beside row i of its second half, as Meta's rotary positions want them."""
    rows = []
    for head in np.split(weights, num_heads):
        for first, second in zip(*np.split(head, 2)):
            rows += [first, second]
    return np.stack(rows)


def quantize(values: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Round each group of consecutive values to int8 in -127..127, with a float32 scale."""
    groups = values.reshape(-1, group_size)
    scales = np.abs(groups).max(axis=1) / np.float32(127)
    return np.round(groups / scales[:, None]).astype(np.int8), scales.astype(np.float32)


def dequantized(sizes: Sizes, tensors: dict[str, np.ndarray], group_size: int = GROUP_SIZE) -> dict[str, np.ndarray]:
    """Return the tensors as a version 2 file holds them: every matrix rounded, in the order that it is written in."""
    made = {}
    for name, values in tensors.items():
        heads = _heads(sizes, name)
        if values.ndim == 1:
            made[name] = values
            continue
        written = values if heads is None else interleave(values, heads)
        integers, scales = quantize(written, group_size)
        loose = np.array([scale * group.astype(np.float32) for group, scale in zip(integers, scales)])
        loose = loose.reshape(values.shape)
        if heads is not None:
            halves = [[head[0::2], head[1::2]] for head in np.split(loose, heads)]
            loose = np.concatenate([half for pair in halves for half in pair])
        made[name] = loose
    return made


def write_llama2c(
    path: Path, version: int, sizes: Sizes, tensors: dict[str, np.ndarray], group_size: int = GROUP_SIZE
) -> Path:
    """Write a file of one version; a classifier of its own is written where there is an ``lm_head``."""
    path.write_bytes(encode_llama2c(version, sizes, tensors, group_size))
    return path


def encode_llama2c(version: int, sizes: Sizes, tensors: dict[str, np.ndarray], group_size: int = GROUP_SIZE) -> bytes:
    shared = "lm_head.weight" not in tensors
    classifier = [] if shared else ["lm_head.weight"]
    embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
    attention_norms = _layered(sizes, "input_layernorm")
    ffn_norms = _layered(sizes, "post_attention_layernorm")
    attention = [name for part in "qkvo" for name in _layered(sizes, f"self_attn.{part}_proj")]
    ffn = [name for part in ("gate", "down", "up") for name in _layered(sizes, f"mlp.{part}_proj")]
    if version == 0:
        parts = [sizes.pack(vocab_sign=1 if shared else -1)]
        parts += [
            _bytes(sizes, tensors, name) for name in (embedding, *attention_norms, *attention, *ffn_norms, *ffn, norm)
        ]
        angles = np.outer(np.arange(sizes.seq_len), 1e4 ** (-np.arange(0, sizes.head_dim, 2) / sizes.head_dim))
        parts += [np.cos(angles).astype("<f4").tobytes(), np.sin(angles).astype("<f4").tobytes()]
        return b"".join(parts + [_bytes(sizes, tensors, name) for name in classifier])
    header = struct.pack("<Ii", MAGIC, version) + sizes.pack() + struct.pack("<B", shared)
    header += struct.pack("<i", group_size) if version == 2 else b""
    parts = [header.ljust(256, b"\0")]
    parts += [_bytes(sizes, tensors, name) for name in (*attention_norms, *ffn_norms, norm)]
    for name in (embedding, *attention, *ffn, *classifier):
        if version == 1:
            parts.append(_bytes(sizes, tensors, name))
        else:
            values = np.frombuffer(_bytes(sizes, tensors, name), "<f4")
            parts += [part.tobytes() for part in quantize(values, group_size)]
    return b"".join(parts)


def write_hf_folder(folder: Path, sizes: Sizes, tensors: dict[str, np.ndarray]) -> Path:
    """Write the same model as a Hugging Face folder."""
    config = {
        "model_type": "llama",
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.dim,
        "intermediate_size": sizes.hidden_dim,
        "num_hidden_layers": sizes.n_layers,
        "num_attention_heads": sizes.n_heads,
        "num_key_value_heads": sizes.n_kv_heads,
        "max_position_embeddings": sizes.seq_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _layered(sizes: Sizes, part: str) -> list[str]:
    return [f"model.layers.{layer}.{part}.weight" for layer in range(sizes.n_layers)]


def _heads(sizes: Sizes, name: str) -> int | None:
    return sizes.n_heads if "q_proj" in name else sizes.n_kv_heads if "k_proj" in name else None


def _bytes(sizes: Sizes, tensors: dict[str, np.ndarray], name: str) -> bytes:
    heads = _heads(sizes, name)
    return (tensors[name] if heads is None else interleave(tensors[name], heads)).astype("<f4").tobytes()
