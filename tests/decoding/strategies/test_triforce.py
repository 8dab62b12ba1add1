"""TriForce changes no token; its inner speculation is lossless, and it counts every read of the weights."""

from dataclasses import replace

import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.decoding.strategies.triforce import TriForce
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import LayerKind, Rope
from tests.decoding.rows import LEAST_MARGIN, SAMPLINGS, least_margin, request, run
from tests.decoding.strategy_cases import perturbed
from tests.toys import TINY_LLAMA, float32_backend, random_params

# From shorter than all caches to much longer, so that chunks are chosen, and chosen anew.
LENGTHS, NUM_NEW, DEPTH = (60, 3, 140, 17, 90), 40, 4
SMALL = TriForce(num_draft_tokens=DEPTH, num_inner_tokens=2, budget=32, chunk=8, sinks=4, window=16, renew_steps=3)
PROMPTS = [np.random.default_rng(length).integers(2, 258, length).tolist() for length in LENGTHS]
SAMPLED = [request(prompt, NUM_NEW, sampling) for prompt, sampling in zip(PROMPTS, SAMPLINGS)]
GREEDY = [request(prompt, NUM_NEW) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def lm():
    return LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA), float32_backend())


@pytest.fixture(scope="module", params=["sampled", "greedy"])
def asked(request):
    return {"sampled": SAMPLED, "greedy": GREEDY}[request.param]


def check_same(lm, requests, strategy):
    plain, rows = run(lm, requests), run(lm, requests, strategy)
    assert [row.tokens for row in rows] == [row.tokens for row in plain]
    for row, other in zip(rows, plain):
        np.testing.assert_allclose(row.logprobs, other.logprobs, atol=1e-4)
    return plain, rows


@pytest.mark.exhaustive
def test_no_token_changes_and_drafts_are_taken_and_refused(lm, asked):
    plain, rows = check_same(lm, asked, SMALL)
    assert min(least_margin(lm, *one) for one in zip(asked, [row.tokens for row in plain])) > LEAST_MARGIN
    assert sum(row.counts.accepted_by_depth[1] > 0 for row in rows) >= 3
    assert sum(row.counts.drafted - row.counts.accepted for row in rows) > 5


@pytest.mark.parametrize(
    "asked",
    [pytest.param("greedy", marks=pytest.mark.exhaustive), pytest.param("sampled", marks=pytest.mark.exhaustive)],
    indirect=True,
)
def test_the_inner_speculation_is_lossless(lm, asked):
    """With and without it the retrieval cache drafts the same, so the full cache takes the same, step by step."""
    with_inner, without = (run(lm, asked, replace(SMALL, num_inner_tokens=inner)) for inner in (2, 0))
    assert [row.counts.accepted_by_depth for row in with_inner] == [row.counts.accepted_by_depth for row in without]
    assert [row.counts.drafted for row in with_inner] == [row.counts.drafted for row in without]
    # Without it a step reads the weights once a draft and once to verify.
    for row in without:
        assert row.counts.target_passes == row.counts.steps + row.counts.drafted
    # With it a round reads them at least twice for at most three tokens, and at most three times for one.
    for row in with_inner:
        inner_passes = row.counts.target_passes - row.counts.steps
        assert 2 / 3 * row.counts.drafted <= inner_passes <= 3 * row.counts.drafted


