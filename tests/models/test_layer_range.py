"""Running a decoder's layers in parts gives what running them at once gives."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.model import Model
from jaxinfer.ops.masks import causal_ancestors
from tests.toys import TINY_LLAMA, float32_backend, random_params

FULL, WINDOW, PLAIN = LayerKind(Rope(10000.0, 8)), LayerKind(Rope(500.0, 8), window=3), LayerKind(None)
PATTERNS = {
    "uniform": (5, (FULL,)),
    "alternating": (5, (WINDOW, FULL)),
    "period-3": (8, (WINDOW, WINDOW, PLAIN)),
    "stretches": (7, (FULL, FULL, FULL, WINDOW, WINDOW, WINDOW, WINDOW)),
}


WIDE = (("period-3", True), ("stretches", True), ("alternating", False))
CASES = [
    pytest.param(*case, marks=pytest.mark.slow if case in WIDE else pytest.mark.exhaustive)
    for case in itertools.product(PATTERNS, (False, True))
]


@pytest.mark.parametrize(("pattern", "scan_layers"), CASES)
def test_parts_make_the_whole(pattern, scan_layers):
    """Cut inside a period of layers and at its edge, cache included."""
    num_layers, kinds = PATTERNS[pattern]
    config = replace(TINY_LLAMA, num_layers=num_layers, layer_pattern=kinds)
    model = Model(Decoder(config, float32_backend(scan_layers)), random_params(config, scan_layers=scan_layers))
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (2, 6)), jnp.int32)
    positions_BT = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (2, 6))
    lengths_B = jnp.full((2,), 6, jnp.int32)
    cache = create_cache(config, 2, 16, model.decoder.backend)
    placements = cache.place(jnp.zeros((2,), jnp.int32), causal_ancestors(6)[None])

    @jax.jit
    def whole(params):
        return Model(model.decoder, params).forward(tokens_BT, positions_BT, cache, placements, lengths_B)

    expected_BTD, expected_cache = whole(model.params)
    for cut in (1, 4):

        @jax.jit
        def parts(params, cut=cut):
            bound, held = Model(model.decoder, params), cache
            hidden_BTD = bound.embedded(tokens_BT, positions_BT)
            for start, stop in ((0, cut), (cut, num_layers)):
                hidden_BTD, held = bound.run_layers(start, stop, hidden_BTD, positions_BT, held, placements, lengths_B)
            return bound.normed(hidden_BTD), held

        found_BTD, found_cache = parts(model.params)
        np.testing.assert_allclose(found_BTD, expected_BTD, atol=1e-5)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), found_cache, expected_cache)
