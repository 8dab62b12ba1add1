"""Training learns, counts only what it should, and repeats itself."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.decoder import Decoder, init_params
from tests.toys import BEGIN, END, TINY_LLAMA, VOCAB_SIZE, encode_bytes, fable, float32_backend
from train.loop.step import (
    Schedule,
    StepSettings,
    Tally,
    TrainState,
    compile_step,
    initial_state,
    next_token_loss,
    token_losses,
    train,
)
from train.texts.batches import Batch, window_batches

CONFIG = replace(TINY_LLAMA, model_dim=16, ffn_dim=32, num_heads=2, num_kv_heads=1)
DECODER = Decoder(CONFIG, float32_backend())
TEXT = encode_bytes(fable(50))
ROWS, LENGTH = 8, 32


def batches(num_steps: int, seed: int = 0):
    return window_batches(TEXT, num_rows=ROWS, length=LENGTH, num_steps=num_steps, seed=seed)


def same_tree(one, other, **tolerances):
    """Assert that two trees of arrays are equal, bit for bit or, with tolerances, nearly."""
    compare = np.testing.assert_allclose if tolerances else np.testing.assert_array_equal
    jax.tree.map(lambda a, b: compare(np.asarray(a), np.asarray(b), **tolerances), one, other)


def parts(batch: Batch, count: int) -> Batch:
    return jax.tree.map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), batch)


loss_and_gradient = jax.jit(
    jax.value_and_grad(
        lambda params, batch: (lambda tally: (tally.loss, tally.num_tokens))(
            next_token_loss(DECODER, params, None, batch)
        ),
        has_aux=True,
    )
)


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda: init_params(CONFIG, float32_backend(), jax.random.key(1)))()


OPTIMIZER = Schedule(num_steps=4, warmup=0.25).build_optimizer()
start = jax.jit(partial(initial_state, DECODER, OPTIMIZER), static_argnames="seed")


@pytest.fixture(scope="module")
def step():
    """A step of one microbatch, compiled once for all tests."""
    return compile_step(partial(next_token_loss, DECODER), OPTIMIZER)


@pytest.mark.slow
def test_loss_falls_well_below_the_entropy_of_single_tokens():
    """A model that knew only how frequent each byte is could not get below that entropy."""
    _, losses = train(DECODER, Schedule(num_steps=250, peak_rate=1e-2), batches(250))
    frequencies = np.bincount(TEXT) / len(TEXT)
    entropy = -np.sum(frequencies * np.log(np.where(frequencies > 0, frequencies, 1)))
    assert losses[0] > 1.2 * entropy
    assert np.mean(losses[-5:]) < 0.7 * entropy


def trained(step, order, seed):
    """Train for four steps as `train` does, with a step that is compiled already."""
    state, losses = start(seed=seed), []
    for batch in batches(4, order):
        state, metrics = step(state, None, parts(batch, 1))
        losses.append(float(metrics.loss))
    return jax.tree.map(np.asarray, state.params), losses


def is_same(one, other):
    return jax.tree.all(jax.tree.map(np.array_equal, one[0], other[0]))


@pytest.mark.slow
def test_training_is_a_function_of_its_seeds(step):
    first, again, other_order, other_start = (
        trained(step, order, seed) for order, seed in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert first[1] == again[1]
    assert is_same(first, again)
    assert not is_same(other_order, first)
    assert not is_same(other_start, first)


@pytest.mark.parametrize("scan_layers", [pytest.param(each, marks=pytest.mark.exhaustive) for each in (True, False)])
def test_training_from_scratch_is_a_function_of_its_seeds(scan_layers):
    decoder = Decoder(CONFIG, float32_backend(scan_layers))
    schedule = Schedule(num_steps=4, warmup=0.25)
    first, again, other_order, other_start = (
        train(decoder, schedule, batches(4, order), seed=seed) for order, seed in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert first[1] == again[1]
    assert is_same(first, again)
    assert not is_same(other_order, first)
    assert not is_same(other_start, first)


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_empty_mask_has_no_loss_and_no_gradient(params):
    (batch,) = batches(1)
    mask_BT = np.zeros((ROWS, LENGTH), bool)
    mask_BT[:, 0] = True  # a first token is never predicted
    (loss, count), gradient = loss_and_gradient(params, Batch(batch.tokens_BT, mask_BT))
    assert (loss, count) == (0, 0)
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradient))


def test_loss_of_two_tokens_equals_the_hand_computed_value(params):
    """With blocks that add nothing the logits are head @ (norm of the embedding), and the loss its cross-entropy."""
    params = {**params, "blocks": jax.tree.map(np.zeros_like, params["blocks"])}
    losses_BT = jax.jit(partial(token_losses, DECODER))(params, np.array([[BEGIN, 77]], np.int32))
    hidden_D = np.asarray(params["embed"]["embedding"], np.float64)[BEGIN]
    normed_D = hidden_D / np.sqrt(np.mean(hidden_D**2) + CONFIG.norm_eps)
    logits_V = np.asarray(params["head"]["kernel"], np.float64) @ normed_D
    expected = np.log(np.sum(np.exp(logits_V))) - logits_V[77]
    assert abs(expected - np.log(VOCAB_SIZE)) > 1e-3
    np.testing.assert_allclose(losses_BT, [[expected]], rtol=1e-5)


@pytest.mark.exhaustive
def test_a_step_consumes_its_state_and_reports_the_gradient(step):
    state = start(seed=0)
    kernel = state.params["head"]["kernel"]
    (batch,) = batches(1)
    after, metrics = step(state, None, parts(batch, 1))
    assert kernel.is_deleted()
    assert (int(after.step), int(metrics.num_tokens)) == (1, ROWS * (LENGTH - 1))
    assert metrics.gradient_norm > 0


def test_accumulation_is_one_large_batch(step):
    """Even where the parts have different numbers of predicted tokens, of which a mean of means would lose sight."""
    (batch,) = batches(1)
    mask_BT = np.arange(LENGTH)[None, :] < np.array([2, 3, 4, 5, 20, 25, 30, 32])[:, None]
    batch = Batch(batch.tokens_BT, mask_BT)
    outcomes = []
    fourfold = compile_step(partial(next_token_loss, DECODER), OPTIMIZER, StepSettings(microbatches=4))
    for count, one in ((1, step), (4, fourfold)):
        _, metrics = one(start(seed=0), None, parts(batch, count))
        outcomes.append(tuple(map(float, metrics[:3])))
    np.testing.assert_allclose(outcomes[0], outcomes[1], rtol=1e-5)


def test_randomness_is_a_function_of_seed_step_and_microbatch():
    def noise(params, frozen, batch, key):
        return Tally(params["w"] * jax.random.normal(key), jnp.float32(1))

    optimizer = Schedule(num_steps=9, decay="constant", warmup=0.0).build_optimizer()
    seen = {}
    for seed in (0, 1):
        step = compile_step(noise, optimizer, StepSettings(seed=seed))
        state = train_state(optimizer)
        for at in range(3):
            state, metrics = step(state, None, jnp.zeros((1, 1)))
            seen[seed, at] = float(metrics.gradient_norm)
    assert len(set(seen.values())) == 6
    _, again = compile_step(noise, optimizer)(
        train_state(optimizer)._replace(step=jnp.int32(2)), None, jnp.zeros((1, 1))
    )
    assert float(again.gradient_norm) == seen[0, 2]


def train_state(optimizer):
    params = {"w": jnp.float32(1)}
    return TrainState(jnp.int32(0), params, optimizer.init(params))


@pytest.mark.slow
def test_mixed_precision_rounds_the_pass_and_keeps_parameters_whole(params):
    """The loss is that of the rounded parameters; updates too small for them are not lost."""
    optimizer = Schedule(num_steps=100, peak_rate=1e-6, decay="constant", warmup=0.0).build_optimizer()
    bfloat = Decoder(CONFIG, replace(float32_backend(), param_dtype="bfloat16"))
    step = compile_step(partial(next_token_loss, bfloat), optimizer, StepSettings(compute_dtype="bfloat16"))
    state = jax.jit(partial(initial_state, DECODER, optimizer, 0))()
    before = jax.tree.map(np.array, state.params)
    rounded = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), before)
    (batch,) = batches(1)
    expected = jax.jit(partial(next_token_loss, bfloat))(rounded, None, batch)
    for _ in range(2):  # the first has a learning rate of zero
        state, metrics = step(state, None, parts(batch, 1))
    np.testing.assert_allclose(metrics.loss, expected.loss / expected.num_tokens, rtol=1e-5)
    kernel, old = np.asarray(state.params["head"]["kernel"]), before["head"]["kernel"]
    assert kernel.dtype == np.float32
    assert (kernel != old).all()
    assert np.mean(kernel.astype(jnp.bfloat16) != old.astype(jnp.bfloat16)) < 0.1


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_schedules_rise_and_fall(decay):
    rate = Schedule(num_steps=100, peak_rate=2.0, warmup=0.1, decay=decay).learning_rate()
    assert float(rate(0)) == 0
    np.testing.assert_allclose([float(rate(5)), float(rate(10))], [1.0, 2.0], rtol=1e-6)
    half = {"cosine": 1.0, "linear": 1.0, "constant": 2.0}[decay]
    np.testing.assert_allclose(float(rate(10 + 91 / 2)), half, rtol=1e-5)


def test_windows_are_pieces_of_the_text():
    text = bytes(TEXT)
    for batch in batches(3):
        assert all(bytes(row_T.tolist()) in text for row_T in np.asarray(batch.tokens_BT))
    with pytest.raises(ValueError, match="holds no window of 32"):
        next(window_batches(TEXT[:31], num_rows=1, length=32, num_steps=1, seed=0))
    (whole,) = window_batches(TEXT[:32], num_rows=2, length=32, num_steps=1, seed=0)
    assert np.asarray(whole.tokens_BT).tolist() == [TEXT[:32]] * 2
