"""The loss of a model that learns to say in few bits what it says in many."""

from dataclasses import dataclass

import jax

from jaxinfer.notation import Params
from jaxinfer.ops.few_bits.formats import Format
from train.distill.loss import DistillBatch, DistillLoss
from train.loop.step import Tally
from train.qat.rounding import rounded


@dataclass(frozen=True)
class RoundedLoss:
    """Distillation of a student that computes with its weights rounded to ``form`` (LLM-QAT, 2305.17888).

    What is trained are the weights before they are rounded.
    """

    distill: DistillLoss
    form: Format

    def __call__(self, trained: Params, frozen: Params, batch: DistillBatch, key: jax.Array) -> Tally:
        """Tally one batch."""
        return self.distill(rounded(trained, self.form), frozen, batch, key)
