"""Automata lose what leads to no end and join what goes on alike, however deep they are."""

import time

import numpy as np

from jaxinfer.errors import InvalidOption
from jaxinfer.grammar.automaton import DEAD, Automaton, smallest, trimmed


def words(found: Automaton, length: int) -> list[bool]:
    """Tell of each word of so many letters at most whether it may come."""
    states, told = np.zeros(1, np.int32), []
    for _ in range(length + 1):
        told += np.append(found.ends_N, False)[states].tolist()
        states = np.concatenate([found.next_NB, np.full((1, found.next_NB.shape[1]), DEAD)])[states].reshape(-1)
    return told


def distinct(found: Automaton) -> int:
    """Count the states that the words from them tell apart."""
    told = set()
    for first in range(len(found.ends_N)):
        order = np.arange(len(found.ends_N))
        order[[0, first]] = first, 0
        places = np.append(np.argsort(order), DEAD)
        told.add(tuple(words(Automaton(places[found.next_NB[order]], found.ends_N[order]), len(order))))
    return len(told)


def test_the_smallest_automaton_has_the_same_words_and_no_two_states_alike():
    rng = np.random.default_rng(0)
    for _ in range(150):
        size, density = int(rng.integers(1, 9)), rng.random(2)
        next_NB = np.where(rng.random((size, 2)) < density[0], DEAD, rng.integers(0, size, (size, 2)))
        given = Automaton(next_NB.astype(np.int32), rng.random(size) < density[1])
        try:
            found = smallest(trimmed(given))
        except InvalidOption:
            assert not any(words(given, size))
            continue
        assert words(found, 9) == words(given, 9)
        assert distinct(found) == len(found.ends_N)


def test_a_string_of_up_to_eight_hundred_letters_is_soon_as_small_as_it_can_be():
    """With every state looked at in every round, this takes minutes."""
    size = 800
    # A letter has one byte, or two of which the first has two forms that mean the same.
    next_NB = np.full((3 * size + 1, 256), DEAD, np.int32)
    begins = 3 * np.arange(size)
    next_NB[begins, 0] = next_NB[begins + 1, 3] = next_NB[begins + 2, 3] = begins + 3
    next_NB[begins, 1], next_NB[begins, 2] = begins + 1, begins + 2
    began = time.process_time()
    found = smallest(trimmed(Automaton(next_NB, np.arange(3 * size + 1) % 3 == 0)))
    assert time.process_time() - began < 5
    assert len(found.ends_N) == 2 * size + 1
