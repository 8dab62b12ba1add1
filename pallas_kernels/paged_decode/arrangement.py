"""How queries come to the kernel over pages and how its results leave: who puts the heads that share keys together.

A group's rows are its queries. Inside the kernel that costs a few loads and stores for each row of a batch; outside, a
copy of all queries in HBM, and another one of all results.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.head_groups import LANES, SUBLANES, gather_heads, spread_queries


class Arrangement(Protocol):
    """An order of queries of N heads and T tokens."""

    @property
    def beside(self) -> int:
        """How many heads of a token are rows that follow one another."""
        ...

    @property
    def is_inside(self) -> bool:
        """Tell whether the kernel puts the rows together."""
        ...

    def laid_out(self, query_BTNH: jax.Array) -> jax.Array:
        """Return the kernel's operand."""
        ...

    def take(self, queries: Any, query_CRI: Any, group: int) -> None:
        """Put a group's queries below one another, and zeros after them; inside the kernel, for one row."""
        ...

    def put(self, output: Any, group: int, rows: Any, mixed_RI: jax.Array) -> None:
        """Write a group's results of some rows, in the order of the operand; inside the kernel, for one row."""
        ...

    def taken_back(self, mixed: jax.Array) -> jax.Array:
        """Return ``[B, T, N, H]`` of the kernel's result."""
        ...


def arrangement_of(query_BTNH: jax.Array, num_kv_heads: int, rows: int, width: int, interpreted: bool) -> Arrangement:
    """Return the cheapest arrangement that the shapes allow: whole tiles of tokens, heads and lanes."""
    _, tokens, num_heads, head_dim = query_BTNH.shape
    packed = 4 // query_BTNH.dtype.itemsize
    shared = num_heads // num_kv_heads
    if width % head_dim == 0 and head_dim % LANES == 0:
        if tokens % SUBLANES == 0 and head_dim == LANES and num_heads % (SUBLANES * packed) == shared % packed == 0:
            return Words(tokens, num_heads, shared, packed, by_words=not interpreted)
        if tokens % (SUBLANES * packed) == 0:
            return Flat(tokens, num_heads, shared)
    return Spread(num_kv_heads, tokens, num_heads, head_dim, rows, width)


@dataclass(frozen=True)
class Spread:
    """``[B, C, R, I]``, put together outside the kernel: any shape, and heads that share lanes."""

    num_kv_heads: int
    tokens: int
    num_heads: int
    head_dim: int
    rows: int
    width: int
    beside: int = 1

    @property
    def is_inside(self) -> bool:
        """No."""
        return False

    def laid_out(self, query_BTNH: jax.Array) -> jax.Array:
        """Return `spread_queries`."""
        return spread_queries(query_BTNH, self.num_kv_heads, self.rows, self.width)

    def take(self, queries: Any, query_CRI: Any, group: int) -> None:
        """Do nothing: the operand has the rows."""

    def put(self, output: Any, group: int, rows: Any, mixed_RI: jax.Array) -> None:
        """Write the rows."""
        output[0, group, rows] = mixed_RI.astype(output.dtype)

    def taken_back(self, mixed: jax.Array) -> jax.Array:
        """Return `gather_heads`."""
        return gather_heads(mixed, self.tokens, self.num_heads, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True)
class Flat:
    """``[B, T, N * H]``: a head of a token is whole lane tiles, and its tokens whole tiles of rows."""

    tokens: int
    num_heads: int
    shared: int
    beside: int = 1

    @property
    def is_inside(self) -> bool:
        """Yes."""
        return True

    def laid_out(self, query_BTNH: jax.Array) -> jax.Array:
        """Return the heads of a token side by side."""
        return query_BTNH.reshape(*query_BTNH.shape[:2], -1)

    def take(self, queries: Any, query_CRI: Any, group: int) -> None:
        """Put the tokens of one head below those of the one before."""
        lanes, shared = query_CRI.shape[2], self.shared
        for head in range(shared):
            here = pl.ds(head * self.tokens, self.tokens)
            query_CRI[group, here] = queries[0, :, pl.ds((group * shared + head) * lanes, lanes)]
        _clear_after(query_CRI, group, shared * self.tokens)

    def put(self, output: Any, group: int, rows: Any, mixed_RI: jax.Array) -> None:
        """Write the heads of a token side by side."""
        lanes, shared = mixed_RI.shape[1], self.shared
        mixed_RI = mixed_RI.astype(output.dtype)
        for head, tokens, here in _pieces(rows, self.tokens, shared):
            output[0, tokens, pl.ds((group * shared + head) * lanes, lanes)] = mixed_RI[here]

    def taken_back(self, mixed: jax.Array) -> jax.Array:
        """Return the lanes as heads."""
        return mixed.reshape(*mixed.shape[:2], self.num_heads, -1)


