"""Tokenizers run by the ``tokenizers`` library: a ``tokenizer.json``, or the vocabulary of a GGUF file."""

import base64
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import processors

from jaxinfer.errors import InvalidTokenizer
from jaxinfer.tokenizers.chat_template import ChatTemplate
from jaxinfer.tokenizers.folder_settings import FolderSettings
from jaxinfer.tokenizers.tokenizer import check_text

_CHARSMAP = re.compile(r'"precompiled_charsmap"\s*:\s*"([^"]*)"')
_BYTE_NAMES = tuple(f"<0x{value:02X}>" for value in range(256))


class HuggingFaceTokenizer:
    """A ``tokenizers`` pipeline with the ids that begin and end a text."""

    def __init__(
        self,
        pipeline: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: ChatTemplate | None = None,
    ):
        # Truncation and padding are training settings: they would cut or fill every prompt.
        pipeline.no_truncation()
        pipeline.no_padding()
        self._pipeline = pipeline
        vocabulary = pipeline.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        byte_names = _BYTE_NAMES if "ByteFallback" in repr(pipeline.decoder) else ()
        self.byte_fallback_ids = frozenset(vocabulary[name] for name in byte_names if name in vocabulary)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the same ids as transformers."""
        check_text(text)
        try:
            return self._pipeline.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            raise (_failure("encode a text", error) if _is_of_library(error) else error) from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the ids; ids outside the vocabulary are skipped."""
        known = [int(token) for token in ids if 0 <= token < self.vocab_size]
        try:
            return self._pipeline.decode(known, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise (_failure("decode tokens", error) if _is_of_library(error) else error) from error

    def token(self, token_id: int) -> str | None:
        """Return a token as written in the vocabulary."""
        return self._pipeline.id_to_token(token_id)

    def to_json(self) -> str:
        """Return the content of its ``tokenizer.json``."""
        return self._pipeline.to_str()


def _is_of_library(error: BaseException) -> bool:
    """Tell whether the library raised an error: bare exceptions, and panics, which are no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _failure(what: str, error: BaseException) -> InvalidTokenizer:
    return InvalidTokenizer(f"the tokenizer is damaged: it cannot {what} ({error}); fetch its files again")


def _check_charsmaps(content: str) -> None:
    """Look at compiled maps of characters as the library does, which panics and prints a trace where one is broken."""
    for found in _CHARSMAP.finditer(content):
        data = base64.b64decode(found[1].replace("\\/", "/"))
        size = int.from_bytes(data[:4], "little")
        if len(data) < 4 or 4 + size > len(data):
            raise ValueError("precompiled_charsmap is cut short")
        data[4 + size // 4 * 4 :].decode("utf-8")


def read_tokenizer_json(path: Path, settings: FolderSettings) -> HuggingFaceTokenizer:
    """Build a folder's tokenizer from its ``tokenizer.json`` and the settings beside it."""
    try:
        content = path.read_text(encoding="utf-8")
        _check_charsmaps(content)
        pipeline = tokenizers.Tokenizer.from_str(content)
    except BaseException as error:  # the library raises bare exceptions, and panics that are none
        if not _is_of_library(error):
            raise
        reason = " ".join(str(error).split())
        raise InvalidTokenizer(f"{path} is damaged: {reason}; fetch it again") from error
    add_declared_tokens(pipeline, settings, path.name)
    ids = {role: settings.find_id(role, pipeline.token_to_id) for role in ("bos_token", "eos_token")}
    if settings.add_bos is not None or settings.add_eos is not None:
        add_begin_and_end(
            pipeline,
            bos=settings.special_tokens.get("bos_token") if settings.add_bos else None,
            eos=settings.special_tokens.get("eos_token") if settings.add_eos else None,
        )
    return HuggingFaceTokenizer(
        pipeline,
        bos_token_id=settings.choose_bos(ids["bos_token"]),
        eos_token_ids=settings.choose_eos(ids["eos_token"]),
        chat_template=settings.make_chat_template(),
    )


def add_begin_and_end(pipeline: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make encoding put these tokens around a text, instead of those it added before."""
    pair = [(token, pipeline.token_to_id(token)) for token in (bos, eos) if token is not None]
    template = [*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])]
    pipeline.post_processor = processors.TemplateProcessing(single=template, special_tokens=pair)


def add_declared_tokens(pipeline: tokenizers.Tokenizer, settings: FolderSettings, vocabulary: str) -> None:
    """Add declared tokens that the pipeline lacks; ``vocabulary`` is the pipeline's file, named in errors."""
    present = {token.content for token in pipeline.get_added_tokens_decoder().values()}
    for declared, token in sorted(settings.added_tokens.items()):
        if token.content in present:
            continue
        pipeline.add_tokens([token])
        if (given := pipeline.token_to_id(token.content)) != declared:
            raise InvalidTokenizer(
                f"{settings.origin}: the tokenizer's settings give {token.content!r} the id {declared}, but "
                f"{vocabulary} has room for it at {given}: fetch both files again"
            )
