"""DFlash: a small network on the target's hidden states drafts a block of tokens in one pass (2602.06036)."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.checkpoint.drafters.dflash import read_dflash
from jaxinfer.checkpoint.drafters.shipped import tree_beside
from jaxinfer.checkpoint.named_path import named_path
from jaxinfer.decoding.drafting.growing_drafter import GrowingDrafter, guess_by_depth
from jaxinfer.decoding.options import check_range
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Prefilled, Proposal, Target, current_tokens, few_nodes
from jaxinfer.decoding.trees.dynamic import Growth, check_growth, grow, read_growth
from jaxinfer.decoding.trees.static import (
    CAUTION,
    OWN_TREE,
    all_valid,
    fill_tree,
    lay_out,
    read_tree,
)
from jaxinfer.errors import InvalidOption
from jaxinfer.models.drafters.dflash import DFlashConfig, Drafter, abstract_dflash
from jaxinfer.models.drafters.heads import top_chances
from jaxinfer.models.model import Model
from jaxinfer.models.stacking import stack_params
from jaxinfer.notation import Array, Float, Int, Params
from jaxinfer.ops.backend import Backend, choose_backend


@dataclass(frozen=True)
class DFlash(GrowingDrafter):
    """Draft all tokens of a block at once, each without a view of the others' choices.

    ``heads`` is a folder in the published layout (`jaxinfer.checkpoint.drafters.dflash`). Without a ``tree``, the
    likeliest tokens are a chain of ``num_draft_tokens``; 0 takes all of a block, or fewer where a step's nodes cost
    time. Ranks of tokens can also be a tree as in `TreeDrafter`, no deeper than the block, or ``dynamic:N``: the
    likeliest N nodes of each step (`jaxinfer.decoding.trees.dynamic`). ``dflash`` and ``params`` are the network.
    """

    name: ClassVar[str] = "dflash"
    description: ClassVar[str] = "draft a block in one pass of a small network on the target's hidden states"

    folder_kind: ClassVar[str] = "dflash"
    trainer: ClassVar[str] = "train.dflash"

    num_draft_tokens: int = 0
    dflash: DFlashConfig | None = field(default=None, repr=False)
    backend: Backend | None = field(default=None, repr=False)
    # How many tokens one step may accept, whoever drafts them, and the current one: their context is yet unread.
    catch_up: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        check_range(self, "num_draft_tokens", 0, 64)
        if self.num_draft_tokens and self.tree and read_growth(self.tree) is None:
            raise InvalidOption(f"dflash: tree={self.tree} says how deep it drafts: leave num_draft_tokens out")

    @property
    def features(self) -> tuple[int, ...]:
        return () if self.dflash is None else tuple(sorted(self.dflash.features))

    def in_sum(self, max_depth: int) -> "DFlash":
        return replace(self, catch_up=max_depth + 1)

    def resolve(self, target: Target) -> "DFlash":
        """Load the network in the target's dtype; raises InvalidOption where none is named."""
        folder, dflash, params = None, self.dflash, self.params
        own = choose_backend(target.backend.param_dtype, scan_layers=target.backend.scan_layers)
        if dflash is None or params is None:
            if not self.heads:
                raise InvalidOption(
                    "dflash: name the folder of a drafter, as in dflash:heads=FOLDER; python -m train.dflash trains one"
                )
            folder = named_path(self.heads)
            dflash, params = read_dflash(folder, target.config, own, target.fingerprint)
        shaped = self.shaped(dflash, tree_beside(folder), few_nodes(target))
        part = target.partitioner.partition(dflash.decoder, own)
        decoder = stack_params(params["decoder"], abstract_dflash(dflash, own)["decoder"])
        params = {
            **target.partitioner.place({name: value for name, value in params.items() if name != "decoder"}),
            "decoder": target.partitioner.place_params(dflash.decoder, own, decoder),
        }
        return replace(shaped, dflash=replace(dflash, decoder=part.config), backend=part.backend, params=params)

    def shaped(self, dflash: DFlashConfig, own_tree: Any = None, most: int | None = None) -> "DFlash":
        """Return the strategy with its tree, by such a network; one that is not named has at most ``most`` nodes."""
        deepest = dflash.block_size - 1
        paths, growth, num_nodes = self.paths, self.growth, read_growth(self.tree)
        if not paths and growth is None:
            if num_nodes is not None:
                growth = Growth(num_nodes, self.num_draft_tokens or deepest)
            elif self.tree == OWN_TREE and own_tree is None:
                raise InvalidOption("dflash: the drafter has no tree of its own: choose another tree")
            elif self.tree:
                paths = read_tree(str(own_tree) if self.tree == OWN_TREE else self.tree)
            else:
                # A sum of few nodes has no use for more.
                bounds = (bound - 1 for bound in (self.sum_nodes or most, most) if bound)
                paths = read_tree(f"chain:{self.num_draft_tokens or min([deepest, 64, *bounds])}")
        if growth is not None:
            check_growth(growth)
        shaped = replace(self, dflash=dflash, paths=paths, growth=growth)
        if shaped.max_depth > deepest:
            raise InvalidOption(
                f"dflash: {shaped.max_depth} tokens are more than the {deepest} that the drafter's block of "
                f"{dflash.block_size} has: draft at most as many"
            )
        if shaped.num_ranks > dflash.decoder.vocab_size:
            raise InvalidOption(f"dflash: the tree asks for rank {shaped.num_ranks - 1}: there are not as many tokens")
        return replace(shaped, catch_up=shaped.max_depth + 1)

    def start(self, model: Model, params: Params, state: DecodeState, prefilled: Prefilled) -> LayeredCache:
        drafter, batch = self._drafter(params), state.lengths_B.shape[0]
        cache = drafter.create_cache(batch, state.tokens_BS.shape[1], self.catch_up)
        # All but the current token: of a text that goes on, its output too.
        features_BTF = self._read(state, jnp.zeros_like(state.lengths_B), prefilled.num_tokens)
        zero_B, counts_B = jnp.zeros_like(state.lengths_B), state.lengths_B - 1
        return drafter.extend(features_BTF, zero_B, cache, state.context_lengths_B, counts_B)

    def propose(self, model: Model, params: Params, state: DecodeState, memory: LayeredCache) -> Proposal:
        drafter, roots_B, start_B = self._drafter(params), current_tokens(state), state.lengths_B - 1
        # At the start of a short text there are fewer tokens; what follows them is written over by the block.
        first_B = jnp.maximum(start_B - self.catch_up, 0)
        features_BTF = self._read(state, first_B, self.catch_up)
        counts_B = start_B - first_B
        cache = drafter.extend(features_BTF, first_B, memory, state.context_lengths_B, counts_B)
        hidden_BND = drafter.run_block(model, roots_B, start_B, cache, state.context_lengths_B)
        logits_BJV = model.logits(hidden_BND[:, 1 : 1 + self.max_depth])
        backend = model.decoder.backend
        log_p_BJR, best_BJR = top_chances({}, logits_BJV, self.num_ranks, backend, CAUTION)
        if self.growth is None:
            layout = lay_out(self.paths)
            tokens_BM, log_p_BM = fill_tree(layout, roots_B, log_p_BJR, best_BJR)
            tree = all_valid(layout, tokens_BM)
        else:
            tree, log_p_BM = grow(self.growth, roots_B, guess_by_depth(log_p_BJR, best_BJR), backend)
        return Proposal(tree, cache, chances_BM=jnp.exp(log_p_BM))

    def _read(self, state: DecodeState, first_B: Int[Array, " B"], count: int) -> Float[Array, "B T F"]:
        assert self.dflash is not None
        slots_BT = first_B[:, None] + jnp.arange(count, dtype=first_B.dtype)
        return state.cache.features.read(slots_BT, self.dflash.features)

    def _drafter(self, params: Params) -> Drafter:
        assert self.dflash is not None
        assert self.backend is not None
        return Drafter(self.dflash, self.backend, params)
