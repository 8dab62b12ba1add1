"""A grammar as a finite automaton over bytes, as small as it can be."""

import io
import json
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.errors import InvalidOption, one_line
from jaxinfer.grammar import compiling
from jaxinfer.grammar.compiling import DEAD
from jaxinfer.grammar.grammar import PLAIN, Grammar
from jaxinfer.grammar.schema import pattern_of

# A table of so many states over a large vocabulary takes tens of megabytes a row.
MOST_STATES = 8192


class Automaton(NamedTuple):
    """N states; state 0 is the first. ``next_NB`` int32 ``[N, 256]`` is the state after a byte, or `DEAD`.

    ``ends_N`` tells in which states a text may end. From every state such a state can be reached.
    """

    next_NB: np.ndarray
    ends_N: np.ndarray


def automaton(grammar: Grammar) -> Automaton:
    """Compile a grammar; raise InvalidOption for one that is wrong, matches nothing, or is too large."""
    whole = smallest(trimmed(_compiled(grammar)))
    if len(whole.ends_N) > MOST_STATES:
        raise InvalidOption(f"the grammar has {len(whole.ends_N)} states: at most {MOST_STATES} fit")
    return whole


def _compiled(grammar: Grammar) -> Automaton:
    """Compile in another process (`jaxinfer.grammar.compiling`), whose time and memory are bounded."""
    given = grammar.text if grammar.kind in PLAIN else json.loads(grammar.text)
    asked = json.dumps({"grammar": _without_schemas(grammar.kind, given)}).encode()
    command = [sys.executable, "-P", compiling.__file__]
    try:
        done = subprocess.run(command, input=asked, capture_output=True, timeout=2 * compiling.SECONDS)
    except subprocess.TimeoutExpired:
        raise InvalidOption(f"the grammar is too large: it took over {2 * compiling.SECONDS} s to compile") from None
    if done.returncode in (3, 4):
        reason = one_line(done.stdout.decode("utf-8", "replace"))
        raise InvalidOption(reason if done.returncode == 4 else f"the grammar cannot be compiled: {reason}")
    if done.returncode:
        bounds = f"{compiling.SECONDS} s or {compiling.MEMORY_BYTES // 2**30} GiB"
        raise InvalidOption(f"the grammar is too large: compiling it took over {bounds}")
    with np.load(io.BytesIO(done.stdout)) as arrays:
        return Automaton(arrays["next_NB"], arrays["ends_N"])


def _without_schemas(kind: str, given: Any) -> tuple[str, Any]:
    """Return a kind of grammar and what it is, of patterns alone; parts are given as a list of both of each."""
    if kind == "json_schema":
        return "regex", pattern_of(json.loads(given))
    return kind, given if kind == "regex" else [_without_schemas(*part) for part in given]


def trimmed(given: Automaton) -> Automaton:
    """Leave out the ways that lead to no end; raise InvalidOption if none is left."""
    next_NX, lives_N, before = given.next_NB, given.ends_N.copy(), _Before(given.next_NB)
    news = np.flatnonzero(lives_N)
    while news.size:
        news = before.states(news)
        news = news[~lives_N[news]]
        lives_N[news] = True
    if not lives_N[0]:
        raise InvalidOption("the grammar matches no text that the model's tokens can write")
    return given._replace(next_NB=np.where(np.append(lives_N, False)[next_NX], next_NX, DEAD).astype(np.int32))


def smallest(given: Automaton) -> Automaton:
    """Join states from which the same texts go on, and leave out those that nothing leads to.

    This is Moore's algorithm, but a round looks again only at states before those that the last round set apart: in
    the automaton of a string of up to a thousand characters there are thousands of rounds.
    """
    next_NX, before = given.next_NB, _Before(given.next_NB)
    columns_NX = np.unique(next_NX, axis=1)
    block_N = np.unique(given.ends_N, return_inverse=True)[1].reshape(-1).astype(np.int64)
    count, looked_at = int(block_N.max()) + 1, np.arange(len(block_N))
    while looked_at.size:
        own = block_N[looked_at]
        after = np.append(block_N, -1)[columns_NX[looked_at]]
        _, first, group = np.unique(
            np.concatenate([own[:, None], after], axis=1), axis=0, return_index=True, return_inverse=True
        )
        group, block_of_group = group.reshape(-1), own[first]
        # States that are not looked at go on as before and stay. Where there are none, the largest group stays.
        is_whole = np.bincount(own, minlength=count) == np.bincount(block_N, minlength=count)
        by_size = np.lexsort([np.bincount(group), block_of_group])
        is_largest = np.zeros(len(first), bool)
        is_largest[by_size[np.append(np.diff(block_of_group[by_size]) != 0, True)]] = True
        moves = ~(is_largest & is_whole[block_of_group])
        numbers = np.where(moves, count + np.cumsum(moves) - 1, block_of_group)
        block_N[looked_at] = numbers[group]
        count += int(moves.sum())
        looked_at = before.states(looked_at[moves[group]])
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


class _Before:
    """From which states an automaton leads to others."""

    def __init__(self, next_NX: np.ndarray) -> None:
        ordered_NX = np.sort(next_NX, axis=1)
        is_way_NX = ordered_NX != DEAD
        is_way_NX[:, 1:] &= ordered_NX[:, 1:] != ordered_NX[:, :-1]
        sources, places = np.nonzero(is_way_NX)
        targets = ordered_NX[sources, places]
        order = np.argsort(targets, kind="stable")
        self._sources = sources[order]
        self._begins = np.searchsorted(targets[order], np.arange(len(next_NX) + 1))

    def states(self, targets: np.ndarray) -> np.ndarray:
        """Return the states, each once, that lead to one of some others."""
        begins, counts = self._begins[targets], self._begins[targets + 1] - self._begins[targets]
        skipped = np.repeat(begins - np.cumsum(counts) + counts, counts)
        return np.unique(self._sources[skipped + np.arange(counts.sum())])
