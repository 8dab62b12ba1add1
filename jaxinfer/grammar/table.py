"""A grammar over a model's tokens: what follows each token in each state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.errors import InvalidOption
from jaxinfer.grammar.automaton import DEAD, Automaton, smallest, trimmed

NO_TOKEN = -1
# Of a table: it is copied for each row. Classes are numbered in 16 bits.
MOST_ENTRIES, MOST_CLASSES = 2**22, 2**15 - 1
_STATES_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class TokenTable:
    """N states, of which 0 is the first, and C classes of tokens that lead to the same states.

    ``classes_V`` int32 is each token's class. ``next_NC`` int32 is the state after a token of a class, or `DEAD`: the
    token may not come. ``only_N`` int32 is the token that must come in a state, or `NO_TOKEN`. A token that ends a text
    leads to the state itself.
    """

    classes_V: np.ndarray
    next_NC: np.ndarray
    only_N: np.ndarray

    def after(self, tokens: Sequence[int], state: int = 0) -> int:
        """Return the state after tokens; `DEAD` after one that may not come."""
        for token in tokens:
            if state == DEAD:
                break
            state = int(self.next_NC[state, self.classes_V[token]])
        return state


def token_table(
    given: Automaton, spellings: Sequence[bytes | None], eos_token_ids: Sequence[int], vocab_size: int
) -> TokenTable:
    """Return a grammar's table for tokens that add these bytes; None adds none, and may not come.

    States are pruned from which these tokens reach no end, so that every text can end. Raise InvalidOption if there is
    no such text.
    """
    ends = [token for token in eos_token_ids if 0 <= token < vocab_size]
    may_come = [spelling if token not in ends else None for token, spelling in enumerate(spellings[:vocab_size])]
    walk = _Walk(may_come + [None] * (vocab_size - len(may_come)))
    classes_V, first_C = walk.classes(given.next_NB)
    _check_size(len(given.next_NB), len(first_C), 16)
    next_NC = np.concatenate(
        [walk.states_after(given.next_NB, states, first_C) for states in _pieces(len(given.next_NB))], axis=1
    ).T
    found = smallest(trimmed(Automaton(next_NC, given.ends_N)))
    # Now the classes again: pruned states may have joined some.
    next_NC, joined_C = np.unique(found.next_NB, axis=1, return_inverse=True)
    classes_V = joined_C.reshape(-1)[classes_V]
    states_N, end_class = np.arange(len(found.ends_N), dtype=np.int32), next_NC.shape[1]
    next_NC = np.concatenate([next_NC, np.where(found.ends_N, states_N, DEAD)[:, None]], axis=1).astype(np.int32)
    classes_V[ends] = end_class
    _check_size(*next_NC.shape)
    sizes_C = np.bincount(classes_V, minlength=end_class + 1)
    first_C = np.full(end_class + 1, NO_TOKEN)
    first_C[classes_V[::-1]] = np.arange(vocab_size)[::-1]
    allowed_NC = next_NC != DEAD
    is_only_N = allowed_NC @ sizes_C == 1
    only_N = np.where(is_only_N, first_C[allowed_NC.argmax(axis=1)], NO_TOKEN).astype(np.int32)
    return TokenTable(classes_V.astype(np.int32), next_NC, only_N)


def _check_size(states: int, classes: int, slack: int = 1) -> None:
    """Refuse a table that is too large; ``slack`` is for one that may still lose states and classes."""
    if states * classes > slack * MOST_ENTRIES or classes > slack * MOST_CLASSES:
        raise InvalidOption(f"the grammar is too large: its table has {states} states of {classes} classes of tokens")


def _pieces(count: int) -> list[np.ndarray]:
    """Return states, some at a time: walked from all of them at once, a large vocabulary would take gigabytes."""
    return np.split(np.arange(count), range(_STATES_AT_ONCE, count, _STATES_AT_ONCE))


class _Walk:
    """Walks the bytes of V tokens through automata, by the tree of all spellings, level by level."""

    def __init__(self, spellings: Sequence[bytes | None]) -> None:
        numbers: dict[bytes, int] = {b"": 0}
        for spelling in filter(None, spellings):
            for length in range(1, len(spelling) + 1):
                numbers.setdefault(spelling[:length], len(numbers))
        self._size = len(numbers)
        self._places_V = np.array([numbers[spelling or b""] for spelling in spellings])
        levels: dict[int, list[bytes]] = {}
        for prefix in numbers:
            levels.setdefault(len(prefix), []).append(prefix)
        self._levels = [
            tuple(
                np.array(column)
                for column in zip(*((numbers[one], numbers[one[:-1]], one[-1]) for one in levels[length]), strict=True)
            )
            for length in range(1, max(levels) + 1)
        ]

    def states_after(self, next_NB: np.ndarray, states_S: np.ndarray, tokens: Any = slice(None)) -> np.ndarray:
        """Return the state after tokens from some states, ``[tokens, S]``; `DEAD` after one without text."""
        padded_NB = np.concatenate([next_NB, np.full((1, 256), DEAD, np.int32)])
        reached_XS = np.full((self._size, len(states_S)), DEAD, np.int32)
        reached_XS[0] = states_S
        for here, parents, last in self._levels:
            reached_XS[here] = padded_NB[reached_XS[parents], last[:, None]]
        reached_XS[0] = DEAD  # a token without text would change nothing for ever
        return reached_XS[self._places_V[tokens]]

    def classes(self, next_NB: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each token's class, and the first token of each class: its tokens lead from all states to the same.

        Tokens are compared by a sum over all states with random factors, modulo 2^64: two of a large vocabulary look
        alike by chance once in a billion grammars.
        """
        weights_N = np.random.default_rng(0).integers(1, 2**63, len(next_NB), dtype=np.uint64)
        hashes_V = np.zeros(len(self._places_V), np.uint64)
        for states in _pieces(len(next_NB)):
            after_VS = self.states_after(next_NB, states).astype(np.int64).astype(np.uint64)
            hashes_V += (after_VS * weights_N[states]).sum(axis=1, dtype=np.uint64)
        _, first_C, classes_V = np.unique(hashes_V, return_index=True, return_inverse=True)
        return classes_V.reshape(-1), first_C
