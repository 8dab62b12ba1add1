"""Evaluates heads on held-out texts: accuracy by head and rank, and the tokens per step of a draft tree."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.decoder import Decoder
from jaxinfer.models.drafters.heads import head_logits, head_states, is_conditioned
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Params
from train.heads.loss import Windows, WindowSource, look_ahead
from train.heads.trees import evaluation_figures

_BATCH = 16


@dataclass
class HeadEvaluation:
    """Counts over held-out windows: maps heads to the figures of an evaluation.

    ``score`` is the expected tokens per step of a tree of ``nodes`` nodes, root included.
    """

    decoder: Decoder
    frozen: Params
    source: WindowSource
    nodes: int = 16
    num_ranks: int = 10

    def __call__(self, heads: Params) -> Mapping[str, Any]:
        """Return the figures of heads as JSON values."""
        return evaluation_figures(self.accuracies(heads), self.nodes)

    def accuracies(self, heads: Params) -> list[list[float]]:
        """Return ``accuracies[k][r]`` as in `jaxinfer.decoding.tuning.head_accuracy.measure_accuracies`."""
        hits_HR = tries_H = np.zeros(())
        for batch in self._batches():
            found_HR, tried_H = count_hits(self.decoder, self.num_ranks, heads, self.frozen, batch)
            hits_HR, tries_H = hits_HR + np.asarray(found_HR, np.float64), tries_H + np.asarray(tried_H, np.float64)
        return (hits_HR / np.maximum(tries_H, 1)[:, None]).tolist()

    def _batches(self) -> Iterator[Windows]:
        windows = np.arange(-(-self.source.count // _BATCH) * _BATCH)  # windows past the end count nothing
        for start in range(0, len(windows), _BATCH):
            yield self.source.take(windows[start : start + _BATCH])


@partial(jax.jit, static_argnums=(0, 1))
def count_hits(
    decoder: Decoder, num_ranks: int, heads: Params, frozen: Params, batch: Windows
) -> tuple[Float[Array, "heads ranks"], Float[Array, " heads"]]:
    model, head_params = Model(decoder, frozen["params"]), {**heads, **frozen.get("heads", {})}
    num_tokens = batch.tokens_BT.shape[1] - len(heads["heads"]) - 1
    views = look_ahead(model, head_params, batch, num_tokens)
    hits, tries = [], []
    for index, head in enumerate(heads["heads"]):
        path = views.path(index, is_conditioned(head_params))
        states = head_states(head, views.hidden_BTD, path, decoder.backend)
        logits_BTW = head_logits(model, head_params, index, states)
        target_BT = views.targets[index]
        known_BT = views.valid[index] & (target_BT >= 0)
        own_BT1 = jnp.take_along_axis(logits_BTW, jnp.maximum(target_BT, 0)[..., None], axis=-1)
        # Among equal logits the lower row comes first, as in a partial sort.
        is_before = jnp.arange(logits_BTW.shape[-1])[None, None, :] < target_BT[..., None]
        rank_BT = jnp.sum((logits_BTW > own_BT1) | ((logits_BTW == own_BT1) & is_before), axis=-1)
        hits_BTR = (rank_BT[..., None] == jnp.arange(num_ranks)[None, None, :]) & known_BT[..., None]
        hits.append(jnp.sum(hits_BTR, axis=(0, 1), dtype=jnp.float32))
        tries.append(jnp.sum(views.valid[index], dtype=jnp.float32))
    return jnp.stack(hits), jnp.stack(tries)
