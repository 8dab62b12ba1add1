"""Finds pages that hold the beginning of a prompt already: a chain of hashes over full pages."""

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxinfer.engine.pages import PagePool


class PrefixIndex:
    """Pages by their content: the page's tokens, all tokens before them, and a salt.

    The salt names whatever else the content depends on, or who may see it. Two prompts with different salts never share
    pages.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool, self._page_size = pool, page_size
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        pool.forget = self._forget

    def keys(self, tokens: Sequence[int], salt: str, known: Sequence[bytes] = ()) -> list[bytes]:
        """Return the key of each full page of a text; ``known`` are the first ones."""
        size, keys = self._page_size, list(known)
        parent = keys[-1] if keys else hashlib.sha256(salt.encode()).digest()
        for start in range(len(keys) * size, len(tokens) - size + 1, size):
            content = np.asarray(tokens[start : start + size], np.int32).tobytes()
            parent = hashlib.sha256(parent + content).digest()
            keys.append(parent)
        return keys

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest beginning of these keys that is there, each with one more user."""
        found = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            found.append(page)
        self._pool.share(found)
        return found

    def add(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Make pages that are in use findable; where a key is there already, its first page stays the one."""
        for key, page in zip(keys, pages):
            if key not in self._pages and page not in self._keys:
                self._pages[key], self._keys[page] = page, key

    def holds(self, page: int) -> bool:
        """Tell whether a page can be found."""
        return page in self._keys

    def clear(self) -> None:
        """Forget all pages: their content is lost. Those in use are then free once they are released."""
        self._pool.drop_cached()
        self._pages.clear()
        self._keys.clear()

    def _forget(self, page: int) -> None:
        del self._pages[self._keys.pop(page)]
