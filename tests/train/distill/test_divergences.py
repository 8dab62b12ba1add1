"""Divergences are what their names say: by hand, at their ends, and in the direction in which they push."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.distill.divergences import DIVERGENCES, acceptance, forward_kl, jensen_shannon, reverse_kl, total_variation

P, Q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])


def logarithm(probabilities):
    return jnp.asarray(np.log(probabilities), jnp.float32)


LOG_P, LOG_Q = logarithm(P), logarithm(Q)


def random_rows(seed, scale=1.5):
    return (scale * np.random.default_rng(seed).standard_normal((4, 9))).astype(np.float32)


def log_softmax(logits):
    return jnp.asarray(logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True)), jnp.float32)


@jax.jit
def derived(log_p, logits):
    """Of each divergence the sum's gradient by the student's logits."""
    return {
        name: jax.grad(lambda logits, one=one: jnp.sum(one(log_p, jax.nn.log_softmax(logits))))(logits)
        for name, one in DIVERGENCES.items()
    }


def test_values_by_hand():
    np.testing.assert_allclose(forward_kl(LOG_P, LOG_Q), 0.25 * np.log(2), rtol=1e-6)
    skewed = logarithm([0.75, 0.125, 0.125])
    np.testing.assert_allclose(forward_kl(LOG_P, skewed), 0.5 * np.log(2 / 3) + 0.5 * np.log(2), rtol=1e-5)
    np.testing.assert_allclose(reverse_kl(LOG_P, skewed), 0.75 * np.log(1.5) + 0.25 * np.log(0.5), rtol=1e-5)
    np.testing.assert_allclose(total_variation(LOG_P, LOG_Q), 0.25, rtol=1e-6)
    np.testing.assert_allclose(acceptance(LOG_P, LOG_Q), 0.75, rtol=1e-6)
    mixture = 0.3 * P + 0.7 * Q
    expected = 0.3 * np.sum(P * np.log(P / mixture)) + 0.7 * np.sum(Q * np.log(Q / mixture))
    np.testing.assert_allclose(jensen_shannon(LOG_P, LOG_Q, 0.3), expected, rtol=1e-5)


def test_the_ends_of_beta_are_the_two_relative_entropies_and_not_zero():
    """D_beta itself vanishes there; over beta it tends to the forward one, over 1 - beta to the reverse one."""
    log_p, log_q = (log_softmax(random_rows(seed)) for seed in (0, 1))
    np.testing.assert_array_equal(jensen_shannon(log_p, log_q, 0.0), forward_kl(log_p, log_q))
    np.testing.assert_array_equal(jensen_shannon(log_p, log_q, 1.0), reverse_kl(log_p, log_q))
    near = 2e-3
    np.testing.assert_allclose(jensen_shannon(log_p, log_q, near) / near, forward_kl(log_p, log_q), rtol=0.05)
    np.testing.assert_allclose(jensen_shannon(log_p, log_q, 1 - near) / near, reverse_kl(log_p, log_q), rtol=0.05)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_is_zero_only_where_both_agree_and_never_negative(name):
    log_p, log_q = (log_softmax(random_rows(seed)) for seed in (0, 1))
    np.testing.assert_allclose(DIVERGENCES[name](log_p, log_p), 0, atol=1e-6)
    assert (np.asarray(DIVERGENCES[name](log_p, log_q)) > 0.01).all()


def test_acceptance_is_one_less_total_variation():
    log_p, log_q = (log_softmax(random_rows(seed)) for seed in (0, 1))
    np.testing.assert_allclose(acceptance(log_p, log_q), 1 - total_variation(log_p, log_q), rtol=1e-5)


def test_gradients_are_those_of_the_formulas():
    """By the student's logits: q - p of the forward KL, q (log(q / p) - KL) of the reverse."""
    log_p, logits = log_softmax(random_rows(0)), random_rows(1)
    found, log_p, log_q = derived(log_p, logits), np.asarray(log_p), np.asarray(log_softmax(logits))
    q = np.exp(log_q)
    np.testing.assert_allclose(found["forward_kl"], q - np.exp(log_p), atol=1e-5)
    relative = np.sum(q * (log_q - log_p), axis=-1, keepdims=True)
    np.testing.assert_allclose(found["reverse_kl"], q * (log_q - log_p - relative), atol=1e-5)
    sign = np.sign(q - np.exp(log_p))
    variation = 0.5 * q * (sign - np.sum(sign * q, axis=-1, keepdims=True))
    np.testing.assert_allclose(found["total_variation"], variation, atol=1e-5)


def test_the_forward_one_covers_what_the_reverse_one_leaves_out():
    """Of a student with one mode for a teacher's two: the first spreads it over both, the second keeps to one."""
    log_p = logarithm([0.499, 0.002, 0.499])
    covering, keeping = (logarithm(q) for q in ([0.34, 0.32, 0.34], [0.979, 0.002, 0.019]))
    assert forward_kl(log_p, covering) < forward_kl(log_p, keeping)
    assert reverse_kl(log_p, keeping) < reverse_kl(log_p, covering)


def test_steps_down_the_gradient_bring_the_student_nearer():
    log_p, start = log_softmax(random_rows(0)), random_rows(1)
    students = dict.fromkeys(DIVERGENCES, start)
    for _ in range(60):
        students = {name: now - 0.5 * derived(log_p, now)[name] for name, now in students.items()}
    before = np.mean(acceptance(log_p, log_softmax(start)))
    for now in students.values():
        assert np.mean(acceptance(log_p, log_softmax(np.asarray(now)))) > before + 0.15
