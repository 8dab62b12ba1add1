"""Heads compute what their formulas say."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.decoder import Decoder
from jaxinfer.models.drafters.heads import (
    head_logits,
    head_states,
    heads_width,
    is_conditioned,
    plain_logits,
    top_tokens,
    vocabulary_rows,
)
from jaxinfer.models.model import Model
from tests.toys import TINY_LLAMA, float32_backend, random_params

WIDTH, VOCAB = TINY_LLAMA.model_dim, TINY_LLAMA.vocab_size


def silu(values):
    return values / (1 + np.exp(-values))


def arrays(seed: int, *shapes):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape) * shape[-1] ** -0.5, jnp.float32) for shape in shapes]


@pytest.fixture(scope="module")
def model():
    return Model(Decoder(TINY_LLAMA, float32_backend()), random_params(TINY_LLAMA))


def test_a_plain_head_adds_each_block_to_what_it_reads(model):
    w1, b1, w2, b2, u, h = arrays(0, (WIDTH, WIDTH), (WIDTH,), (WIDTH, WIDTH), (WIDTH,), (VOCAB, WIDTH), (3, WIDTH))
    head = {"blocks": ({"kernel": w1, "bias": b1}, {"kernel": w2, "bias": b2}), "output": {"kernel": u}}
    once = np.asarray(h) + silu(h @ w1.T + b1)
    twice = once + silu(once @ w2.T + b2)
    logits_BHV = plain_logits(model, {"heads": (head, head)}, h)
    np.testing.assert_allclose(logits_BHV[:, 0], twice @ u.T, atol=1e-4)
    np.testing.assert_array_equal(logits_BHV[:, 0], logits_BHV[:, 1])
    assert not is_conditioned({"heads": (head,)})


def test_heads_without_an_output_share_the_models(model):
    w, b, h = arrays(1, (WIDTH, WIDTH), (WIDTH,), (3, WIDTH))
    head_params = {"heads": ({"blocks": ({"kernel": w, "bias": b},)},)}
    state = h + silu(h @ w.T + b)
    np.testing.assert_allclose(plain_logits(model, head_params, h)[:, 0], model.logits(jnp.asarray(state)), atol=1e-4)


def test_a_conditioned_head_reads_the_path_and_keeps_the_hidden_state(model):
    inner = 20
    w, b, out, u, h, path = arrays(
        2, (inner, 3 * WIDTH), (inner,), (WIDTH, inner), (VOCAB, WIDTH), (2, 5, WIDTH), (2, 5, 2 * WIDTH)
    )
    head = {"blocks": ({"kernel": w, "bias": b, "out": out},), "output": {"kernel": u}}
    inputs = np.concatenate([h, path], axis=-1)
    expected = np.asarray(h) + silu(inputs @ w.T + b) @ out.T
    states = head_states(head, h, path, model.decoder.backend)
    np.testing.assert_allclose(states, expected, atol=1e-4)
    np.testing.assert_allclose(head_logits(model, {"heads": (head,)}, 0, states), expected @ u.T, atol=1e-4)
    assert is_conditioned({"heads": (head,)})
    assert heads_width({"heads": (head,)}) == WIDTH


def test_the_best_rows_of_a_draft_vocabulary_are_its_tokens():
    ids = jnp.asarray([40, 7, 99, 3], jnp.int32)
    logits, backend = jnp.asarray([[[0.1, 3.0, -1.0, 2.0]]]), float32_backend()
    assert top_tokens({"heads": (), "ids": ids}, logits, 3, backend).tolist() == [[[7, 3, 40]]]
    assert top_tokens({"heads": ()}, logits, 3, backend).tolist() == [[[1, 3, 0]]]


OUTPUTS = {
    "tied": {},
    "own": {"tied_embeddings": False},
    "biased": {"head_bias": True},
    "narrow": {"embedding_dim": 16},
    "capped": {"final_softcap": 3.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTPUTS)
def test_the_models_rows_rank_some_tokens_as_the_model_does(name):
    config = replace(TINY_LLAMA, **OUTPUTS[name])
    params = random_params(config)
    model = Model(Decoder(config, float32_backend()), params)
    ids, (h,) = jnp.asarray([200, 5, 77, 0, 131], jnp.int32), arrays(3, (4, WIDTH))
    head_params = {"heads": ({"blocks": ()},), "output": vocabulary_rows(config, params, ids)}
    logits, whole = head_logits(model, head_params, 0, 4 * h), model.logits(4 * h)[:, ids]
    if config.final_softcap is not None:
        logits = config.final_softcap * jnp.tanh(logits / config.final_softcap)
    np.testing.assert_allclose(logits, whole, atol=1e-4)
    assert np.std(whole) > 0.5
