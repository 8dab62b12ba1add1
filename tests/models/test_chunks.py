"""Layers that attend in chunks, beside layers whose queries grow: in every cache, with kernels and while drafting."""

from dataclasses import replace

import numpy as np
import pytest

from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.cache.ring import RingCache
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig, Experts, LayerKind, Rope, Sharpening
from jaxinfer.models.decoder import create_cache
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.masks import Chunk
from tests.models.dense import dense_logits
from tests.toys import TINY_LLAMA, float32_backend, random_params

SIZE = 24
CHUNKED, GROWING = LayerKind(Rope(1e4, 8), SIZE, chunked=True), LayerKind(None, sharpening=Sharpening(0.5, 10))
EXPERTS = Experts(4, 2, 24, shared_dim=24, scoring="chosen_sigmoid", scales_inputs=True, layer_pattern=(False, True))
CONFIG: DecoderConfig = replace(TINY_LLAMA, layer_pattern=(CHUNKED, GROWING), experts=EXPERTS, qk_norm="rotated_heads")
# Longer than two chunks, and ending at the end of one.
PROMPTS = [np.random.default_rng(length).integers(2, 258, length).tolist() for length in (70, 48, 5)]


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


@pytest.fixture(scope="module")
def plain(params):
    return LanguageModel(CONFIG, params, float32_backend(), max_len=128)


def check_logits(lm: LanguageModel) -> None:
    logits_BTV = np.asarray(lm.logits(PROMPTS))
    for row, ids in enumerate(PROMPTS):
        expected_TV = dense_logits(CONFIG, lm.params, ids)
        assert np.abs(logits_BTV[row, : len(ids)] - expected_TV).max() < 1e-4 * expected_TV.std()


def test_chunks_are_kept_in_rings_and_seen_by_the_definition(plain):
    check_logits(plain)
    cache = create_cache(CONFIG, 2, 128, float32_backend())
    ring, whole = cache.parts
    assert isinstance(ring, RingCache)
    assert (ring.window, whole.window) == (Chunk(SIZE), None)
    assert ring.capacity < whole.keys.shape[2]


@pytest.mark.parametrize(
    "cache",
    [
        pytest.param("paged:page=16", marks=pytest.mark.slow),
        pytest.param("dense", marks=pytest.mark.exhaustive),
    ],
)
def test_kernels_and_pages_give_the_logits_of_the_definition(params, cache):
    backend = choose_backend("float32", "cpu", kernels="interpret")
    lm = LanguageModel(CONFIG, params, backend, cache=cache, max_len=128)
    check_logits(lm)


@pytest.mark.parametrize(
    ("strategy", "cache"),
    [
        pytest.param("lookahead:window=3,ngram=3,guesses=3", "dense", marks=pytest.mark.slow),
        pytest.param("prompt_lookup", "paged:page=16", marks=pytest.mark.exhaustive),
        pytest.param("layerskip:exit_layer=1", "dense", marks=pytest.mark.exhaustive),
        pytest.param("triforce:budget=16,chunk=4,window=8", "dense", marks=pytest.mark.exhaustive),
    ],
)
def test_drafts_change_no_token(params, plain, strategy, cache):
    """Also at the steps at which a chunk begins; each text by the definition's logits."""
    sampling = SamplingParams(min_new_tokens=30)
    lm = plain if cache == "dense" else LanguageModel(CONFIG, params, float32_backend(), cache=cache, max_len=128)
    found = lm.generate(PROMPTS, max_new_tokens=30, sampling=sampling, strategy=strategy)
    for ids, result in zip(PROMPTS, found):
        text = [*ids, *result.tokens]
        best = dense_logits(CONFIG, params, text)[len(ids) - 1 : -1]
        best[:, list(CONFIG.eos_token_ids)] = -np.inf
        assert best.argmax(axis=-1).tolist() == list(result.tokens)


def test_heads_are_normed_after_their_rotation():
    """Whose weights do not turn with them (Hunyuan)."""
    config = replace(TINY_LLAMA, num_layers=1, qk_norm="head", norm_after_rotation=True)
    drawn = random_params(config)
    found = np.asarray(LanguageModel(config, drawn, float32_backend()).logits(PROMPTS[2:]))[0]
    expected = dense_logits(config, drawn, PROMPTS[2])
    assert np.abs(found - expected).max() < 1e-4 * expected.std()


def test_a_text_without_end_is_refused():
    for changes, named in (
        ({"layer_pattern": (GROWING,)}, "multiplies queries by their place"),
        ({"layer_pattern": (CHUNKED,)}, "above 24"),
        ({"qk_norm": "head", "norm_after_rotation": True}, "after their rotation"),
    ):
        config = replace(TINY_LLAMA, **changes)
        with pytest.raises(InvalidOption, match=named) as error:
            LanguageModel(config, random_params(config), float32_backend(), cache="streaming:sinks=4,window=16")
        assert "\n" not in str(error.value)
