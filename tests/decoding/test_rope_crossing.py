"""A text that grows past the original length of ``longrope`` is, at every length, what its own forward pass draws."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.decoding.batch import RunningBatch
from jaxinfer.models.config import LayerKind, Rope, RopeScaling
from jaxinfer.sampling import History, margins, sampling_arrays
from jaxinfer.sampling.draw import draw, log_probabilities
from tests.decoding.rows import LEAST_MARGIN, PLAIN, SAMPLINGS, Row, request, run
from tests.decoding.scripted import Branches, Chain
from tests.models.hugging_face import build_model, greedy_tokens, save_model
from tests.models.variants.variant import Variant, partial_rope_to_version_4
from tests.toys import TINY_LLAMA, float32_backend, random_params

ORIGINAL = 24  # tokens
SHORT, LONG = (1.0, 1.1, 1.3, 1.6), (2.0, 5.0, 9.0, 20.0)
SCALING = RopeScaling("longrope", 8.0, ORIGINAL, short_factors=SHORT, long_factors=LONG)
LENGTHS = (5, 20, 24, 25, 60)  # of the prompts
NUM_NEW, DEPTH = 32, 3


@pytest.fixture(scope="module")
def lm():
    """One layer keeps the whole text and one a ring, which a renewed cache must fill as a first one does."""
    rope = Rope(10000.0, 8, SCALING)
    config = replace(TINY_LLAMA, max_position=192, layer_pattern=(LayerKind(rope), LayerKind(rope, window=16)))
    return LanguageModel(config, random_params(config), float32_backend())


@pytest.fixture(scope="module")
def requests():
    rng = np.random.default_rng(1)
    return [request(rng.integers(2, 258, length).tolist(), NUM_NEW, one) for length, one in zip(LENGTHS, SAMPLINGS)]


@pytest.fixture(scope="module")
def batch(lm, requests):
    return run(lm, requests)


@pytest.fixture(scope="module")
def texts(requests, batch):
    return tuple((*asked.prompt, *row.tokens) for asked, row in zip(requests, batch))


def check_same(rows: list[Row], expected: list[Row]) -> None:
    assert [row.tokens for row in rows] == [row.tokens for row in expected]
    for row, other in zip(rows, expected):
        np.testing.assert_allclose(row.logprobs, other.logprobs, atol=1e-4)


def test_every_token_is_the_draw_after_a_forward_pass_over_the_text_before_it(lm, requests, texts, batch):
    places = [(row, length) for row, asked in enumerate(LENGTHS) for length in range(asked, asked + NUM_NEW)]
    prefixes = [texts[row][:length] for row, length in places]
    prompt_lengths, lengths = (np.array(column, np.int32) for column in zip(*((LENGTHS[at], n) for at, n in places)))
    logits_B1V = jnp.take_along_axis(lm.logits(prefixes), jnp.asarray(lengths)[:, None, None] - 1, axis=1)
    tokens_BS = jnp.asarray([prefix + (0,) * (max(lengths) - len(prefix)) for prefix in prefixes], jnp.int32)
    history = History(tokens_BS, jnp.asarray(prompt_lengths), jnp.asarray(lengths))
    arrays = sampling_arrays([requests[row].sampling for row, _ in places], [0] * len(places), (), 258)
    inputs = logits_B1V, jnp.asarray(lengths)[:, None], arrays, history
    assert float(jax.jit(margins)(*inputs).min()) > LEAST_MARGIN
    draws_B1 = jax.jit(draw)(*inputs)
    assert draws_B1.reshape(len(batch), NUM_NEW).tolist() == [row.tokens for row in batch]
    expected = np.asarray(log_probabilities(logits_B1V, draws_B1)).reshape(len(batch), NUM_NEW)
    np.testing.assert_allclose([row.logprobs for row in batch], expected, atol=1e-4)


def test_a_cache_that_is_not_renewed_gives_other_texts(lm, requests, batch, monkeypatch):
    monkeypatch.setattr("jaxinfer.decoding.batch.reachable_lengths", lambda config, lengths_B, limits_B, _: limits_B)
    for length, row, other in zip(LENGTHS, run(lm, requests), batch):
        same = max(ORIGINAL + 1 - length, 0)  # tokens that are drawn before the switch
        assert row.tokens[:same] == other.tokens[:same]
        assert (row.tokens == other.tokens) == (length > ORIGINAL)


@pytest.mark.exhaustive
def test_a_row_is_the_same_alone(lm, requests, batch):
    check_same([run(lm, [requests[row]])[0] for row in (1, 4)], [batch[1], batch[4]])


def test_steps_count_the_tokens_after_the_first_wherever_the_cache_was_renewed(batch):
    assert [row.counts.steps for row in batch] == [NUM_NEW - 1] * len(batch)


@pytest.mark.parametrize(
    "kind", [pytest.param(Chain, marks=pytest.mark.exhaustive), pytest.param(Branches, marks=pytest.mark.slow)]
)
def test_drafts_change_no_token(lm, requests, batch, texts, kind):
    rows = run(lm, requests, kind(texts, DEPTH), num_rows=len(requests) + 1)
    check_same(rows, batch)
    for length, row in zip(LENGTHS, rows):
        # No step goes past the switch: one run of steps ends there, another begins.
        before = min(max(ORIGINAL - length, 0), NUM_NEW - 1)
        assert row.counts.steps == -(-before // (DEPTH + 1)) + -(-(NUM_NEW - 1 - before) // (DEPTH + 1))


def test_a_stop_token_just_before_the_switch_ends_its_row(lm, requests, batch):
    place = ORIGINAL - LENGTHS[0]
    stop = batch[0].tokens[place]
    rows = run(lm, requests, eos_token_ids=(stop,))
    for row, other in zip(rows, batch):
        end = other.tokens.index(stop) + 1 if stop in other.tokens else NUM_NEW
        assert row.tokens == other.tokens[:end]


def test_a_row_that_is_stopped_while_it_waits_stays_so(lm, requests, batch):
    running = RunningBatch(lm.programs, lm.params, PLAIN, requests, (), lm.max_len)
    while not all(running.finished(row) for row in (3, 4)):
        running.advance(32)
    rows = running.new_tokens()
    assert [len(row) for row in rows[:3]] == [ORIGINAL + 1 - length for length in LENGTHS[:3]]
    assert not any(running.finished(row) for row in (0, 1, 2))
    running.stop([1])
    while not running.done:
        assert running.finished(1)
        running.advance(4)
    rows = [row + more for row, more in zip(rows, running.new_tokens())]
    assert [len(row) for row in rows] == [NUM_NEW, ORIGINAL + 1 - LENGTHS[1], NUM_NEW, NUM_NEW, NUM_NEW]
    assert all(row == other.tokens[: len(row)] for row, other in zip(rows, batch))


@pytest.mark.slow
def test_a_text_that_ends_at_the_switch_does_not_wait(lm, requests, batch):
    prompt = requests[1].prompt
    running = RunningBatch(
        lm.programs, lm.params, PLAIN, [request(prompt, ORIGINAL + 1 - len(prompt), SAMPLINGS[1])], (), lm.max_len
    )
    running.advance(32)
    assert running.done
    assert running.new_tokens() == [batch[1].tokens[: ORIGINAL + 1 - len(prompt)]]


def test_streaming_goes_on_across_the_switch(lm, requests, batch):
    pieces = list(lm.stream(list(requests[1].prompt), max_new_tokens=NUM_NEW, sampling=SAMPLINGS[1]))
    result = pieces[-1].result
    assert [token for piece in pieces for token in piece.tokens] == batch[1].tokens
    assert (result.finish_reason, result.stats.steps, result.stats.tokens_per_step) == ("length", NUM_NEW - 1, 1.0)


@pytest.mark.parity
@pytest.mark.slow
def test_greedy_tokens_equal_those_of_transformers_phi3(tmp_path):
    """One ragged batch against single texts, for which transformers throws its cache away at the switch."""
    pytest.importorskip("torch")
    rope = {"rope_type": "longrope", "short_factor": [*SHORT, 2.0, 2.5], "long_factor": [*LONG, 25.0, 40.0]}
    variant = Variant(
        {"original_max_position_embeddings": ORIGINAL, "rope_parameters": {**rope, "rope_theta": 10000.0}},
        model_type="phi3",
        to_version_4=partial_rope_to_version_4,
    )
    model = build_model(variant)
    lm = jaxinfer.load(save_model(model, tmp_path, variant), scan_layers=False)
    prompts = [np.random.default_rng(length).integers(2, 96, length).tolist() for length in (5, 20, 24, 25, 37, 100)]
    results = lm.generate(prompts, max_new_tokens=NUM_NEW, sampling=SamplingParams(min_new_tokens=NUM_NEW))
    assert [list(result.tokens) for result in results] == [greedy_tokens(model, ids, NUM_NEW) for ids in prompts]
