"""Evaluates streams on held-out texts: accuracy by stream and rank, and the tokens per step of a draft tree."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.decoder import Decoder
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Params
from train.heads.trees import evaluation_figures
from train.streams.loss import StreamRows, learned_params, look_ahead, row_logits, run_rows
from train.streams.rows import RowSource

_BATCH = 2


@dataclass
class StreamEvaluation:
    """Counts over held-out rows: maps what is learned to the figures of an evaluation.

    It uses ``most`` rows, and as many tokens of each as the source picks. Ranks are in the whole vocabulary, so the
    source's targets must be token ids. ``score`` is the expected tokens per step of a tree of ``nodes`` nodes, root
    included.
    """

    decoder: Decoder
    num_layers: int
    params: Params
    source: RowSource
    lora_scale: float = 1.0
    most: int = 64
    nodes: int = 16
    num_ranks: int = 10

    def __call__(self, learned: Params) -> Mapping[str, Any]:
        """Return the figures as JSON values."""
        return evaluation_figures(self.accuracies(learned, self.most), self.nodes)

    def accuracies(self, learned: Params, most: int | None = None) -> list[list[float]]:
        """Return ``accuracies[j][r]``: how often rank r of stream j + 1 is right; ``most`` None counts every token."""
        params = learned_params(learned, self.params, self.lora_scale)
        parts = self.source.parts(most)
        parts += [(-1, 0)] * (-len(parts) % _BATCH)
        hits_JR = tries_J = np.zeros(())
        for start in range(0, len(parts), _BATCH):
            batch = self.source.part(parts[start : start + _BATCH])
            found_JR, tried_J = count_hits(
                self.decoder, self.num_layers, self.num_ranks, learned["streams"], params, batch
            )
            hits_JR, tries_J = hits_JR + np.asarray(found_JR, np.float64), tries_J + np.asarray(tried_J, np.float64)
        return (hits_JR / np.maximum(tries_J, 1)[:, None]).tolist()


@partial(jax.jit, static_argnums=(0, 1, 2))
def count_hits(
    decoder: Decoder, num_layers: int, num_ranks: int, stream_params: Params, params: Params, batch: StreamRows
) -> tuple[Float[Array, "J R"], Float[Array, " J"]]:
    """Count for each stream the targets that it ranks r-th, and all its targets."""
    model = Model(decoder, params)
    streams_BPJD = run_rows(model, stream_params, num_layers, batch).streams_BPJD
    targets = look_ahead(batch, streams_BPJD.shape[2] + 1)
    target_BPJ, is_valid_BPJ = targets.rows_BPA[..., 1:], targets.is_valid_BPA[..., 1:]
    logits_BPJV = row_logits(model, {}, streams_BPJD)
    own_BPJ1 = jnp.take_along_axis(logits_BPJV, target_BPJ[..., None], axis=-1)
    # Among equal logits the lower token comes first, as in a partial sort.
    is_before = jnp.arange(logits_BPJV.shape[-1]) < target_BPJ[..., None]
    rank_BPJ = jnp.sum((logits_BPJV > own_BPJ1) | ((logits_BPJV == own_BPJ1) & is_before), axis=-1)
    hits_BPJR = (rank_BPJ[..., None] == jnp.arange(num_ranks)) & is_valid_BPJ[..., None]
    return jnp.sum(hits_BPJR, axis=(0, 1), dtype=jnp.float32), jnp.sum(is_valid_BPJ, axis=(0, 1), dtype=jnp.float32)
