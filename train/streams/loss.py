"""The training of streams: rows of whole texts, and their loss (Bhendawade et al., 2402.11131).

After token t, the model and the early exit predict token t + 1, and stream j predicts token t + 1 + j. At chosen tokens
t, with p_j the distribution of stream j over the loss vocabulary, the loss is

    sum_j alpha_j sum_t  (1 - s) * -log p_j(token)  +  s * KL(teacher || p_j)

over the targets in this vocabulary, plus the same for the exit with alpha_1; the exit's loss trains only the exit. The
teacher is the model's own distribution of the same token, given all tokens before it; ``s`` is 0 for the paper's loss.
If the model learns too, by adapters (`train.model.lora`), its own cross-entropy at these t is added.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxinfer.models.decoder import Decoder
from jaxinfer.models.drafters.heads import head_logits
from jaxinfer.models.drafters.streams import exit_states
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Bool, Float, Int, Params
from train.features.text_pass import Texts, run_first
from train.loop.step import Tally
from train.model.lora import with_lora
from train.streams.forward import run_top, stream_states


class StreamRows(NamedTuple):
    """B rows of T tokens of whole texts; ``picks`` are the places in each whose streams run, -1 for none.

    ``hidden`` are the states before the layers with streams, None if they must be computed. ``is_target`` marks the
    predicted tokens. ``targets`` are their rows in the output over the loss vocabulary, -1 for tokens outside it.
    """

    tokens_BT: Any
    positions_BT: Any
    segments_BT: Any
    is_target_BT: Any
    targets_BT: Any
    picks_BP: Any
    hidden_BTD: Any = None

    @property
    def texts(self) -> Texts:
        """The texts without targets and picks."""
        return Texts(*(jnp.asarray(array) for array in self[:3]))


class Targets(NamedTuple):
    """The targets of each pick, the next token first: output rows, and where they count.

    ``is_known`` also requires that the loss vocabulary has the token.
    """

    rows_BPA: Int[Array, "B P A"]
    is_valid_BPA: Bool[Array, "B P A"]

    @property
    def is_known_BPA(self) -> Bool[Array, "B P A"]:
        return self.is_valid_BPA & (self.rows_BPA >= 0)


def look_ahead(batch: StreamRows, num_ahead: int) -> Targets:
    """Return the targets of each pick; those in another text, or not predicted, are not valid."""
    picks_BP = jnp.asarray(batch.picks_BP)
    (rows, num_tokens), num_picks = batch.tokens_BT.shape, picks_BP.shape[1]
    places_BPA = picks_BP[..., None] + jnp.arange(1, num_ahead + 1)
    inside_BPA = (picks_BP[..., None] >= 0) & (places_BPA < num_tokens)
    flat_BX = jnp.clip(places_BPA, 0, num_tokens - 1).reshape(rows, -1)

    def at(array: Any) -> Array:
        return jnp.take_along_axis(jnp.asarray(array), flat_BX, axis=1).reshape(rows, num_picks, num_ahead)

    own_BP = jnp.take_along_axis(jnp.asarray(batch.segments_BT), jnp.maximum(picks_BP, 0), axis=1)
    is_same_BPA = at(batch.segments_BT) == own_BP[..., None]
    return Targets(at(batch.targets_BT), inside_BPA & is_same_BPA & at(batch.is_target_BT))


@dataclass(frozen=True)
class StreamLoss:
    """The loss as a function of what is learned.

    This is ``"streams"`` (`jaxinfer.models.drafters.streams`) and, if the model learns too, the base's ``"lora"``,
    times ``lora_scale``. ``num_layers`` layers have streams. ``alpha`` weighs the streams; its last value also holds
    for all later ones. ``soft`` is the teacher's share s.
    """

    decoder: Decoder
    num_layers: int
    alpha: tuple[float, ...] = (1.0,)
    soft: float = 0.0
    lora_scale: float = 1.0

    def __call__(self, learned: Params, frozen: Params, batch: StreamRows, key: jax.Array) -> Tally:
        """Tally one batch; ``frozen`` has the model's ``"params"`` and, with a loss vocabulary, its ``"output"``.

        It counts the tokens that the first stream predicts.
        """
        frozen = jax.lax.stop_gradient(frozen)
        model = Model(self.decoder, learned_params(learned, frozen["params"], self.lora_scale))
        run = run_rows(model, learned["streams"], self.num_layers, batch)
        tally = _tally_streams(model, frozen, learned["streams"], run, batch, self.alpha, self.soft)
        return _add_main(model, frozen, run, batch, tally) if "lora" in learned else tally


def learned_params(learned: Params, params: Params, lora_scale: float) -> Params:
    """Return the model's parameters, with its learned adapters."""
    return with_lora(params, learned["lora"], lora_scale) if "lora" in learned else params


class RowsRun(NamedTuple):
    """States of a batch: the tokens' before the layers with streams, the tokens' final ones, and the streams'."""

    hidden_BTD: Float[Array, "B T D"]
    final_BTD: Float[Array, "B T D"]
    streams_BPJD: Float[Array, "B P J D"]


