"""The schedules of LayerSkip (Elhoushi et al., 2404.16710): which layers are dropped, and which exits learn.

Layer l of L, counted from 0, is dropped for a text at step t of T with probability

    p(t, l) = S(t) D(l) p_max,    D(l) = exp(l ln 2 / (L - 1)) - 1,    S(t) = exp(t ln 2 / (T - 1)) - 1

S is 1 if a trained model is trained further. The loss of step t is ``sum_l w(t, l) CE(exit after layer l)`` with

    w(t, l) = C(t, l) e(l) / sum_i C(t, i) e(i),    e(l) = e_scale (1 + ... + E)  for E = l + 1 < L,
                                                     e(L - 1) = L + e_scale (1 + ... + (L - 1))

The paper has l where E is used here. Then the first layer's exit would never learn, but in models of few layers that
exit drafts. C, the curriculum, is 0 or 1, and always 1 for the last layer.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from jaxinfer.notation import Float

Curriculum = Literal["rotational", "gradual", "none"]
CURRICULA: tuple[str, ...] = get_args(Curriculum)


@dataclass(frozen=True)
class ExitSchedule:
    """The schedules of `train.layerskip.schedules` for a model of ``num_layers`` trained for ``num_steps``.

    ``max_drop`` is p_max, ``exit_scale`` e_scale. ``every`` is R of the rotational curriculum: every R-th exit learns,
    others at each step. In the gradual curriculum exits join from the last to the first over half of the steps.
    """

    num_layers: int
    num_steps: int
    max_drop: float = 0.1
    exit_scale: float = 0.2
    curriculum: Curriculum = "rotational"
    every: int = 8
    from_scratch: bool = False

    def drop_rates(self, step: int) -> Float[np.ndarray, " L"]:
        """Return p(t, l) of every layer."""
        depth_L = np.arange(self.num_layers) / max(1, self.num_layers - 1)
        share = _rise(step / max(1, self.num_steps - 1)) if self.from_scratch else 1.0
        return (share * (np.exp(depth_L * math.log(2)) - 1) * self.max_drop).astype(np.float32)

    def exit_weights(self, step: int) -> Float[np.ndarray, " L"]:
        """Return w(t, l) of every layer; the last is the whole model. Their sum is 1."""
        return self._normalized(self._learns(step))

    def all_exits(self) -> Float[np.ndarray, " L"]:
        """Return the weights if every exit learns, for the loss of evaluations."""
        return self._normalized(np.ones(self.num_layers, bool))

    def _learns(self, step: int) -> np.ndarray:
        layers_L = np.arange(self.num_layers)
        if self.curriculum == "rotational":
            learns_L = layers_L % self.every == step % self.every
        elif self.curriculum == "gradual":
            learns_L = step / self.num_steps >= 0.5 * (self.num_layers - layers_L) / self.num_layers
        else:
            learns_L = np.ones(self.num_layers, bool)
        return learns_L | (layers_L == self.num_layers - 1)

    def _normalized(self, learns_L: np.ndarray) -> Float[np.ndarray, " L"]:
        exits_L = np.arange(1, self.num_layers + 1)
        weights_L = self.exit_scale * exits_L * (exits_L + 1) / 2
        weights_L[-1] = self.num_layers + self.exit_scale * (self.num_layers - 1) * self.num_layers / 2
        weights_L = weights_L * learns_L
        return (weights_L / weights_L.sum()).astype(np.float32)


def _rise(progress: float) -> float:
    return math.exp(progress * math.log(2)) - 1
