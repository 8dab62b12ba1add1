"""Measures how sparse a model's activations are, what leaving features out saves, and how much faster it is."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.sparsity.shares import active_features
from jaxinfer.cache.slots import slots_for
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.active_columns import feed_forward_kernels
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.layers import KERNEL
from jaxinfer.models.model import Model
from jaxinfer.models.unit_order import live_share, order_units
from jaxinfer.ops.active_products import LARGEST_SHARE, MOST_ROWS
from jaxinfer.ops.cpu_kernels.active.products import unit_of
from jaxinfer.ops.masks import causal_ancestors
from jaxinfer.sampling.draw import best_token

# The tokens before those of a step, and how often a step is repeated in one run.
_BEFORE, _STEPS = 16, 8


@dataclass(frozen=True)
class LayerShare:
    """A layer: its share of features that are zero at a token, and the share of units that a step's rows need.

    A unit is a feature, or two neighbours where bfloat16 is multiplied in pairs. The steps of ``needed`` are the
    report's, in order.
    """

    layer: int
    zeros: float
    needed: tuple[float, ...]


@dataclass(frozen=True)
class StepSpeed:
    """A step of so many rows, of ``batch`` sequences with ``nodes`` nodes of a tree each.

    Nodes are neighbouring tokens of the text, sequences begin at different places. ``skipped`` is the share of all
    weights that the step does not read. Times are in seconds, the best of several, dense and sparse in turn.
    """

    batch: int
    nodes: int
    skipped: float
    dense_seconds: float
    sparse_seconds: float

    @property
    def ratio(self) -> float:
        """How many times as fast a step is."""
        return self.dense_seconds / self.sparse_seconds


@dataclass(frozen=True)
class BlockShare:
    """The share of blocks of 128 hidden units that a step needs, and of all weights that a TPU does not read then.

    In the order in which the units are ``stored``, and as `jaxinfer.models.unit_order` would have them ``ordered`` by
    the first half of the text; counted over the second half.
    """

    batch: int
    nodes: int
    stored: float
    ordered: float
    skipped_stored: float
    skipped_ordered: float


@dataclass(frozen=True)
class SparsityReport:
    """``tokens`` are those that zeros were counted over."""

    model: str
    sparsity: str
    dtype: str
    device: str
    cores: int
    tokens: int
    layers: tuple[LayerShare, ...]
    steps: tuple[StepSpeed, ...]
    blocks: tuple[BlockShare, ...]


def measure_sparsity(
    name: str,
    lm: LanguageModel,
    tokens: Sequence[int],
    steps: Sequence[tuple[int, int]],
    repeats: int,
    advance: Callable[[str], None] = lambda label: None,
) -> SparsityReport:
    """Measure a model with sparsity on a text, in steps of (batch, nodes); ``advance`` is called after each."""
    assert lm.backend.sparsity is not None
    active = active_features(lm, tokens)
    unit = unit_of(lm.backend.param_dtype)
    places = {step: _places(len(tokens), *step) for step in steps}
    layers = tuple(
        LayerShare(layer, 1 - float(active_TF.mean()), tuple(_needed(active_TF, places[step], unit) for step in steps))
        for layer, active_TF in enumerate(active)
    )
    dense = lm.changed(lm.params, backend=replace(lm.backend, sparsity=None))
    found = []
    for index, step in enumerate(steps):
        ids_BT = np.asarray(tokens, np.int32)[places[step]]
        seconds = _seconds((dense, lm), ids_BT, step[1], repeats)
        found.append(StepSpeed(*step, skipped_share(lm, [layer.needed[index] for layer in layers], step), *seconds))
        advance(f"{step[0]}x{step[1]}")
    return SparsityReport(
        model=name,
        sparsity=lm.backend.sparsity.name,
        dtype=lm.backend.param_dtype,
        device=jax.devices()[0].device_kind,
        cores=os.cpu_count() or 1,
        tokens=len(tokens),
        layers=layers,
        steps=tuple(found),
        blocks=tuple(block_shares(lm, active, steps)),
    )


def block_shares(lm: LanguageModel, active: Sequence[np.ndarray], steps: Sequence[tuple[int, int]]) -> list[BlockShare]:
    """Return what a TPU's lists of live blocks leave out in steps of (batch, nodes), by activity ``[T, F]`` a layer."""
    half = len(active[0]) // 2
    orders = [order_units(active_TF[:half]) for active_TF in active]
    later = [active_TF[half:] for active_TF in active]
    ordered = [active_TF[:, order] for active_TF, order in zip(later, orders)]
    found = []
    for batch, nodes in steps:
        by_layer = [[live_share(active_TF, batch, nodes) for active_TF in each] for each in (later, ordered)]
        skipped = [_unread(lm, shares) if batch * nodes <= MOST_ROWS else 0.0 for shares in by_layer]
        found.append(BlockShare(batch, nodes, *(float(np.mean(shares)) for shares in by_layer), *skipped))
    return found


