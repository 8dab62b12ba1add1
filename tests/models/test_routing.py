"""The choice of experts: by the best scores, the lower expert among equals, in the same bits in any company."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer.models.config import Experts
from jaxinfer.models.routing import choose_experts

SOFTMAX = Experts(num_experts=12, per_token=3, ffn_dim=8)
GROUPED = replace(SOFTMAX, scoring="sigmoid", normalised=True, scale=1.5, correction_bias=True, groups=4, kept_groups=2)
MIXER = replace(SOFTMAX, scoring="sparse_mixer", spread=0.3)
LOGITS = np.random.default_rng(0).standard_normal((1, 70, 12)).astype(np.float32)
choose = jax.jit(choose_experts, static_argnums=2)


def chosen(logits: list[float], experts: Experts, correction: list[float] | None = None) -> list[int]:
    added = None if correction is None else np.array(correction, np.float32)
    return np.asarray(choose(np.array(logits, np.float32)[None, None], added, experts)[0])[0, 0].tolist()


def test_the_lower_of_equal_experts_is_chosen():
    assert chosen([1, 2, 0, 2, 1, 2, 1, 0, 0, 0, 0, 1], SOFTMAX) == [1, 3, 5]
    assert chosen([1, 2, 0, 3, 1, 1, 1, 0, 0, 0, 0, 1], SOFTMAX) == [3, 1, 0]


@pytest.mark.parametrize("scoring", ["softmax", "chosen_softmax"])
def test_weights_are_a_softmax_over_all_or_over_the_chosen(scoring):
    found, weights = (np.asarray(each)[0] for each in choose(LOGITS, None, replace(SOFTMAX, scoring=scoring)))
    powers = np.exp(LOGITS[0].astype(np.float64))
    picked = np.take_along_axis(powers, found, axis=-1)
    whole = (powers if scoring == "softmax" else picked).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(weights, picked / whole, rtol=1e-6)


def test_sigmoids_of_the_chosen_leave_the_choice_to_the_logits():
    """Of logits whose sigmoids are all 1 in float32, the largest is chosen."""
    experts = replace(SOFTMAX, per_token=2, scoring="chosen_sigmoid")
    logits = [40.0, 30, 50, 20, -1, -2, 0, 0, 0, 0, 0, 45]
    found, weights = choose(np.array(logits, np.float32)[None, None], None, experts)
    assert np.asarray(found)[0, 0].tolist() == [2, 11]
    np.testing.assert_allclose(weights[0, 0], [1, 1])
    np.testing.assert_allclose(choose(LOGITS, None, experts)[1], 1 / (1 + np.exp(-np.sort(LOGITS)[..., :-3:-1])), 1e-6)


def test_a_sparse_mixer_weighs_each_choice_among_those_near_it():
    """Two logits are near if they differ by no more than a share of the larger, or of the best."""
    experts = replace(SOFTMAX, per_token=2, scoring="sparse_mixer", spread=0.25)
    logits = [4.0, 1, 3.5, 2.9, -9, -9, -9, -9, -9, -9, -9, 2.5]
    found, weights = choose(np.array(logits, np.float32)[None, None], None, experts)
    assert np.asarray(found)[0, 0].tolist() == [0, 2]
    # Of 4, 3.5 is near, and 2.9 is not; of 3.5, 2.9 is, and 2.5 is not.
    shares = [1 / (1 + np.exp(3.5 - 4)), 1 / (1 + np.exp(2.9 - 3.5))]
    np.testing.assert_allclose(weights[0, 0], shares, rtol=1e-6)
    # Below zero the larger of both is the best, whatever its sign: none is near but by its own size.
    found, weights = choose(-np.array([*range(1, 13)], np.float32)[None, None], None, experts)
    assert np.asarray(found)[0, 0].tolist() == [0, 1]
    np.testing.assert_allclose(weights[0, 0], [1, 1])


def test_groups_are_kept_by_their_best_or_by_the_sum_of_their_two_best():
    """Of groups of three, the first has the best score, the last two have the best sums of two."""
    logits = [3.0, -3, -3, 0, 0, 0, 2, 1.9, -3, 2, 1.5, 1.4]
    none, by_two = [0.0] * 12, replace(GROUPED, per_token=4)
    assert chosen(logits, by_two, none) == [6, 9, 7, 10]
    assert chosen(logits, replace(by_two, group_score="best"), none) == [0, 6, 7, 1]
    # A correction moves the choice, and is no part of the weights.
    correction = np.array([9.0] * 3 + [0.0] * 9, np.float32)
    found, weights = choose(np.array(logits, np.float32)[None, None], correction, by_two)
    assert np.asarray(found)[0, 0].tolist() == [0, 1, 2, 6]
    scores = 1 / (1 + np.exp(-np.array([3.0, -3, -3, 2])))
    np.testing.assert_allclose(weights[0, 0], 1.5 * scores / scores.sum(), rtol=1e-6)


@pytest.mark.optimised
@pytest.mark.parametrize("experts", [SOFTMAX, GROUPED, MIXER], ids=["softmax", "groups", "mixer"])
def test_a_tokens_choice_has_the_same_bits_in_any_company(experts):
    """Of a thousand tokens too, whose exponentials the compiler computes otherwise than those of a few."""
    many = np.random.default_rng(1).standard_normal((16, 64, 12)).astype(np.float32)
    correction = many[0, 0] / 8 if experts is GROUPED else None
    whole = [np.asarray(each) for each in choose(many, correction, experts)]
    for count in (1, 3, 16, 64):
        for one, all_of_them in zip(choose(many[:1, :count], correction, experts), whole):
            assert (np.asarray(one) == all_of_them[:1, :count]).all()
