"""The bytes that each token adds to a text."""

from collections.abc import Callable, Sequence

from jaxinfer.tokenizers.tokenizer import Tokenizer

_BROKEN = "\ufffd"


def token_bytes(tokenizer: Tokenizer) -> list[bytes | None]:
    """Return what each token adds to a text that it continues; None for special tokens and those without text.

    A token that is part of a character has its bytes where the tokenizer can name them, else None.
    """
    anchor = _anchor(tokenizer)
    before = len(tokenizer.decode(anchor))
    single = {token: bytes([int(_written(tokenizer, token)[3:5], 16)]) for token in _byte_ids(tokenizer)}
    found: list[bytes | None] = []
    for token in range(tokenizer.vocab_size):
        text = tokenizer.decode([*anchor, token])[before:]
        if token in single:
            found.append(single[token])
        elif _BROKEN in text:
            found.append(_spelled(_written(tokenizer, token)))
        else:
            found.append(text.encode("utf-8") or None)
    return found


def _anchor(tokenizer: Tokenizer) -> list[int]:
    """Return tokens of a word; what follows them keeps its leading space."""
    return list(tokenizer.encode("a", add_special_tokens=False))


def _byte_ids(tokenizer: Tokenizer) -> Sequence[int]:
    """Return the tokens that write a byte each, as in ``<0x0A>``."""
    return sorted(getattr(tokenizer, "byte_fallback_ids", ()))


def _written(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as written in the vocabulary, where the tokenizer can tell."""
    name: Callable[[int], str | None] = getattr(tokenizer, "token", lambda _: None)
    return name(token) or ""


def _spelled(written: str) -> bytes | None:
    """Return the bytes of a token of a byte-level vocabulary, which writes each byte as a printable character."""
    values = [_BYTES.get(character) for character in written]
    known = [value for value in values if value is not None]
    return bytes(known) if known and len(known) == len(values) else None


def _printable_bytes() -> dict[str, int]:
    """Return GPT-2's alphabet: a printable byte is itself, every other one is the next character from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _printable_bytes()
