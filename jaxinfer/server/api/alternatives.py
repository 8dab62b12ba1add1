"""What else might have stood in the place of a token: its most probable rivals, and how they are spelled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxinfer.grammar.vocabulary import token_bytes
from jaxinfer.tokenizers import Tokenizer


@dataclass(frozen=True)
class Alternative:
    """A token that might stand in a place: its text by itself, the bytes of it, and its log-probability."""

    token: int
    text: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True)
class Scored:
    """What scoring adds to an answer, an entry a token.

    ``prompt_texts`` are empty where the prompt is not part of the answer; they join to its text. The first token of a
    prompt has neither a log-probability nor alternatives. ``best`` are the alternatives to the answer's tokens.
    """

    prompt_texts: tuple[str, ...] = ()
    prompt_logprobs: tuple[float | None, ...] = ()
    prompt_best: tuple[tuple[Alternative, ...], ...] = ()
    best: tuple[tuple[Alternative, ...], ...] = ()


class Spelling:
    """How the tokens of a vocabulary are written one by one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _bytes(self) -> list[bytes | None]:
        return token_bytes(self._tokenizer)

    def alternative(self, token: int, logprob: float) -> Alternative:
        """Return a token with its text, ``bytes:\\xNN`` where it is part of a character."""
        known = self._bytes[token] if token < len(self._bytes) else None
        if known is None:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            return Alternative(token, text, text.encode(), logprob)
        try:
            text = known.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in known)
        return Alternative(token, text, known, logprob)


def with_drawn(best: Sequence[Alternative], token: int, text: str, logprob: float) -> list[Alternative]:
    """Return alternatives of which the token that was taken has the text and the log-probability that the answer has.

    Both are the same number where bits do not depend on the batch.
    """
    return [replace(one, text=text or one.text, logprob=logprob) if one.token == token else one for one in best]


def by_text(best: Sequence[Alternative], token: int, text: str, logprob: float) -> Mapping[str, float]:
    """Return log-probabilities by text, those of the token that was taken among them, the most probable first.

    A text that another one has already, or that is empty, is spelled ``token_id:ID``.
    """
    taken = text or next((one.text for one in best if one.token == token), "") or f"token_id:{token}"
    named = {taken: logprob}
    for one in best:
        if one.token != token:
            named[one.text if one.text and one.text not in named else f"token_id:{one.token}"] = one.logprob
    return dict(sorted(named.items(), key=lambda item: -item[1]))
