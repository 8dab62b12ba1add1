"""Drafters' matrices in four bits, where a CPU multiplies such."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.decoder import Decoder
from jaxinfer.models.drafters.four_bits import FORM, heads_in_four_bits, in_four_bits
from jaxinfer.models.drafters.heads import head_logits, head_states, heads_width, is_conditioned
from jaxinfer.models.model import Model
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from tests.toys import TINY_LLAMA, float32_backend

BACKEND = float32_backend()
WIDTH = 64


@pytest.fixture(scope="module")
def head_params():
    """Conditioned heads, the first of which has an output matrix of its own, beside one that they share."""
    rng = np.random.default_rng(1)

    def drawn(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32) / shape[-1] ** 0.5)

    block = {"kernel": drawn(96, 2 * WIDTH), "bias": jnp.zeros(96), "out": drawn(WIDTH, 96)}
    own, shared = ({"kernel": drawn(100, WIDTH), "bias": jnp.ones(100)} for _ in range(2))
    return {"heads": ({"blocks": [block], "output": own}, {"blocks": []}), "output": shared, "ids": jnp.arange(100)}


def test_matrices_of_heads_are_rounded_where_the_kernels_are(head_params):
    rounded = heads_in_four_bits(head_params, BACKEND)
    first, block = rounded["heads"][0], rounded["heads"][0]["blocks"][0]
    matrices = block["kernel"], block["out"], first["output"]["kernel"], rounded["output"]["kernel"]
    if not BACKEND.cpu_kernels:
        pytest.skip("no kernels of our own for this processor")
    assert [each.form for each in matrices] == [FORM] * 4
    assert (rounded["output"]["bias"], rounded["ids"]) == (head_params["output"]["bias"], head_params["ids"])
    assert heads_width(rounded) == heads_width(head_params) == WIDTH
    assert is_conditioned(rounded)
    # Once only.
    assert heads_in_four_bits(rounded, BACKEND)["output"]["kernel"] is rounded["output"]["kernel"]
    plain = heads_in_four_bits(head_params, replace(BACKEND, cpu_kernels=False))
    assert not any(map(is_quantized, (plain["output"]["kernel"], plain["heads"][0]["output"]["kernel"])))


def test_what_they_guess_changes_little(head_params):
    rng = np.random.default_rng(2)
    hidden_MD, path_MD = (jnp.asarray(rng.standard_normal((40, WIDTH), np.float32)) for _ in range(2))
    model = Model(Decoder(TINY_LLAMA, BACKEND), {})

    def guessed(params):
        states_MD = head_states(params["heads"][0], hidden_MD, path_MD, BACKEND)
        return np.asarray(head_logits(model, params, 0, states_MD))

    exact, rounded = guessed(head_params), guessed(heads_in_four_bits(head_params, BACKEND))
    assert 0 < np.abs(rounded - exact).max() < 0.5 * exact.std()


def test_only_what_divides_into_groups_is_rounded():
    for kept in (jnp.ones((100, 48)), jnp.ones((100, 64), jnp.int32)):
        assert in_four_bits(kept, BACKEND) is kept
