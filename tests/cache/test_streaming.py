"""The streaming cache is StreamingLLM: by the dense forward over the whole text that it stands for, and without end."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
import jaxinfer.decoding.programs
from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.cache.layouts import StreamingLayout, parse_layout
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import LayerKind, Rope, RopeScaling
from jaxinfer.models.decoder import create_cache
from jaxinfer.models.positions import rotary_tables, unbounded_tables
from tests.cache.streaming_reference import kept_positions, streamed_logits
from tests.decoding.rows import LEAST_MARGIN, SAMPLINGS, request, run
from tests.decoding.scripted import Branches, Chain
from tests.toys import TINY_LLAMA, float32_backend, random_params

SINKS, WINDOW, DEPTH = 4, 20, 3
LAYOUT = StreamingLayout(SINKS, WINDOW)
# Shorter than the sinks, between, and longer than the cache; the texts outgrow the cache, and the model's context too.
LENGTHS, NUM_NEW, CONTEXT = (50, 3, 23, 1, 31), 60, 64
CONFIGS = {
    "llama": replace(TINY_LLAMA, max_position=CONTEXT),
    "gemma": replace(
        TINY_LLAMA,
        max_position=CONTEXT,
        norm="rms_plus_one",
        block="sandwich",
        activation="gelu_tanh",
        attention_softcap=5.0,
        final_softcap=10.0,
        embedding_scale=3.0,
        tied_embeddings=True,
    ),
}
PROMPTS = [np.random.default_rng(length).integers(2, 258, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module", params=[pytest.param("llama", marks=pytest.mark.exhaustive), "gemma"])
def case(request):
    """A model on a streaming cache, and its parameters; prompts go in by chunks that the ring has no room for."""
    config = CONFIGS[request.param]
    params = random_params(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxinfer.decoding.programs, "PREFILL_CHUNK", 16)
        yield config, params, LanguageModel(config, params, float32_backend(), cache=LAYOUT)


def reference(config, params, prompt, tokens, layout=LAYOUT):
    """Return the log-probabilities of every token of the vocabulary at each output token."""
    logits_TV = streamed_logits(config, params, [*prompt, *tokens[:-1]], layout.sinks, layout.window)
    return np.asarray(jax.nn.log_softmax(logits_TV[len(prompt) - 1 :], axis=-1))


def check_equal(expected, rows):
    for expected_TV, row in zip(expected, rows, strict=True):
        assert expected_TV.argmax(axis=-1).tolist() == row.tokens
        np.testing.assert_allclose(row.logprobs, expected_TV.max(axis=-1), atol=2e-5)


def test_it_equals_the_dense_forward_that_rotates_by_cache_index(case):
    """Over chunks of prompts, plain steps, and trees and chains whose drafts are kept or not."""
    config, params, lm = case
    requests = [request(prompt, NUM_NEW) for prompt in PROMPTS]
    plain = run(lm, requests)
    expected = [reference(config, params, prompt, row.tokens) for prompt, row in zip(PROMPTS, plain)]
    best_T2 = np.sort(np.concatenate(expected), axis=-1)[:, -2:]
    assert np.min(best_T2[:, 1] - best_T2[:, 0]) > LEAST_MARGIN
    check_equal(expected, plain)
    texts = tuple((*prompt, *row.tokens) for prompt, row in zip(PROMPTS, plain))
    for drafter in (Chain(texts, DEPTH, lies_from=3), Branches(texts, DEPTH)):
        rows = run(lm, requests, drafter)
        check_equal(expected, rows)
        assert all(row.counts.accepted_by_depth[1] > 0 for row in rows)
        assert all(row.counts.drafted > row.counts.accepted for row in rows)


@pytest.mark.parametrize(
    "case",
    [pytest.param("llama", marks=pytest.mark.exhaustive), pytest.param("gemma", marks=pytest.mark.slow)],
    indirect=True,
)
def test_the_reference_tells_other_caches_apart(case):
    """Another sink, another window or no cache at all gives other log-probabilities, by far more than the tolerance."""
    config, params, lm = case
    (row,) = run(lm, [request(PROMPTS[0], NUM_NEW)])
    expected_TV = reference(config, params, PROMPTS[0], row.tokens)
    for other in (StreamingLayout(SINKS + 1, WINDOW), StreamingLayout(SINKS, WINDOW + 1), StreamingLayout(SINKS, 999)):
        other_TV = reference(config, params, PROMPTS[0], row.tokens, other)
        assert np.abs(other_TV - expected_TV).max() > 1e-2


@pytest.mark.exhaustive
def test_drafting_changes_no_token_of_a_sampled_text():
    config = CONFIGS["llama"]
    lm = LanguageModel(config, random_params(config), float32_backend(), cache=LAYOUT)
    requests = [request(prompt, NUM_NEW, sampling) for prompt, sampling in zip(PROMPTS, SAMPLINGS)]
    plain = run(lm, requests)
    texts = tuple((*prompt, *row.tokens) for prompt, row in zip(PROMPTS, plain))
    for drafter in (Chain(texts, DEPTH, lies_from=3), Branches(texts, DEPTH)):
        rows = run(lm, requests, drafter)
        assert [row.tokens for row in rows] == [row.tokens for row in plain]
        for row, other in zip(rows, plain):
            np.testing.assert_allclose(row.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.exhaustive
def test_a_cache_that_has_forgotten_nothing_is_the_dense_one():
    config = CONFIGS["llama"]
    params, asked = random_params(config), [request(prompt, 10) for prompt in PROMPTS]
    dense, streaming = (
        run(LanguageModel(config, params, float32_backend(), cache=cache), asked)
        for cache in ("dense", "streaming:sinks=4,window=60")
    )
    assert [row.tokens for row in streaming] == [row.tokens for row in dense]


@pytest.mark.slow
def test_memory_is_constant_past_the_context():
    """Whatever the length of the text, a row has the slots of sinks, window and headroom, and at most a tile beside."""
    config = CONFIGS["llama"]
    shapes = {
        create_cache(config, 1, num_slots, float32_backend(), 4, LAYOUT).parts[0].keys.shape
        for num_slots in (64, 512, 2**20)
    }
    assert len(shapes) == 1
    assert SINKS + WINDOW + 4 <= shapes.pop()[2] < SINKS + WINDOW + 4 + 16
    lm = LanguageModel(config, random_params(config), float32_backend(), cache=LAYOUT)
    (result,) = lm.generate([PROMPTS[0] * 2], max_new_tokens=2 * CONTEXT, sampling=SamplingParams(ignore_eos=True))
    assert (result.stats.prompt_tokens, len(result.tokens)) == (100, 2 * CONTEXT)


def test_layers_with_a_shorter_window_keep_it():
    """Alternating layers: full ones stream, windowed ones keep the ring that they have anyway."""
    full, windowed = LayerKind(Rope(10000.0, 8)), LayerKind(Rope(10000.0, 8), 8)
    config = replace(TINY_LLAMA, layer_pattern=(full, windowed))
    cache = create_cache(config, 1, 512, float32_backend(), 1, LAYOUT)
    assert [type(part).__name__ for part in cache.parts] == ["StreamingCache", "RingCache"]
    wide = replace(config, layer_pattern=(full, replace(windowed, window=SINKS + WINDOW)))
    assert {type(part).__name__ for part in create_cache(wide, 1, 512, float32_backend(), 1, LAYOUT).parts} == {
        "StreamingCache"
    }


def test_positions_are_as_exact_at_a_billion_tokens_as_at_the_first():
    """Against float64; the tables of ordinary texts are off by radians there."""
    rope = Rope(10000.0, 64)
    positions_BT = jnp.asarray([[0, 1, 77, 4095, 4_000_001, 1_000_000_007]], jnp.int32)
    exact_TR = np.asarray(positions_BT[0], np.float64)[:, None] * 10000.0 ** (-np.arange(32) / 32)
    cosines_BTR, sines_BTR = unbounded_tables(rope, positions_BT, jnp.dtype("float32"))
    np.testing.assert_allclose(cosines_BTR[0], np.cos(exact_TR), atol=1e-6)
    np.testing.assert_allclose(sines_BTR[0], np.sin(exact_TR), atol=1e-6)
    usual_BTR, _ = rotary_tables(rope, positions_BT, jnp.asarray([1]), jnp.dtype("float32"))
    np.testing.assert_allclose(usual_BTR[0, :4], np.cos(exact_TR[:4]), atol=1e-3)
    assert np.abs(usual_BTR[0, 5] - np.cos(exact_TR[5])).max() > 0.1


def test_the_reference_keeps_sinks_and_window_in_order():
    assert kept_positions(4, 2, 3) == [0, 1, 2, 3, 4]
    assert kept_positions(5, 2, 3) == [0, 1, 3, 4, 5]
    assert kept_positions(9, 2, 3) == [0, 1, 7, 8, 9]


SCALED = replace(TINY_LLAMA, layer_pattern=(LayerKind(Rope(1e4, 8, RopeScaling("dynamic", 4.0, 40))),))


@pytest.mark.parametrize(
    ("spec", "config", "max_len", "named"),
    [
        ("ring", TINY_LLAMA, None, "unknown cache 'ring'; use dense, paged, streaming"),
        ("dense:window=3", TINY_LLAMA, None, "'window' of cache dense; its options are: none"),
        ("streaming:sink=4", TINY_LLAMA, None, "'sink' of cache streaming; its options are: sinks, window"),
        ("streaming:window=many", TINY_LLAMA, None, "window='many' is not a whole number"),
        ("streaming:window=0", TINY_LLAMA, None, "window=0 is not a whole number of 1 or more"),
        ("streaming:window=1021", TINY_LLAMA, None, "hold 1025 tokens, but the model's positions reach 1024"),
        ("streaming:window=97", TINY_LLAMA, 100, "window=97 are more than max_len=100"),
        ("streaming:window=37", SCALED, None, "hold 41 tokens, but the model's positions reach 40"),
        ("streaming", replace(TINY_LLAMA, layer_pattern=(LayerKind(None),), learned_positions=0), None, "learned"),
        ("streaming", replace(SCALED, layer_pattern=(replace(SCALED.kinds[0], window=9),)), None, "see 9 tokens"),
    ],
)
def test_what_cannot_stream_is_refused_in_one_line(spec, config, max_len, named):
    with pytest.raises(InvalidOption, match=r"^[^\n]*$") as error:
        LanguageModel(config, {}, float32_backend(), max_len=max_len, cache=spec)
    assert named in str(error.value)


def test_a_step_that_writes_more_than_the_window_is_refused():
    lm = LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA), float32_backend(), cache="streaming:window=8")
    with pytest.raises(InvalidOption, match="writes up to 11 tokens, more than window=8"):
        lm.generate([[5, 6]], strategy="prompt_lookup")
    with pytest.raises(InvalidOption, match="beam needs the dense cache"):
        lm.generate([[5, 6]], strategy="beam")
    with pytest.raises(InvalidOption, match="mcts needs the dense cache"):
        lm.generate([[5, 6]], strategy="mcts")


def test_a_checkpoint_loads_onto_the_cache_that_is_named(tiny_llama_folder):
    lm = jaxinfer.load(tiny_llama_folder(), cache="streaming:sinks=2,window=20")
    assert lm.programs.layout == StreamingLayout(2, 20)
    assert lm.max_len > 10**6
    assert jaxinfer.load(tiny_llama_folder(), cache=LAYOUT, max_len=5000).max_len == 5000


def test_a_layout_is_read_as_it_is_written():
    assert parse_layout("streaming:sinks=1,window=9") == StreamingLayout(1, 9)
    assert parse_layout(LAYOUT) is LAYOUT
