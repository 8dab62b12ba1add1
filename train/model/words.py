"""Toys whose vocabulary is whole words: their tokenizer, and the folder that they are written to."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxinfer.models.config import DecoderConfig
from train.model.export import save_hf_folder

SPECIAL = ("<|end|>", "<|unknown|>")


def words_tokenizer(vocabulary: Sequence[str]) -> str:
    """Return a tokenizer of whole words, as ``tokenizer.json`` holds it."""
    words = {word: index for index, word in enumerate((*SPECIAL, *vocabulary))}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [{"id": index, "content": name, **flags} for index, name in enumerate(SPECIAL)],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": words, "unk_token": SPECIAL[1]},
        }
    )


def write_toy(folder: Path, config: DecoderConfig, params: Any, tokenizer: str) -> None:
    """Write a model folder whose end of text is the first special token."""
    save_hf_folder(folder, config, jax.device_get(params))
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[0]}))
