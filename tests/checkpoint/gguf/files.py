"""Small GGUF files of the llama architecture, written by the tests with the gguf package."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYERS, WIDTH, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 32, 64, 4, 2, 8, 40
# Where the float16 scales lie in a block of the types that the gguf package reads and does not write.
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
KEYS: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": HEAD_DIM,
    "llama.vocab_size": VOCAB,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": [f"token {i}" for i in range(VOCAB)],
    "tokenizer.ggml.token_type": [1] * VOCAB,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows as llama.cpp's converter does for interleaved rotary positions."""
    split = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def hf_tensors(tied: bool = True, bias: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Make random float32 tensors under Hugging Face names, in Hugging Face's row order."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, WIDTH)
    query, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        shapes[f"{block}.input_layernorm.weight"] = (WIDTH,)
        shapes[f"{block}.post_attention_layernorm.weight"] = (WIDTH,)
        for name, rows in (("q", query), ("k", keys), ("v", keys), ("o", WIDTH)):
            shapes[f"{block}.self_attn.{name}_proj.weight"] = (rows, query if name == "o" else WIDTH)
            if bias:
                shapes[f"{block}.self_attn.{name}_proj.bias"] = (rows,)
        for name, rows, columns in (("gate", FFN, WIDTH), ("up", FFN, WIDTH), ("down", WIDTH, FFN)):
            shapes[f"{block}.mlp.{name}_proj.weight"] = (rows, columns)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_tensors(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rename and reorder tensors as llama.cpp's converter does."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    made = {}
    for name, values in tensors.items():
        renamed = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert renamed is not None
        if "q_proj" in name or "k_proj" in name:
            values = permute(values, HEADS if "q_proj" in name else KV_HEADS)
        made[renamed] = values
    return made


def random_blocks(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, seed: int = 0) -> np.ndarray:
    """Make the bytes of a random tensor of any type, with finite scales of 0.001 to 1 of either sign."""
    rng = np.random.default_rng(seed)
    if kind.name not in _SCALES:
        return gguf.quants.quantize(rng.standard_normal(shape).astype(np.float32), kind)
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // weights, size), dtype=np.uint8)
    for at in _SCALES[kind.name]:
        scales = rng.uniform(0.001, 1, (*blocks.shape[:-1], 1)) * rng.choice([-1, 1], (*blocks.shape[:-1], 1))
        blocks[..., at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    keys: dict[str, Any] | None = None,
    architecture: str = "llama",
    blocks: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    **writer_options: Any,
) -> Path:
    """Write a GGUF with matrices stored as ``kind`` and vectors as F32; ``keys`` are set, or removed where None.

    ``blocks`` are more tensors, as bytes of a type; ``writer_options`` may ask for several parts.
    """
    writer = gguf.GGUFWriter(path, architecture, **writer_options)
    for key, value in (KEYS | (keys or {})).items():
        _add(writer, key, value)
    for name, values in tensors.items():
        if values.ndim > 1 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    for name, (raw, raw_kind) in (blocks or {}).items():
        writer.add_tensor(name, raw, raw_dtype=raw_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_parts(folder: Path, tensors: dict[str, np.ndarray], per_part: int, **options: Any) -> list[Path]:
    """Write a GGUF in parts of ``per_part`` tensors, named as llama.cpp's gguf-split does."""
    write_gguf(folder / "m.gguf", tensors, split_max_tensors=per_part, **options)
    return sorted(folder.glob("m-*-of-*.gguf"))


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
