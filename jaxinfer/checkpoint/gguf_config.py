"""Translates the metadata of a llama GGUF into the ``config.json`` that Hugging Face would have written."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxinfer.checkpoint.gguf_header import quote
from jaxinfer.checkpoint.gguf_metadata import MetadataReader
from jaxinfer.checkpoint.gguf_rope import read_rope_scaling
from jaxinfer.errors import InvalidCheckpoint


def translate_config(
    origin: str, metadata: Mapping[str, Any], tensors: Collection[str], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """Translate the metadata of architecture llama; ``tensors`` are the file's names, ``rope_factors`` is [H / 2]."""
    reader = MetadataReader(origin, metadata, "llama")
    reader.refuse_unknown()
    num_heads = reader.positive_int("attention.head_count")
    model_dim = reader.positive_int("embedding_length")
    head_dim = reader.positive_int("attention.key_length", default=max(1, model_dim // num_heads))
    if head_dim % 2:
        raise reader.refuse("attention.key_length", f"rotary positions need an even head width, not {head_dim}")
    for key in ("attention.value_length", "rope.dimension_count"):
        if reader.positive_int(key, default=head_dim) != head_dim:
            raise reader.refuse(key, f"it must equal the head width {head_dim}")
    theta = reader.positive_float("rope.freq_base", default=10000.0)
    max_position = reader.positive_int("context_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _vocab_size(reader),
        "hidden_size": model_dim,
        "intermediate_size": reader.positive_int("feed_forward_length"),
        "num_hidden_layers": reader.positive_int("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": reader.positive_int("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": max_position,
        "rope_theta": theta,
        "rope_scaling": read_rope_scaling(reader, rope_factors, theta, head_dim, max_position),
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(name.endswith(".bias") and ".attn_" in name for name in tensors),
        "mlp_bias": any(name.endswith(".bias") and ".ffn_" in name for name in tensors),
        **_special_tokens(reader),
    }


def _vocab_size(reader: MetadataReader) -> int:
    tokens = reader.metadata.get("tokenizer.ggml.tokens")
    return reader.positive_int("vocab_size", default=len(tokens) if isinstance(tokens, list) and tokens else None)


def _special_tokens(reader: MetadataReader) -> dict[str, Any]:
    """Collect the ids that begin, end and pad a text; ends of a turn and of a message end a text too."""
    found = {}
    for word in ("bos", "eos", "eot", "eom", "padding"):
        key = f"tokenizer.ggml.{word}_token_id"
        value = found[word] = reader.metadata.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < 2**31):
            raise InvalidCheckpoint(f"{reader.origin}: {key} = {quote(value)} is not a token id; download it again")
    # Files of SentencePiece vocabularies may leave out what llama.cpp takes as given.
    if reader.metadata.get("tokenizer.ggml.model") == "llama":
        found["bos"] = 1 if found["bos"] is None else found["bos"]
        found["eos"] = 2 if found["eos"] is None else found["eos"]
    ends = list(dict.fromkeys(found[word] for word in ("eos", "eot", "eom") if found[word] is not None))
    return {
        "bos_token_id": found["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": found["padding"],
    }
