import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.sampling import SamplingParams, draw, gumbel, margins, request_key
from tests.sampling.rows import arrays_of, blank_history

V = 32
margin = jax.jit(margins)
drawn = jax.jit(draw)
noise = jax.jit(gumbel)


def margin_of(logits_V, params):
    batch = np.asarray(logits_V, np.float32)[None, None]
    return float(margin(batch, np.array([[1]], np.int32), arrays_of([params], V), blank_history(1))[0, 0])


def test_a_greedy_margin_is_the_gap_of_the_two_best_and_zero_at_a_tie():
    logits = np.zeros(V)
    logits[4], logits[9] = 3.0, 2.5
    assert margin_of(logits, SamplingParams()) == pytest.approx(0.5)
    logits[9] = 3.0
    assert margin_of(logits, SamplingParams()) == 0.0


def boundary_case(name):
    """Give token 0 noise to win if a boundary lets it in, and return its distance to that boundary."""
    logits = np.full(V, -30.0)
    logits[:4] = [1.0, 2.0, 2.5, 3.0]
    weights = np.exp(logits - logits.max())
    share_above = weights[1:4].sum() / weights.sum()
    options, distance = {
        "top_k": ({"top_k": 3}, 1.0),
        "top_p": ({"top_p": share_above - 0.01}, 0.01),
        "min_p": ({"min_p": float(np.exp(-2.0 + 0.125))}, 0.125),
    }[name]
    keys = np.stack([request_key(seed) for seed in range(400)])
    perturbed = logits + np.asarray(noise(keys, 1, 0, np.arange(V)))
    scores, first = np.sort(perturbed[:, 1:4]), perturbed[:, 0]
    seed = int(np.flatnonzero((first > scores[:, 2]) & (scores[:, 2] - scores[:, 1] > 1.5))[0])
    return logits, SamplingParams(temperature=1.0, seed=seed, **options), distance


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_a_token_that_would_win_from_outside_is_as_near_as_its_boundary(name):
    logits, params, distance = boundary_case(name)
    assert margin_of(logits, params) == pytest.approx(distance, rel=1e-3)


def test_a_drawn_token_leaves_the_top_k_once_the_first_dropped_token_overtakes_it():
    logits = np.full(V, -30.0)
    logits[:2] = 3.0, 2.875
    keys = np.stack([request_key(seed) for seed in range(100)])
    noise_SV = np.asarray(noise(keys, 1, 0, np.arange(V)))
    seed = int(np.flatnonzero(noise_SV[:, 0] > noise_SV[:, 1] + 2)[0])  # so that it would not lead
    assert margin_of(logits, SamplingParams(temperature=1.0, seed=seed, top_k=1)) == pytest.approx(0.125, rel=1e-3)


@pytest.mark.slow
@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.integers(0, 2**20), st.integers(0, V), st.floats(0.05, 1), st.floats(0, 0.5))
def test_a_change_well_under_the_margin_never_changes_the_draw(seed, top_k, top_p, min_p):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(1, 16, V)).astype(np.float32) * 2
    params = SamplingParams(temperature=1.0, seed=seed, top_k=top_k, top_p=top_p, min_p=min_p)
    arrays, positions, history = arrays_of([params], V), np.arange(16, dtype=np.int32)[None], blank_history(1)
    change = 1e-2
    # A gap between two logits moves by twice the change at the most, a share of the mass by less.
    safe = np.asarray(margin(logits, positions, arrays, history)) > 2.1 * change
    before = np.asarray(drawn(logits, positions, arrays, history))
    for _ in range(3):
        changed = logits + rng.choice([-change, change], size=logits.shape).astype(np.float32)
        after = np.asarray(drawn(changed, positions, arrays, history))
        assert (after == before)[safe].all()
    assert safe.any()
