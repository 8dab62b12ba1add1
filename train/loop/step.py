"""The train step: pure, jitted with its state donated, for any mesh; and next-token training, its simplest use.

A step adds up the gradients of microbatches, each a sum over predicted tokens, and divides once by their number. So
accumulation changes only the memory. All randomness depends only on the seed and the step's number.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxinfer.models.decoder import Decoder, init_params, output_logits
from jaxinfer.notation import Array, Float, Int, Params
from train.loop.whole_text import text_hidden
from train.texts.batches import Batch


@dataclass(frozen=True)
class Schedule:
    """The optimizer's schedule: AdamW with a warm-up and then a decay, gradients clipped by their norm.

    ``warmup`` is a fraction of ``num_steps``; ``decay`` goes to zero (cosine, linear) or is off (constant).
    """

    num_steps: int
    peak_rate: float = 3e-3
    warmup: float = 0.1
    weight_decay: float = 0.01
    largest_norm: float = 1.0
    decay: Literal["cosine", "linear", "constant"] = "cosine"

    def learning_rate(self) -> optax.Schedule:
        """Return the learning rate as a function of the step."""
        warmup_steps = max(1, round(self.warmup * self.num_steps))
        rest = max(1, self.num_steps + 1 - warmup_steps)
        after = {
            "cosine": optax.cosine_decay_schedule(self.peak_rate, rest),
            "linear": optax.linear_schedule(self.peak_rate, 0.0, rest),
            "constant": optax.constant_schedule(self.peak_rate),
        }[self.decay]
        return optax.join_schedules([optax.linear_schedule(0.0, self.peak_rate, warmup_steps), after], [warmup_steps])

    def build_optimizer(self) -> optax.GradientTransformation:
        """Return the schedule as an optax transformation."""
        return optax.chain(
            optax.clip_by_global_norm(self.largest_norm),
            optax.adamw(self.learning_rate(), b2=0.95, weight_decay=self.weight_decay),
        )


class TrainState(NamedTuple):
    """The changing state of training: ``step`` counts updates, ``moments`` are the optimizer's."""

    step: Int[Array, ""]
    params: Params
    moments: Any


class Tally(NamedTuple):
    """The sums of a microbatch: of its losses, of its predicted tokens, and others for the record.

    Each of ``others`` is a sum and its divisor.
    """

    loss: Float[Array, ""]
    num_tokens: Float[Array, ""]
    others: Mapping[str, tuple[Any, Any]] = {}


class Metrics(NamedTuple):
    """Mean loss of the predicted tokens in nats, their number, and the norm of the unclipped gradient."""

    loss: Float[Array, ""]
    num_tokens: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    others: Mapping[str, Any] = {}


# (trained parameters, frozen parameters, microbatch, key) -> its tally, whose loss is differentiated
Loss = Callable[[Any, Any, Any, jax.Array], Tally]


@dataclass(frozen=True)
class StepSettings:
    """Static settings of a step.

    Every leaf of a batch has ``microbatches`` as its first axis. If ``compute_dtype`` is given, parameters are rounded
    to it for the forward and backward pass, and updated in their own dtype.
    """

    microbatches: int = 1
    compute_dtype: str | None = None
    seed: int = 0


def train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    settings: StepSettings,
    state: TrainState,
    frozen: Any,
    batch: Any,
) -> tuple[TrainState, Metrics]:
    """Update the parameters once."""
    step_key = jax.random.fold_in(jax.random.key(settings.seed), state.step)

    def differentiate(microbatch: Any, index: Any) -> tuple[Tally, Params]:
        def total(params: Params) -> tuple[Array, Tally]:
            rounded = params if settings.compute_dtype is None else cast_floats(params, settings.compute_dtype)
            tally = loss(rounded, frozen, microbatch, jax.random.fold_in(step_key, index))
            return tally.loss, tally

        (_, tally), gradients = jax.value_and_grad(total, has_aux=True)(state.params)
        return tally, gradients

    if settings.microbatches == 1:
        tally, gradients = differentiate(jax.tree.map(lambda leaf: leaf[0], batch), 0)
    else:
        shapes = jax.eval_shape(differentiate, jax.tree.map(lambda leaf: leaf[0], batch), jnp.int32(0))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        def add(sums: Any, one: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, differentiate(*one)), None

        (tally, gradients), _ = jax.lax.scan(add, zeros, (batch, jnp.arange(settings.microbatches)))
    return _update(optimizer, state, tally, gradients)


