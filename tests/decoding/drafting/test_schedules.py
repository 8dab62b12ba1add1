"""How many tokens a draft model drafts next."""

import jax.numpy as jnp
import pytest

from jaxinfer.decoding.drafting.schedules import FIRST, MOST, first_lengths, next_lengths


def lengths_after(schedule, accepted, batch=1, most=None):
    """Return the lengths after each step, given how many drafts every row accepted in it."""
    lengths = first_lengths(batch, FIRST[schedule])
    found = []
    for counts in accepted:
        counts_B = jnp.broadcast_to(jnp.asarray(counts, jnp.int32), (batch,))
        lengths = next_lengths(schedule, lengths, counts_B, jnp.ones((batch,), bool), most or MOST[schedule])
        found.append(lengths.counts_B.tolist())
    return found


def test_bass_follows_the_published_trace():
    accepted = [7, 9, 11, 5, 5, 5, 3, 3, 3, 3, 0, 0, 0]
    assert lengths_after("bass", accepted) == [[n] for n in (9, 11, 13, 11, 8, 6, 4, 3, 5, 4, 2, 1, 1)]


def test_bass_has_one_length_for_the_batch_set_by_the_best_running_row():
    assert lengths_after("bass", [(0, 7, 3), (9, 0, 0)], batch=3) == [[9, 9, 9], [11, 11, 11]]
    lengths = first_lengths(2, 7)
    one_ended = next_lengths("bass", lengths, jnp.array([7, 2]), jnp.array([False, True]), 32)
    assert one_ended.counts_B.tolist() == [6, 6]


def test_bass_stays_within_its_limit():
    assert lengths_after("bass", list(range(7, 60, 2)))[-1] == [32]


def test_heuristic_is_two_more_after_full_acceptance_or_one_less_for_each_row():
    steps = [(5, 0), (7, 4), (8, 0), (8, 0), (8, 0), (8, 0)]
    expected = [[7, 4], [9, 6], [8, 5], [10, 4], [9, 3], [8, 2]]
    assert lengths_after("heuristic", steps, batch=2) == expected
    assert lengths_after("heuristic", [0] * 9)[-1] == [1]
    assert lengths_after("heuristic", [99] * 20)[-1] == [20]


@pytest.mark.parametrize("schedule", ["constant", "confidence"])
def test_the_others_stay_as_they_are(schedule):
    assert lengths_after(schedule, [0, 3, 99]) == [[FIRST[schedule]]] * 3
