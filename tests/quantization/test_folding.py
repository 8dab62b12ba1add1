"""Inputs that are scaled, and what feeds them divided, change no text: of any block, by its definition."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.families.registry import family_of
from jaxinfer.quantization.folding import scale_inputs
from tests.models.dense import dense_logits
from tests.toys import random_params

CONFIG = {
    "model_type": "llama", "vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
QKV, WIDE = ("query", "key", "value"), ("gate", "up")
OUTPUT, DOWN = ("output",), ("down",)
# What differs from a Llama with grouped queries, and the linear layers whose inputs are scaled.
CASES = {
    "grouped queries": ({}, [QKV, WIDE, DOWN]),
    "own values": ({"num_kv_heads": 4, **BIASES}, [QKV, WIDE, OUTPUT, DOWN]),
    "norms before and after": ({"block": "sandwich", "norm": "rms_plus_one"}, [QKV, WIDE, DOWN]),
    "norms with biases, side by side": ({"block": "parallel_norms", "norm": "layer", **BIASES}, [QKV, WIDE, DOWN]),
    "one norm for both": ({"block": "parallel", "norm": "scaled_layer"}, [QKV + WIDE, DOWN]),
    "norms after": ({"block": "post_norm"}, [DOWN]),
    "norms of outputs": ({"block": "output_norm"}, [DOWN]),
    "norms without weights": ({"norm": "plain_layer"}, [DOWN]),
    "no gate": ({"gated_mlp": False, "activation": "gelu"}, [QKV, ("up",)]),
    "no gate but a ReLU": ({"gated_mlp": False, "activation": "relu", **BIASES}, [QKV, ("up",), DOWN]),
    "bounded values": ({"num_kv_heads": 4, "clip_qkv": 0.5}, [QKV, WIDE, DOWN]),
    "gated attention": ({"num_kv_heads": 4, "attention_gate": True}, [(*QKV, "gate"), WIDE, OUTPUT, DOWN]),
    "norms inside both parts": ({"num_kv_heads": 4, "inner_norms": True}, [QKV, WIDE]),
    "RMS norms without weights": ({"norm": "plain_rms"}, [DOWN]),
    "a ReLU squared": ({"gated_mlp": False, "activation": "relu_squared"}, [QKV, ("up",)]),
}


@pytest.mark.parametrize("name", CASES)
def test_scaled_inputs_change_no_logits(name):
    changes, expected = CASES[name]
    config = replace(family_of(CONFIG).translate(CONFIG), **changes)
    params, rng, seen = random_params(config), np.random.default_rng(1), []

    def choose(places, kernels):
        seen.append(tuple(place[1] for place in places))
        (width,) = {kernel.shape[1] for kernel in kernels}
        return jnp.asarray(np.exp(rng.normal(size=width)), jnp.float32)

    layers = {layer: scale_inputs(config, block, choose) for layer, block in params["blocks"].items()}
    assert seen == expected * config.num_layers
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    plain, scaled = (
        dense_logits(config, {**params, "blocks": blocks}, tokens) for blocks in (params["blocks"], layers)
    )
    np.testing.assert_allclose(scaled, plain, atol=2e-5 * np.abs(plain).max())
    for part in {place for group in expected for place in group}:
        module = "attention" if part in (*QKV, *OUTPUT) else "mlp"
        one, other = (blocks["layer_0"][module][part]["kernel"] for blocks in (params["blocks"], layers))
        assert np.abs(np.asarray(one) - np.asarray(other)).max() > 0.01
