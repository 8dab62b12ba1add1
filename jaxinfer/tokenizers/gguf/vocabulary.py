"""Builds the tokenizer in a GGUF file's metadata."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import InvalidTokenizer
from jaxinfer.tokenizers.gguf.byte_level import build_byte_level
from jaxinfer.tokenizers.gguf.sentence_piece import DEFAULT_IDS, build_sentence_piece
from jaxinfer.tokenizers.gguf.tokens import read_tokens
from jaxinfer.tokenizers.tokenizer import Tokenizer


def read_gguf_vocabulary(metadata: Mapping[str, Any], origin: str) -> Tokenizer:
    """Build the tokenizer that a GGUF file's key-value section describes."""
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        return build_byte_level(read_tokens(metadata, origin, {}))
    if model == "llama":
        return build_sentence_piece(read_tokens(metadata, origin, DEFAULT_IDS))
    raise InvalidTokenizer(
        f"{origin}: tokenizer.ggml.model {model!r:.80} is not supported, only 'gpt2' (byte-level BPE) and 'llama' "
        "(SentencePiece BPE): give the model as a Hugging Face folder"
    )
