"""Divergences are what their names say: by hand, at their ends, and in the direction in which they push."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.distill.divergences import DIVERGENCES, acceptance, forward_kl, jensen_shannon, reverse_kl, total_variation

P, Q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
LOG_P, LOG_Q = jnp.log(P), jnp.log(Q)


def random_rows(seed, scale=1.5):
    logits = scale * np.random.default_rng(seed).standard_normal((4, 9))
    return jnp.asarray(logits, jnp.float32)


def test_values_by_hand():
    np.testing.assert_allclose(forward_kl(LOG_P, LOG_Q), 0.25 * np.log(2), rtol=1e-6)
    skewed = jnp.log(jnp.array([0.75, 0.125, 0.125]))
    np.testing.assert_allclose(forward_kl(LOG_P, skewed), 0.5 * np.log(2 / 3) + 0.5 * np.log(2), rtol=1e-5)
    np.testing.assert_allclose(reverse_kl(LOG_P, skewed), 0.75 * np.log(1.5) + 0.25 * np.log(0.5), rtol=1e-5)
    np.testing.assert_allclose(total_variation(LOG_P, LOG_Q), 0.25, rtol=1e-6)
    np.testing.assert_allclose(acceptance(LOG_P, LOG_Q), 0.75, rtol=1e-6)
    mixture = 0.3 * P + 0.7 * Q
    expected = 0.3 * np.sum(P * np.log(P / mixture)) + 0.7 * np.sum(Q * np.log(Q / mixture))
    np.testing.assert_allclose(jensen_shannon(LOG_P, LOG_Q, 0.3), expected, rtol=1e-5)


def test_the_ends_of_beta_are_the_two_relative_entropies_and_not_zero():
    """D_beta itself vanishes there; over beta it tends to the forward one, over 1 - beta to the reverse one."""
    log_p, log_q = (jax.nn.log_softmax(random_rows(seed)) for seed in (0, 1))
    np.testing.assert_array_equal(jensen_shannon(log_p, log_q, 0.0), forward_kl(log_p, log_q))
    np.testing.assert_array_equal(jensen_shannon(log_p, log_q, 1.0), reverse_kl(log_p, log_q))
    near = 2e-3
    np.testing.assert_allclose(jensen_shannon(log_p, log_q, near) / near, forward_kl(log_p, log_q), rtol=0.05)
    np.testing.assert_allclose(jensen_shannon(log_p, log_q, 1 - near) / near, reverse_kl(log_p, log_q), rtol=0.05)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_is_zero_only_where_both_agree_and_never_negative(name):
    log_p, log_q = (jax.nn.log_softmax(random_rows(seed)) for seed in (0, 1))
    np.testing.assert_allclose(DIVERGENCES[name](log_p, log_p), 0, atol=1e-6)
    assert (np.asarray(DIVERGENCES[name](log_p, log_q)) > 0.01).all()


def test_acceptance_is_one_less_total_variation():
    log_p, log_q = (jax.nn.log_softmax(random_rows(seed)) for seed in (0, 1))
    np.testing.assert_allclose(acceptance(log_p, log_q), 1 - total_variation(log_p, log_q), rtol=1e-5)


def test_gradients_are_those_of_the_formulas():
    """By the student's logits: q - p of the forward KL, q (log(q / p) - KL) of the reverse."""
    log_p, logits = jax.nn.log_softmax(random_rows(0)), random_rows(1)
    q, log_q = jax.nn.softmax(logits), jax.nn.log_softmax(logits)

    def gradient(divergence):
        return jax.grad(lambda logits: jnp.sum(divergence(log_p, jax.nn.log_softmax(logits))))(logits)

    np.testing.assert_allclose(gradient(forward_kl), q - jnp.exp(log_p), atol=1e-5)
    reverse = q * (log_q - log_p - reverse_kl(log_p, log_q)[:, None])
    np.testing.assert_allclose(gradient(reverse_kl), reverse, atol=1e-5)
    sign = jnp.sign(q - jnp.exp(log_p))
    variation = 0.5 * q * (sign - jnp.sum(sign * q, axis=-1, keepdims=True))
    np.testing.assert_allclose(gradient(total_variation), variation, atol=1e-5)


def test_the_forward_one_covers_what_the_reverse_one_leaves_out():
    """Of a student with one mode for a teacher's two: the first spreads it over both, the second keeps to one."""
    log_p = jnp.log(jnp.array([0.499, 0.002, 0.499]))
    covering, keeping = (jnp.log(jnp.array(q)) for q in ([0.34, 0.32, 0.34], [0.979, 0.002, 0.019]))
    assert forward_kl(log_p, covering) < forward_kl(log_p, keeping)
    assert reverse_kl(log_p, keeping) < reverse_kl(log_p, covering)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_step_down_the_gradient_brings_the_student_nearer(name):
    log_p, logits = jax.nn.log_softmax(random_rows(0)), random_rows(1)

    def mean(logits):
        return jnp.mean(DIVERGENCES[name](log_p, jax.nn.log_softmax(logits)))

    for _ in range(60):
        logits = logits - 0.5 * 4 * jax.grad(mean)(logits)
    taken = jnp.mean(acceptance(log_p, jax.nn.log_softmax(logits)))
    assert taken > jnp.mean(acceptance(log_p, jax.nn.log_softmax(random_rows(1)))) + 0.15
