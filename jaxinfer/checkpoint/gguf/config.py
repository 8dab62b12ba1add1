"""Translates the metadata that all GGUF architectures share into the keys of Hugging Face's ``config.json``."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.checkpoint.gguf.header import quote
from jaxinfer.checkpoint.gguf.metadata import MetadataReader
from jaxinfer.checkpoint.gguf.rope import read_rope_scaling
from jaxinfer.errors import InvalidCheckpoint

# The most that the model families allow; a damaged number must not create a list of as many layers.
_MOST_LAYERS = 1000


@dataclass(frozen=True)
class FileTensors:
    """The tensors' names in the file and the rotary divisors' values [H / 2], which a config depends on."""

    names: Collection[str]
    rope_divisors: Mapping[str, np.ndarray]


def read_sizes(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    """Read the sizes and the special tokens of a decoder."""
    num_heads = reader.positive_int("attention.head_count")
    num_layers = reader.positive_int("block_count", most=_MOST_LAYERS)
    return {
        "vocab_size": read_vocab_size(reader),
        "hidden_size": reader.positive_int("embedding_length"),
        "intermediate_size": reader.positive_int("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": reader.alike("attention.head_count_kv", num_layers, default=num_heads),
        "max_position_embeddings": reader.positive_int("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors.names,
        **read_special_tokens(reader),
    }


def read_head_dim(reader: MetadataReader) -> int:
    """Read the width of a head, which queries, keys and values share."""
    derived = max(1, reader.positive_int("embedding_length") // reader.positive_int("attention.head_count"))
    head_dim = reader.positive_int("attention.key_length", default=derived)
    if reader.positive_int("attention.value_length", default=head_dim) != head_dim:
        raise reader.refuse("attention.value_length", f"it must equal the head width {head_dim}")
    return head_dim


def read_derived_head_dim(reader: MetadataReader) -> int:
    """Read the width of a head, which must be the model's width divided by the number of heads."""
    model_dim, num_heads = reader.positive_int("embedding_length"), reader.positive_int("attention.head_count")
    if (head_dim := read_head_dim(reader)) * num_heads != model_dim:
        key = "attention.key_length" if reader.has("attention.key_length") else "attention.head_count"
        raise reader.refuse(key, f"the {num_heads} heads must make up the model's width {model_dim}")
    return head_dim


def read_rotary(reader: MetadataReader, tensors: FileTensors, head_dim: int) -> dict[str, Any]:
    """Read the rotary positions of a head that is rotated as a whole."""
    if head_dim % 2:
        raise reader.refuse("attention.key_length", f"rotary positions need an even head width, not {head_dim}")
    if reader.positive_int("rope.dimension_count", default=head_dim) != head_dim:
        raise reader.refuse("rope.dimension_count", f"it must equal the head width {head_dim}")
    theta = reader.positive_float("rope.freq_base", default=10000.0)
    divisors = tensors.rope_divisors.get("rope_freqs.weight")
    max_position = reader.positive_int("context_length")
    return {
        "rope_theta": theta,
        "rope_scaling": read_rope_scaling(reader, divisors, theta, head_dim, max_position),
    }


def read_partial_rotary(reader: MetadataReader, head_dim: int) -> tuple[int, float]:
    """Return how many elements of a head are rotated, and the fraction that gives this number in Hugging Face."""
    dims = reader.positive_int("rope.dimension_count", default=head_dim)
    if dims % 2 or dims > head_dim:
        raise reader.refuse("rope.dimension_count", f"it must be even and at most the head width {head_dim}")
    share = dims / head_dim
    # Hugging Face truncates the product to an integer, so rounding may lose one.
    while int(head_dim * share) < dims:
        share = float(np.nextafter(share, 2.0))
    return dims, share


def read_rotated_part(reader: MetadataReader, head_dim: int) -> dict[str, Any]:
    """Read the rotary positions of a head of which a part may rotate."""
    rotary_dim, share = read_partial_rotary(reader, head_dim)
    theta = reader.positive_float("rope.freq_base", default=10000.0)
    max_position = reader.positive_int("context_length")
    return {
        "rope_theta": theta,
        "rope_scaling": read_rope_scaling(reader, None, theta, rotary_dim, max_position),
        "partial_rotary_factor": share,
    }


def read_vocab_size(reader: MetadataReader) -> int:
    """Read the size of the vocabulary, or else count its tokens."""
    tokens = _tokens(reader)
    return reader.positive_int("vocab_size", default=len(tokens) or None)


def read_special_tokens(reader: MetadataReader) -> dict[str, Any]:
    """Collect the ids that begin, end and pad a sequence; the end of a turn or of a message ends a sequence too."""
    found = {}
    for word in ("bos", "eos", "eot", "eom", "padding"):
        key = f"tokenizer.ggml.{word}_token_id"
        value = found[word] = reader.metadata.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < 2**31):
            raise InvalidCheckpoint(f"{reader.origin}: {key} = {quote(value)} is not a token id; download it again")
    # Files with a SentencePiece vocabulary may omit llama.cpp's defaults.
    if reader.metadata.get("tokenizer.ggml.model") == "llama":
        found["bos"] = 1 if found["bos"] is None else found["bos"]
        found["eos"] = 2 if found["eos"] is None else found["eos"]
    ends = list(dict.fromkeys(found[word] for word in ("eos", "eot", "eom") if found[word] is not None))
    return {
        "bos_token_id": found["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": found["padding"],
    }


def add_turn_ends(config: dict[str, Any], reader: MetadataReader, texts: tuple[str, ...]) -> dict[str, Any]:
    """Add the tokens that end a turn: converters omit them, and llama.cpp finds them by their text."""
    tokens, ends = _tokens(reader), config["eos_token_id"]
    ends = [] if ends is None else list(ends) if isinstance(ends, list) else [ends]
    ends += [tokens.index(text) for text in texts if text in tokens]
    unique = list(dict.fromkeys(ends))
    return config | {"eos_token_id": unique[0] if len(unique) == 1 else unique or None}


def _tokens(reader: MetadataReader) -> list[Any]:
    tokens = reader.metadata.get("tokenizer.ggml.tokens")
    return tokens if isinstance(tokens, list) else []
