"""A forward pass over whole texts is the decoder's own, and texts packed into one row do not see each other."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.models.decoder import Decoder
from tests.toys import TINY_LLAMA, float32_backend, random_params
from tests.train.loop.test_step import same_tree
from train.loop.step import next_token_loss, token_losses
from train.loop.whole_text import text_hidden
from train.texts.batches import Batch
from train.texts.packing import Example, pack

WINDOWED = replace(
    TINY_LLAMA, layer_pattern=(LayerKind(Rope(10000.0, 8)), LayerKind(Rope(10000.0, 8), window=5)), num_layers=2
)
TEXTS = [list(range(40, 61)), list(range(90, 70, -1)), [7, 7, 9, 30, 12, 99, 3]]


@pytest.mark.parametrize(
    "config", [WINDOWED, pytest.param(TINY_LLAMA, marks=pytest.mark.slow)], ids=["windowed", "dense"]
)
def test_losses_are_those_of_the_logits_of_inference(config):
    """Texts alone in their rows, against the cached forward pass of generation; beyond the window too."""
    from jaxinfer import LanguageModel

    params = random_params(config)
    decoder = Decoder(config, float32_backend())
    logits_BTV = LanguageModel(config, params, float32_backend()).logits(TEXTS[:1])
    expected_T = -jax.nn.log_softmax(logits_BTV)[0, jnp.arange(20), jnp.asarray(TEXTS[0][1:])]
    losses_BT = jax.jit(partial(token_losses, decoder))(params, jnp.asarray(TEXTS[:1], jnp.int32))
    np.testing.assert_allclose(losses_BT[0], expected_T, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "config", [WINDOWED, pytest.param(TINY_LLAMA, marks=pytest.mark.slow)], ids=["windowed", "dense"]
)
def test_texts_of_one_row_are_as_if_alone(config):
    params, decoder = random_params(config), Decoder(config, float32_backend())
    packed = pack([Example(tuple(text), (True,) * len(text)) for text in TEXTS], 64, seed=0)
    assert packed.tokens_BT.shape[0] == 1
    hidden = jax.jit(partial(text_hidden, decoder))
    together_TD = hidden(params, packed.tokens_BT, packed.segments_BT)[0]
    for segment in (1, 2, 3):
        (places,) = np.nonzero(np.asarray(packed.segments_BT)[0] == segment)
        alone_TD = hidden(params, jnp.asarray(packed.tokens_BT)[:, places])[0]
        np.testing.assert_allclose(together_TD[places], alone_TD, rtol=1e-4, atol=1e-5)


def test_a_packed_row_counts_no_token_that_begins_a_text():
    params, decoder = random_params(TINY_LLAMA), Decoder(TINY_LLAMA, float32_backend())
    packed = pack([Example(tuple(text), (True,) * len(text)) for text in TEXTS], 64, seed=0)
    tally = jax.jit(partial(next_token_loss, decoder))(params, None, packed)
    assert tally.num_tokens == sum(len(text) - 1 for text in TEXTS)
    # Each text by itself in a row as long, of which the rest counts nothing: what follows changes nothing before it.
    rows = np.array([text + [0] * (64 - len(text)) for text in TEXTS], np.int32)
    mask_BT = np.arange(64) < np.array([[len(text)] for text in TEXTS])
    alone = jax.jit(partial(next_token_loss, decoder))(params, None, Batch(rows, mask_BT))
    np.testing.assert_allclose(tally.loss, alone.loss, rtol=1e-5)


@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_recomputing_blocks_changes_no_gradient(scan_layers):
    backend = float32_backend(scan_layers)
    params = random_params(TINY_LLAMA, scan_layers=scan_layers)
    batch = Batch(np.array(TEXTS[:1], np.int32), np.ones((1, 21), bool))

    def gradient(backend):
        loss = partial(next_token_loss, Decoder(TINY_LLAMA, backend))
        return jax.jit(jax.grad(lambda params: loss(params, None, batch).loss))(params)

    plain, recomputed = gradient(backend), gradient(replace(backend, remat_layers=True))
    same_tree(plain, recomputed, rtol=1e-4, atol=1e-5)
