"""Speculative streaming: the target drafts while it verifies (Bhendawade et al., 2402.11131; EMNLP 2025)."""

import re
from dataclasses import dataclass, field, replace
from itertools import product
from os.path import expanduser
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.checkpoint.drafters.shipped import own_tree, shipped_folder
from jaxinfer.checkpoint.drafters.streams import read_streams
from jaxinfer.decoding.acceptance.walk import Walk
from jaxinfer.decoding.options import check_range
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Nodes, Prefilled, Proposal, Strategy, Target, Verified, current_tokens, few_nodes
from jaxinfer.decoding.trees.pruning import best_nodes, kept_tree, path_scores
from jaxinfer.decoding.trees.static import (
    CAUTION,
    MAX_NODES,
    OWN_TREE,
    Paths,
    TreeLayout,
    check_tree,
    fill_tree,
    lay_out,
    paths_for,
    read_tree,
    tree_depth,
)
from jaxinfer.decoding.trees.tree import DraftTree, ancestors
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.drafters.heads import top_chances
from jaxinfer.models.drafters.streams import exit_logits, run_streams
from jaxinfer.models.model import Model
from jaxinfer.models.padding import pad_adapters
from jaxinfer.notation import Array, Float, Int, Params

# What each stream of a token finds likeliest to stand at its place: log-probabilities and tokens.
_Best = tuple[Float[Array, "B J K"], Int[Array, "B J K"]]

_PRODUCT = re.compile(r"[1-9]\d*(\.[1-9]\d*)*")


