"""Evaluates a model's exits on held-out texts, and chooses one for drafting."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.decoder import Decoder
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Params
from train.layerskip.loss import exit_losses, visit_layers
from train.loop.whole_text import predicted
from train.texts.batches import Batch
from train.texts.rows import batches_of

_TOKENS_AT_ONCE = 1024
_MOST_DRAFTS = 12


class ExitFigures(NamedTuple):
    """For the exit after each layer, the last included: its cross-entropy, and how often its best token is the model's.

    The second number is the acceptance rate of a greedy draft whose predecessors were accepted.
    """

    losses: list[float]
    acceptance: list[float]


@dataclass
class ExitEvaluation:
    """Evaluates by the loss of all exits; ``finish`` turns trained parameters into the model's."""

    decoder: Decoder
    finish: Callable[[Any], Params]
    rows: Batch
    weights_L: np.ndarray

    def __call__(self, trained: Any) -> Mapping[str, Any]:
        """Return the figures as JSON values; ``score`` is the negative weighted loss of all exits."""
        found = self.measure(self.finish(trained))
        score = -float(np.dot(self.weights_L, found.losses))
        return {
            "score": round(score, 5),
            "whole_model_loss": round(found.losses[-1], 5),
            "acceptance": [round(one, 4) for one in found.acceptance[:-1]],
        }

    def measure(self, params: Params) -> ExitFigures:
        """Return the figures of a model's exits."""
        size = max(1, _TOKENS_AT_ONCE // self.rows.tokens_BT.shape[1])
        sums = [np.asarray(_count(self.decoder, params, batch)) for batch in batches_of(self.rows, size)]
        losses_L, agreed_L, count_L = np.sum(np.stack(sums, dtype=np.float64), axis=0) if sums else np.zeros((3, 1))
        count_L = np.maximum(count_L, 1)
        return ExitFigures((losses_L / count_L).tolist(), (agreed_L / count_L).tolist())


class ExitChoice(NamedTuple):
    """An exit for drafting: its number of layers, its drafts per round, and the expected gain."""

    exit_layer: int
    num_draft_tokens: int
    tokens_per_step: float
    speedup: float

    @property
    def strategy(self) -> str:
        """The strategy's name on the command line."""
        return f"layerskip:exit_layer={self.exit_layer},num_draft_tokens={self.num_draft_tokens}"


def choose_exit(acceptance: Sequence[float]) -> ExitChoice:
    """Return the exit and the draft length with the highest gain, if time is proportional to layers read.

    A round of g drafts reads ``g E + L`` layers. If drafts are accepted with probability a, it gives an expected ``(1 -
    a^(g + 1)) / (1 - a)`` tokens (Leviathan et al., 2211.17192).
    """
    num_layers = len(acceptance) + 1
    choices = []
    for exit_layer, rate in enumerate(acceptance, 1):
        for drafts in range(1, _MOST_DRAFTS + 1):
            tokens = math.fsum(rate**depth for depth in range(drafts + 1))
            choices.append(ExitChoice(exit_layer, drafts, tokens, tokens / (drafts * exit_layer / num_layers + 1)))
    return max(choices, key=lambda choice: choice.speedup)


@partial(jax.jit, static_argnums=0)
def _count(decoder: Decoder, params: Params, rows: Batch) -> Float[Array, "figures L"]:
    model, next_ones = Model(decoder, params), predicted(rows)

    def visit(hidden_BTD: Array, _: Any) -> Any:
        best_BT = jnp.argmax(model.logits(model.normed(hidden_BTD)), axis=-1)
        return jnp.sum(exit_losses(model, hidden_BTD, next_ones)), best_BT

    losses_L, best_LBT = visit_layers(model, rows, visit, None)
    agreed_L = jnp.sum((best_LBT == best_LBT[-1]) & next_ones.counts_BT, axis=(1, 2), dtype=jnp.float32)
    count = jnp.sum(next_ones.counts_BT, dtype=jnp.float32)
    return jnp.stack([losses_L, agreed_L, jnp.full_like(losses_L, count)])