@pytest.mark.exhaustive
def test_a_budget_that_holds_the_text_drafts_what_the_target_draws(lm, asked):
    rows = run(lm, asked, replace(SMALL, budget=184))
    for row in rows:
        assert row.counts.accepted == row.counts.drafted > 0
        # The last draft leaves room for the token that verifying gives.
        assert row.counts.accepted + row.counts.steps == NUM_NEW - 1
        assert row.counts.steps == -(-(NUM_NEW - 1) // (DEPTH + 1))


def with_drafter(lm, strategy, params):
    return lm.resolve(replace(strategy, drafter="small", config=lm.config, backend=lm.backend, params=params))


@pytest.mark.slow
def test_a_drafter_that_is_the_target_is_taken_whole_at_both_levels(lm):
    """Its cache stays right after each: one round on the retrieval cache gives what goes to the full one."""
    alike = with_drafter(lm, replace(SMALL, budget=184, window=184, num_inner_tokens=DEPTH - 1), lm.params)
    requests = [SAMPLED[0], GREEDY[2]]
    plain, rows = run(lm, requests), run(lm, requests, alike)
    for row, expected in zip(rows, plain):
        assert row.tokens == expected.tokens
        assert row.counts.accepted == row.counts.drafted > 0
        assert row.counts.steps == -(-(NUM_NEW - 1) // (DEPTH + 1))
        assert row.counts.target_passes == 2 * row.counts.steps


@pytest.mark.exhaustive
def test_a_drafter_of_any_quality_changes_no_token_and_none_of_what_the_target_takes(lm, asked):
    with_small = with_drafter(lm, SMALL, perturbed(lm.params, 0.2))
    _, rows = check_same(lm, asked, with_small)
    without = run(lm, asked, replace(SMALL, num_inner_tokens=0))
    assert [row.counts.accepted_by_depth for row in rows] == [row.counts.accepted_by_depth for row in without]
    assert sum(row.counts.target_passes for row in rows) < sum(row.counts.target_passes for row in without)


@pytest.mark.exhaustive
def test_which_chunks_are_held_matters_and_follows_the_text(lm):
    """Chosen anew less often, they serve differently; or what was asked for would not be looked at."""
    often, seldom = (run(lm, GREEDY, replace(SMALL, renew_steps=steps)) for steps in (3, 10))
    assert [row.tokens for row in often] == [row.tokens for row in seldom]
    assert [row.counts.accepted_by_depth for row in often] != [row.counts.accepted_by_depth for row in seldom]


@pytest.mark.exhaustive
def test_windows_learned_positions_and_a_stop_token_change_nothing():
    """Windowed layers draft over their own ring; a text may end inside a draft, at every level."""
    kinds = LayerKind(None), LayerKind(None, 12)
    config = replace(TINY_LLAMA, layer_pattern=kinds, learned_positions=0, attention_softcap=5.0)
    lm = LanguageModel(config, random_params(config), float32_backend())
    plain, _ = check_same(lm, GREEDY, SMALL)
    stop = plain[2].tokens[7]
    rows = run(lm, GREEDY, SMALL, (stop,))
    for row, whole in zip(rows, plain):
        assert row.tokens == (whole.tokens[: whole.tokens.index(stop) + 1] if stop in whole.tokens else whole.tokens)
    assert len(rows[2].tokens) <= 8


def test_sizes_follow_the_published_ones_and_shrink_with_the_cache():
    assert TriForce().sizes(131072)[:2] == (4096, 234)
    assert TriForce().sizes(1024)[:2] == (256, 128)
    assert TriForce().sizes(128)[:2] == (32, 16)
    assert TriForce(budget=512, window=100).sizes(1024)[:2] == (512, 100)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("budget=100", "budget=100 is no multiple of chunk=8"),
        ("budget=4096", "budget=4096 is larger than the cache of 128 tokens"),
        ("window=300", "window=300 is larger than the cache of 128 tokens"),
        ("sinks=200", "sinks=200 is larger than the cache of 128 tokens"),
        ("chunk=256", "budget=256 is larger than the cache of 128 tokens"),
        ("num_draft_tokens=0", "num_draft_tokens=0"),
        ("renew_steps=0", "renew_steps=0"),
        ("drafter=x,num_inner_tokens=0", "drafter= drafts num_inner_tokens at a time"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_one_line(lm, options, named):
    with pytest.raises(InvalidOption, match=r"^[^\n]*$") as error:
        lm.generate([[5, 6, 7]], max_new_tokens=8, strategy=f"triforce:{options}")
    assert named in str(error.value)


def test_models_and_caches_that_hold_no_long_text_are_refused():
    windowed = replace(TINY_LLAMA, layer_pattern=(LayerKind(Rope(10000.0, 8), 12),))
    with pytest.raises(InvalidOption, match="nothing to retrieve"):
        LanguageModel(windowed, {}, float32_backend()).generate([[5]], strategy="triforce")
    with pytest.raises(InvalidOption, match="triforce needs the dense cache"):
        LanguageModel(TINY_LLAMA, {}, float32_backend(), cache="streaming").generate([[5]], strategy="triforce")
