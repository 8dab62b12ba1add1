"""Adapters of low rank: what they add, to which tokens, and that merging them changes nothing."""

from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.errors import InvalidOption
from jaxinfer.models.decoder import Decoder, init_params
from jaxinfer.models.linear import Linear
from jaxinfer.ops.backend import choose_backend
from tests.toys import TINY_LLAMA
from train.loop.whole_text import text_hidden
from train.model.lora import init_lora, merge_lora, save_lora, with_lora


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["scanned", "unrolled"])
def model(request):
    backend = choose_backend("float32", "cpu", scan_layers=request.param)
    decoder = Decoder(TINY_LLAMA, backend)
    params = jax.jit(lambda: init_params(TINY_LLAMA, backend, jax.random.key(0)))()
    lora = jax.jit(partial(init_lora, rank=3, key=jax.random.key(1)))(params)
    return decoder, params, lora


def drawn(lora):
    """Adapters that are not zero."""
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape).astype(np.float32), lora)


def test_new_adapters_change_nothing_and_merged_ones_what_they_did(model):
    decoder, params, lora = model
    tokens = jnp.arange(12)[None] % TINY_LLAMA.vocab_size
    run = jax.jit(partial(text_hidden, decoder))
    plain = run(params, tokens)
    np.testing.assert_array_equal(run(with_lora(params, lora, 2.0), tokens), plain)
    trained = drawn(lora)
    adapted = run(with_lora(params, trained, 0.5), tokens)
    assert not np.allclose(adapted, plain, atol=1e-2)
    merged = jax.jit(partial(merge_lora, scale=0.5))(params, trained)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    np.testing.assert_allclose(run(merged, tokens), adapted, atol=2e-5)


def test_saved_adapters_do_loaded_what_they_did(model, tmp_path):
    decoder, params, lora = model
    trained = drawn(lora)
    lm = LanguageModel(TINY_LLAMA, params, decoder.backend)
    lm.load_adapter("trained", save_lora(tmp_path / "saved", TINY_LLAMA, trained, alpha=6.0))
    tokens = list(range(12))
    expected = LanguageModel(TINY_LLAMA, merge_lora(params, trained, 2.0), decoder.backend).logits([tokens])
    np.testing.assert_allclose(lm.logits([tokens], adapter="trained"), expected, atol=2e-5)
    with pytest.raises(InvalidOption, match=r"its checkpoints hold .* in a tensor with others"):
        save_lora(tmp_path / "joined", replace(TINY_LLAMA, family="phi3"), trained, alpha=6.0)


def test_every_linear_layer_of_every_block_has_an_adapter(model):
    _, params, lora = model
    kernels = [path for path, _ in jax.tree_util.tree_leaves_with_path(params["blocks"]) if "kernel" in str(path[-1])]
    assert len(jax.tree.leaves(lora)) == 2 * len(kernels)


@pytest.mark.slow
def test_tokens_before_the_first_adapted_one_keep_every_bit():
    backend = choose_backend("float32", "cpu")
    linear = Linear(5, (None, None), backend)
    inputs = jax.random.normal(jax.random.key(0), (2, 6, 4))
    params = nn.unbox(linear.init(jax.random.key(1), inputs)["params"])
    down, up = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in ((2, (3, 4)), (3, (5, 3))))
    adapted = {**params, "adapter": {"down": down, "up": up}}
    plain = linear.apply({"params": params}, inputs)
    some = Linear(5, (None, None), replace(backend, adapted_from=4)).apply({"params": adapted}, inputs)
    np.testing.assert_array_equal(some[:, :4], plain[:, :4])
    np.testing.assert_allclose(some[:, 4:], plain[:, 4:] + inputs[:, 4:] @ down.T @ up.T, rtol=1e-5, atol=1e-5)
