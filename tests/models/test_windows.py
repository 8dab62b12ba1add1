"""Layers with a sliding window: a ring gives what attention within the window gives, in the window's memory."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxinfer.decoding.programs
from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.cache.dense import DenseCache
from jaxinfer.cache.ring import RingCache
from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.models.decoder import create_cache
from tests.models.dense import dense_logits
from tests.models.restack import scanned
from tests.toys import TINY_LLAMA, float32_backend, random_params

WINDOW = 24
FULL, WINDOWED = LayerKind(Rope(10000.0, 8)), LayerKind(Rope(10000.0, 8), WINDOW)
CONFIGS = {
    "all-layers": replace(TINY_LLAMA, layer_pattern=(WINDOWED,)),
    "some-layers": replace(TINY_LLAMA, num_layers=3, layer_pattern=(FULL, WINDOWED, WINDOWED)),
    "alternating": replace(TINY_LLAMA, num_layers=7, layer_pattern=(WINDOWED, WINDOWED, FULL)),
}
PROMPTS = [np.random.default_rng(length).integers(2, 258, length).tolist() for length in (100, 37, 5)]
LOGPROBS_TOLERANCE = 1e-3


class Kept:
    """Makes caches, and remembers their layouts and sizes."""

    def __init__(self):
        self.parts = []

    def __call__(self, *arguments):
        cache = create_cache(*arguments)
        self.parts = []
        for part in cache.parts:
            keys, values = jax.tree.leaves(part)
            self.parts.append((type(part), keys.shape, keys.nbytes + values.nbytes))
        return cache


@pytest.fixture
def kept(monkeypatch):
    kept = Kept()
    monkeypatch.setattr(jaxinfer.decoding.programs, "create_cache", kept)
    return kept


@pytest.mark.parametrize(
    ("name", "scan_layers", "chunk"),
    [
        pytest.param("all-layers", False, 512, marks=pytest.mark.exhaustive),
        pytest.param("all-layers", True, 32, marks=pytest.mark.exhaustive),
        ("some-layers", False, 32),
        pytest.param("some-layers", True, 512, marks=pytest.mark.exhaustive),
        pytest.param("alternating", True, 32, marks=pytest.mark.slow),
    ],
)
def test_a_ring_generates_what_attention_within_the_window_does(name, scan_layers, chunk, kept, monkeypatch):
    """Prompts of several lengths go in at once, or in chunks longer than the ring; the text is long enough to wrap."""
    config = CONFIGS[name]
    params = random_params(config)
    monkeypatch.setattr(jaxinfer.decoding.programs, "PREFILL_CHUNK", chunk)
    lm = LanguageModel(config, scanned(config, params) if scan_layers else params, float32_backend(scan_layers))
    results = lm.generate(PROMPTS, max_new_tokens=48, sampling=SamplingParams(ignore_eos=True, logprobs=True))
    layout, shape, _ = kept.parts[config.kinds.index(WINDOWED)]
    assert layout is RingCache
    assert WINDOW <= shape[2] <= WINDOW + 8
    for ids, result in zip(PROMPTS, results):
        assert len(result.tokens) == 48
        expected_TV, wide_TV = (
            log_softmax(dense_logits(described, params, [*ids, *result.tokens])[len(ids) - 1 : -1])
            for described in (config, replace(config, layer_pattern=(FULL,)))
        )
        chosen_T = np.take_along_axis(expected_TV, np.array(result.tokens)[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(chosen_T, expected_TV.max(axis=1), atol=LOGPROBS_TOLERANCE)
        np.testing.assert_allclose(result.logprobs, chosen_T, atol=LOGPROBS_TOLERANCE)
        # Without windows the text is another, or this would say nothing about what a ring forgets.
        assert len(ids) < WINDOW or wide_TV.argmax(axis=1).tolist() != list(result.tokens)


def log_softmax(logits_TV: np.ndarray) -> np.ndarray:
    shifted_TV = logits_TV - logits_TV.max(axis=1, keepdims=True)
    return shifted_TV - np.log(np.exp(shifted_TV).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("headroom", [0, 5])
def test_the_memory_of_windowed_layers_is_what_the_window_needs(headroom):
    config = CONFIGS["some-layers"]
    lanes, num_layers, batch = config.num_kv_heads * config.head_dim, 2, 3
    sizes = []
    for num_slots in (64, 4096):
        kept = Kept()
        kept(config, batch, num_slots, float32_backend(), headroom)
        (full, full_shape, full_bytes), (windowed, shape, num_bytes) = kept.parts
        assert (full, windowed) == (DenseCache, RingCache)
        assert full_shape[2] == num_slots
        assert WINDOW + headroom <= shape[2] <= WINDOW + 8
        assert num_bytes == 2 * num_layers * batch * shape[2] * lanes * 4
        sizes.append((full_bytes, num_bytes))
    assert sizes[1][0] == 64 * sizes[0][0]
    assert sizes[0][1] == sizes[1][1]
