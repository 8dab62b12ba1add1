"""Evaluates an EAGLE drafter on held-out texts: accuracy by depth and rank, and the tokens per step of a draft tree."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.decoder import Decoder
from jaxinfer.models.drafters.eagle import EagleShape, draft_logits
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Params
from train.eagle.rows import EagleRows, RowSource
from train.eagle.unroll import ahead, is_asked, read_features, unroll
from train.heads.trees import evaluation_figures

_BATCH = 2


@dataclass
class EagleEvaluation:
    """Counts over held-out rows, ``most`` of them: maps a drafter to the figures of an evaluation.

    ``rows_V`` is each token's row in the drafter's outputs, -1 without one. ``score`` is the expected tokens per step
    of a tree of ``nodes`` nodes, root included.
    """

    decoder: Decoder
    shape: EagleShape
    frozen: Params
    source: RowSource
    rows_V: np.ndarray
    steps: int
    most: int = 64
    nodes: int = 16
    num_ranks: int = 10

    def __call__(self, params: Params) -> Mapping[str, Any]:
        """Return the figures as JSON values."""
        return evaluation_figures(self.accuracies(params, self.most), self.nodes)

    def accuracies(self, params: Params, most: int | None = None) -> list[list[float]]:
        """Return ``accuracies[i][r]``: how often rank r of step i is right, if those before it are; None: all rows."""
        hits_IR = tries_I = np.zeros(())
        rows = np.arange(min(most or self.source.count, self.source.count))
        rows = np.concatenate([rows, np.full(-len(rows) % _BATCH, -1)])
        for start in range(0, len(rows), _BATCH):
            batch = self.source.take(rows[start : start + _BATCH])
            found_IR, tried_I = count_hits(
                self.decoder, self.shape, self.steps, self.num_ranks, params, self.frozen, self.rows_V, batch
            )
            hits_IR, tries_I = hits_IR + np.asarray(found_IR, np.float64), tries_I + np.asarray(tried_I, np.float64)
        return (hits_IR / np.maximum(tries_I, 1)[:, None]).tolist()


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def count_hits(
    decoder: Decoder,
    shape: EagleShape,
    steps: int,
    num_ranks: int,
    params: Params,
    frozen: Params,
    rows_V: Any,
    batch: EagleRows,
) -> tuple[Float[Array, "I R"], Float[Array, " I"]]:
    """Count for each step the text's own tokens that it ranks r-th, and all that it is asked for."""
    model, drafter = Model(decoder, frozen["params"]), {**params, **frozen["drafter"]}
    features = read_features(shape, model, batch)
    targets_BT = jnp.asarray(rows_V)[jnp.asarray(batch.tokens_BT)]
    hits, tries = [], []
    for step, hidden_BTD in enumerate(unroll(shape, model, drafter, features.read_BTF, batch, steps)):
        logits_BTU = draft_logits(shape, model, drafter, hidden_BTD)
        target_BT, asked_BT = ahead(targets_BT, step + 2), is_asked(batch, step)
        own_BT1 = jnp.take_along_axis(logits_BTU, jnp.maximum(target_BT, 0)[..., None], axis=-1)
        # Among equal logits the lower row comes first, as in a partial sort.
        is_before = jnp.arange(logits_BTU.shape[-1]) < target_BT[..., None]
        rank_BT = jnp.sum((logits_BTU > own_BT1) | ((logits_BTU == own_BT1) & is_before), axis=-1)
        is_found_BT = asked_BT & (target_BT >= 0)
        hits_BTR = (rank_BT[..., None] == jnp.arange(num_ranks)) & is_found_BT[..., None]
        hits.append(jnp.sum(hits_BTR, axis=(0, 1), dtype=jnp.float32))
        tries.append(jnp.sum(asked_BT, dtype=jnp.float32))
    return jnp.stack(hits), jnp.stack(tries)
