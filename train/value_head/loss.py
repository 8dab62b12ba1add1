"""The squared error of a value head, at every token of an answer (Cobbe et al., 2110.14168), and its evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.value_head import head_values
from jaxinfer.notation import Array, Float, Params
from jaxinfer.ops.backend import Backend
from train.loop.step import Tally
from train.value_head.states import Rollout, ValueBatch, ValueSource

_BATCH = 1024
# Where in an answer values are judged: after so much of it.
SHARES = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class ValueLoss:
    """The sum of squared errors as a function of a head, in units of the scores' spread."""

    backend: Backend

    def __call__(self, head: Params, frozen: Any, batch: ValueBatch, key: jax.Array) -> Tally:
        """Tally one batch."""
        errors_P = head_values(head, batch.hidden_PD, self.backend) - batch.scores_P
        return Tally(jnp.sum(jnp.square(errors_P)), jnp.float32(errors_P.shape[0]))


@dataclass
class ValueEvaluation:
    """Maps a head to its figures over held-out answers, all states of one text after another.

    ``explained`` is the part of the scores' variance that values explain; ``right_pairs`` is by `SHARES` how often, of
    two answers to one prompt with different scores, the better one has the higher value, None without such a pair.
    ``score`` is ``explained``.
    """

    backend: Backend
    source: ValueSource
    rollouts: Sequence[Rollout]

    def __call__(self, head: Params) -> Mapping[str, Any]:
        """Return the figures as JSON values."""
        values_P = self._values(head)
        texts_P = self.source.texts_P[self.source.places]
        scores_P = (self.source.scores[texts_P] - self.source.mean) / self.source.spread
        variance = float(np.var(scores_P))
        explained = 1 - float(np.mean(np.square(values_P - scores_P))) / (variance or 1.0)
        return {"score": explained, "explained": explained, "right_pairs": self._right_pairs(values_P, texts_P)}

    def _values(self, head: Params) -> np.ndarray:
        places = np.arange(-(-self.source.count // _BATCH) * _BATCH) % self.source.count
        values = [
            np.asarray(_head_values(self.backend, head, self.source.take(places[at : at + _BATCH]).hidden_PD))
            for at in range(0, len(places), _BATCH)
        ]
        return np.concatenate(values)[: self.source.count]

    def _right_pairs(self, values_P: np.ndarray, texts_P: np.ndarray) -> list[float | None]:
        by_prompt: dict[Any, list[int]] = {}
        for text in np.unique(texts_P).tolist():
            by_prompt.setdefault(self.rollouts[text].prompt, []).append(text)
        pairs = [pair for texts in by_prompt.values() for pair in combinations(texts, 2)]
        scores = self.source.scores
        pairs = [pair for pair in pairs if scores[pair[0]] != scores[pair[1]]]
        own = {text: values_P[texts_P == text] for text in {text for pair in pairs for text in pair}}
        found: list[float | None] = []
        for share in SHARES:
            value = {text: _at(values_T, share) for text, values_T in own.items()}
            # Equal values say nothing: half of them are right.
            right = [
                0.5 if value[one] == value[other] else (value[one] > value[other]) == (scores[one] > scores[other])
                for one, other in pairs
            ]
            found.append(float(np.mean(right)) if right else None)
        return found


def _at(values_T: np.ndarray, share: float) -> float:
    return float(values_T[round(share * (len(values_T) - 1))])


@partial(jax.jit, static_argnums=0)
def _head_values(backend: Backend, head: Params, hidden_PD: Any) -> Float[Array, " P"]:
    return head_values(head, hidden_PD, backend)
