"""A trained model as a loadable folder: weights, config, tokenizer and card, complete or absent."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxinfer.checkpoint.convert import copy_files
from jaxinfer.checkpoint.new_folder import new_folder
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import UnsupportedModel, WriteFailed
from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Params
from jaxinfer.tokenizers import Tokenizer
from jaxinfer.tokenizers.hugging_face import HuggingFaceTokenizer
from train.loop.step import cast_floats
from train.model.export import describe_config, save_hf_folder

CARD = "README.md"
_CONFIG = "config.json"


def check_writable(config: DecoderConfig, checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    """Raise an error for a model that `write_model` cannot write, before a run begins."""
    describe_config(config)
    if checkpoint.folder is None and not isinstance(tokenizer, HuggingFaceTokenizer):
        raise UnsupportedModel(
            f"{checkpoint.origin}: its SentencePiece vocabulary cannot be written beside the trained weights: "
            "give the model as a Hugging Face folder"
        )


def write_model(
    target: Path,
    config: DecoderConfig,
    params: Params,
    dtype: str,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    card: str,
) -> None:
    """Write a model with the tokenizer of ``checkpoint``; an existing ``target`` is replaced as a whole."""
    try:
        with new_folder(target, _CONFIG) as folder:
            save_hf_folder(folder, config, cast_floats(params, str(jnp.dtype(dtype))))
            _write_tokenizer(folder, checkpoint, tokenizer)
            (folder / CARD).write_text(card)
    except OSError as error:
        if isinstance(error, WriteFailed):
            raise
        raise WriteFailed(
            f"{target}: {error.strerror or error}; free some space, then the same command writes it"
        ) from None


def write_card(folder: Path, card: str) -> None:
    """Write a card into a model's folder, in place of one that is there."""
    try:
        (folder / CARD).write_text(card)
    except OSError as error:
        raise WriteFailed(f"{folder / CARD}: {error.strerror}; the model itself is whole") from None


def _write_tokenizer(folder: Path, checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    if checkpoint.folder is not None:
        copy_files(checkpoint.folder, folder)
        return
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    template = tokenizer.chat_template
    settings: dict[str, Any] = {} if template is None else dict(template.special_tokens)
    begin = tokenizer.bos_token_id
    settings["bos_token"] = None if begin is None else tokenizer.token(begin)  # null is written too: it means none
    if tokenizer.eos_token_ids:
        settings["eos_token"] = tokenizer.token(tokenizer.eos_token_ids[0])
    if template is not None:
        settings["chat_template"] = [{"name": name, "template": text} for name, text in template.templates.items()]
    ends = {"bos_token_id": begin, "eos_token_id": list(tokenizer.eos_token_ids)}
    for name, content in (("tokenizer_config.json", settings), ("generation_config.json", ends)):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
