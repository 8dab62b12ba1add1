"""A row's text and the bits of its log-probabilities do not depend on its batch, its place or the cache's length."""

import numpy as np
import pytest

import jaxinfer
from tests.decoding.rows import LEAST_MARGIN, SAMPLINGS, least_margin, request, run

# As users compile.
pytestmark = pytest.mark.optimised

LENGTHS = (12, 3, 7, 40, 9)
NUM_NEW = 20


@pytest.fixture(scope="module")
def lm(tiny_llama_folder):
    return jaxinfer.load(tiny_llama_folder())


@pytest.fixture(scope="module")
def requests():
    rng = np.random.default_rng(1)
    return [request(rng.integers(2, 258, length).tolist(), NUM_NEW, one) for length, one in zip(LENGTHS, SAMPLINGS)]


@pytest.fixture(scope="module")
def batch(lm, requests):
    return run(lm, requests)


def check_same(rows, expected):
    assert [row.tokens for row in rows] == [row.tokens for row in expected]
    assert [row.logprobs for row in rows] == [row.logprobs for row in expected]


@pytest.mark.slow
def test_rows_have_texts_of_their_own(requests, batch):
    assert len({tuple(row.tokens) for row in batch}) == len(requests)


@pytest.mark.slow
def test_a_row_is_the_same_alone(lm, requests, batch):
    check_same([run(lm, [one])[0] for one in requests], batch)


@pytest.mark.slow
def test_a_token_that_was_drawn_has_the_bits_that_it_has_in_a_prompt(lm, requests, batch):
    """What decoding wrote is what prefill writes of the same text, so that either may be kept for the other."""
    for asked, row in zip(requests, batch):
        longer = request([*asked.prompt, *row.tokens[:9]], NUM_NEW - 9, asked.sampling)
        if asked.sampling.repetition_penalty == 1 and not asked.sampling.frequency_penalty:
            found = run(lm, [longer])[0]
            assert (found.tokens, found.logprobs) == (row.tokens[9:], row.logprobs[9:])


@pytest.mark.slow
def test_a_row_is_the_same_in_another_order(lm, requests, batch):
    check_same(run(lm, requests[::-1])[::-1], batch)
    check_same(run(lm, [requests[1]] * 5), [batch[1]] * 5)


@pytest.mark.exhaustive
def test_a_row_is_the_same_beside_a_longer_one_and_in_a_longer_cache(lm, requests, batch):
    """The neighbour makes the prompts' bucket and the cache eight times as long."""
    neighbour = request(np.random.default_rng(2).integers(2, 258, 300).tolist(), 400)
    rows = run(lm, [*requests[:2], neighbour, *requests[2:]])
    check_same([*rows[:2], *rows[3:]], batch)


@pytest.mark.exhaustive
def test_a_row_is_the_same_in_a_shorter_context(tiny_llama_folder, requests, batch):
    check_same(run(jaxinfer.load(tiny_llama_folder(), max_len=64), requests), batch)


@pytest.mark.exhaustive
def test_a_row_is_the_same_when_layers_are_scanned(lm, tiny_llama_folder, requests, batch):
    """By XLA's products, which round differently."""
    assert min(least_margin(lm, *one) for one in zip(requests, [row.tokens for row in batch])) > LEAST_MARGIN
    rows = run(jaxinfer.load(tiny_llama_folder(), scan_layers=True), requests)
    assert [row.tokens for row in rows] == [row.tokens for row in batch]
    for row, other in zip(rows, batch):
        np.testing.assert_allclose(row.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.slow
def test_a_row_that_ends_leaves_the_others_alone(lm, requests, batch):
    stop = batch[0].tokens[2]
    rows = run(lm, requests, eos_token_ids=(stop,))
    assert rows[0].tokens == batch[0].tokens[: batch[0].tokens.index(stop) + 1]
    others = [(row, one) for row, one in zip(rows, batch) if stop not in one.tokens]
    assert len(others) >= 2
    check_same(*zip(*others))
