"""Next-token training of a decoder: a pure step, jitted with its state donated, and the loop around it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxinfer.decoding.step import forward_prompt
from jaxinfer.models.decoder import Decoder, create_cache, init_params, output_logits
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Int, Params
from train.data import Batch


@dataclass(frozen=True)
class Schedule:
    """How parameters are updated: AdamW under a warm-up and a cosine decay to zero, gradients clipped by their norm.

    ``warmup`` is a fraction of ``num_steps``.
    """

    num_steps: int
    peak_rate: float = 3e-3
    warmup: float = 0.1
    weight_decay: float = 0.01
    largest_norm: float = 1.0

    def build_optimizer(self) -> optax.GradientTransformation:
        """Return the schedule as an optax transformation."""
        warmup_steps = max(1, round(self.warmup * self.num_steps))
        rate = optax.warmup_cosine_decay_schedule(0.0, self.peak_rate, warmup_steps, self.num_steps + 1)
        return optax.chain(
            optax.clip_by_global_norm(self.largest_norm),
            optax.adamw(rate, b2=0.95, weight_decay=self.weight_decay),
        )


class TrainState(NamedTuple):
    """What changes while a model is trained: ``step`` counts updates, ``moments`` are the optimizer's."""

    step: Int[Array, ""]
    params: Params
    moments: Any


class Metrics(NamedTuple):
    """Mean loss of the predicted tokens in nats, how many they were, and the norm of the unclipped gradient."""

    loss: Float[Array, ""]
    num_tokens: Int[Array, ""]
    gradient_norm: Float[Array, ""]


def initial_state(decoder: Decoder, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """Draw a model's parameters and start its optimizer."""
    params = init_params(decoder.config, decoder.backend, jax.random.key(seed))
    return TrainState(jnp.int32(0), params, optimizer.init(params))


def token_losses(decoder: Decoder, params: Params, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T-1"]:
    """Return the cross-entropy, in nats, of every token but the first, given those before it."""
    batch, length = tokens_BT.shape
    cache = create_cache(decoder.config, batch, length, decoder.backend)
    lengths_B = jnp.full((batch,), length, jnp.int32)
    hidden_BTD, _ = forward_prompt(Model(decoder, params), tokens_BT, lengths_B, cache, chunk=length)
    logits_BTV = output_logits(decoder, params, hidden_BTD[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BT[:, 1:])


def mean_loss(decoder: Decoder, params: Params, batch: Batch) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the mean loss of the batch's masked tokens, 0 where there is none, and their number."""
    counts_BT = jnp.asarray(batch.mask_BT)[:, 1:]
    losses_BT = jnp.where(counts_BT, token_losses(decoder, params, jnp.asarray(batch.tokens_BT)), 0)
    num_tokens = jnp.sum(counts_BT, dtype=jnp.int32)
    return jnp.sum(losses_BT) / jnp.maximum(num_tokens, 1), num_tokens


def train_step(
    decoder: Decoder, optimizer: optax.GradientTransformation, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    """Update the parameters once."""
    differentiate = jax.value_and_grad(lambda params: mean_loss(decoder, params, batch), has_aux=True)
    (loss, num_tokens), gradients = differentiate(state.params)
    updates, moments = optimizer.update(gradients, state.moments, state.params)
    params = optax.apply_updates(state.params, updates)
    norm = jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(gradients)))
    return TrainState(state.step + 1, params, moments), Metrics(loss, num_tokens, norm)  # pyright: ignore[reportArgumentType]


def compile_step(
    decoder: Decoder, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Return `train_step` as ``(state, batch) -> (state, metrics)``, jitted; the state is consumed."""
    return jax.jit(partial(train_step, decoder, optimizer), donate_argnums=0)


def train(
    decoder: Decoder, schedule: Schedule, batches: Iterable[Batch], *, seed: int = 0
) -> tuple[Params, list[float]]:
    """Train from scratch on the batches; return the parameters and the loss before each update.

    Weights in float32 or wider; the same seed and batches give the same parameters, bit for bit, on one machine.
    """
    optimizer = schedule.build_optimizer()
    step = compile_step(decoder, optimizer)
    state = initial_state(decoder, optimizer, seed)
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
    return state.params, [float(loss) for loss in losses]