@dataclass(frozen=True)
class Streams(Strategy):
    """Draft what the streams of the last accepted token rank best: the j-th stream at depth j of a tree.

    ``heads`` is a folder of streams (`jaxinfer.checkpoint.drafters.streams`), by default those that come with the
    package for the target's weights. ``tree`` is how many tokens of each stream are combined, as in ``4.2.1``, or a
    tree as `jaxinfer.decoding.trees.static` reads it, or ``own``: the one that comes with the streams or, where none
    does, 4.2.1. By default it is that one too, but where it comes with streams its first nodes alone on a CPU, where
    more cost more than they gain, and in a sum of bounded size, whose nodes are ``sum_nodes``. Before the layers that
    have streams, drafts are pruned by what an early exit makes of them: those that it gives less than ``prune_below``
    after their parents go with all that follows them, and of the rest the likeliest ``keep_nodes`` stay (0: all).
    ``paths``, ``num_layers`` and ``params`` are the tree, the number of layers with streams and the streams' parameters
    themselves, for those who have them at hand.
    """

    name: ClassVar[str] = "streams"
    description: ClassVar[str] = "draft with streams beside each token in the target's top layers"

    heads: str = ""
    tree: str = ""
    prune_below: float = 0.0
    keep_nodes: int = 0
    paths: Paths = field(default=(), repr=False)
    sum_nodes: int = field(default=0, repr=False)
    num_layers: int = field(default=0, repr=False)
    params: Params | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_range(self, "prune_below", 0, 1)
        check_range(self, "keep_nodes", 0, MAX_NODES)

    @property
    def parameters(self) -> Any:
        return () if self.params is None else self.params

    @property
    def max_depth(self) -> int:
        return tree_depth(self.paths)

    @property
    def num_kept(self) -> int:
        """How many nodes are verified and get streams, the root among them."""
        return 1 + min(self.keep_nodes or len(self.paths), len(self.paths))

    @property
    def headroom(self) -> int:
        return max(1 + len(self.paths), self.num_kept * self.slots_per_node)

    @property
    def slots_per_node(self) -> int:
        return 1 + self.max_depth

    @property
    def verifies_any_tree(self) -> bool:
        return self.prune_below == 0 and self.keep_nodes == 0

    @property
    def prunes(self) -> bool:
        """Whether drafts are looked at before the top layers."""
        return self.prune_below > 0 or self.num_kept <= len(self.paths)

    def bounded(self, nodes: int) -> "Streams":
        return replace(self, sum_nodes=nodes)

    def resolve(self, target: Target) -> "Streams":
        """Read the streams and the tree; raises InvalidOption where they do not fit each other or the target."""
        folder, params, num_layers = None, self.params, self.num_layers
        if params is None:
            given = Path(expanduser(self.heads)) if self.heads else None
            folder = given or shipped_folder("streams", target.fingerprint, "python -m train.streams")
            streams, params = read_streams(folder, target.config, target.backend, target.fingerprint)
            num_layers = streams.num_layers
        # Each node has its streams beside it; what is to be pruned has to be drafted first.
        few = few_nodes(target)
        most = few // 2 if few is not None and self.verifies_any_tree else None
        paths = check_tree(self.paths, "of paths") if self.paths else self.read_paths(folder, most)
        self._check_fit(params, num_layers, paths, target.config)
        # Streams that no node of the tree is drafted from need not run.
        identifiers = params["identifiers"][: tree_depth(paths)]
        params = {**params, "identifiers": identifiers}
        if "blocks" in params:
            params["blocks"] = pad_adapters(params["blocks"], target.config, target.partitioner.tensor)
        params = target.partitioner.place(params)
        return replace(self, paths=paths, num_layers=num_layers, params=params)

    def start(self, model: Model, params: Params, state: DecodeState, prefilled: Prefilled) -> _Best:
        # The last token in the cache runs once more, now with streams; what that writes to the cache is dropped.
        start_B = jnp.maximum(state.lengths_B - 2, 0)
        tokens_B1, position_B1 = jnp.take_along_axis(state.tokens_BS, start_B[:, None], axis=1), start_B[:, None]
        itself_111 = jnp.ones((1, 1, 1), bool)
        nodes = Nodes(start_B, itself_111, position_B1)
        hidden_B1D, cache = self._run_first(model, state, tokens_B1, nodes)
        run = run_streams(model, params, self.num_layers, hidden_B1D, *nodes, cache, state.context_lengths_B)
        return self._best(model, run.streams_BMJD[:, 0])

    def propose(self, model: Model, params: Params, state: DecodeState, memory: _Best) -> Proposal:
        layout = lay_out(self.paths)
        tokens_BM, log_p_BM = fill_tree(layout, current_tokens(state), *memory)
        parents_BM = jnp.broadcast_to(jnp.asarray(layout.parents_M), tokens_BM.shape)
        all_BM = jnp.ones(tokens_BM.shape, bool)
        tree = DraftTree(tokens_BM, parents_BM, all_BM, all_BM)
        if self.prunes:
            return self._pruned(model, params, state, tree, layout)
        return Proposal(tree, None, chances_BM=jnp.exp(log_p_BM) if self.sum_nodes else None)

    def forward(self, model: Model, params: Params, state: DecodeState, proposal: Proposal, nodes: Nodes) -> Verified:
        hidden_BMD, cache, passes = proposal.memory, state.cache, self.num_layers / model.config.num_layers
        if not self.prunes:
            hidden_BMD, cache = self._run_first(model, state, proposal.tree.tokens_BM, nodes)
            passes = 1.0
        run = run_streams(model, params, self.num_layers, hidden_BMD, *nodes, cache, state.context_lengths_B)
        return Verified(model.logits(run.hidden_BMD), run.hidden_BMD, run.cache, passes, run.streams_BMJD)

    def observe(
        self,
        model: Model,
        params: Params,
        state: DecodeState,
        proposal: Proposal,
        verified: Verified,
        draws_BM: Any,
        walk: Walk,
    ) -> _Best:
        last_B1 = jnp.take_along_axis(walk.path_BM, walk.taken_B[:, None] - 1, axis=1)
        streams_BJD = jnp.take_along_axis(verified.aux, last_B1[..., None, None], axis=1)[:, 0]
        return self._best(model, streams_BJD)

    def read_paths(self, folder: Path | None = None, most: int | None = None) -> Paths:
        """Return the tree that the options name for streams of a folder, or ``most`` nodes if they name none."""
        if self.tree not in ("", OWN_TREE):
            return read_product(self.tree)
        path = own_tree(folder)
        paths = read_product("4.2.1") if path is None else read_tree(str(path))
        is_listed = path is not None and not self.tree
        return paths_for(paths, self.sum_nodes or most, self.sum_nodes > 0) if is_listed else paths

    def _run_first(
        self, model: Model, state: DecodeState, tokens_BM: Int[Array, "B M"], nodes: Nodes
    ) -> tuple[Float[Array, "B M D"], LayeredCache]:
        """Run the layers that have no streams."""
        stop, positions_BM = model.config.num_layers - self.num_layers, nodes.positions_BM
        placements = state.cache.place(nodes.start_B, nodes.ancestors_BMM)
        hidden_BMD = model.embedded(tokens_BM, positions_BM)
        return model.run_layers(0, stop, hidden_BMD, positions_BM, state.cache, placements, state.context_lengths_B)

    def _best(self, model: Model, streams_BJD: Float[Array, "B J D"]) -> _Best:
        count, logits_BJV = 1 + max(max(path) for path in self.paths), model.logits(streams_BJD)
        log_p_BJK, tokens_BJK = top_chances({}, logits_BJV, count, model.decoder.backend, CAUTION)
        # Remembered from step to step, they would be computed even where no bounded sum reads them.
        return log_p_BJK if self.sum_nodes else jnp.zeros_like(log_p_BJK), tokens_BJK

    def _pruned(
        self, model: Model, params: Params, state: DecodeState, tree: DraftTree, layout: TreeLayout
    ) -> Proposal:
        """Run the layers without streams, and go on with the nodes that their result speaks for."""
        start_B = state.lengths_B - 1
        positions_BM = start_B[:, None] + jnp.asarray(layout.depths_M)
        relation_1MM = ancestors(tree.parents_BM[:1])
        hidden_BMD, cache = self._run_first(model, state, tree.tokens_BM, Nodes(start_B, relation_1MM, positions_BM))
        inner = np.unique(layout.parents_M)
        logits_BIV = exit_logits(model, params, hidden_BMD[:, inner])
        scores_BM = path_scores(layout, tree.tokens_BM, logits_BIV, self.prune_below)
        kept_BP = best_nodes(scores_BM, self.num_kept, model.decoder.backend)
        # The kept nodes stand together from here on, as if there had never been others.
        cache = cache.keep(start_B, kept_BP, jnp.full_like(start_B, self.num_kept))
        hidden_BPD = jnp.take_along_axis(hidden_BMD, kept_BP[..., None], axis=1)
        passes = 1.0 - self.num_layers / model.config.num_layers
        return Proposal(kept_tree(tree, kept_BP, scores_BM > -jnp.inf), hidden_BPD, cache, passes=passes)

    def _check_fit(self, params: Params, num_layers: int, paths: Paths, config: DecoderConfig) -> None:
        where = self.heads or "the streams given"
        num_streams, width = params["identifiers"].shape
        tree, depth, most = "of paths" if self.paths else self.tree, tree_depth(paths), max(map(max, paths))
        if width != config.model_dim:
            raise InvalidOption(f"streams: {where} have {width} channels, but hidden states have {config.model_dim}")
        if not 1 <= num_layers < config.num_layers:
            raise InvalidOption(
                f"streams: num_layers={num_layers} of {where} is not inside the model's {config.num_layers} layers: "
                f"choose 1 to {config.num_layers - 1}"
            )
        if num_streams == 0:
            raise InvalidOption(f"streams: {where} are 0 streams: train 1 or more")
        if depth > num_streams:
            raise InvalidOption(
                f"streams: tree {tree} is {depth} deep, but {where} are {num_streams}: choose a tree of at most that "
                f"depth, such as tree=chain:{num_streams}"
            )
        if most >= config.vocab_size:
            raise InvalidOption(f"streams: tree {tree} asks for rank {most} of {config.vocab_size} tokens")


def read_product(name: str) -> Paths:
    """Return the tree that combines as many tokens of each depth as ``4.2.1`` names, or any other named tree."""
    if not _PRODUCT.fullmatch(name):
        return read_tree(name)
    widths = [int(width) for width in name.split(".")]
    level, nodes = 1, 1
    for width in widths:
        level *= width
        nodes += level
    if nodes > MAX_NODES:
        raise InvalidOption(f"streams: tree={name} has {nodes} nodes, more than {MAX_NODES}: combine fewer tokens")
    return tuple(
        path for depth in range(1, len(widths) + 1) for path in product(*(range(width) for width in widths[:depth]))
    )
