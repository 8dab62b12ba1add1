"""What a model and its heads learn together (Medusa-2, Cai et al., 2401.10774): whole texts, and their loss.

With c the heads' coefficient, s(t) a ramp over the steps and L_k the loss of head k = 0, 1, ..,

    L = L_base  +  c s(t) sum_k 0.8^(k + 1) L_k

where L_base is the cross-entropy of the next token (two stages: heads that are trained already, on data that may be
another's) or the divergence from the base as it was (self-distillation: on text that the base itself wrote).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.decoder import Decoder, output_logits
from jaxinfer.models.drafters.heads import vocabulary_rows
from jaxinfer.notation import Array, Float, Params
from train.heads.evaluation import count_hits
from train.heads.loss import NOT_PREDICTED, HeadLoss, Windows
from train.heads.trees import evaluation_figures
from train.loop.step import Tally
from train.loop.whole_text import text_hidden
from train.model.lora import with_lora
from train.texts.batches import Batch

Recipe = Literal["two-stage", "self-distillation"]
Ramp = Literal["constant", "linear", "sine"]


class JointBatch(NamedTuple):
    """Rows of whole texts, their tokens' positions and rows in the heads' outputs, and what the heads' loss weighs."""

    tokens_BT: Any
    mask_BT: Any
    segments_BT: Any
    positions_BT: Any
    targets_BT: Any
    weight_B: Any


@dataclass(frozen=True)
class JointLoss:
    """The loss as a function of ``{"lora" | "base", "heads"}``.

    ``frozen`` has ``"params"`` and, as ``"heads"``, what heads read and do not learn; ``scale`` is the
    adapters'.
    """

    heads: HeadLoss
    recipe: Recipe
    scale: float = 1.0

    def __call__(self, trained: Params, frozen: Params, batch: JointBatch, key: jax.Array) -> Tally:
        """Tally one batch; its tokens are those that the base is to predict."""
        decoder, frozen = self.heads.decoder, jax.lax.stop_gradient(frozen)
        params = joint_params(trained, frozen["params"], self.scale)
        hidden_BTD = text_hidden(decoder, params, batch.tokens_BT, batch.segments_BT)
        original_BTD = None
        if self.recipe == "self-distillation":
            original_BTD = text_hidden(decoder, frozen["params"], batch.tokens_BT, batch.segments_BT)
        losses_BT, counts_BT = base_losses(decoder, params, frozen["params"], batch, hidden_BTD, original_BTD)
        language, count = jnp.sum(losses_BT), jnp.sum(counts_BT, dtype=jnp.float32)
        beside = beside_heads(decoder, params, frozen)
        tally = self.heads(trained["heads"], beside, as_windows(batch, hidden_BTD), key)
        share = jnp.mean(batch.weight_B) * self.heads.decay
        others = {**tally.others, "base_loss": (language, count), "heads_weight": (share, jnp.float32(1))}
        return Tally(language + share * tally.loss, count, others)


def joint_params(trained: Params, base: Params, scale: float) -> Params:
    """Return the model that is trained: the base with adapters, or parameters of its own."""
    return with_lora(base, trained["lora"], scale) if "lora" in trained else trained["base"]


def beside_heads(decoder: Decoder, params: Params, frozen: Params) -> Params:
    """Return what heads read beside hidden states, as it is in the model that is trained.

    No gradient flows into it: the heads' loss reaches the model through its hidden states alone.
    """
    frozen_heads = dict(frozen.get("heads", {}))
    if "output" in frozen_heads:
        frozen_heads["output"] = vocabulary_rows(decoder.config, params, frozen_heads["ids"])
    return {"params": params, "heads": frozen_heads}


def as_windows(batch: JointBatch, hidden_BTD: Float[Array, "B T D"]) -> Windows:
    """Return rows as what heads learn from: what belongs to no answer is marked as of no text."""
    mask_BT = jnp.asarray(batch.mask_BT)
    # The state before an answer's first token foresees the second.
    is_state_BT = mask_BT | jnp.pad(mask_BT[:, 1:], ((0, 0), (0, 1)))
    texts_BT = jnp.where(is_state_BT & (jnp.asarray(batch.segments_BT) > 0), batch.segments_BT, -1)
    targets_BT = jnp.where(mask_BT, batch.targets_BT, NOT_PREDICTED)
    return Windows(hidden_BTD, batch.tokens_BT, batch.positions_BT, texts_BT, targets_BT)


