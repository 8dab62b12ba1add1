"""Medusa: heads on the target's last hidden state draft a tree (Cai et al., 2401.10774; Hydra: 2402.05109)."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint.drafters.heads import read_heads
from jaxinfer.decoding.acceptance.walk import Walk
from jaxinfer.decoding.drafting.tree_drafter import TreeDrafter
from jaxinfer.decoding.options import check_choice, check_range
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Prefilled, Proposal, Target, Verified, current_tokens, few_nodes
from jaxinfer.decoding.trees.dynamic import Beams, Growth, Guess, check_growth, grow, read_growth
from jaxinfer.decoding.trees.static import CAUTION, Paths, all_valid, fill_tree, lay_out, tree_depth
from jaxinfer.errors import InvalidOption
from jaxinfer.models.drafters.heads import (
    head_logits,
    head_states,
    heads_width,
    is_conditioned,
    plain_logits,
    rounded_outputs,
    top_chances,
    vocabulary_rows,
)
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Int, Params


@dataclass(frozen=True)
class Medusa(TreeDrafter):
    """Draft what heads rank best at each depth, along a tree of ranks.

    ``heads`` is a folder of heads (`jaxinfer.checkpoint.drafters.heads`); it, ``tree``, ``paths`` and ``params`` are as
    in `TreeDrafter`, but a tree can also be ``dynamic:N``, for the N nodes that the heads find likeliest at each step
    (`jaxinfer.decoding.trees.dynamic`), which ``growth`` is itself. ``epsilon`` and ``delta`` are those of typical
    acceptance. On a CPU own output matrices of heads are rounded to seven bits (`jaxinfer.ops.seven_bits`): with
    ``params``, resolve it once.
    """

    name: ClassVar[str] = "medusa"
    description: ClassVar[str] = "draft a tree with heads on the target's last hidden state"

    folder_kind: ClassVar[str] = "heads"
    trainer: ClassVar[str] = "train.medusa"
    default_tree: ClassVar[str] = "mc_sim_7b_63"

    verify: Literal["match", "typical"] = "match"
    epsilon: float = 0.09
    delta: float = 0.3
    growth: Growth | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_choice(self, "verify", ("match", "typical"))
        check_range(self, "epsilon", 0, 1)
        check_range(self, "delta", 0, 1)

    @property
    def acceptance(self) -> str:
        return self.verify

    @property
    def typical_thresholds(self) -> tuple[float, float]:
        return self.epsilon, self.delta

    @property
    def branches(self) -> bool:
        return self.growth is not None or len(self.paths) > tree_depth(self.paths)

    @property
    def headroom(self) -> int:
        return len(self.paths) + 1 if self.growth is None else self.growth.num_nodes

    @property
    def max_depth(self) -> int:
        return tree_depth(self.paths) if self.growth is None else self.growth.max_depth

    def resolve(self, target: Target) -> "Medusa":
        folder, params = None, self.params
        if params is None:
            folder = self.folder_for(target)
        if self.growth is not None:
            num_nodes = self.growth.num_nodes
        else:
            num_nodes = None if self.paths else read_growth(self.tree)
        paths = self.read_paths(folder, few_nodes(target)) if num_nodes is None else ()
        if params is None:
            assert folder is not None
            params = read_heads(folder, target.config, target.backend, tree_depth(paths) or None, target.fingerprint)
        growth = None if num_nodes is None else self.growth or Growth(num_nodes, len(params["heads"]))
        shaped = replace(self, paths=paths, growth=growth)
        self._check_fit(params, shaped, target)
        if "ids" in params and "output" not in params and "output" not in params["heads"][0]:
            params = {**params, "output": vocabulary_rows(target.config, target.params, params["ids"])}
        # Those that are used alone, and rounded, for they only draft.
        params = {**params, "heads": params["heads"][: shaped.max_depth]}
        params = rounded_outputs(params, target.partitioner.partition(target.config, target.backend).backend)
        return replace(shaped, params=target.partitioner.place_heads(params))

    def start(self, model: Model, params: Params, state: DecodeState, prefilled: Prefilled) -> Float[Array, "B D"]:
        return prefilled.hidden_BD

    def propose(self, model: Model, params: Params, state: DecodeState, memory: Float[Array, "B D"]) -> Proposal:
        if self.growth is not None:
            guess = guess_conditioned if is_conditioned(params) else guess_plain
            roots_B, backend = current_tokens(state), model.decoder.backend
            tree, log_p_BM = grow(self.growth, roots_B, guess(model, params, self.growth, state, memory), backend)
            return Proposal(tree, memory, chances_BM=jnp.exp(log_p_BM))
        draft = draft_conditioned if is_conditioned(params) else draft_plain
        tokens_BM, log_p_BM = draft(model, params, self.paths, state, memory)
        return Proposal(all_valid(lay_out(self.paths), tokens_BM), memory, chances_BM=jnp.exp(log_p_BM))

    def observe(
        self,
        model: Model,
        params: Params,
        state: DecodeState,
        proposal: Proposal,
        verified: Verified,
        draws_BM: Any,
        walk: Walk,
    ) -> Float[Array, "B D"]:
        return verified.last.hidden_BD

    def _check_fit(self, params: Params, shaped: "Medusa", target: Target) -> None:
        where = self.heads or "the heads given"
        num_heads, depth, config = len(params["heads"]), shaped.max_depth, target.config
        if depth > num_heads:
            raise InvalidOption(
                f"medusa: tree {self.tree_name} is {depth} deep, but {where} has {num_heads} heads: choose a tree of "
                f"at most that depth, such as tree=chain:{num_heads}"
            )
        width, rows = heads_width(params), len(params["ids"]) if "ids" in params else config.vocab_size
        if width != config.model_dim:
            raise InvalidOption(f"medusa: {where} reads {width} channels, but hidden states have {config.model_dim}")
        output = params["heads"][0].get("output") or params.get("output")
        if output is not None and output["kernel"].shape[0] != rows:
            raise InvalidOption(f"medusa: {where} knows {output['kernel'].shape[0]} tokens, but needs to know {rows}")
        growth = shaped.growth
        most = max(max(path) for path in shaped.paths) if growth is None else check_growth(growth).num_ranks - 1
        if most >= rows:
            raise InvalidOption(f"medusa: the tree asks for rank {most}, but the heads choose among {rows} tokens")


def draft_plain(
    model: Model, params: Params, paths: Paths, state: DecodeState, hidden_BD: Float[Array, "B D"]
) -> tuple[Int[Array, "B M"], Float[Array, "B M"]]:
    """Return the tokens of a tree's nodes, and the log-probability of the path to each, by heads that see no drafts."""
    layout = lay_out(paths)
    logits_BJU, most = plain_logits(model, params, hidden_BD), int(layout.ranks_M.max()) + 1
    log_p_BJR, best_BJR = top_chances(params, logits_BJU, most, model.decoder.backend, CAUTION)
    return fill_tree(layout, current_tokens(state), log_p_BJR, best_BJR)


