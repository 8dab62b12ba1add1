"""Speculative streaming: the target drafts while it verifies (Bhendawade et al., 2402.11131; EMNLP 2025)."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.checkpoint.drafters.streams import read_streams
from jaxinfer.decoding.acceptance.walk import Walk
from jaxinfer.decoding.drafting.tree_drafter import TreeDrafter
from jaxinfer.decoding.options import check_range
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Nodes, Prefilled, Proposal, Target, Verified, current_tokens, few_nodes
from jaxinfer.decoding.trees.pruning import best_nodes, kept_tree, path_scores
from jaxinfer.decoding.trees.static import (
    CAUTION,
    MAX_NODES,
    Paths,
    TreeLayout,
    all_valid,
    fill_tree,
    lay_out,
    tree_depth,
)
from jaxinfer.decoding.trees.tree import DraftTree, ancestors
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.drafters.heads import top_chances
from jaxinfer.models.drafters.streams import exit_logits, run_streams
from jaxinfer.models.folded import folded_adapters
from jaxinfer.models.model import Model
from jaxinfer.models.padding import pad_adapters
from jaxinfer.notation import Array, Float, Int, Params

# What each stream of a token finds likeliest to stand at its place: log-probabilities and tokens.
_Best = tuple[Float[Array, "B J R"], Int[Array, "B J R"]]


@dataclass(frozen=True)
class Streams(TreeDrafter):
    """Draft what the streams of the last accepted token rank best: the j-th stream at depth j of a tree.

    ``heads`` is a folder of streams (`jaxinfer.checkpoint.drafters.streams`); it, ``tree``, ``paths`` and ``params``
    are as in `TreeDrafter`. Before the layers that have streams, drafts are pruned by what an early exit makes of them:
    those that it gives less than ``prune_below`` after their parents go with all that follows them, and of the rest the
    likeliest ``keep_nodes`` stay (0: all). ``num_layers`` is the number of layers with streams, where ``params`` are
    given.
    """

    name: ClassVar[str] = "streams"
    description: ClassVar[str] = "draft with streams beside each token in the target's top layers"

    folder_kind: ClassVar[str] = "streams"
    trainer: ClassVar[str] = "train.streams"
    default_tree: ClassVar[str] = "4.2.1"

    prune_below: float = 0.0
    keep_nodes: int = 0
    num_layers: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        check_range(self, "prune_below", 0, 1)
        check_range(self, "keep_nodes", 0, MAX_NODES)

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
    def fills_steps(self) -> bool:
        # Its top layers multiply nodes and streams together, so that shapes are others in any case.
        return False

    @property
    def verifies_any_tree(self) -> bool:
        return self.prune_below == 0 and self.keep_nodes == 0

    @property
    def prunes(self) -> bool:
        """Whether drafts are looked at before the top layers."""
        return self.prune_below > 0 or self.num_kept <= len(self.paths)

    def resolve(self, target: Target) -> "Streams":
        """Read the streams and the tree; raises InvalidOption where they do not fit each other or the target."""
        folder, params, num_layers = None, self.params, self.num_layers
        if params is None:
            folder = self.folder_for(target)
            streams, params = read_streams(folder, target.config, target.backend, target.fingerprint)
            num_layers = streams.num_layers
            if "blocks" in params:
                first = target.config.num_layers - num_layers
                params = {**params, "blocks": folded_adapters(params["blocks"], target.folded, first)}
        # Each node has its streams beside it; what is to be pruned has to be drafted first.
        few = few_nodes(target)
        most = few // 2 if few is not None and self.verifies_any_tree else None
        paths = self.read_paths(folder, most)
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
        tree = all_valid(layout, tokens_BM)
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
        return self._best(model, verified.last.aux)

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
        log_p_BJR, tokens_BJR = top_chances({}, logits_BJV, count, model.decoder.backend, CAUTION)
        # Remembered from step to step, they would be computed even where no bounded sum reads them.
        return log_p_BJR if self.sum_nodes else jnp.zeros_like(log_p_BJR), tokens_BJR

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
        kept_BC = best_nodes(scores_BM, self.num_kept, model.decoder.backend)
        # The kept nodes stand together from here on, as if there had never been others.
        cache = cache.keep(start_B, kept_BC, jnp.full_like(start_B, self.num_kept))
        hidden_BCD = jnp.take_along_axis(hidden_BMD, kept_BC[..., None], axis=1)
        passes = 1.0 - self.num_layers / model.config.num_layers
        return Proposal(kept_tree(tree, kept_BC, scores_BM > -jnp.inf), hidden_BCD, cache, passes=passes)

    def _check_fit(self, params: Params, num_layers: int, paths: Paths, config: DecoderConfig) -> None:
        where = self.heads or "the streams given"
        num_streams, width = params["identifiers"].shape
        tree, depth, most = self.tree_name, tree_depth(paths), max(map(max, paths))
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