def run_rows(model: Model, stream_params: Params, num_layers: int, batch: StreamRows) -> RowsRun:
    """Run the model over a batch's texts, and the streams of its picks."""
    texts, dtype = batch.texts, jnp.dtype(model.decoder.backend.compute_dtype)
    if batch.hidden_BTD is None:
        hidden_BTD = run_first(model, texts, num_layers)
    else:
        hidden_BTD = jnp.asarray(batch.hidden_BTD).astype(dtype)
    final_BTD, cache = run_top(model, hidden_BTD, texts, num_layers)
    picks_BP = jnp.maximum(jnp.asarray(batch.picks_BP), 0)
    streams_BPJD = stream_states(model, stream_params, num_layers, hidden_BTD, texts, cache, picks_BP)
    return RowsRun(hidden_BTD, final_BTD, streams_BPJD)


def _add_main(model: Model, frozen: Params, run: RowsRun, batch: StreamRows, tally: Tally) -> Tally:
    """Add the cross-entropy of the next tokens."""
    final_BPD = jnp.take_along_axis(run.final_BTD, jnp.maximum(jnp.asarray(batch.picks_BP), 0)[..., None], axis=1)
    targets = look_ahead(batch, 1)
    picks_BP = jnp.asarray(batch.picks_BP)
    next_BP = jnp.take_along_axis(jnp.asarray(batch.texts.tokens_BT), jnp.maximum(picks_BP, 0) + 1, axis=1, mode="clip")
    # Over the whole vocabulary, not that of the streams' loss: the model must keep predicting all tokens.
    losses_BP = optax.softmax_cross_entropy_with_integer_labels(model.logits(final_BPD), next_BP)
    is_valid_BP = targets.is_valid_BPA[..., 0]
    loss = jnp.sum(jnp.where(is_valid_BP, losses_BP, 0))
    others = {**tally.others, "main_loss": (loss, jnp.sum(is_valid_BP, dtype=jnp.float32))}
    return Tally(tally.loss + loss, tally.num_tokens, others)


def _tally_streams(
    model: Model,
    frozen: Params,
    stream_params: Params,
    run: RowsRun,
    batch: StreamRows,
    alpha: tuple[float, ...],
    soft: float,
) -> Tally:
    """Add up the losses of the streams and of the early exit."""
    num_streams, picks_BP = run.streams_BPJD.shape[2], jnp.maximum(jnp.asarray(batch.picks_BP), 0)
    targets = look_ahead(batch, num_streams + 1)
    picked_BPD = jnp.take_along_axis(run.hidden_BTD, picks_BP[..., None], axis=1)
    exit_BPD = exit_states(model, stream_params, jax.lax.stop_gradient(picked_BPD))
    states_BPAD = jnp.concatenate([exit_BPD[:, :, None], run.streams_BPJD], axis=2)
    logits_BPAW = row_logits(model, frozen, states_BPAD)
    rows_BPA1 = jnp.maximum(targets.rows_BPA, 0)[..., None]
    chosen_BPA = jnp.take_along_axis(logits_BPAW, rows_BPA1, axis=-1)[..., 0]
    totals_BPA = jax.nn.logsumexp(logits_BPAW, axis=-1)
    losses_BPA = totals_BPA - chosen_BPA
    hard_A = jnp.sum(jnp.where(targets.is_known_BPA, losses_BPA, 0), axis=(0, 1))
    loss_A = hard_A
    if soft:
        places_BX = (picks_BP[..., None] + jnp.arange(num_streams + 1)).reshape(len(picks_BP), -1)
        final_BXD = jnp.take_along_axis(run.final_BTD, places_BX[..., None], axis=1, mode="clip")
        final_BPAD = jax.lax.stop_gradient(final_BXD).reshape(states_BPAD.shape)
        teacher_BPAW = jax.nn.log_softmax(row_logits(model, frozen, final_BPAD))
        logprobs_BPAW = logits_BPAW - totals_BPA[..., None]
        divergence_BPA = jnp.sum(jnp.exp(teacher_BPAW) * (teacher_BPAW - logprobs_BPAW), axis=-1)
        loss_A = (1 - soft) * hard_A + soft * jnp.sum(jnp.where(targets.is_known_BPA, divergence_BPA, 0), axis=(0, 1))
    weights_A = jnp.asarray([alpha[0], *(alpha[min(at, len(alpha) - 1)] for at in range(num_streams))])
    is_hit_BPA = (chosen_BPA >= jnp.max(logits_BPAW, axis=-1)) & targets.is_known_BPA
    hits_A, tries_A, known_A = (
        jnp.sum(array, axis=(0, 1), dtype=jnp.float32)
        for array in (is_hit_BPA, targets.is_valid_BPA, targets.is_known_BPA)
    )
    others = {}
    for at, name in enumerate(("exit", *(f"stream_{stream}" for stream in range(1, num_streams + 1)))):
        others |= {f"{name}_loss": (hard_A[at], known_A[at]), f"{name}_top1": (hits_A[at], tries_A[at])}
    return Tally(jnp.sum(weights_A * loss_A), tries_A[1], others)


def row_logits(model: Model, frozen: Params, states: Float[Array, "*rows D"]) -> Float[Array, "*rows W"]:
    """Return logits over the loss vocabulary, whose output rows are ``frozen["output"]``, or over all tokens."""
    output = {"output": frozen["output"]} if "output" in frozen else {}
    logits, cap = (
        head_logits(model, {"heads": [{}], **output}, 0, states).astype(jnp.float32),
        model.config.final_softcap,
    )
    return cap * jnp.tanh(logits / cap) if output and cap is not None else logits