def draft_conditioned(
    model: Model, params: Params, paths: Paths, state: DecodeState, hidden_BD: Float[Array, "B D"]
) -> tuple[Int[Array, "B M"], Float[Array, "B M"]]:
    """Return what `draft_plain` does, by heads that see the path to each node: a level at a time."""
    layout, backend = lay_out(paths), model.decoder.backend
    batch, width = hidden_BD.shape
    position_B1 = state.lengths_B[:, None] - 1
    tokens_BM, scores_BM = current_tokens(state)[:, None], jnp.zeros((batch, 1), jnp.float32)
    path_BMD = model.embedded(tokens_BM, position_B1)
    # Of the nodes one level up: the embeddings along the path to each, and where that level begins.
    first = 0
    for depth in range(1, tree_depth(paths) + 1):
        level = np.flatnonzero(layout.depths_M == depth)
        parents, parent_of = np.unique(layout.parents_M[level], return_inverse=True)
        ranks = layout.ranks_M[level]
        path_BCD = path_BMD[:, parents - first]
        hidden_BCD = jnp.broadcast_to(hidden_BD[:, None], (batch, len(parents), width))
        states_BCD = head_states(params["heads"][depth - 1], hidden_BCD, path_BCD, backend)
        logits_BCU = head_logits(model, params, depth - 1, states_BCD)
        log_p_BCR, best_BCR = top_chances(params, logits_BCU, int(ranks.max()) + 1, backend, CAUTION)
        drafted_BM = best_BCR[:, parent_of, ranks]
        embedded_BMD = model.embedded(drafted_BM, jnp.broadcast_to(position_B1 + depth, drafted_BM.shape))
        path_BMD = jnp.concatenate([path_BCD[:, parent_of], embedded_BMD], axis=-1)
        above_BM = scores_BM[:, layout.parents_M[level]]
        scores_BM = jnp.concatenate([scores_BM, above_BM + log_p_BCR[:, parent_of, ranks]], axis=1)
        tokens_BM, first = jnp.concatenate([tokens_BM, drafted_BM], axis=1), int(level[0])
    return tokens_BM, scores_BM


def guess_plain(
    model: Model, params: Params, growth: Growth, state: DecodeState, hidden_BD: Float[Array, "B D"]
) -> Guess:
    """Return what heads that see the hidden state alone guess: at each depth the same after every beam."""
    logits_BJU = plain_logits(model, params, hidden_BD)
    log_p_BJR, tokens_BJR = top_chances(params, logits_BJU, growth.num_ranks, model.decoder.backend, CAUTION)

    def guess(depth: int, beams: Beams, _: Any) -> tuple[Any, Any, Any]:
        shape = (*beams.tokens_BW.shape, growth.num_ranks)
        log_p_BWR, tokens_BWR = (jnp.broadcast_to(each[:, depth - 1, None], shape) for each in (log_p_BJR, tokens_BJR))
        return log_p_BWR, tokens_BWR, None

    return guess


def guess_conditioned(
    model: Model, params: Params, growth: Growth, state: DecodeState, hidden_BD: Float[Array, "B D"]
) -> Guess:
    """Return what heads that see the path to each beam guess; what they pass on are the embeddings along the paths."""
    backend, position_B1 = model.decoder.backend, state.lengths_B[:, None] - 1

    def guess(depth: int, beams: Beams, path_BWD: Any) -> tuple[Any, Any, Any]:
        tokens_BW = beams.tokens_BW
        embedded_BWD = model.embedded(tokens_BW, jnp.broadcast_to(position_B1 + depth - 1, tokens_BW.shape))
        if path_BWD is not None:
            before_BWD = jnp.take_along_axis(path_BWD, beams.origins_BW[..., None], axis=1)
            embedded_BWD = jnp.concatenate([before_BWD, embedded_BWD], axis=-1)
        hidden_BWD = jnp.broadcast_to(hidden_BD[:, None], (*tokens_BW.shape, hidden_BD.shape[-1]))
        states_BWD = head_states(params["heads"][depth - 1], hidden_BWD, embedded_BWD, backend)
        logits_BWU = head_logits(model, params, depth - 1, states_BWD)
        return *top_chances(params, logits_BWU, growth.num_ranks, backend, CAUTION), embedded_BWD

    return guess
