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
        _, block_N = np.unique(np.concatenate([block_N[:, None], signature_NX], axis=1), axis=0, return_inverse=True)
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
