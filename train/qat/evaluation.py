"""Evaluates weights in few bits on held-out texts: how far they are from the model that they were."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jaxinfer.notation import Params
from jaxinfer.ops.few_bits.formats import Format
from train.distill.evaluation import DraftEvaluation, DraftFigures
from train.qat.rounding import rounded


@dataclass
class RoundedEvaluation:
    """Evaluates parameters after rounding; the score is the divergence from the teacher, the smaller the better."""

    against: DraftEvaluation
    form: Format

    def __call__(self, trained: Params) -> Mapping[str, Any]:
        """Return the figures as JSON values."""
        found = self.measure(trained)
        return {"score": -found.divergence, "divergence": found.divergence, "agreement": round(found.agreement, 4)}

    def measure(self, trained: Params) -> DraftFigures:
        """Return the figures of parameters that are rounded here."""
        return self.against.measure(_rounded(trained, self.form))


_rounded = partial(jax.jit, static_argnums=1)(rounded)
