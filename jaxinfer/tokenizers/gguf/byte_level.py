"""Builds the byte-level BPE of a GGUF file."""

import tokenizers
from tokenizers import AddedToken

from jaxinfer.errors import InvalidTokenizer
from jaxinfer.tokenizers.byte_level.library import build_pipeline
from jaxinfer.tokenizers.byte_level.word_splits import ARCHITECTURE_SPLITS, WORD_SPLITS, WordSplit
from jaxinfer.tokenizers.gguf.tokens import GGUFTokens
from jaxinfer.tokenizers.hugging_face import HuggingFaceTokenizer, add_begin_and_end
from jaxinfer.tokenizers.sentence_piece.model import PieceKind


def build_byte_level(vocabulary: GGUFTokens) -> HuggingFaceTokenizer:
    """Build the tokenizer of a vocabulary of kind ``gpt2``."""
    split = _find_split(vocabulary)
    pipeline = _build_pipeline(vocabulary, split)
    pipeline.add_tokens(
        [
            AddedToken(token, special=kind == PieceKind.CONTROL, normalized=False)
            for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
            if kind in (PieceKind.CONTROL, PieceKind.USER_DEFINED)
        ]
    )
    special = vocabulary.special_tokens
    add_begin_and_end(
        pipeline,
        bos=special.get("bos_token") if vocabulary.flag("add_bos_token", split.adds_bos) else None,
        eos=special.get("eos_token") if vocabulary.flag("add_eos_token", False) else None,
    )
    return HuggingFaceTokenizer(
        pipeline,
        bos_token_id=vocabulary.ids.get("bos"),
        eos_token_ids=vocabulary.end_ids,
        chat_template=vocabulary.chat_template,
    )


def _find_split(vocabulary: GGUFTokens) -> WordSplit:
    name = vocabulary.metadata.get("tokenizer.ggml.pre")
    if name is None:
        name = ARCHITECTURE_SPLITS.get(str(vocabulary.metadata.get("general.architecture")))
    split = WORD_SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        raise InvalidTokenizer(
            f"{vocabulary.origin}: tokenizer.ggml.pre {name!r:.80} is not supported, only "
            f"{', '.join(sorted(WORD_SPLITS))}: give the model as a Hugging Face folder"
        )
    return split


def _build_pipeline(vocabulary: GGUFTokens, split: WordSplit) -> tokenizers.Tokenizer:
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        raise InvalidTokenizer(f"{vocabulary.origin}: tokenizer.ggml.tokens names a token twice: fetch the file again")
    source = f"{vocabulary.origin}: tokenizer.ggml.merges"
    return build_pipeline(ids, _read_merges(vocabulary), split, source=source)


def _read_merges(vocabulary: GGUFTokens) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for line in vocabulary.strings("merges"):
        first, _, second = line.partition(" ")
        if not first or not second:
            raise InvalidTokenizer(
                f"{vocabulary.origin}: tokenizer.ggml.merges holds {line!r:.80}, not two tokens: fetch it again"
            )
        merges.append((first, second))
    return merges