def _update(
    optimizer: optax.GradientTransformation, state: TrainState, tally: Tally, gradients: Params
) -> tuple[TrainState, Metrics]:
    share = 1 / jnp.maximum(tally.num_tokens, 1)
    gradients = jax.tree.map(lambda leaf: (leaf * share).astype(leaf.dtype), gradients)
    updates, moments = optimizer.update(gradients, state.moments, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    others = {name: total / jnp.maximum(count, 1) for name, (total, count) in tally.others.items()}
    norm = jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(gradients)))
    metrics = Metrics(tally.loss * share, tally.num_tokens, norm, others)  # pyright: ignore[reportArgumentType]
    return TrainState(state.step + 1, params, moments), metrics


def compile_step(
    loss: Loss, optimizer: optax.GradientTransformation, settings: StepSettings = StepSettings()
) -> Callable[[TrainState, Any, Any], tuple[TrainState, Metrics]]:
    """Return `train_step` as ``(state, frozen, batch) -> (state, metrics)``, jitted; the state is consumed."""
    return jax.jit(partial(train_step, loss, optimizer, settings), donate_argnums=0)


def cast_floats(params: Params, dtype: str) -> Params:
    """Return parameters with every floating-point array in another dtype."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, params)


def token_losses(
    decoder: Decoder, params: Params, tokens_BT: Int[Array, "B T"], segments_BT: Any = None
) -> Float[Array, "B T-1"]:
    """Return the cross-entropy, in nats, of every token but the first, given the tokens before it in its text."""
    hidden_BTD = text_hidden(decoder, params, tokens_BT, segments_BT)
    logits_BTV = output_logits(decoder, params, hidden_BTD[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BT[:, 1:])


def next_token_loss(decoder: Decoder, params: Params, frozen: Any, batch: Batch, key: Any = None) -> Tally:
    """Return the losses of the batch's masked tokens."""
    segments_BT = None if batch.segments_BT is None else jnp.asarray(batch.segments_BT)
    counts_BT = jnp.asarray(batch.mask_BT)[:, 1:]
    if segments_BT is not None:
        counts_BT = counts_BT & (segments_BT[:, 1:] == segments_BT[:, :-1])
    losses_BT = token_losses(decoder, params, jnp.asarray(batch.tokens_BT), segments_BT)
    return Tally(jnp.sum(jnp.where(counts_BT, losses_BT, 0)), jnp.sum(counts_BT, dtype=losses_BT.dtype))


def initial_state(decoder: Decoder, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """Draw a model's parameters and start its optimizer."""
    params = init_params(decoder.config, decoder.backend, jax.random.key(seed))
    return TrainState(jnp.int32(0), params, optimizer.init(params))


def train(
    decoder: Decoder, schedule: Schedule, batches: Iterable[Batch], *, seed: int = 0
) -> tuple[Params, list[float]]:
    """Train from scratch on the batches; return the parameters and the loss before each update.

    Weights are float32 or wider. The same seed and batches give bit-identical parameters on one machine.
    """
    optimizer = schedule.build_optimizer()
    step = compile_step(partial(next_token_loss, decoder), optimizer)
    state = initial_state(decoder, optimizer, seed)
    losses = []
    for batch in batches:
        state, metrics = step(state, None, jax.tree.map(lambda leaf: leaf[None], batch))
        losses.append(metrics.loss)
    return state.params, [float(loss) for loss in losses]
