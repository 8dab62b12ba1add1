"""The interface of tokenizers, and the checks that they share."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxinfer.errors import InvalidOption
from jaxinfer.tokenizers.chat_template import ChatTemplate


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back, with the ids that begin and end a text.

    ``vocab_size`` is the largest id plus one, added tokens included. Some tokenizers write a character without a token
    as one token per byte, and decode a run of such tokens as a whole. They also have ``byte_fallback_ids:
    frozenset[int]``, so that a stream can wait for the end of a run.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: ChatTemplate | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's ids; special tokens in it are parsed, ``add_special_tokens`` adds the usual ones."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids; ids outside the vocabulary are skipped, broken characters become U+FFFD."""
        ...


def check_text(text: str) -> None:
    """Raise InvalidOption unless the text is a string that UTF-8 can encode."""
    if not isinstance(text, str):
        raise InvalidOption(f"a text to encode must be a string, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidOption(f"the text is not valid Unicode at character {error.start}: give it as UTF-8") from None
