"""A loss over positions in pieces is the loss over all of them, and so are its gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.loop.position_pieces import loss_by_pieces

BATCH, TOKENS, WIDTH, ROWS = 3, 7, 4, 5


def cross_entropy(learned, states, whole, along):
    """A loss of two kinds of states through one matrix, and how many positions it is of."""
    targets_BT, mask_BT = along
    total = jnp.float32(0)
    for weight, states_BTD in zip(whole["weights"], states):
        log_q_BTV = jax.nn.log_softmax(jnp.tanh(states_BTD @ learned["matrix"]) + learned["bias"])
        picked_BT = jnp.take_along_axis(log_q_BTV, targets_BT[..., None], axis=-1)[..., 0]
        total -= weight * jnp.sum(jnp.where(mask_BT, picked_BT, 0))
    return total, {"count": jnp.sum(mask_BT)}


def example(count):
    rng = np.random.default_rng(0)
    draw = partial(rng.standard_normal, dtype=np.float32)
    learned = {"matrix": draw((WIDTH, ROWS)), "bias": draw(ROWS)}
    states = tuple(draw((BATCH, TOKENS, WIDTH)) for _ in range(2))
    mask_BT = (np.arange(TOKENS) < count) & (rng.random((BATCH, TOKENS)) < 0.7)
    along = rng.integers(0, ROWS, (BATCH, TOKENS)), mask_BT
    return jax.tree.map(jnp.asarray, (learned, states, {"weights": np.float32([1.0, 0.5])}, along))


@pytest.mark.parametrize("at_once", [1, 9, 100])
@pytest.mark.parametrize("count", [0, 4, TOKENS])
def test_it_is_the_loss_and_the_gradient_of_all_at_once(count, at_once):
    learned, states, whole, along = example(count)

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def by_pieces(learned, states, count):
        total, told = loss_by_pieces(cross_entropy, learned, states, whole, along, count, at_once)
        return 3 * total, told

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def at_once_of(learned, states):
        total, told = cross_entropy(learned, states, whole, along)
        return 3 * total, told

    found, expected = by_pieces(learned, states, jnp.int32(count)), at_once_of(learned, states)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def test_gradients_have_the_dtypes_of_what_is_learned():
    learned, states, whole, along = example(TOKENS)
    learned, states = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (learned, states))
    derive = jax.grad(partial(loss_by_pieces, cross_entropy, at_once=9), argnums=(0, 1), has_aux=True)
    gradients, _ = derive(learned, states, whole, along, TOKENS)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradients)} == {"bfloat16"}
