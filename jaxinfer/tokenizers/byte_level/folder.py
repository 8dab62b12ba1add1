"""The byte-level BPE of a folder with ``vocab.json`` and ``merges.txt`` instead of a ``tokenizer.json``."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jaxinfer.errors import InvalidTokenizer
from jaxinfer.tokenizers.byte_level.library import build_pipeline
from jaxinfer.tokenizers.byte_level.word_splits import CLASS_SPLITS, MODEL_CLASSES, WORD_SPLITS, WordSplit
from jaxinfer.tokenizers.folder_settings import FolderSettings, read_json_object
from jaxinfer.tokenizers.hugging_face import HuggingFaceTokenizer, add_begin_and_end, add_declared_tokens

VOCABULARY, MERGES = "vocab.json", "merges.txt"
# The special token of these vocabularies if the folder names none.
_END_OF_TEXT = "<|endoftext|>"
_LARGEST_ID = 2**31 - 1


def read_vocab_and_merges(folder: Path, settings: FolderSettings, model_type: Any) -> HuggingFaceTokenizer:
    """Build a folder's tokenizer from these two files and the settings beside them.

    ``model_type`` decides how text is split into words if no file names the tokenizer's class.
    """
    missing = next((name for name in (VOCABULARY, MERGES) if not (folder / name).is_file()), None)
    if missing is not None:
        present = VOCABULARY if missing == MERGES else MERGES
        raise InvalidTokenizer(f"{folder}: has {present} but no {missing}: fetch both, or the model's tokenizer.json")
    ids = _read_ids(folder / VOCABULARY)
    settings = _complete(settings, ids, folder)
    pipeline = build_pipeline(
        ids,
        _read_merges(folder / MERGES),
        _find_split(settings, model_type),
        source=f"{folder / MERGES}: the merges",
        add_prefix_space=bool(settings.add_prefix_space),
    )
    _add_special_tokens(pipeline, settings)
    named = {role: settings.find_id(role, pipeline.token_to_id) for role in ("bos_token", "eos_token")}
    if settings.add_bos or settings.add_eos:
        add_begin_and_end(
            pipeline,
            bos=settings.special_tokens.get("bos_token") if settings.add_bos else None,
            eos=settings.special_tokens.get("eos_token") if settings.add_eos else None,
        )
    return HuggingFaceTokenizer(
        pipeline,
        bos_token_id=settings.choose_bos(named["bos_token"]),
        eos_token_ids=settings.choose_eos(named["eos_token"]),
        chat_template=settings.make_chat_template(),
    )


def _read_ids(path: Path) -> dict[str, int]:
    try:
        # Not with the reader of settings: if a token occurs twice, its last entry would silently win.
        pairs = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise InvalidTokenizer(f"{path} is not valid JSON: {' '.join(str(error).split())}; fetch it again") from error
    is_object = isinstance(pairs, list) and pairs and all(isinstance(pair, tuple) for pair in pairs)
    if not is_object or not all(_is_id(value) for _, value in pairs):
        raise InvalidTokenizer(f"{path} must hold an object of tokens and their ids; fetch it again")
    ids = dict(pairs)
    if len(ids) != len(pairs) or len(set(ids.values())) != len(ids):
        raise InvalidTokenizer(f"{path} names a token or an id twice; fetch it again")
    return ids


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST_ID


def _read_merges(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except ValueError as error:
        raise InvalidTokenizer(f"{path} is not UTF-8: {error}; fetch it again") from error
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#version"):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise InvalidTokenizer(f"{path}: line {number} is {line!r:.80}, not two tokens; fetch it again")
        merges.append((parts[0], parts[1]))
    return merges


def _find_split(settings: FolderSettings, model_type: Any) -> WordSplit:
    name = settings.tokenizer_class or MODEL_CLASSES.get(str(model_type))
    split = CLASS_SPLITS.get(name.removesuffix("Fast")) if name is not None else None
    if split is None:
        raise InvalidTokenizer(
            f"{settings.origin}: tokenizer_class {name!r:.80} cannot be read from {VOCABULARY} and {MERGES}; "
            "put its tokenizer.json beside them (AutoTokenizer.from_pretrained and save_pretrained write one)"
        )
    return WORD_SPLITS[split]


def _complete(settings: FolderSettings, ids: Mapping[str, int], folder: Path) -> FolderSettings:
    """Add settings that these folders keep elsewhere or leave to the tokenizer's class."""
    special = dict(settings.special_tokens)
    if _END_OF_TEXT in ids:
        special.setdefault("eos_token", _END_OF_TEXT)
        if not settings.names_bos:
            special.setdefault("bos_token", _END_OF_TEXT)
    added = dict(settings.added_tokens)
    if not added:
        for content, token in read_json_object(folder / "added_tokens.json").items():
            if not _is_id(token) or not content:
                raise InvalidTokenizer(
                    f"{folder}: added_tokens.json must map tokens to ids, not {content!r} to {token!r}"
                )
            is_special = content in {*special.values(), *settings.extra_special_tokens}
            added[token] = AddedToken(content, special=is_special, normalized=not is_special)
    return replace(settings, special_tokens=special, added_tokens=added)


def _add_special_tokens(pipeline: tokenizers.Tokenizer, settings: FolderSettings) -> None:
    add_declared_tokens(pipeline, settings, VOCABULARY)
    # A special token without an id would get a new id, outside the embedding.
    contents = dict.fromkeys((*settings.special_tokens.values(), *settings.extra_special_tokens))
    known = [content for content in contents if pipeline.token_to_id(content) is not None]
    pipeline.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in known])
