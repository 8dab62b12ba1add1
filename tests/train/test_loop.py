"""Training learns, counts only what it should, and repeats itself."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.decoder import Decoder, init_params
from tests.toys import BEGIN, END, TINY_LLAMA, VOCAB_SIZE, encode_bytes, fable, float32_backend
from train.data import Batch, window_batches
from train.loop import Schedule, compile_step, initial_state, mean_loss, token_losses, train

CONFIG = replace(TINY_LLAMA, model_dim=16, ffn_dim=32, num_heads=2, num_kv_heads=1)
DECODER = Decoder(CONFIG, float32_backend())
TEXT = encode_bytes(fable(50))
ROWS, LENGTH = 8, 32


def batches(num_steps: int, seed: int = 0):
    return window_batches(TEXT, num_rows=ROWS, length=LENGTH, num_steps=num_steps, seed=seed)


loss_and_gradient = jax.jit(jax.value_and_grad(lambda params, batch: mean_loss(DECODER, params, batch), has_aux=True))


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, float32_backend(), jax.random.key(1))


def test_loss_falls_well_below_the_entropy_of_single_tokens():
    """A model that knew only how frequent each byte is could not get below that entropy."""
    _, losses = train(DECODER, Schedule(num_steps=250, peak_rate=1e-2), batches(250))
    frequencies = np.bincount(TEXT) / len(TEXT)
    entropy = -np.sum(frequencies * np.log(np.where(frequencies > 0, frequencies, 1)))
    assert losses[0] > 1.2 * entropy
    assert np.mean(losses[-5:]) < 0.7 * entropy


@pytest.mark.parametrize("scan_layers", [False, True])
def test_training_is_a_function_of_its_seeds(scan_layers):
    decoder = Decoder(CONFIG, float32_backend(scan_layers))
    schedule = Schedule(num_steps=4, warmup=0.25)
    first, again, other_order, other_start = (
        train(decoder, schedule, batches(4, seed), seed=start) for seed, start in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert first[1] == again[1]
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first[0], again[0]))
    for other in (other_order, other_start):
        assert not jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first[0], other[0]))


def test_tokens_outside_the_mask_contribute_nothing(params):
    """Neither to the loss nor to the gradient, whatever stands there; inside the mask it matters."""
    (batch,) = batches(1)
    mask_BT = np.arange(LENGTH) % 3 == 0
    mask_BT = np.broadcast_to(mask_BT & (np.arange(LENGTH) <= 24), (ROWS, LENGTH))
    changed_BT = np.array(batch.tokens_BT)
    changed_BT[:, 25:] = END

    (loss, count), gradient = loss_and_gradient(params, Batch(batch.tokens_BT, mask_BT))
    (same_loss, same_count), same_gradient = loss_and_gradient(params, Batch(changed_BT, mask_BT))
    assert count == same_count == 8 * ROWS
    assert loss == same_loss
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), gradient, same_gradient))
    changed_BT[:, 24] = END
    assert loss_and_gradient(params, Batch(changed_BT, mask_BT))[0][0] != loss


def test_an_empty_mask_has_no_loss_and_no_gradient(params):
    (batch,) = batches(1)
    mask_BT = np.zeros((ROWS, LENGTH), bool)
    mask_BT[:, 0] = True  # a first token is never predicted
    (loss, count), gradient = loss_and_gradient(params, Batch(batch.tokens_BT, mask_BT))
    assert (loss, count) == (0, 0)
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradient))


def test_loss_of_two_tokens_equals_the_hand_computed_value():
    """With blocks that add nothing the logits are head @ (norm of the embedding), and the loss its cross-entropy."""
    params = init_params(CONFIG, float32_backend(), jax.random.key(2))
    params["blocks"] = jax.tree.map(lambda leaf: leaf * 0, params["blocks"])
    losses_BT = token_losses(DECODER, params, jnp.array([[BEGIN, 77]], jnp.int32))
    hidden_D = np.asarray(params["embed"]["embedding"], np.float64)[BEGIN]
    normed_D = hidden_D / np.sqrt(np.mean(hidden_D**2) + CONFIG.norm_eps)
    logits_V = np.asarray(params["head"]["kernel"], np.float64) @ normed_D
    expected = np.log(np.sum(np.exp(logits_V))) - logits_V[77]
    assert abs(expected - np.log(VOCAB_SIZE)) > 1e-3
    np.testing.assert_allclose(losses_BT, [[expected]], rtol=1e-5)


def test_a_step_consumes_its_state_and_reports_the_gradient():
    optimizer = Schedule(num_steps=2, warmup=0.5).build_optimizer()
    step, state = compile_step(DECODER, optimizer), initial_state(DECODER, optimizer, seed=0)
    kernel = state.params["head"]["kernel"]
    (batch,) = batches(1)
    after, metrics = step(state, batch)
    assert kernel.is_deleted()
    assert (int(after.step), int(metrics.num_tokens)) == (1, ROWS * (LENGTH - 1))
    assert metrics.gradient_norm > 0


def test_windows_are_pieces_of_the_text():
    text = bytes(TEXT)
    for batch in batches(3):
        assert all(bytes(row_T.tolist()) in text for row_T in np.asarray(batch.tokens_BT))
    with pytest.raises(ValueError, match="holds no window of 32"):
        next(window_batches(TEXT[:31], num_rows=1, length=32, num_steps=1, seed=0))
    (whole,) = window_batches(TEXT[:32], num_rows=2, length=32, num_steps=1, seed=0)
    assert np.asarray(whole.tokens_BT).tolist() == [TEXT[:32]] * 2
