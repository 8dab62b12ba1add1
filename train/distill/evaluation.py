"""Evaluates a draft model on held-out texts: how often the teacher would accept its drafts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.decoder import Decoder, output_logits
from jaxinfer.notation import Array, Float, Params
from train.distill.divergences import acceptance, forward_kl
from train.distill.loss import log_probs
from train.loop.position_pieces import sum_by_pieces
from train.loop.whole_text import predicted, text_hidden
from train.texts.batches import Batch
from train.texts.rows import batches_of


class DraftFigures(NamedTuple):
    """Means over the tokens of answers, each drafted after the answer's own earlier tokens.

    ``acceptance`` is the acceptance rate of rejection sampling, ``sum min(p, q)``, or 1 minus total variation.
    ``agreement`` is that of greedy decoding: how often both models have the same best token. ``divergence`` is
    KL(teacher || student) in nats.
    """

    acceptance: float
    agreement: float
    divergence: float

    def tokens_per_step(self, num_drafts: int) -> float:
        """Return the expected tokens per step with ``num_drafts`` drafts (Leviathan et al., 2211.17192)."""
        return sum(self.acceptance**depth for depth in range(num_drafts + 1))


@dataclass
class DraftEvaluation:
    """Evaluates a student; its score is ``acceptance``."""

    teacher: Decoder
    student: Decoder
    frozen: Params
    rows: Batch
    temperature: float = 1.0

    def __call__(self, trained: Params) -> Mapping[str, Any]:
        """Return the figures as JSON values."""
        found = self.measure(trained)
        figures = {name: round(value, 4) for name, value in found._asdict().items()}
        return {"score": figures["acceptance"], **figures}

    def measure(self, trained: Params) -> DraftFigures:
        """Return the figures of a student's parameters."""
        sums = [
            np.asarray(_count(self.teacher, self.student, self.temperature, self.frozen, trained, batch))
            for batch in batches_of(self.rows)
        ]
        *figures, count = np.sum(np.stack(sums, dtype=np.float64), axis=0)
        return DraftFigures(*(float(one / max(count, 1)) for one in figures))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _count(
    teacher: Decoder, student: Decoder, temperature: float, frozen: Params, trained: Params, rows: Batch
) -> Float[Array, " figures"]:
    tokens_BT = jnp.asarray(rows.tokens_BT)

    def judge(of_teacher: Array, of_student: Array, targets_BT: Array, counts_BT: Array) -> Array:
        num_tokens = teacher.config.num_tokens
        logits_p = output_logits(teacher, frozen, of_teacher)[..., :num_tokens]
        logits_q = output_logits(student, trained, of_student)[..., :num_tokens]
        log_p, log_q = log_probs(logits_p, temperature), log_probs(logits_q, temperature)
        agrees = jnp.argmax(logits_p, axis=-1) == jnp.argmax(logits_q, axis=-1)
        figures = (acceptance(log_p, log_q), agrees, forward_kl(log_p, log_q), jnp.ones_like(counts_BT))
        return jnp.stack([jnp.sum(jnp.where(counts_BT, one, 0), dtype=jnp.float32) for one in figures])

    of_teacher = text_hidden(teacher, frozen, tokens_BT, rows.segments_BT)
    of_student = text_hidden(student, trained, tokens_BT, rows.segments_BT)
    return sum_by_pieces(judge, of_teacher, of_student, *predicted(rows))
