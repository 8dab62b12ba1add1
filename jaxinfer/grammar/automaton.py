"""A grammar as a finite automaton over bytes, as small as it can be."""

from typing import NamedTuple

import numpy as np

from jaxinfer.errors import InvalidOption, one_line
from jaxinfer.grammar.grammar import Grammar, library

DEAD = -1
# A table of so many states over a large vocabulary takes tens of megabytes a row.
MOST_STATES = 8192


class Automaton(NamedTuple):
    """N states; state 0 is the first. ``next_NB`` int32 ``[N, 256]`` is the state after a byte, or `DEAD`.

    ``ends_N`` tells in which states a text may end. From every state such a state can be reached.
    """

    next_NB: np.ndarray
    ends_N: np.ndarray


def automaton(grammar: Grammar) -> Automaton:
    """Compile a grammar; raise InvalidOption for one that is no regular expression, matches nothing, or is too large."""
    outlines = library()
    try:
        alphabet = outlines.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
        index = outlines.Index(grammar.pattern, alphabet)
    except Exception as error:
        raise InvalidOption(f"the grammar cannot be compiled: {one_line(str(error))}") from error
    found = index.get_transitions()
    first, final = index.get_initial_state(), index.get_final_states()
    names = {first: 0}
    for name in (*found, *(after for row in found.values() for after in row.values())):
        names.setdefault(name, len(names))
    if len(names) > 16 * MOST_STATES:
        raise InvalidOption(f"the grammar has {len(names)} states: at most {MOST_STATES} fit")
    next_NB = np.full((len(names), 256), DEAD, np.int32)
    for name, row in found.items():
        for byte, after in row.items():
            if byte < 256:  # the library adds a token that ends a text
                next_NB[names[name], byte] = names[after]
    ends_N = np.array([name in final for name in names], bool)
    whole = smallest(trimmed(Automaton(next_NB, ends_N)))
    if len(whole.ends_N) > MOST_STATES:
        raise InvalidOption(f"the grammar has {len(whole.ends_N)} states: at most {MOST_STATES} fit")
    return whole


def trimmed(given: Automaton) -> Automaton:
    """Leave out the ways that lead to no end; raise InvalidOption if none is left."""
    next_NX, lives_N = given.next_NB, given.ends_N.copy()
    while True:
        reaches_N = lives_N | (np.append(lives_N, False)[next_NX]).any(axis=1)
        if (reaches_N == lives_N).all():
            break
        lives_N = reaches_N
    if not lives_N[0]:
        raise InvalidOption("the grammar matches no text that the model's tokens can write")
    return given._replace(next_NB=np.where(np.append(lives_N, False)[next_NX], next_NX, DEAD).astype(np.int32))


def smallest(given: Automaton) -> Automaton:
    """Join states from which the same texts go on (Moore's algorithm), and leave out those that nothing leads to."""
    next_NX = given.next_NB
    block_N, count = given.ends_N.astype(np.int64), 0
    while True:
        signature_NX = np.append(block_N, -1)[next_NX]
        _, block_N = np.unique(
            np.concatenate([block_N[:, None], signature_NX], axis=1), axis=0, return_inverse=True
        )
        block_N = block_N.reshape(-1)
        if block_N.max() + 1 == count:
            break
        count = block_N.max() + 1
    leaders = np.unique(block_N, return_index=True)[1]
    joined_NX = np.append(block_N, DEAD)[next_NX[leaders]]
    # Numbered in the order in which they are reached, the first one 0.
    order, seen = [int(block_N[0])], {int(block_N[0])}
    for state in order:
        for after in np.unique(joined_NX[state]).tolist():
            if after != DEAD and after not in seen:
                seen.add(after)
                order.append(after)
    number_N = np.full(count + 1, DEAD, np.int32)
    number_N[order] = np.arange(len(order))
    return Automaton(number_N[joined_NX[order]], given.ends_N[leaders][order])