def least_tokens(nodes: int) -> int:
    """Return how many tokens a text needs for steps of so many nodes."""
    return _BEFORE + nodes


def _places(length: int, batch: int, nodes: int) -> np.ndarray:
    """Return the places ``[B, T]`` in a text of what each sequence of a step holds: some tokens, then its nodes."""
    begins = np.linspace(0, length - least_tokens(nodes), batch).astype(int)
    return begins[:, None] + np.arange(least_tokens(nodes))


def _needed(active_TF: np.ndarray, places_BT: np.ndarray, unit: int) -> float:
    """Return the share of units that the nodes of a step need."""
    active_F = active_TF[places_BT[:, _BEFORE:].reshape(-1)].any(axis=0)
    return float(active_F.reshape(-1, unit).any(axis=1).mean())


def skipped_share(lm: LanguageModel, needed: Sequence[float], step: tuple[int, int]) -> float:
    """Return the share of all weights that a step does not read, by what each layer needs."""
    if step[0] * step[1] > MOST_ROWS:
        return 0.0
    most = LARGEST_SHARE[unit_of(lm.backend.param_dtype)]
    return _unread(lm, [share if share <= most else 1.0 for share in needed])


def _unread(lm: LanguageModel, read: Sequence[float]) -> float:
    """Return the share of all weights that a step does not read, by the share that it reads of each layer's parts."""
    unread = 0.0
    for share, mlp in zip(read, feed_forward_kernels(lm.params).values(), strict=True):
        parts = [mlp["down"], *([mlp["up"]] if lm.config.gated_mlp else [])]
        unread += sum(part[KERNEL].nbytes for part in parts) * (1 - share)
    # A table that is the output matrix too is read whole, another one by rows.
    rows = {name: node for name, node in lm.params.items() if name != "embed" or lm.config.tied_embeddings}
    return unread / sum(leaf.nbytes for leaf in jax.tree.leaves(rows))


def _seconds(models: Sequence[LanguageModel], ids_BT: np.ndarray, nodes: int, repeats: int) -> list[float]:
    """Return each model's seconds a step, the best of ``repeats`` runs; models take turns."""
    runs, best = [_compiled(lm, ids_BT, nodes) for lm in models], [float("inf")] * len(models)
    for _ in range(repeats + 1):  # the first run also touches memory for the first time
        for index, run in enumerate(runs):
            began = time.perf_counter()
            jax.block_until_ready(run())
            best[index] = min(best[index], (time.perf_counter() - began) / _STEPS)
    return best


def _compiled(lm: LanguageModel, ids_BT: np.ndarray, nodes: int) -> Callable[[], Any]:
    decoder, params = lm.programs.decoder, lm.adapted_params
    batch, length = ids_BT.shape
    cache = create_cache(lm.config, batch, slots_for(length + nodes), decoder.backend, nodes)
    _, cache = jax.jit(partial(_pass, decoder, 0))(params, cache, jnp.asarray(ids_BT[:, :_BEFORE]))
    compiled = jax.jit(partial(_repeated, decoder)).lower(params, cache, jnp.asarray(ids_BT[:, _BEFORE:])).compile()
    return lambda: compiled(params, cache, jnp.asarray(ids_BT[:, _BEFORE:]))


def _repeated(decoder: Decoder, params: Any, cache: Any, tokens_BM: Any) -> Any:
    def again(_: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        cache, tokens_BM = carry
        draws_BM, cache = _pass(decoder, _BEFORE, params, cache, tokens_BM)
        # The same tokens once more, which the compiler does not know.
        return cache, tokens_BM + jnp.minimum(draws_BM, 0)

    return jax.lax.fori_loop(0, _STEPS, again, (cache, tokens_BM))[1]


def _pass(decoder: Decoder, start: int, params: Any, cache: Any, tokens_BM: Any) -> tuple[Any, Any]:
    batch, count = tokens_BM.shape
    start_B = jnp.full((batch,), start, jnp.int32)
    positions_BM = start_B[:, None] + jnp.arange(count, dtype=jnp.int32)
    model = Model(decoder, params)
    placements = cache.place(start_B, causal_ancestors(count)[None])
    hidden_BMD, cache = model.forward(tokens_BM, positions_BM, cache, placements, start_B + count)
    return best_token(model.logits(hidden_BMD), decoder.backend).astype(jnp.int32), cache
