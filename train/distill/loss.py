"""The loss of a student that learns to predict its teacher."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxinfer.models.decoder import Decoder, output_logits
from jaxinfer.notation import Array, Float, Params
from train.distill.divergences import Divergence, acceptance
from train.loop.position_pieces import sum_by_pieces
from train.loop.step import Tally
from train.loop.whole_text import predicted, text_hidden
from train.texts.batches import Batch


class DistillBatch(NamedTuple):
    """Rows of texts, and which of them the student wrote."""

    texts: Batch
    is_sampled_B: Any


@dataclass(frozen=True)
class DistillLoss:
    """The loss as a function of the student's parameters; the teacher's are frozen and get no gradient.

    Both distributions are of logits over ``temperature``, as in sampling. ``hard`` is the weight of an added
    cross-entropy with the texts, for rows that the student did not write.
    """

    teacher: Decoder
    student: Decoder
    divergence: Divergence
    temperature: float = 1.0
    hard: float = 0.0

    def __call__(self, trained: Params, frozen: Params, batch: DistillBatch, key: jax.Array) -> Tally:
        """Tally one batch; also record the divergence alone and the probability that a draft is accepted."""
        frozen, next_ones = jax.lax.stop_gradient(frozen), predicted(batch.texts)
        tokens_BT, segments_BT = jnp.asarray(batch.texts.tokens_BT), batch.texts.segments_BT
        hard_BT = next_ones.counts_BT & ~jnp.asarray(batch.is_sampled_B)[:, None]

        def judge(of_teacher: Array, of_student: Array, targets_BT: Array, counts_BT: Array, hard_BT: Array) -> Any:
            raw_BTV = output_logits(self.student, trained, of_student)[..., : self.teacher.config.num_tokens]
            log_q = log_probs(raw_BTV, self.temperature)
            log_p = log_probs(self._teach(frozen, of_teacher), self.temperature)
            divergences = jnp.sum(jnp.where(counts_BT, self.divergence(log_p, log_q), 0))
            accepted = jnp.sum(jnp.where(counts_BT, acceptance(log_p, log_q), 0))
            losses_BT = optax.softmax_cross_entropy_with_integer_labels(raw_BTV.astype(jnp.float32), targets_BT)
            return divergences, accepted, jnp.sum(jnp.where(hard_BT, losses_BT, 0))

        of_teacher = jax.lax.stop_gradient(text_hidden(self.teacher, frozen, tokens_BT, segments_BT))
        of_student = text_hidden(self.student, trained, tokens_BT, segments_BT)
        divergence, accepted, hard = sum_by_pieces(judge, of_teacher, of_student, *next_ones, hard_BT)
        count = jnp.sum(next_ones.counts_BT, dtype=jnp.float32)
        others = {"divergence": (divergence, count), "acceptance": (accepted, count)}
        return Tally(divergence + self.hard * hard, count, others)

    def _teach(self, frozen: Params, hidden: Array) -> Array:
        logits = output_logits(self.teacher, frozen, hidden)
        return jax.lax.stop_gradient(logits[..., : self.teacher.config.num_tokens])


def log_probs(logits: Float[Array, "*rows V"], temperature: float) -> Float[Array, "*rows V"]:
    """Return log-probabilities at a temperature, in float32."""
    return jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
