"""The tree step changes no token, whatever was drafted: only how many steps the text takes."""

import numpy as np
import pytest

import jaxinfer
from jaxinfer import SamplingParams, Strategy
from jaxinfer.decoding.batch import RunningBatch
from tests.decoding.rows import LEAST_MARGIN, PLAIN, SAMPLINGS, least_margin, request, run
from tests.decoding.scripted import Branches, Chain

LENGTHS = (12, 3, 7, 5, 9)  # of the prompts
LIMITS = (24, 23, 22, 21, 24)  # of the outputs: runs of accepted tokens end within a step and at its end
DEPTH = 3


@pytest.fixture(scope="module")
def lm(tiny_llama_folder):
    return jaxinfer.load(tiny_llama_folder())


@pytest.fixture(scope="module")
def requests():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 258, length).tolist() for length in LENGTHS]
    return [request(*one) for one in zip(prompts, LIMITS, SAMPLINGS)]


@pytest.fixture(scope="module")
def oracle(lm, requests):
    return run(lm, requests)


@pytest.fixture(scope="module")
def texts(requests, oracle):
    return tuple((*asked.prompt, *row.tokens) for asked, row in zip(requests, oracle))


def check_same(lm, requests, oracle, strategy: Strategy, eos_token_ids=()):
    rows = run(lm, requests, strategy, eos_token_ids)
    assert [row.tokens for row in rows] == [row.tokens for row in oracle]
    for row, plain in zip(rows, oracle):
        np.testing.assert_allclose(row.logprobs, plain.logprobs, atol=1e-4)
    return rows


@pytest.mark.slow
def test_texts_of_this_file_are_screened(lm, requests, oracle):
    assert [len(row.tokens) for row in oracle] == list(LIMITS)
    assert min(least_margin(lm, *one) for one in zip(requests, [row.tokens for row in oracle])) > LEAST_MARGIN


def test_a_perfect_drafter_is_accepted_whole(lm, requests, oracle, texts):
    rows = check_same(lm, requests, oracle, Chain(texts, DEPTH))
    for row, limit in zip(rows, LIMITS):
        # Prefill draws the first token, each step then four; the last step may have room for fewer.
        assert row.counts.steps == -(-(limit - 1) // (DEPTH + 1))
        assert row.counts.accepted >= limit - 1 - row.counts.steps
        assert row.counts.drafted == DEPTH * row.counts.steps
        assert row.counts.accepted_by_depth[0] == row.counts.steps


@pytest.mark.slow
def test_a_lying_drafter_is_never_accepted(lm, requests, oracle, texts):
    for row, limit in zip(check_same(lm, requests, oracle, Chain(texts, DEPTH, lies_from=1)), LIMITS):
        assert (row.counts.steps, row.counts.accepted, row.counts.accepted_by_depth) == (limit - 1, 0, (0, 0, 0))


def test_a_drafter_is_accepted_up_to_its_first_lie(lm, requests, oracle, texts):
    for row, limit in zip(check_same(lm, requests, oracle, Chain(texts, DEPTH, lies_from=3)), LIMITS):
        assert row.counts.steps == -(-(limit - 1) // 3)
        assert row.counts.accepted_by_depth[2] == 0


@pytest.mark.parametrize("validity", ["padding", "window"])
def test_nodes_that_are_no_drafts_are_never_taken(lm, requests, oracle, texts, validity):
    for row, limit in zip(check_same(lm, requests, oracle, Chain(texts, DEPTH, validity=validity)), LIMITS):
        assert (row.counts.steps, row.counts.drafted, row.counts.accepted) == (limit - 1, 0, 0)


def test_the_right_branch_is_found_behind_a_wrong_one(lm, requests, oracle, texts):
    """The keys and values of the taken nodes stand apart in the cache, and are moved together."""
    for row, limit in zip(check_same(lm, requests, oracle, Branches(texts, DEPTH)), LIMITS):
        assert row.counts.steps == -(-(limit - 1) // (DEPTH + 1))


@pytest.mark.parametrize("kind", [Chain, Branches])
@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_a_stop_token_inside_an_accepted_run_ends_the_row(lm, requests, oracle, texts, kind, place):
    """At every place of the second step's run, for the first row; other rows may end by the same token or go on."""
    stop = oracle[0].tokens[DEPTH + 1 + place]
    plain = run(lm, requests, eos_token_ids=(stop,))
    assert plain[0].tokens == oracle[0].tokens[: oracle[0].tokens.index(stop) + 1]
    rows = check_same(lm, requests, plain, kind(texts, DEPTH), (stop,))
    assert rows[0].counts.new_tokens == len(plain[0].tokens)


def test_a_batch_may_hold_rows_of_no_request(lm, requests, oracle, texts):
    """A strategy sees them, and nothing comes of it."""
    rows = run(lm, requests[:4], Chain(texts, DEPTH), num_rows=5)
    assert [row.tokens for row in rows] == [row.tokens for row in oracle[:4]]


def test_as_many_steps_are_run_as_are_asked_for(lm, requests, texts):
    for strategy, tokens in ((PLAIN, 1), (Chain(texts, DEPTH), DEPTH + 1)):
        batch = RunningBatch(lm.programs, lm.params, strategy, requests, (), lm.max_len)
        for steps in (1, 3):
            batch.new_tokens()
            batch.advance(steps)
            assert [len(news) for news in batch.new_tokens()] == [steps * tokens] * len(requests)


@pytest.mark.slow
def test_seventeen_rows_of_very_different_requests(lm):
    """Ends after one token and at the first stop among them; the texts are those of batches of five."""
    rng = np.random.default_rng(17)
    asked = []
    for row in range(20):
        narrow = SamplingParams(temperature=1.3, top_p=0.5, ignore_eos=row % 3 == 0, seed=row)
        hot = SamplingParams(temperature=2.0, top_k=1 + row, min_p=0.02, ignore_eos=row % 4 == 0, seed=2**40 + row)
        prompt = rng.integers(2, 258, 1 + row % 13).tolist()
        asked.append(request(prompt, 1 if row in (4, 16) else 5 + row, narrow if row % 2 else hot))
    # What the second row draws first is its end, and that of rows that draw it later.
    (first, *_) = run(lm, asked[1:6], num_rows=5)
    ends = (first.tokens[0],)
    plain = [row for at in range(0, 20, 5) for row in run(lm, asked[at : at + 5], eos_token_ids=ends)][:17]
    texts = tuple((*one.prompt, *row.tokens) for one, row in zip(asked, plain))
    lengths = [len(row.tokens) for row in plain]
    assert (lengths[1], lengths[4], lengths[16]) == (1, 1, 1)
    assert sum(length > 5 for length in lengths) > 10
    rows = check_same(lm, asked[:17], plain, Branches(texts, DEPTH), ends)
    assert max(row.counts.steps for row in rows) < max(lengths) / 2
