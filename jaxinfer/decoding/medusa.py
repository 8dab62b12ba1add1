"""Medusa: heads on the target's last hidden state draft a tree (Cai et al., 2401.10774; Hydra: 2402.05109)."""

from dataclasses import dataclass, field, replace
from os.path import expanduser
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint.drafters import own_tree, shipped_folder
from jaxinfer.checkpoint.medusa_heads import read_heads
from jaxinfer.decoding.draft_trees import Paths, check_tree, lay_out, read_tree, tree_depth
from jaxinfer.decoding.options import check_choice, check_range
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Prompt, Proposal, Strategy, Target, Verified, current_tokens
from jaxinfer.decoding.tree import DraftTree
from jaxinfer.decoding.verify import Walk
from jaxinfer.errors import InvalidOption
from jaxinfer.models.extra_heads import (
    head_logits,
    head_states,
    heads_width,
    is_conditioned,
    plain_logits,
    top_tokens,
    vocabulary_rows,
)
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Int, Params


@dataclass(frozen=True)
class Medusa(Strategy):
    """Draft what heads rank best at each depth, along a tree of ranks.

    ``heads`` is a folder of heads (`jaxinfer.checkpoint.medusa_heads`), by default those that come with the package for
    the target's weights, and ``tree`` a published tree, ``chain:K`` or a
    JSON file of paths (`jaxinfer.decoding.draft_trees`), or ``own``: the one that comes with the heads or, where none
    does, mc_sim_7b_63. ``epsilon`` and ``delta`` are those of typical acceptance.
    ``paths`` and ``extra`` are tree and heads themselves, for those who have them at hand.
    """

    name: ClassVar[str] = "medusa"
    description: ClassVar[str] = "draft a tree with heads on the target's last hidden state"

    heads: str = ""
    tree: str = "own"
    verify: Literal["match", "typical"] = "match"
    epsilon: float = 0.09
    delta: float = 0.3
    paths: Paths = field(default=(), repr=False)
    extra: Params | None = field(default=None, compare=False, repr=False)

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
    def parameters(self) -> Any:
        return () if self.extra is None else self.extra

    @property
    def branches(self) -> bool:
        return len(self.paths) > tree_depth(self.paths)

    @property
    def headroom(self) -> int:
        return len(self.paths) + 1

    @property
    def max_depth(self) -> int:
        return tree_depth(self.paths)

    def resolve(self, target: Target) -> "Medusa":
        folder, extra = None, self.extra
        if extra is None:
            given = Path(expanduser(self.heads)) if self.heads else None
            folder = given or shipped_folder("heads", target.fingerprint, "python -m train.medusa")
        paths = check_tree(self.paths, "of paths") if self.paths else self._read_tree(folder)
        depth = tree_depth(paths)
        if extra is None:
            assert folder is not None
            extra = read_heads(folder, target.config, target.backend, depth, target.fingerprint)
        self._check_fit(extra, paths, target)
        if "ids" in extra and "output" not in extra and "output" not in extra["heads"][0]:
            extra = {**extra, "output": vocabulary_rows(target.config, target.params, extra["ids"])}
        extra = target.partitioner.place_heads({**extra, "heads": tuple(extra["heads"][:depth])})
        return replace(self, paths=paths, extra=extra)

    def start(self, model: Model, own: Params, state: DecodeState, prompt: Prompt) -> Float[Array, "B D"]:
        return prompt.hidden_BD

    def propose(self, model: Model, own: Params, state: DecodeState, memory: Float[Array, "B D"]) -> Proposal:
        draft = draft_conditioned if is_conditioned(own) else draft_plain
        tokens_BM = draft(model, own, self.paths, state, memory)
        parents_BM = jnp.broadcast_to(jnp.asarray(lay_out(self.paths).parents_M), tokens_BM.shape)
        all_BM = jnp.ones(tokens_BM.shape, bool)
        return Proposal(DraftTree(tokens_BM, parents_BM, all_BM, all_BM), memory)

    def observe(
        self,
        model: Model,
        own: Params,
        state: DecodeState,
        proposal: Proposal,
        verified: Verified,
        draws_BM: Any,
        walk: Walk,
    ) -> Float[Array, "B D"]:
        last_B1 = jnp.take_along_axis(walk.path_BM, walk.taken_B[:, None] - 1, axis=1)
        return jnp.take_along_axis(verified.hidden_BMD, last_B1[..., None], axis=1)[:, 0]

    def _read_tree(self, folder: Path | None) -> Paths:
        if self.tree != "own":
            return read_tree(self.tree)
        path = own_tree(folder)
        return read_tree("mc_sim_7b_63" if path is None else str(path))

    def _check_fit(self, extra: Params, paths: Paths, target: Target) -> None:
        where = self.heads or "the heads given"
        depth, num_heads, config = tree_depth(paths), len(extra["heads"]), target.config
        if depth > num_heads:
            tree = "of paths" if self.paths else self.tree
            raise InvalidOption(
                f"medusa: tree {tree} is {depth} deep, but {where} has {num_heads} heads: choose a tree of at most "
                f"that depth, such as tree=chain:{num_heads}"
            )
        width, rows = heads_width(extra), len(extra["ids"]) if "ids" in extra else config.vocab_size
        if width != config.model_dim:
            raise InvalidOption(f"medusa: {where} reads {width} channels, but hidden states have {config.model_dim}")
        output = extra["heads"][0].get("output") or extra.get("output")
        if output is not None and output["kernel"].shape[0] != rows:
            raise InvalidOption(f"medusa: {where} knows {output['kernel'].shape[0]} tokens, but needs to know {rows}")
        most = max(max(path) for path in paths)
        if most >= rows:
            raise InvalidOption(f"medusa: the tree asks for rank {most}, but the heads choose among {rows} tokens")


