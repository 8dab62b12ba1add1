"""Medusa: heads on the target's last hidden state draft a tree (Cai et al., 2401.10774; Hydra: 2402.05109)."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from jaxinfer.checkpoint.drafters.heads import heads_files, read_heads
from jaxinfer.decoding.acceptance.walk import Walk
from jaxinfer.decoding.drafting.growing_drafter import GrowingDrafter, guess_by_depth
from jaxinfer.decoding.options import check_choice, check_range
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import (
    LastNode,
    Prefilled,
    Proposal,
    Target,
    Verified,
    current_tokens,
    few_nodes,
    made_anew,
)
from jaxinfer.decoding.trees.dynamic import Beams, Growth, Guess, check_growth, follow, grow, read_growth
from jaxinfer.decoding.trees.static import (
    CAUTION,
    OWN_TREE,
    Paths,
    all_valid,
    fill_tree,
    lay_out,
    paths_for,
    tree_depth,
)
from jaxinfer.errors import InvalidOption
from jaxinfer.kept.spelling import digest_of_files
from jaxinfer.models.drafters.four_bits import heads_in_four_bits
from jaxinfer.models.drafters.heads import (
    head_logits,
    head_states,
    heads_width,
    is_conditioned,
    plain_logits,
    top_chances,
    vocabulary_rows,
)
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Int, Params


@dataclass(frozen=True)
class Medusa(GrowingDrafter):
    """Draft what heads rank best at each depth, along a tree of ranks.

    ``heads`` is a folder of heads (`jaxinfer.checkpoint.drafters.heads`); it, ``tree``, ``paths`` and ``params`` are as
    in `TreeDrafter`, but a tree can also be ``dynamic:N``, for the N nodes that the heads find likeliest at each step
    (`jaxinfer.decoding.trees.dynamic`), which ``growth`` is itself. ``epsilon`` and ``delta`` are those of typical
    acceptance. On a CPU the heads' own matrices are rounded to four bits (`jaxinfer.models.drafters.four_bits`): with
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

    def __post_init__(self) -> None:
        check_choice(self, "verify", ("match", "typical"))
        check_range(self, "epsilon", 0, 1)
        check_range(self, "delta", 0, 1)
        for name in ("epsilon", "delta"):
            if self.verify == "match" and getattr(self, name) != getattr(type(self), name):
                raise InvalidOption(f"medusa: {name}= is of verify=typical: name that, or leave it out")

    @property
    def acceptance(self) -> str:
        return self.verify

    @property
    def typical_thresholds(self) -> tuple[float, float]:
        return self.epsilon, self.delta

    def resolve(self, target: Target) -> "Medusa":
        folder = self.folder_for(target) if self.params is None else None
        growth = self.growth
        num_nodes = None if growth is not None or self.paths else read_growth(self.tree)
        paths = () if growth is not None or num_nodes is not None else self.read_paths(folder, few_nodes(target))
        backend = target.partitioner.partition(target.config, target.backend).backend

        def shaped(params: Params) -> "Medusa":
            grown = growth if num_nodes is None else Growth(num_nodes, len(params["heads"]))
            return replace(self, paths=paths, growth=grown)

        def prepared() -> Params:
            if folder is None:
                assert self.params is not None
                params = self.params
            else:
                most = tree_depth(paths) or None
                params = read_heads(folder, target.config, target.backend, most, target.fingerprint)
            self._check_fit(params, shaped(params), target)
            if "ids" in params and "output" not in params and "output" not in params["heads"][0]:
                params = {**params, "output": vocabulary_rows(target.config, target.params, params["ids"])}
            # Those that are used alone, and rounded, for they only draft.
            params = {**params, "heads": params["heads"][: shaped(params).max_depth]}
            return heads_in_four_bits(params, backend)

        def layout() -> Any:
            assert folder is not None
            tree = paths, growth, num_nodes
            return "heads", digest_of_files(heads_files(folder)), tree, target.config, target.backend

        # By typical acceptance the text depends on what drafts.
        is_kept = folder is not None and backend.mesh is None and self.acceptance == "match"
        params = (target.made_once if is_kept else made_anew)(layout, prepared)
        return replace(shaped(params), params=target.partitioner.place_heads(params))

    def narrowed(self, nodes: int) -> "Medusa":
        if self.growth is not None or self.tree not in ("", OWN_TREE):
            return self
        return replace(self, paths=paths_for(self.paths, nodes, is_summed=True))

    def start(self, model: Model, params: Params, state: DecodeState, prefilled: Prefilled) -> Float[Array, "B D"]:
        return prefilled.hidden_BD

    def propose(self, model: Model, params: Params, state: DecodeState, memory: Float[Array, "B D"]) -> Proposal:
        if self.growth is None and not is_conditioned(params):
            tokens_BM, log_p_BM = draft_plain(model, params, self.paths, state, memory)
            return Proposal(all_valid(lay_out(self.paths), tokens_BM), memory, chances_BM=jnp.exp(log_p_BM))
        roots_B, conditioned = current_tokens(state), is_conditioned(params)
        guess = (guess_conditioned if conditioned else guess_plain)(model, params, self.num_ranks, state, memory)
        if self.growth is None:
            tree, log_p_BM = follow(self.paths, roots_B, guess)
        else:
            tree, log_p_BM = grow(self.growth, roots_B, guess, model.decoder.backend)
        return Proposal(tree, memory, chances_BM=jnp.exp(log_p_BM))

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

    def resumed(self, memory: Float[Array, "B D"], last: LastNode) -> Float[Array, "B D"]:
        return last.hidden_BD

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
        if shaped.growth is not None:
            check_growth(shaped.growth)
        if shaped.num_ranks > rows:
            raise InvalidOption(
                f"medusa: the tree asks for rank {shaped.num_ranks - 1}, but the heads choose among {rows} tokens"
            )


def draft_plain(
    model: Model, params: Params, paths: Paths, state: DecodeState, hidden_BD: Float[Array, "B D"]
) -> tuple[Int[Array, "B M"], Float[Array, "B M"]]:
    """Return the tokens of a tree's nodes, and the log-probability of the path to each, by heads that see no drafts."""
    layout = lay_out(paths)
    logits_BJU, most = plain_logits(model, params, hidden_BD), int(layout.ranks_M.max()) + 1
    log_p_BJR, best_BJR = top_chances(params, logits_BJU, most, model.decoder.backend, CAUTION)
    return fill_tree(layout, current_tokens(state), log_p_BJR, best_BJR)


def guess_plain(
    model: Model, params: Params, num_ranks: int, state: DecodeState, hidden_BD: Float[Array, "B D"]
) -> Guess:
    """Return what heads that see the hidden state alone guess: at each depth the same after every beam."""
    logits_BJU = plain_logits(model, params, hidden_BD)
    return guess_by_depth(*top_chances(params, logits_BJU, num_ranks, model.decoder.backend, CAUTION))


def guess_conditioned(
    model: Model, params: Params, num_ranks: int, state: DecodeState, hidden_BD: Float[Array, "B D"]
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
        return *top_chances(params, logits_BWU, num_ranks, backend, CAUTION), embedded_BWD

    return guess
