"""Evaluates a DFlash drafter on held-out texts: how far blocks agree with them, and the ranks of right tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.drafters.dflash import Drafter
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Params
from train.dflash.loss import DFlashLoss, block_states
from train.streams.loss import StreamRows, look_ahead, row_logits
from train.streams.rows import RowSource

_BATCH = 2


class Agreement(NamedTuple):
    """How drafts agree with texts.

    ``accuracies[k][r]`` is how often the token that place k + 1 ranks r-th is right, where all places before rank the
    right one first; ``tokens`` are the tokens a step that whole blocks give as chains.
    """

    accuracies: list[list[float]]
    tokens: float


@dataclass
class DFlashEvaluation:
    """Counts over held-out rows: maps a drafter's parameters to the figures of an evaluation.

    It uses ``most`` rows, and as many anchors of each as the source picks. Ranks are in the whole vocabulary, so the
    source's targets must be token ids. ``score`` is the tokens that a step gives where all of a block is drafted.
    """

    loss: DFlashLoss
    params: Params
    source: RowSource
    most: int = 64
    num_ranks: int = 10

    def __call__(self, learned: Params) -> Mapping[str, Any]:
        """Return the figures as JSON values."""
        found = self.agreement(learned, self.most)
        return {"score": round(found.tokens, 4), "top1": [round(ranks[0], 4) for ranks in found.accuracies]}

    def agreement(self, learned: Params, most: int | None = None) -> Agreement:
        """Return how the drafter agrees with ``most`` rows; None counts every anchor."""
        parts = self.source.parts(most)
        parts += [(-1, 0)] * (-len(parts) % _BATCH)
        hits_JR = tries_J = np.zeros(())
        for start in range(0, len(parts), _BATCH):
            batch = self.source.part(parts[start : start + _BATCH])
            found_JR, tried_J = count_hits(self.loss, self.num_ranks, learned, self.params, batch)
            hits_JR, tries_J = hits_JR + np.asarray(found_JR, np.float64), tries_J + np.asarray(tried_J, np.float64)
        accuracies = (hits_JR / np.maximum(tries_J, 1)[:, None]).tolist()
        return Agreement(accuracies, 1.0 + float(np.sum(hits_JR[:, 0]) / max(tries_J[0], 1)))


@partial(jax.jit, static_argnums=(0, 1))
def count_hits(
    loss: DFlashLoss, num_ranks: int, learned: Params, params: Params, batch: StreamRows
) -> tuple[Float[Array, "J R"], Float[Array, " J"]]:
    """Count, of the blocks that are right before each place, those whose target it ranks r-th, and all of them."""
    model = Model(loss.decoder, params)
    states_BPJD = block_states(model, Drafter(loss.dflash, loss.backend, learned), batch)
    targets = look_ahead(batch, loss.dflash.block_size)
    target_BPJ, is_valid_BPJ = targets.rows_BPA[..., 1:], targets.is_valid_BPA[..., 1:]
    logits_BPJV = row_logits(model, {}, states_BPJD)
    own_BPJ1 = jnp.take_along_axis(logits_BPJV, target_BPJ[..., None], axis=-1)
    # Among equal logits the lower token comes first, as in a partial sort.
    is_before = jnp.arange(logits_BPJV.shape[-1]) < target_BPJ[..., None]
    rank_BPJ = jnp.sum((logits_BPJV > own_BPJ1) | ((logits_BPJV == own_BPJ1) & is_before), axis=-1)
    is_right_BPJ = (rank_BPJ == 0) & is_valid_BPJ
    reached_BPJ = jnp.cumprod(jnp.pad(is_right_BPJ, ((0, 0), (0, 0), (1, 0)), constant_values=True)[..., :-1], axis=-1)
    tried_BPJ = (reached_BPJ > 0) & is_valid_BPJ
    hits_BPJR = (rank_BPJ[..., None] == jnp.arange(num_ranks)) & tried_BPJ[..., None]
    return jnp.sum(hits_BPJR, axis=(0, 1), dtype=jnp.float32), jnp.sum(tried_BPJ, axis=(0, 1), dtype=jnp.float32)