def draft_plain(
    model: Model, extra: Params, paths: Paths, state: DecodeState, hidden_BD: Float[Array, "B D"]
) -> Int[Array, "B M"]:
    """Return the tokens of a tree's nodes from heads that see the hidden state alone: all depths at once."""
    layout = lay_out(paths)
    logits_BHW, most = plain_logits(model, extra, hidden_BD), int(layout.ranks_M.max()) + 1
    best_BHR = top_tokens(extra, logits_BHW, most, model.decoder.backend)
    drafted_BM = best_BHR[:, layout.depths_M[1:] - 1, layout.ranks_M[1:]]
    return jnp.concatenate([current_tokens(state)[:, None], drafted_BM], axis=1)


def draft_conditioned(
    model: Model, extra: Params, paths: Paths, state: DecodeState, hidden_BD: Float[Array, "B D"]
) -> Int[Array, "B M"]:
    """Return the tokens of a tree's nodes from heads that see the path to each: a level at a time."""
    layout, backend = lay_out(paths), model.decoder.backend
    batch, width = hidden_BD.shape
    position_B1 = state.lengths_B[:, None] - 1
    tokens_BM = current_tokens(state)[:, None]
    path_BMD = model.embedded(tokens_BM, position_B1)
    # Of the nodes one level up: the embeddings along the path to each, and where that level begins.
    first = 0
    for depth in range(1, tree_depth(paths) + 1):
        level = np.flatnonzero(layout.depths_M == depth)
        parents, parent_of = np.unique(layout.parents_M[level], return_inverse=True)
        path_BPD = path_BMD[:, parents - first]
        hidden_BPD = jnp.broadcast_to(hidden_BD[:, None], (batch, len(parents), width))
        states_BPD = head_states(extra["heads"][depth - 1], hidden_BPD, path_BPD, backend)
        logits_BPW = head_logits(model, extra, depth - 1, states_BPD)
        best_BPR = top_tokens(extra, logits_BPW, int(layout.ranks_M[level].max()) + 1, backend)
        drafted_BM = best_BPR[:, parent_of, layout.ranks_M[level]]
        embedded_BMD = model.embedded(drafted_BM, jnp.broadcast_to(position_B1 + depth, drafted_BM.shape))
        path_BMD = jnp.concatenate([path_BPD[:, parent_of], embedded_BMD], axis=-1)
        tokens_BM, first = jnp.concatenate([tokens_BM, drafted_BM], axis=1), int(level[0])
    return tokens_BM
