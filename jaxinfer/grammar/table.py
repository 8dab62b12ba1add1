"""A grammar over a model's tokens: what follows each token in each state."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxinfer.grammar.automaton import DEAD, Automaton, smallest, trimmed

NO_TOKEN = -1


class TokenTable(NamedTuple):
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
    next_NV = np.full((len(given.ends_N), vocab_size), DEAD, np.int32)
    next_NV[:, : len(spellings)] = _walked(given.next_NB, spellings)[:, :vocab_size]
    next_NV[:, ends] = DEAD
    classes_V, next_NC = _classes(next_NV)
    found = smallest(trimmed(Automaton(next_NC, given.ends_N)))
    # Now the classes again: pruned states may have joined some.
    joined_V, next_NC = _classes(found.next_NB)
    classes_V = joined_V[classes_V]
    states_N, end_class = np.arange(len(found.ends_N), dtype=np.int32), next_NC.shape[1]
    next_NC = np.concatenate([next_NC, np.where(found.ends_N, states_N, DEAD)[:, None]], axis=1).astype(np.int32)
    classes_V[ends] = end_class
    sizes_C = np.bincount(classes_V, minlength=end_class + 1)
    first_C = np.full(end_class + 1, NO_TOKEN)
    first_C[classes_V[::-1]] = np.arange(vocab_size)[::-1]
    allowed_NC = next_NC != DEAD
    is_only_N = allowed_NC @ sizes_C == 1
    only_N = np.where(is_only_N, first_C[allowed_NC.argmax(axis=1)], NO_TOKEN).astype(np.int32)
    return TokenTable(classes_V.astype(np.int32), next_NC, only_N)


def _walked(next_NB: np.ndarray, spellings: Sequence[bytes | None]) -> np.ndarray:
    """Return the state after each token, from every state ``[N, V]``: by the tree of all spellings, level by level."""
    numbers: dict[bytes, int] = {b"": 0}
    for spelling in spellings:
        for length in range(1, len(spelling or b"") + 1):
            numbers.setdefault((spelling or b"")[:length], len(numbers))
    count = len(next_NB)
    padded_NB = np.concatenate([next_NB, np.full((1, 256), DEAD, np.int32)])
    reached_XN = np.full((len(numbers), count), DEAD, np.int32)
    reached_XN[0] = np.arange(count)
    levels: dict[int, list[bytes]] = {}
    for prefix in numbers:
        levels.setdefault(len(prefix), []).append(prefix)
    for length in range(1, max(levels) + 1):
        prefixes = levels.get(length, [])
        here = np.array([numbers[prefix] for prefix in prefixes])
        parents = np.array([numbers[prefix[:-1]] for prefix in prefixes])
        last_X = np.array([prefix[-1] for prefix in prefixes])
        reached_XN[here] = padded_NB[reached_XN[parents], last_X[:, None]]
    reached_XN[0] = DEAD  # a token without text would change nothing for ever
    return reached_XN[[numbers[spelling or b""] for spelling in spellings]].T


def _classes(next_NV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each column's number among the different ones, and these."""
    # Columns are compared by a hash first, whose sums of products are exact modulo 2^64; then by what they are.
    weights_N = np.random.default_rng(0).integers(1, 2**63, len(next_NV), dtype=np.uint64)
    with np.errstate(over="ignore"):
        hashes_V = (next_NV.astype(np.int64).astype(np.uint64) * weights_N[:, None]).sum(axis=0, dtype=np.uint64)
    _, first_C, classes_V = np.unique(hashes_V, return_index=True, return_inverse=True)
    classes_V = classes_V.reshape(-1)
    next_NC = next_NV[:, first_C]
    if not (next_NC[:, classes_V] == next_NV).all():  # once in 2^64 pairs
        next_NC, classes_V = np.unique(next_NV, axis=1, return_inverse=True)
        classes_V = classes_V.reshape(-1)
    return classes_V, next_NC
