"""Layers of several kinds are grouped for a scan: none is left out, and a scan computes what single blocks do."""

from collections import defaultdict
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer import LanguageModel
from jaxinfer.models.config import DecoderConfig, LayerKind, Rope, shortest_pattern
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.layers import Cycle, cycles, index_in_kind, locate
from tests.models.dense import dense_logits
from tests.models.restack import scanned
from tests.toys import TINY_LLAMA, float32_backend, random_params

FULL = LayerKind(Rope(10000.0, 8))
WINDOW = LayerKind(Rope(500.0, 8), window=6)
NARROW = LayerKind(Rope(10000.0, 8), window=3)
NOPE = LayerKind(None)
TEXTS = np.random.default_rng(0).integers(2, 258, (2, 24)).tolist()


def decoder(num_layers: int, *pattern: LayerKind) -> DecoderConfig:
    return replace(TINY_LLAMA, num_layers=num_layers, layer_pattern=pattern)


PATTERNS = {
    "uniform-4": (decoder(4, NARROW), [(0, 4, 1)]),
    "single-layer": (decoder(1, FULL), [(0, 1, 1)]),
    "period-2-of-5": (decoder(5, WINDOW, FULL), [(0, 4, 2), (4, 5, 1)]),
    "period-3-of-7": (decoder(7, WINDOW, NOPE, FULL), [(0, 6, 3), (6, 7, 1)]),
    "period-3-of-8": (decoder(8, WINDOW, WINDOW, NOPE), [(0, 6, 3), (6, 7, 1), (7, 8, 1)]),
    "stretches-3-and-4": (decoder(7, FULL, FULL, FULL, WINDOW, WINDOW, WINDOW, WINDOW), [(0, 3, 1), (3, 7, 1)]),
    "one-and-two": (decoder(3, FULL, NARROW, NARROW), [(0, 1, 1), (1, 3, 1)]),
}
by_pattern = pytest.mark.parametrize("pattern", PATTERNS)


@by_pattern
def test_layers_are_scanned_by_the_period_or_by_the_stretch(pattern):
    config, expected = PATTERNS[pattern]
    assert cycles(config) == tuple(Cycle(*cycle) for cycle in expected)


def test_a_long_period_is_not_one_body():
    """Nine blocks in the body of a scan would cost more to compile than the scan saves."""
    long = (FULL,) * 4 + (WINDOW,) * 5
    assert cycles(decoder(18, *long)) == (Cycle(0, 4, 1), Cycle(4, 9, 1), Cycle(9, 13, 1), Cycle(13, 18, 1))
    assert cycles(decoder(16, *long[:8])) == (Cycle(0, 16, 8),)


@given(st.lists(st.sampled_from([FULL, WINDOW, NOPE]), min_size=1, max_size=30))
@settings(derandomize=True, max_examples=100, deadline=None)
def test_any_order_of_layers_is_cut_into_scans_of_equal_bodies(layers):
    config = decoder(len(layers), *shortest_pattern(tuple(layers)))
    assert list(config.layers) == layers
    found = cycles(config)
    assert [layer for cycle in found for layer in range(cycle.start, cycle.stop)] == list(range(len(layers)))
    for start, stop, period in found:
        assert (stop - start) % period == 0
        assert layers[start : stop - period] == layers[start + period : stop]


@given(st.lists(st.sampled_from([FULL, WINDOW, NOPE]), min_size=1, max_size=12))
@settings(derandomize=True, max_examples=50, deadline=None)
def test_layers_of_a_kind_are_counted_from_zero(layers):
    config = decoder(len(layers), *layers)
    counts = defaultdict(list)
    for layer, kind in enumerate(layers):
        found, index = index_in_kind(config, layer)
        assert config.kinds[found] == kind
        counts[found].append(index)
    assert {kind: list(range(layers.count(config.kinds[kind]))) for kind in counts} == counts


@by_pattern
@pytest.mark.parametrize("scan_layers", [False, True])
def test_each_parameter_of_a_block_is_found_once_for_every_layer(pattern, scan_layers):
    config = replace(PATTERNS[pattern][0], qkv_bias=True)
    found = defaultdict(list)
    for path, struct in jax.tree_util.tree_leaves_with_path(abstract_params(config, float32_backend(scan_layers))):
        location = locate(tuple(key.key for key in path), struct.shape)
        if location.layers is None:
            found[location.name].append(None)
            continue
        assert len(location.layers) == (struct.shape[0] if location.stacked else 1)
        found[location.name].extend(location.layers)
    top = {"embed.embedding", "final_norm.scale", "head.kernel"}
    assert found.keys() > top
    for name, layers in found.items():
        assert sorted(layers) == list(range(config.num_layers)) if name not in top else layers == [None], name


@pytest.mark.parametrize(
    "pattern", [pytest.param("period-2-of-5", marks=pytest.mark.slow), "period-3-of-7", "stretches-3-and-4"]
)
def test_scanned_layers_of_several_kinds_compute_what_single_ones_do(pattern):
    """By the definition in NumPy."""
    config, _ = PATTERNS[pattern]
    params = random_params(config)
    expected = np.stack([dense_logits(config, params, text) for text in TEXTS])
    found = LanguageModel(config, scanned(config, params), float32_backend(scan_layers=True)).logits(TEXTS)
    assert expected.std() > 1
    np.testing.assert_allclose(found, expected, atol=2e-4)
    # The layers' kinds matter: one place further on in the pattern they give other logits.
    moved = replace(config, layer_pattern=shortest_pattern(config.layers[1:] + config.layers[:1]))
    others = np.stack([dense_logits(moved, params, text) for text in TEXTS])
    assert np.abs(others - expected).max() > 0.1
