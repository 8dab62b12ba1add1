"""Finds pages that hold the beginning of a prompt: a chain of hashes over full pages, and the last pages of prompts."""

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxinfer.engine.pages import PagePool


class PrefixIndex:
    """Pages by their content: the page's tokens, all tokens before them, and a salt.

    The salt names whatever else the content depends on, or who may see it. Two prompts with different salts never share
    pages. A prompt's last page, which is not full, can be found too, by what it begins with: it is copied, not shared,
    since its owner goes on writing to it.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool, self._page_size = pool, page_size
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        # Last pages by the key of all pages before, and the other way round.
        self._tails: dict[bytes, dict[int, tuple[int, ...]]] = {}
        self._parents: dict[int, bytes] = {}
        pool.forget, pool.freed = self._forget, self._drop_tail

    def keys(self, tokens: Sequence[int], salt: str, known: Sequence[bytes] = ()) -> list[bytes]:
        """Return the key of each full page of a text; ``known`` are the first ones."""
        size, keys = self._page_size, list(known)
        parent = self._parent(keys, salt)
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

    def count(self, keys: Sequence[bytes]) -> int:
        """Return how many of these keys `find` would find now; any thread may ask."""
        return next((at for at, key in enumerate(keys) if key not in self._pages), len(keys))

    def add(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Make pages that are in use findable; where a key is there already, its first page stays the one."""
        for key, page in zip(keys, pages):
            if key not in self._pages and page not in self._keys:
                self._pages[key], self._keys[page] = page, key

    def add_tail(self, keys: Sequence[bytes], salt: str, tokens: Sequence[int], page: int) -> None:
        """Make what a page in use begins with findable, after the pages of these keys."""
        parent = self._parent(keys, salt)
        if tokens and page not in self._parents:
            self._tails.setdefault(parent, {})[page] = tuple(tokens)
            self._parents[page] = parent

    def find_tail(self, keys: Sequence[bytes], salt: str, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the page that begins with the most of these tokens, and with how many; none, with page 0."""
        best = 0, 0
        for page, held in self._tails.get(self._parent(keys, salt), {}).items():
            count = next((at for at, (one, other) in enumerate(zip(held, tokens)) if one != other), None)
            count = min(len(held), len(tokens)) if count is None else count
            best = max(best, (page, count), key=lambda pair: pair[1])
        return best

    def holds(self, page: int) -> bool:
        """Tell whether a page can be found."""
        return page in self._keys

    def clear(self) -> None:
        """Forget all pages: their content is lost. Those in use are then free once they are released."""
        self._pool.drop_cached()
        self._pages.clear()
        self._keys.clear()
        self._tails.clear()
        self._parents.clear()

    def _forget(self, page: int) -> None:
        del self._pages[self._keys.pop(page)]
        self._drop_tail(page)

    def _drop_tail(self, page: int) -> None:
        parent = self._parents.pop(page, None)
        if parent is not None:
            del self._tails[parent][page]
            if not self._tails[parent]:
                del self._tails[parent]

    def _parent(self, keys: Sequence[bytes], salt: str) -> bytes:
        return keys[-1] if keys else hashlib.sha256(salt.encode()).digest()
