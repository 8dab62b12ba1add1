"""The model in fewer bits decodes ahead in the model's own cache, whatever drafts for it."""

from typing import Any

import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.decoding.batch import Request, RunningBatch
from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.decoding.strategies.cascade import Cascade
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.decoding.strategies.medusa import Medusa
from jaxinfer.decoding.strategies.prompt_lookup import PromptLookup
from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from jaxinfer.errors import InvalidOption
from jaxinfer.ops.few_bits.formats import int4
from tests.decoding.fitted_heads import fit_plain
from tests.decoding.rows import SAMPLINGS, request, run
from tests.decoding.strategy_cases import TREE, perturbed
from tests.toys import TINY_LLAMA, float32_backend, random_params

NUM_NEW, DEPTH = 40, 5
PROMPTS = [np.random.default_rng(length).integers(2, 258, length).tolist() for length in (60, 3, 90)]
REQUESTS = [request(prompt, NUM_NEW, sampling) for prompt, sampling in zip(PROMPTS, SAMPLINGS)]


@pytest.fixture(scope="module")
def lm():
    return LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA), float32_backend())


@pytest.fixture(scope="module")
def plain(lm):
    return run(lm, REQUESTS)


def with_weights(lm: LanguageModel, params: Any, drafter: Any) -> Any:
    """Let these weights of the model's shape decode ahead."""
    at_hand = {"config": lm.config, "backend": lm.backend, "params": params}
    return lm.resolve(Cascade(num_draft_tokens=DEPTH, drafter=drafter, **at_hand))


def heads_and_text(lm: LanguageModel) -> SumOfDrafters:
    heads = fit_plain(lm, [token for prompt in PROMPTS for token in prompt], 3)
    return SumOfDrafters((Medusa(params=heads, paths=TREE), PromptLookup(num_draft_tokens=3)), 8)


@pytest.mark.slow
def test_the_weights_are_rounded_and_change_no_token(lm, plain):
    strategy: Any = lm.resolve(f"cascade:num_draft_tokens={DEPTH}")
    assert strategy.params["blocks"]["layer_0"]["mlp"]["up"]["kernel"].form == int4(32, False)
    # What is not rounded is not copied either.
    assert strategy.params["final_norm"]["scale"] is lm.params["final_norm"]["scale"]
    found = run(lm, REQUESTS, strategy)
    assert [row.tokens for row in found] == [row.tokens for row in plain]
    counts = [row.counts for row in found]
    assert 0.2 < sum(each.accepted for each in counts) / sum(each.drafted for each in counts) < 1


@pytest.mark.slow
def test_weights_that_are_the_models_are_taken_whole(lm, plain):
    """Their drafts are in the model's own cache, which each step writes anew, and they end where the text does."""
    for found, expected in zip(run(lm, REQUESTS, with_weights(lm, lm.params, heads_and_text(lm))), plain):
        assert found.tokens == expected.tokens
        assert found.counts.accepted == found.counts.drafted > 0
        assert found.counts.steps == -(-(NUM_NEW - 1) // (DEPTH + 1))


@pytest.mark.slow
def test_steps_ahead_are_counted(lm):
    """Of what the weights draft alone, each token is a step; with drafters that are right, fewer are."""
    counted = []
    itself = DraftModel(num_draft_tokens=2, config=lm.config, backend=lm.backend, params=lm.params)
    for drafter in (Autoregressive(), itself):
        batch = RunningBatch(lm.programs, lm.params, with_weights(lm, lm.params, drafter), REQUESTS, (), 256)
        batch.advance(3)
        counted.append([np.asarray(values) for values in (batch._state.steps_ahead_B, batch._state.drafted_B)])
    (alone_B, drafted_B), (fewer_B, same_B) = counted
    assert (drafted_B == 3 * DEPTH).all()
    np.testing.assert_array_equal(alone_B, drafted_B)
    np.testing.assert_array_equal(same_B, drafted_B)
    assert (fewer_B < alone_B).all()


@pytest.mark.exhaustive
def test_what_drafts_for_the_drafter_changes_no_draft(lm, plain):
    """With heads and the text, and with nothing, the weights draft the same, so the same is taken."""
    weights = perturbed(lm.params, 0.3)
    with_heads, without = (
        run(lm, REQUESTS, with_weights(lm, weights, drafter)) for drafter in (heads_and_text(lm), Autoregressive())
    )
    assert [row.tokens for row in with_heads] == [row.tokens for row in plain]
    assert [row.counts.accepted_by_depth for row in with_heads] == [row.counts.accepted_by_depth for row in without]
    assert sum(row.counts.drafted - row.counts.accepted for row in without) > 5


def test_a_draft_is_as_long_as_drafts_have_been_right(lm):
    """Weights that agree with the model in nothing are asked for one token in the end."""
    strategy = with_weights(lm, perturbed(lm.params, 3.0), Autoregressive())
    drafted = [row.counts.drafted for row in run(lm, REQUESTS, strategy)]
    for row, count in zip(run(lm, REQUESTS), drafted):
        steps = len(row.tokens) - 1
        assert steps <= count <= steps + DEPTH * (DEPTH - 1) / 2 + 2 * DEPTH


@pytest.mark.slow
def test_heads_go_on_from_what_the_model_has_taken(lm):
    """Of the chains some were taken in part: the heads read the last hidden state of the text, not of a draft."""
    strategy = with_weights(lm, perturbed(lm.params, 0.3), heads_and_text(lm))
    batch = RunningBatch(lm.programs, lm.params, strategy, REQUESTS, (), 256)
    batch.advance(4)
    state = batch._state
    texts = [np.asarray(state.tokens_BS[row, : state.lengths_B[row]]).tolist() for row in range(len(REQUESTS))]
    assert any(batch.counts(row).accepted < batch.counts(row).drafted for row in range(len(REQUESTS)))
    requests = [Request(text[:-1], len(text) + 30, REQUESTS[0].sampling) for text in texts]
    anew = RunningBatch(lm.programs, lm.params, strategy, requests, (), 256)
    found, wanted = (np.asarray(each._memory.of_drafter.memories[0]) for each in (batch, anew))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused_in_one_line(lm):
    refused = {
        "cascade:weights=int9": "unknown weights",
        "cascade:weights=gguf": "cascade: gguf is no form to round",
        "cascade:weights=int4:group=128": "cascade: weights=int4:group=128: .* do not divide into groups of 128",
        "cascade:nodes=1": "cascade: nodes=1 is not a whole number from 2",
        "cascade:num_draft_tokens=65": "cascade: num_draft_tokens=65 is not a whole number from 1",
        "cascade+prompt_lookup": "cascade cannot be part of a sum",
    }
    for spec, message in refused.items():
        with pytest.raises(InvalidOption, match=message):
            lm.resolve(spec)


def test_a_step_has_room_for_the_tree_that_follows_the_last_draft_but_one(lm):
    strategy = with_weights(lm, lm.params, heads_and_text(lm))
    assert strategy.headroom >= DEPTH - 1 + strategy.drafter.num_nodes