def base_losses(
    decoder: Decoder,
    params: Params,
    base: Params,
    batch: JointBatch,
    hidden_BTD: Float[Array, "B T D"],
    original_BTD: Float[Array, "B T D"] | None,
) -> tuple[Array, Array]:
    """Return the loss before each token of an answer, and which these are; computed anew on the way back."""
    segments_BT, tokens_BT = jnp.asarray(batch.segments_BT), jnp.asarray(batch.tokens_BT)
    counts_BT = jnp.asarray(batch.mask_BT)[:, 1:] & (segments_BT[:, 1:] == segments_BT[:, :-1])

    def compute(params: Params, hidden_BTD: Array) -> Array:
        logprobs_BTV = jax.nn.log_softmax(output_logits(decoder, params, hidden_BTD[:, :-1]).astype(jnp.float32))
        if original_BTD is None:
            losses_BT = -jnp.take_along_axis(logprobs_BTV, tokens_BT[:, 1:, None], axis=-1)[..., 0]
        else:
            teacher_BTV = jax.nn.log_softmax(output_logits(decoder, base, original_BTD[:, :-1]).astype(jnp.float32))
            # A token that cannot be drawn at all, as of a padded vocabulary, has no share in either.
            terms_BTV = jnp.exp(teacher_BTV) * (teacher_BTV - logprobs_BTV)
            losses_BT = jnp.sum(jnp.where(jnp.isfinite(teacher_BTV), terms_BTV, 0), axis=-1)
        return jnp.where(counts_BT, losses_BT, 0)

    return jax.checkpoint(compute)(params, hidden_BTD), counts_BT


def ramp_at(ramp: Ramp, step: int, num_steps: int) -> float:
    """Return what the heads' loss weighs at a step, from 0 to 1."""
    done = step / max(num_steps, 1)
    return {"constant": 1.0, "linear": done, "sine": math.sin(math.pi / 2 * done)}[ramp]


def as_joint_batch(rows: Batch, target_rows_V: np.ndarray, weight: float) -> JointBatch:
    """Return packed rows with their tokens' positions, each counted from its text's beginning."""
    assert rows.segments_BT is not None
    tokens_BT, segments_BT = np.asarray(rows.tokens_BT), np.asarray(rows.segments_BT)
    is_first_BT = np.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    places_T = np.arange(tokens_BT.shape[1])
    starts_BT = np.maximum.accumulate(np.where(is_first_BT, places_T, 0), axis=1)
    weight_B = np.full((len(tokens_BT),), weight, np.float32)
    return JointBatch(
        tokens_BT,
        rows.mask_BT,
        segments_BT,
        (places_T - starts_BT).astype(np.int32),
        target_rows_V[tokens_BT],
        weight_B,
    )


@dataclass
class JointEvaluation:
    """Counts over held-out rows: called with what is trained, gives the figures that a run judges it by.

    ``score`` is the number of tokens a step that a tree of ``nodes``, the root included, is expected to give.
    """

    decoder: Decoder
    frozen: Params
    batches: Sequence[JointBatch]
    scale: float
    nodes: int = 16
    num_ranks: int = 10

    def __call__(self, trained: Params) -> Mapping[str, Any]:
        """Return the figures as JSON holds them."""
        accuracies, loss = self.measure(trained)
        return {**evaluation_figures(accuracies, self.nodes), "next_token_loss": round(loss, 4)}

    def measure(self, trained: Params) -> tuple[list[list[float]], float]:
        """Return accuracies as `decoding.tuning.head_accuracy.measure_accuracies` does, and the next token's loss."""
        sums = [
            jax.device_get(_evaluate(self.decoder, self.num_ranks, self.scale, trained, self.frozen, batch))
            for batch in self.batches
        ]
        hits_HR, tries_H, loss, count = (sum(np.asarray(one, np.float64) for one in column) for column in zip(*sums))
        return (hits_HR / np.maximum(tries_H, 1)[:, None]).tolist(), float(loss / max(count, 1))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _evaluate(
    decoder: Decoder, num_ranks: int, scale: float, trained: Params, frozen: Params, batch: JointBatch
) -> tuple[Array, ...]:
    params = joint_params(trained, frozen["params"], scale)
    hidden_BTD = text_hidden(decoder, params, batch.tokens_BT, batch.segments_BT)
    losses_BT, counts_BT = base_losses(decoder, params, params, batch, hidden_BTD, None)
    beside = beside_heads(decoder, params, frozen)
    hits_HR, tries_H = count_hits(decoder, num_ranks, trained["heads"], beside, as_windows(batch, hidden_BTD))
    return hits_HR, tries_H, jnp.sum(losses_BT), jnp.sum(counts_BT)
