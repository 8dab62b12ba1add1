"""On a CPU, a row's probabilities are added up to the same bits in any company, whatever is computed around them.

XLA's own sums are the counterexample: log-softmax of 300 logits differs between two and six rows.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.ops.cpu_kernels.masses import masses_module, total_masses
from jaxinfer.ops.rounding import rounded
from jaxinfer.sampling.draw import log_probabilities
from jaxinfer.sampling.mass import log_softmax
from jaxinfer.sampling.threshold import top_p_threshold
from tests.ops.foreign_calls import HOST, POOLS, Calls, drawn
from tests.toys import float32_backend

BACKEND = float32_backend()


def directly(calls, scores, largest, least):
    return calls.call([scores, largest, least], [largest.shape] * 2)


@POOLS
def test_whatever_the_pool_does_masses_are_added_up_and_records_freed(pool):
    rng = np.random.default_rng(0)
    calls = Calls(masses_module(HOST), pool, threads=5)
    for rows, length in itertools.product((0, 1, 9), (1, 7, 31, 32, 33, 300, 20_011)):
        scores, least = 5 * drawn(rng, (rows, length)), drawn(rng, (rows,)) - 5
        largest = scores.max(axis=1, initial=-9)
        totals, logarithms = directly(calls, scores, largest, least)
        counted = np.where(scores >= least[:, None], np.exp(scores.astype(np.float64) - largest[:, None]), 0)
        np.testing.assert_allclose(totals, counted.sum(axis=1), rtol=2e-6)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(logarithms, np.log(totals), rtol=1e-6, atol=1e-7)
    calls.finish()


def test_exponentials_of_all_powers():
    """One score a row: each power between those that count as 0 and the highest; hidden and infinite scores."""
    calls = Calls(masses_module(HOST))
    powers = np.concatenate([np.linspace(-120, 88, 4001), [0, -np.inf, np.inf]]).astype(np.float32)
    zeros = np.zeros_like(powers)
    totals, _ = directly(calls, powers[:, None], zeros, zeros - np.inf)
    expected = np.exp(np.clip(powers.astype(np.float64), None, 88))
    expected[powers < -86] = 0
    np.testing.assert_allclose(totals, expected, rtol=3e-7)
    assert totals[powers == 0] == 1


def test_a_row_has_the_same_bits_alone_and_in_company():
    rng = np.random.default_rng(1)
    calls = Calls(masses_module(HOST), threads=3)
    for length in (31, 300, 4099):
        scores, zeros = drawn(rng, (17, length)), np.zeros(17, np.float32)
        together = directly(calls, scores, zeros, zeros - 1)
        for part in (np.s_[:1], np.s_[16:], np.s_[3:6]):
            for found, expected in zip(directly(calls, scores[part], zeros[part], zeros[part] - 1), together):
                np.testing.assert_array_equal(found, expected[part])


def test_a_total_does_not_increase_with_its_threshold():
    rng = np.random.default_rng(2)
    calls = Calls(masses_module(HOST))
    row = drawn(rng, (1, 333))
    totals = directly(calls, row.repeat(333, axis=0), np.full(333, 4, np.float32), np.sort(row[0]))[0]
    assert np.all(np.diff(totals) <= 0)
    assert totals[-1] > 0
    nan = np.full(1, np.nan, np.float32)
    assert directly(calls, row, np.zeros(1, np.float32), nan)[0] == 0


@pytest.mark.optimised
@pytest.mark.parametrize("vocab_size", [31, 300])
def test_what_is_said_of_a_row_does_not_depend_on_its_batch_or_tree(vocab_size):
    rng = np.random.default_rng(3)
    logits = 4 * drawn(rng, (85, vocab_size))
    tokens = rng.integers(0, vocab_size, 85)

    @jax.jit
    def said(logits, tokens):
        top_p = jnp.full(logits.shape[:2], 0.8, jnp.float32)
        # Rounded, as products in the decoder are: what is computed anew in another place then has the same bits.
        edited = rounded(logits / 0.7) + 1
        return (
            log_probabilities(edited, tokens, BACKEND),
            log_softmax(edited, BACKEND),
            top_p_threshold(edited, jnp.full_like(top_p, -jnp.inf), top_p, BACKEND),
        )

    together = said(logits[:, None], tokens[:, None])
    for shape in ((1, 1), (1, 2), (2, 3), (3, 1), (5, 7), (17, 5)):
        count = math.prod(shape)
        part = said(logits[:count].reshape(*shape, -1), tokens[:count].reshape(shape))
        for found, expected in zip(part, together):
            np.testing.assert_array_equal(np.asarray(found).reshape(expected[:count].shape), expected[:count])


@pytest.mark.slow
def test_kernels_and_xla_agree():
    rng = np.random.default_rng(4)
    logits = jnp.asarray(4 * drawn(rng, (2, 3, 300))).at[:, :, 7].set(-jnp.inf)
    tokens, top_p = jnp.full((2, 3), 5), jnp.full((2, 3), 0.9)
    for function, rest in (
        (log_softmax, ()),
        (log_probabilities, (tokens,)),
        (top_p_threshold, (jnp.full((2, 3), -3.0), top_p)),
    ):
        np.testing.assert_allclose(function(logits, *rest, BACKEND), function(logits, *rest), rtol=1e-5)
    nothing = jnp.full((1, 1, 40), -jnp.inf)
    assert np.isnan(log_probabilities(nothing, jnp.zeros((1, 1), int), BACKEND)).all()


def test_other_numbers_are_refused():
    with pytest.raises(ValueError, match="no masses"):
        total_masses(jnp.zeros((2, 8), jnp.bfloat16), jnp.zeros(2), jnp.zeros(2))


@pytest.mark.slow
def test_log_probabilities_have_the_gradient_of_softmax():
    logits, tokens = jnp.asarray(drawn(np.random.default_rng(3), (2, 3, 40))), jnp.arange(6).reshape(2, 3)
    found, of_all = (
        jax.grad(compute)(logits)
        for compute in (
            lambda logits: log_probabilities(logits, tokens, BACKEND).sum(),
            lambda logits: (log_softmax(logits, BACKEND) * jax.nn.one_hot(tokens, 40)).sum(),
        )
    )
    expected = jax.nn.one_hot(tokens, 40) - jax.nn.softmax(logits)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(of_all, expected, atol=1e-6)
