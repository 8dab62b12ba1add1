"""Drafts verified by rejection leave the target's distribution as it is, whether they are good or poor.

Each check is a chi-square on the joint law of the first three tokens. With `FALSE_ALARM` for each of `NUM_CHECKS`,
code that is right fails this file with a probability of at most 1e-6, and as seeds are fixed, not by chance later on.
"""

from dataclasses import replace

import numpy as np
import pytest

from jaxinfer import LanguageModel, SamplingParams, Strategy
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.decoding.strategies.layerskip import LayerSkip
from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.notation import Params
from tests.decoding.acceptance.joint_law import chance, draft_and_reject, kept, random_chains
from tests.decoding.covered_models import damp_last_layer
from tests.decoding.rows import request
from tests.decoding.strategy_cases import perturbed, with_model
from tests.decoding.watched import run_watched
from tests.toys import TINY_LLAMA, float32_backend, random_params

NUM_CHECKS = 10
FALSE_ALARM = 1e-6 / NUM_CHECKS
VOCAB_SIZE = 5
CONFIG = replace(
    TINY_LLAMA,
    vocab_size=VOCAB_SIZE,
    model_dim=16,
    ffn_dim=32,
    num_heads=2,
    num_kv_heads=1,
    layer_pattern=(LayerKind(Rope(1e4, 8)),),
)
PROMPT = (1, 3, 2)
SAMPLING = SamplingParams(temperature=0.8, top_k=4, frequency_penalty=0.7)
NUM_TEXTS = 6000
LENGTH = 5


def next_law(logits_V: np.ndarray, output: tuple[int, ...]) -> np.ndarray:
    """Return what a token is drawn from, by the definition of the sampling parameters."""
    tempered_V = (logits_V - 0.7 * np.bincount(output, minlength=VOCAB_SIZE)) / 0.8
    weights_V = np.where(tempered_V >= np.sort(tempered_V)[-4], np.exp(tempered_V), 0)
    return weights_V / weights_V.sum()


def law(lm: LanguageModel) -> np.ndarray:
    """Return the joint law of the first three tokens, from the model's logits after every beginning."""
    pairs = [(first, second) for first in range(VOCAB_SIZE) for second in range(VOCAB_SIZE)]
    logits_NTV = np.asarray(lm.logits([[*PROMPT, *pair] for pair in pairs]), np.float64)[:, len(PROMPT) - 1 :]
    law_VVV = np.zeros((VOCAB_SIZE,) * 3)
    for (first, second), (zero_V, one_V, two_V) in zip(pairs, logits_NTV):
        of_pair = next_law(zero_V, ())[first] * next_law(one_V, (first,))[second]
        law_VVV[first, second] = of_pair * next_law(two_V, (first, second))
    return law_VVV


def check_law(lm: LanguageModel, strategy: Strategy) -> dict[str, int]:
    """Check the texts of many seeds, drawn as one batch, and return what was seen."""
    requests = [request(PROMPT, LENGTH, replace(SAMPLING, seed=seed)) for seed in range(NUM_TEXTS)]
    assert strategy.exactness == "distribution"
    found = run_watched(lm, requests, strategy)
    assert chance(np.array(found.tokens)[:, :3], law(lm)) > FALSE_ALARM
    assert found.seen["deep"] > NUM_TEXTS / 100
    assert found.seen["refused"] > NUM_TEXTS / 100
    return found.seen


def model_of(params: Params) -> LanguageModel:
    return LanguageModel(CONFIG, params, float32_backend(), max_len=len(PROMPT) + LENGTH)


@pytest.mark.exhaustive
def test_texts_of_a_good_and_a_poor_draft_model_follow_the_law():
    lm, strategy = model_of(random_params(CONFIG, 1)), DraftModel(num_draft_tokens=3, verify="rejection")
    good = check_law(lm, with_model(strategy, lm, perturbed(lm.params, 0.1)))
    poor = check_law(lm, with_model(strategy, lm, random_params(CONFIG, 2)))
    assert poor["refused"] > 1.5 * good["refused"]


@pytest.mark.exhaustive
def test_texts_of_good_and_of_poor_first_layers_follow_the_law():
    strategy, params = LayerSkip(exit_layer=1, num_draft_tokens=3, verify="rejection"), random_params(CONFIG, 1)
    lm = model_of(damp_last_layer(CONFIG, params, 0.1))
    good = check_law(lm, strategy)
    lm.params = damp_last_layer(CONFIG, params, 3.0)
    poor = check_law(lm, strategy)
    assert poor["refused"] > 1.5 * good["refused"]


@pytest.mark.parametrize("distance", [pytest.param(0.3, marks=pytest.mark.slow), 2.0])
def test_trees_with_equal_siblings_follow_the_law(distance):
    """A sibling is tried on what those before it have left, which is nothing where they were the same token."""
    target = random_chains(0, VOCAB_SIZE)
    game = draft_and_reject(target, random_chains(1, VOCAB_SIZE, target, distance), 40_000)
    assert chance(game.tokens_N3, target.law_VVV) > FALSE_ALARM
    assert min(np.bincount(game.taken_N)[1:]) > 100
    assert game.later_N.sum() > 500


@pytest.mark.parametrize(("distance", "count"), [(1.0, VOCAB_SIZE), (2.0, 2)])
def test_trees_of_distinct_siblings_follow_the_law(distance, count):
    """Of two likely tokens the third sibling is no draw any more."""
    target = random_chains(0, VOCAB_SIZE)
    drafter = kept(random_chains(1, VOCAB_SIZE, target, distance), count)
    game = draft_and_reject(target, drafter, 40_000, is_distinct=True)
    assert chance(game.tokens_N3, target.law_VVV) > FALSE_ALARM
    assert min(np.bincount(game.taken_N)[1:]) > 100
    assert game.later_N.sum() > 500


@pytest.mark.exhaustive
def test_texts_of_trees_of_a_draft_model_follow_the_law():
    lm, strategy = model_of(random_params(CONFIG, 1)), DraftModel(tree="3.2.1", verify="rejection")
    good, poor = (
        check_law(lm, lm.resolve(with_model(strategy, lm, weights)))
        for weights in (perturbed(lm.params, 0.1), random_params(CONFIG, 2))
    )
    assert poor["refused"] > 1.5 * good["refused"]
    assert min(good["later"], poor["later"]) > NUM_TEXTS / 20