@dataclass(frozen=True)
class Words:
    """``[B, T * N, 128]``, queries as they lie: words of 32 bits hold ``packed`` heads of a token, which share keys.

    The words of a token lie N / packed after those of the token before: they are loaded and stored with that stride, so
    that neither queries nor results are copied outside the kernel. ``by_words`` is false where the kernel is
    interpreted: that can load words of packed heads, and not store them.
    """

    tokens: int
    num_heads: int
    shared: int
    packed: int
    by_words: bool

    @property
    def beside(self) -> int:
        """The heads of a word are rows that follow one another."""
        return self.packed

    @property
    def is_inside(self) -> bool:
        """Yes."""
        return True

    def laid_out(self, query_BTNH: jax.Array) -> jax.Array:
        """Return the heads of all tokens below one another."""
        return query_BTNH.reshape(query_BTNH.shape[0], -1, LANES)

    def take(self, queries: Any, query_CRI: Any, group: int) -> None:
        """Put the tokens of one word below those of the one before."""
        rows = self.tokens * self.packed
        for word in range(self.shared // self.packed):
            words = queries.bitcast(jnp.uint32) if self.packed > 1 else queries
            words_TI = words[:, self._of_word(group, word, 0, self.tokens), :][0]
            query_CRI[group, pl.ds(word * rows, rows)] = pltpu.bitcast(words_TI, query_CRI.dtype)
        _clear_after(query_CRI, group, self.shared * self.tokens)

    def put(self, output: Any, group: int, rows: Any, mixed_RI: jax.Array) -> None:
        """Write the words of the rows' tokens."""
        mixed_RI, rows_per_word = mixed_RI.astype(output.dtype), self.tokens * self.packed
        for word, of_word, here in _pieces(rows, rows_per_word, self.shared // self.packed):
            first, size = of_word.start // self.packed, of_word.size // self.packed
            if self.packed == 1:
                output[:, self._of_word(group, word, first, size), :] = mixed_RI[here][None]
            elif self.by_words:
                words_TI = pltpu.bitcast(mixed_RI[here], jnp.uint32)
                output.bitcast(jnp.uint32)[:, self._of_word(group, word, first, size), :] = words_TI[None]
            else:
                for at in range(self.packed):
                    head = group * self.shared + word * self.packed + at
                    of_head = pl.ds(first * self.num_heads + head, size, stride=self.num_heads)
                    output[:, of_head, :] = mixed_RI[here][at :: self.packed][None]

    def taken_back(self, mixed: jax.Array) -> jax.Array:
        """Return the tokens' heads."""
        return mixed.reshape(mixed.shape[0], self.tokens, self.num_heads, LANES)

    def _of_word(self, group: int, word: int, first: int, tokens: int) -> Any:
        stride = self.num_heads // self.packed
        return pl.ds(first * stride + group * (self.shared // self.packed) + word, tokens, stride=stride)


def _pieces(rows: Any, tokens: int, shared: int) -> list[tuple[int, Any, slice]]:
    """Return which heads some rows of a group are of, with their tokens and their places among the rows."""
    found = []
    for head in range(shared):
        first = max(rows.start, head * tokens)
        last = min(rows.start + rows.size, (head + 1) * tokens)
        if first < last:
            of_head = pl.ds(first - head * tokens, last - first)
            found.append((head, of_head, slice(first - rows.start, last - rows.start)))
    return found


def _clear_after(query_CRI: Any, group: int, rows: int) -> None:
    _, all_rows, lanes = query_CRI.shape
    if all_rows > rows:
        query_CRI[group, pl.ds(rows, all_rows - rows)] = jnp.zeros((all_rows - rows, lanes), query_CRI.dtype)
