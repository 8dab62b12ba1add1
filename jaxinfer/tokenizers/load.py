"""Finds the tokenizer of an opened checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import InvalidTokenizer
from jaxinfer.tokenizers.byte_level.folder import MERGES, VOCABULARY, read_vocab_and_merges
from jaxinfer.tokenizers.folder_settings import read_folder_settings
from jaxinfer.tokenizers.gguf.vocabulary import read_gguf_vocabulary
from jaxinfer.tokenizers.hugging_face import read_tokenizer_json
from jaxinfer.tokenizers.llama2c import load_llama2c_tokenizer
from jaxinfer.tokenizers.sentence_piece.tokenizer import read_sentence_piece
from jaxinfer.tokenizers.tokenizer import Tokenizer


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Build the checkpoint's tokenizer.

    In a folder it is tokenizer.json, else tokenizer.model, else vocab.json and merges.txt. In a GGUF file it is the
    embedded vocabulary; for a llama2.c file, the file beside it. Raises InvalidTokenizer if it is missing or damaged.
    """
    if checkpoint.folder is not None and (tokenizer := _read_folder(checkpoint.folder, checkpoint.config)) is not None:
        return tokenizer
    if checkpoint.gguf_metadata is not None:
        return read_gguf_vocabulary(checkpoint.gguf_metadata, checkpoint.origin)
    if checkpoint.llama2c_file is not None:
        return load_llama2c_tokenizer(checkpoint.llama2c_file, checkpoint.config["vocab_size"])
    raise InvalidTokenizer(
        f"{checkpoint.origin} has no tokenizer: put the model's tokenizer.json or tokenizer.model beside its weights"
    )


def _read_folder(folder: Path, config: Mapping[str, Any]) -> Tokenizer | None:
    for name, read in (("tokenizer.json", read_tokenizer_json), ("tokenizer.model", read_sentence_piece)):
        if (folder / name).is_file():
            return read(folder / name, read_folder_settings(folder, config))
    if any((folder / name).is_file() for name in (VOCABULARY, MERGES)):
        return read_vocab_and_merges(folder, read_folder_settings(folder, config), config.get("model_type"))
    return None
