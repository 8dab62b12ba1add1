"""EAGLE: a layer over the target's features drafts a tree, level by level (2401.15077, 2406.16858, 2503.01840)."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.checkpoint.drafters.eagle import read_eagle
from jaxinfer.decoding.drafting.growing_drafter import GrowingDrafter
from jaxinfer.decoding.options import check_range
from jaxinfer.decoding.programs import prefill_chunk
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.step import num_passes
from jaxinfer.decoding.strategy import Prefilled, Proposal, Target, current_tokens, few_nodes
from jaxinfer.decoding.trees.dynamic import Beams, Growth, Guess, check_growth, follow, grow, read_growth
from jaxinfer.errors import InvalidOption
from jaxinfer.models.drafters.eagle import (
    EagleCache,
    EagleShape,
    create_eagle_cache,
    draft_logits,
    drafter_backend,
    fused,
    next_embeddings,
    run_places,
)
from jaxinfer.models.drafters.four_bits import matrices_in_four_bits
from jaxinfer.models.drafters.heads import top_chances, vocabulary_rows
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Bool, Float, Int, Params
from jaxinfer.ops.masks import causal_ancestors, visible_slots
from jaxinfer.ops.rows import take_rows

# How deep published trees are, and how deep those of a device on which each level's pass takes more time than it gains.
_DEEPEST, _DEEPEST_OF_FEW = 8, 3
# How many nodes are drafted for each one that a bounded sum verifies, as of a tree of ranks.
_CHOICE = 1.25


class _Drafted(NamedTuple):
    """What one level of a tree passes on to the next.

    Its beams' outputs, which nodes each of them sees (itself among them), the cache, and how many nodes stand in it.
    """

    hidden_BWD: Any
    sees_BWN: Any
    cache: EagleCache
    count: int


@dataclass(frozen=True)
class Eagle(GrowingDrafter):
    """Draft with one layer that reads the target's features, and its own outputs where there are none yet.

    ``heads`` is a folder of a drafter (`jaxinfer.checkpoint.drafters.eagle`), EAGLE-1, 2 or 3, by default the one that
    comes with the package for the target's weights. ``tree`` is ``dynamic:N`` for the N nodes that it finds likeliest
    at each step (EAGLE-2), of at most ``depth`` levels (0: more for more nodes, up to 8; on a CPU 3, unless a tree is
    named), or a tree as in `TreeDrafter`. ``shape`` and ``params`` are a drafter at hand; ``growth`` is a dynamic tree
    itself. On a CPU all of its matrices are rounded to four bits (`jaxinfer.models.drafters.four_bits`).
    """

    name: ClassVar[str] = "eagle"
    description: ClassVar[str] = "draft a tree with a layer on the target's features (EAGLE-1, 2 and 3)"

    folder_kind: ClassVar[str] = "eagle"
    trainer: ClassVar[str] = "train.eagle"
    default_tree: ClassVar[str] = "dynamic:60"

    depth: int = 0
    shape: EagleShape | None = field(default=None, repr=False)
    # How many tokens of others' drafts and its own a step may have added.
    catch_up: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        check_range(self, "depth", 0, 64)
        if self.depth and self.tree and read_growth(self.tree) is None:
            raise InvalidOption(f"eagle: tree={self.tree} says how deep it is: leave depth= out")

    @property
    def features(self) -> tuple[int, ...]:
        return () if self.shape is None else self.shape.layers

    @property
    def num_run(self) -> int:
        """How many nodes its own layer runs on: those that may get children, but for the root."""
        if self.growth is not None:
            return (self.growth.max_depth - 1) * self.growth.num_beams
        return len({path[:-1] for path in self.paths} - {()})

    def in_sum(self, max_depth: int) -> "Eagle":
        return replace(self, catch_up=max_depth + 1)

    def resolve(self, target: Target) -> "Eagle":
        """Read the drafter and choose the tree; raises InvalidOption where they do not fit each other."""
        shape, params, folder = self.shape, self.params, None
        if shape is None or params is None:
            folder = self.folder_for(target)
            shape, params = read_eagle(folder, target.config, target.backend, target.params, target.fingerprint)
        growth, paths = self._read_growth(target), ()
        if growth is None:
            paths = self.read_paths(folder)
        shaped = replace(self, shape=shape, growth=growth, paths=paths)
        shaped = replace(shaped, catch_up=max(self.catch_up, shaped.max_depth + 1))
        self._check_ranks(shaped, len(params["ids"]) if "ids" in params else target.config.vocab_size)
        if shape.fuses and "ids" in params and "output" not in params:
            params = {**params, "output": vocabulary_rows(target.config, target.params, params["ids"])}
        place, backend = target.partitioner, target.partitioner.partition(target.config, target.backend).backend
        # It only drafts.
        inner = drafter_backend(backend)
        layer = {name: matrices_in_four_bits(part, inner) for name, part in params.items() if name != "output"}
        placed = place.place(layer)
        if "output" in params:
            output = matrices_in_four_bits(params["output"], backend)
            placed |= place.place_heads({"output": output})
        return replace(shaped, params=placed)

    def start(self, model: Model, params: Params, state: DecodeState, prefilled: Prefilled) -> EagleCache:
        batch, num_slots = state.tokens_BS.shape
        assert self.shape is not None
        cache = create_eagle_cache(self.shape, batch, num_slots + self.num_run, model.decoder.backend)
        num_tokens, backend = prefilled.num_tokens, model.decoder.backend
        size = min(prefill_chunk(backend, num_tokens), num_tokens)

        def run_chunk(index: Any, cache: EagleCache) -> EagleCache:
            return self._read_text(model, params, state, cache, jnp.full((batch,), index * size, jnp.int32), size)[1]

        if num_tokens == size:
            return run_chunk(0, cache)
        return jax.lax.fori_loop(0, num_passes(state.lengths_B, num_tokens, size, backend), run_chunk, cache)

    def propose(self, model: Model, params: Params, state: DecodeState, memory: EagleCache) -> Proposal:
        # What it has read of these tokens' features it reads once more: how many are new differs from row to row.
        first_B = jnp.maximum(state.lengths_B - 1 - self.catch_up, 0)
        hidden_BTD, cache = self._read_text(model, params, state, memory, first_B, self.catch_up)
        last_B1 = jnp.clip(state.lengths_B - 2 - first_B, 0, self.catch_up - 1)[:, None]
        guess, kept = self._guesser(model, params, state, take_rows(hidden_BTD, last_B1), cache)
        roots_B = current_tokens(state)
        if self.growth is None:
            tree, log_p_BM = follow(self.paths, roots_B, guess)
        else:
            tree, log_p_BM = grow(self.growth, roots_B, guess, model.decoder.backend)
        return Proposal(tree, kept[-1], chances_BM=jnp.exp(log_p_BM))

    def _read_text(
        self,
        model: Model,
        params: Params,
        state: DecodeState,
        cache: EagleCache,
        first_B: Int[Array, " B"],
        count: int,
    ) -> tuple[Float[Array, "B T D"], EagleCache]:
        """Run the layer over ``count`` places from ``first_B`` on, with the target's features.

        Those past the current token's place, whose token is unknown, mean nothing; drafts are written over them.
        """
        assert self.shape is not None
        backend = model.decoder.backend
        slots_BT = first_B[:, None] + jnp.arange(count, dtype=first_B.dtype)
        features_BTF = state.cache.features.read(slots_BT, self.shape.layers)
        if not self.shape.fuses:
            features_BTF = model.normed(features_BTF)
        tokens_BT = jnp.take_along_axis(state.tokens_BS, slots_BT + 1, axis=1, mode="clip")
        mask_BTS = visible_slots(first_B, causal_ancestors(count)[None], cache.keys.shape[1])
        return run_places(
            self.shape,
            params,
            backend,
            next_embeddings(model, params, tokens_BT),
            fused(self.shape, params, features_BTF, backend),
            slots_BT,
            cache,
            slots_BT,
            mask_BTS,
            state.context_lengths_B,
        )

    def _guesser(
        self, model: Model, params: Params, state: DecodeState, hidden_B1D: Float[Array, "B 1 D"], cache: EagleCache
    ) -> tuple[Guess, list[EagleCache]]:
        """Return what guesses a level's tokens after its beams, and a list whose last member is the cache by then.

        Nodes stand in the cache past the text in the order of their levels, from the current token's place on.
        """
        shape, backend = self.shape, model.decoder.backend
        assert shape is not None
        start_B, num_slots, total = state.lengths_B - 1, cache.keys.shape[1], self.num_run
        kept, text_BS = [cache], jnp.arange(num_slots)[None, :] < start_B[:, None]

        def guess(depth: int, beams: Beams, carried: _Drafted | None) -> tuple[Any, Any, _Drafted]:
            batch, width = beams.tokens_BW.shape
            if carried is None:
                drafted = _Drafted(hidden_B1D, jnp.zeros((batch, 1, total), bool), cache, 0)
            else:
                before_BWD = take_rows(carried.hidden_BWD, beams.origins_BW)
                own_WN = jnp.arange(total)[None, :] == carried.count + jnp.arange(width)[:, None]
                sees_BWN = take_rows(carried.sees_BWN, beams.origins_BW) | own_WN
                nodes_W = carried.count + jnp.arange(width, dtype=start_B.dtype)
                hidden_BWD, cache_now = run_places(
                    shape,
                    params,
                    backend,
                    next_embeddings(model, params, beams.tokens_BW),
                    before_BWD,
                    jnp.broadcast_to(start_B[:, None] + depth - 2, (batch, width)),
                    carried.cache,
                    start_B[:, None] + nodes_W,
                    text_BS[:, None, :] | _placed(sees_BWN, start_B, num_slots),
                    state.context_lengths_B,
                )
                drafted = _Drafted(hidden_BWD, sees_BWN, cache_now, carried.count + width)
                kept.append(cache_now)
            logits_BWU = draft_logits(shape, model, params, drafted.hidden_BWD)
            return *top_chances(params, logits_BWU, self.num_ranks, backend, 1.0), drafted

        return guess, kept

    def _read_growth(self, target: Target) -> Growth | None:
        if self.growth is not None or self.paths:
            return self.growth
        num_nodes = read_growth(self.tree or self.default_tree)
        if num_nodes is None:
            return None
        deepest = _DEEPEST
        if not self.tree:
            few = few_nodes(target)
            deepest = _DEEPEST if few is None else _DEEPEST_OF_FEW
            # A sum chooses among a few more than it verifies.
            num_nodes = 1 + math.ceil((self.sum_nodes - 1) * _CHOICE) if self.sum_nodes else few or num_nodes
        depth = self.depth or min(deepest, num_nodes.bit_length() + 1)
        return check_growth(Growth(num_nodes, min(depth, num_nodes - 1)))

    def _check_ranks(self, shaped: "Eagle", rows: int) -> None:
        if shaped.num_ranks > rows:
            raise InvalidOption(
                f"eagle: the tree asks for rank {shaped.num_ranks - 1}, but the drafter chooses among {rows} tokens"
            )


def _placed(sees_BWN: Bool[Array, "B W N"], start_B: Int[Array, " B"], num_slots: int) -> Bool[Array, "B W S"]:
    """Return which slots of the cache hold the nodes that are seen, where these begin at ``start_B``."""
    batch, width, total = sees_BWN.shape
    index_BS = jnp.arange(num_slots)[None, :] - start_B[:, None]
    inside_BS = (index_BS >= 0) & (index_BS < total)
    index_BWS = jnp.broadcast_to(jnp.clip(index_BS, 0, max(total - 1, 0))[:, None], (batch, width, num_slots))
    return inside_BS[:, None] & jnp.take_along_axis(sees_BWN, index_BWS, axis=2)
