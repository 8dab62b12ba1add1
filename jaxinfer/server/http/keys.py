"""The keys that clients must show, kept as hashes."""

import hashlib
import hmac
import re
from collections.abc import Sequence
from pathlib import Path

from jaxinfer.errors import InvalidOption

_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")
_BEARER = "bearer "


class Keys:
    """SHA-256 hashes of keys; without any, everybody is let in."""

    def __init__(self, hashes: Sequence[bytes] = ()) -> None:
        self._hashes = tuple(hashes)

    @property
    def are_needed(self) -> bool:
        """Whether a client has to show a key."""
        return bool(self._hashes)

    def allow(self, authorization: str | None) -> bool:
        """Tell whether a header of ``Bearer KEY`` holds a key, in a time that does not depend on the keys."""
        if not self._hashes:
            return True
        key = _key_in(authorization)
        given = hash_key(key)
        found = [hmac.compare_digest(given, each) for each in self._hashes]
        return any(found) and bool(key)

    def client(self, authorization: str | None) -> str:
        """Return what names a client that is let in: its key's hash, or nothing where no keys are needed."""
        return hash_key(_key_in(authorization)).hex() if self._hashes else ""


def _key_in(authorization: str | None) -> str:
    """Return the key of a header, empty if it has none."""
    text = authorization or ""
    return text[len(_BEARER) :].strip() if text[: len(_BEARER)].lower() == _BEARER else ""


def hash_key(key: str) -> bytes:
    """Return a key's hash; headers are bytes, which Starlette reads as Latin-1."""
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()


def read_keys(keys: Sequence[str], file: Path | None) -> Keys:
    """Return keys that were given, and those of a file: a key or ``sha256:HASH`` a line, comments after ``#``."""
    lines = [] if file is None else _lines(file)
    hashes = []
    for text in (*keys, *lines):
        hashed = _HASHED.fullmatch(text)
        if hashed is None and (not text.isascii() or not text.isprintable() or not text or " " in text):
            raise InvalidOption("an API key is empty or has characters other than letters, digits and signs")
        if hashed is None and text.startswith("sha256:"):
            raise InvalidOption("an API key that begins with sha256: has to go on with 64 hexadecimal digits")
        hashes.append(hash_key(text) if hashed is None else bytes.fromhex(hashed[1]))
    if file is not None and not lines:
        raise InvalidOption(f"{file}: holds no key")
    return Keys(hashes)


def _lines(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidOption(f"{file}: is not a text file") from None
    stripped = (line.strip() for line in text.splitlines())
    return [line for line in stripped if line and not line.startswith("#")]
