"""Converts the SentencePiece vocabulary of a GGUF file to a model that SentencePiece itself reads.

A GGUF file has the pieces with their scores and kinds, and whether a text gets a leading space. For all else, use
llama.cpp's choices: merging by score (BPE), no normalization, and no removal of spaces.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tokenizers import AddedToken

from jaxinfer.errors import InvalidTokenizer
from jaxinfer.tokenizers.folder_settings import FolderSettings
from jaxinfer.tokenizers.gguf.tokens import GGUFTokens
from jaxinfer.tokenizers.sentence_piece.model import PieceKind, write_sentence_piece_model
from jaxinfer.tokenizers.sentence_piece.tokenizer import SentencePieceTokenizer

# Defaults of files without these ids.
DEFAULT_IDS: Mapping[str, int] = MappingProxyType({"bos": 1, "eos": 2, "unknown": 0})

_SPACE = "▁"
_NUM_BYTES = 256
_FLOAT32_MAX = 3.4e38
_NO_PREFIX_ARCHITECTURES = ("gemma", "gemma2", "gemma3")
# Phi-3's control tokens remove the spaces after them, except these; a GGUF file cannot record that.
_PHI_3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")


def build_sentence_piece(vocabulary: GGUFTokens) -> SentencePieceTokenizer:
    """Build the tokenizer of a vocabulary of kind ``llama``."""
    for name in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if vocabulary.metadata.get(f"tokenizer.ggml.{name}"):
            raise InvalidTokenizer(
                f"{vocabulary.origin}: tokenizer.ggml.{name} has no meaning for a 'llama' vocabulary: "
                "give the model as a Hugging Face folder"
            )
    kinds = _settle_kinds(vocabulary)
    pieces = _spell_pieces(vocabulary, kinds)
    architecture = vocabulary.metadata.get("general.architecture")
    adds_prefix = vocabulary.flag("add_space_prefix", architecture not in _NO_PREFIX_ARCHITECTURES)
    model = write_sentence_piece_model(pieces, _read_scores(vocabulary), kinds, add_dummy_prefix=adds_prefix)
    template = vocabulary.chat_template
    settings = FolderSettings(
        origin=Path(vocabulary.origin),
        special_tokens={name: pieces[token] for name, token in vocabulary.named_ids.items()},
        added_tokens=_strip_after(pieces, kinds) if architecture == "phi3" else {},
        add_bos=vocabulary.flag("add_bos_token", True),
        add_eos=vocabulary.flag("add_eos_token", False),
        add_prefix_space=adds_prefix,
        # Text after a special token begins a word too: Llama 2 and Phi-3 were trained so, and llama.cpp does so.
        legacy=True,
        chat_templates=template.templates if template else {},
        bos_id=None,
        eos_ids=vocabulary.end_ids,
        names_bos=True,
    )
    source = f"the vocabulary inside {vocabulary.origin}"
    return SentencePieceTokenizer(model, settings, source=source, always_adds_space=True)


def _settle_kinds(vocabulary: GGUFTokens) -> list[int]:
    """Return the kinds, with exactly one unknown token, as SentencePiece requires."""
    known = tuple(PieceKind)
    kinds = [kind if kind in known else PieceKind.NORMAL for kind in vocabulary.kinds]
    unknown = [index for index, kind in enumerate(kinds) if kind == PieceKind.UNKNOWN]
    for index in unknown[1:]:
        kinds[index] = PieceKind.UNUSED
    if not unknown:
        kinds[vocabulary.ids.get("unknown", 0)] = PieceKind.UNKNOWN
    num_bytes = kinds.count(PieceKind.BYTE)
    if num_bytes not in (0, _NUM_BYTES):
        raise InvalidTokenizer(
            f"{vocabulary.origin}: tokenizer.ggml.token_type marks {num_bytes} bytes, not all {_NUM_BYTES} or none: "
            "fetch the file again"
        )
    return kinds


def _spell_pieces(vocabulary: GGUFTokens, kinds: list[int]) -> list[str]:
    """Return the pieces in SentencePiece's spelling: spaces as ``▁``, none empty, none twice."""
    taken: dict[str, int] = {}
    pieces = []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, kinds, strict=True)):
        # Converters write user-defined runs of spaces as plain spaces.
        piece = token.replace(" ", _SPACE) if kind == PieceKind.USER_DEFINED else token
        if not piece:
            piece, kinds[index] = f"[EMPTY_{index}]", PieceKind.UNUSED
        if taken.setdefault(piece, index) != index:
            raise InvalidTokenizer(
                f"{vocabulary.origin}: tokenizer.ggml.tokens names {piece!r:.80} twice, as {taken[piece]} and {index}: "
                "fetch the file again"
            )
        pieces.append(piece)
    return pieces


def _read_scores(vocabulary: GGUFTokens) -> list[float]:
    scores = vocabulary.metadata.get("tokenizer.ggml.scores")
    if (
        not isinstance(scores, list)
        or len(scores) != len(vocabulary.tokens)
        or not all(type(score) is float and abs(score) <= _FLOAT32_MAX for score in scores)
    ):
        raise InvalidTokenizer(
            f"{vocabulary.origin}: tokenizer.ggml.scores must have one finite number a token: fetch the file again"
        )
    return scores


def _strip_after(pieces: list[str], kinds: list[int]) -> dict[int, AddedToken]:
    return {
        index: AddedToken(piece, rstrip=True, special=True, normalized=False)
        for index, (piece, kind) in enumerate(zip(pieces, kinds, strict=True))
        if kind == PieceKind.CONTROL and piece not in _PHI_3_KEEPS_SPACES
    }
