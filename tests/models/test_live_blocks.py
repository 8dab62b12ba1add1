"""On a TPU steps read live blocks of feed-forward layers alone, where they lie in the stack of all layers."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.decoding.programs import full_logits
from jaxinfer.errors import InvalidOption
from jaxinfer.models.decoder import Decoder
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.sparsity import parse_sparsity
from tests.decoding.covered_models import random_model
from tests.toys import TINY_LLAMA, random_params

TPU = choose_backend("float32", "tpu", kernels="interpret")
# Three blocks, of which the last is cut; only the second is live.
UNITS = 320
DEAD = np.r_[:128, 256:UNITS]
TOKENS = np.random.default_rng(0).integers(1, 16, (2, 9)).astype(np.int32)
LENGTHS = np.full(2, 9, np.int32)
CONFIGS = {
    "gated": replace(TINY_LLAMA, activation="relu", ffn_dim=UNITS),
    "opt": replace(random_model("opt").config, ffn_dim=UNITS),
}


def changed(params, changes):
    """Return parameters with ``{(layer, name): value}`` in the dead blocks of feed-forward layers."""

    def change(path, leaf):
        *_, part, layer, name = ["", "", *(key.key for key in path)]
        if part != "mlp" or (layer, name) not in changes:
            return leaf
        units = (..., DEAD, slice(None)) if name == "kernel" and layer != "down" else (..., DEAD)
        return leaf.at[units].set(changes[layer, name])

    return jax.tree_util.tree_map_with_path(change, params)


def drawn(name):
    """Return random parameters of a model with dead blocks."""
    of_dead = {("gate", "kernel"): 0.0} if name == "gated" else {("up", "bias"): -50.0}
    return changed(random_params(CONFIGS[name], scan_layers=True), of_dead)


def logits(name, params, sparsity=None, backend=TPU):
    backend = replace(backend, sparsity=parse_sparsity(sparsity))
    run = jax.jit(partial(full_logits, Decoder(CONFIGS[name], backend)))
    return np.asarray(run(params, TOKENS, LENGTHS))


@pytest.mark.parametrize("name", ["gated", pytest.param("opt", marks=pytest.mark.slow)])
def test_logits_are_those_of_all_features_and_dead_blocks_are_not_read(name):
    """There weights may be anything."""
    params = drawn(name)
    expected = logits(name, params)
    unread = {("down", "kernel"): np.nan, **({("up", "kernel"): np.nan} if name == "gated" else {})}
    found = logits(name, changed(params, unread), "exact")
    np.testing.assert_allclose(found, expected, atol=1e-5 * expected.std())


@pytest.mark.exhaustive
def test_separate_layers_references_and_other_kinds_leave_the_same_out():
    params, name = drawn("gated"), "gated"
    expected = logits(name, params)
    for change in ({"kernels": "reference"}, {}):
        backend, sparsity = replace(TPU, **change), "exact" if change else "threshold:1e-6"
        np.testing.assert_allclose(logits(name, params, sparsity, backend), expected, atol=2e-5 * expected.std())
    apart = replace(TPU, scan_layers=False)
    blocks = {f"layer_{layer}": jax.tree.map(lambda leaf: leaf[layer], params["blocks"]) for layer in range(2)}  # noqa: B023
    found = logits(name, {**params, "blocks": blocks}, "exact", apart)
    np.testing.assert_allclose(found, expected, atol=1e-5 * expected.std())


def test_a_model_for_a_tpu_has_no_other_columns_and_refuses_what_its_kernel_does_not_multiply():
    config, params = CONFIGS["gated"], drawn("gated")
    backend = replace(TPU, sparsity=parse_sparsity("exact"))
    lm = LanguageModel(config, params, backend)
    assert lm.adapted_params is lm.params
    lost = changed(params, {("down", "kernel"): np.inf})
    with pytest.raises(InvalidOption, match=r"blocks\.down has weights that are not finite"):
        LanguageModel(config, lost, backend)
    with pytest.raises(InvalidOption, match="has no products for float16"):
        LanguageModel(config, params, replace(backend, param_dtype="float16", compute_dtype="float16"))
