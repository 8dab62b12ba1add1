"""Layers with a sliding window: a ring gives what a dense cache with the same masks gives, in the window's memory."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxinfer.decoding.programs
import jaxinfer.models.decoder
from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.cache.dense import DenseCache
from jaxinfer.cache.ring import RingCache
from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.models.decoder import create_cache
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


def generate(lm):
    results = lm.generate(PROMPTS, max_new_tokens=64, sampling=SamplingParams(ignore_eos=True, logprobs=True))
    return [list(result.tokens) for result in results], [result.logprobs for result in results]


@pytest.fixture(scope="module", params=CONFIGS)
def case(request):
    """A decoder with windows, its parameters, and what it generates with dense caches of all layers."""
    config = CONFIGS[request.param]
    params, kept = random_params(config), Kept()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxinfer.models.decoder, "ring_capacity", lambda window, headroom: 10**9)
        patch.setattr(jaxinfer.decoding.programs, "create_cache", kept)
        expected = generate(LanguageModel(config, params, float32_backend()))
    assert {layout for layout, _, _ in kept.parts} == {DenseCache}
    return config, params, expected


@pytest.mark.parametrize(
    ("case", "scan_layers", "chunk"),
    [
        ("all-layers", False, 512),
        ("all-layers", True, 32),
        ("some-layers", False, 32),
        ("some-layers", True, 512),
        ("alternating", True, 32),
    ],
    indirect=["case"],
)
def test_a_ring_generates_what_a_dense_cache_does(case, scan_layers, chunk, kept, monkeypatch):
    """Prompts of several lengths go in at once, or in chunks longer than the ring."""
    config, params, (tokens, logprobs) = case
    monkeypatch.setattr(jaxinfer.decoding.programs, "PREFILL_CHUNK", chunk)
    params = scanned(config, params) if scan_layers else params
    found, found_logprobs = generate(LanguageModel(config, params, float32_backend(scan_layers)))
    layout, shape, _ = kept.parts[config.kinds.index(WINDOWED)]
    assert layout is RingCache
    assert WINDOW <= shape[2] <= WINDOW + 8
    assert found == tokens
    np.testing.assert_allclose(found_logprobs, logprobs, atol=LOGPROBS_TOLERANCE)


@pytest.mark.parametrize("case", ["all-layers"], indirect=True)
def test_without_windows_the_text_is_another(case):
    """Or the equality above would say nothing about what a ring forgets."""
    config, params, (tokens, _) = case
    found, _ = generate(LanguageModel(replace(config, layer_pattern=(FULL,)), params, float32_backend()))
    assert found[0] != tokens[0]


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
