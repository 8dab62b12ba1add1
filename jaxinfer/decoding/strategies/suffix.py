"""Suffix decoding: what followed a text's longest repeated end, by frequency (Oliaro et al., 2411.04975)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint.named_path import named_path
from jaxinfer.decoding.drafting.past_answers import PastAnswers, past_continuations, past_matches
from jaxinfer.decoding.drafting.text_matches import (
    NUM_KINDS,
    chances_after,
    continuations,
    kinds_of,
    match_lengths,
    shortest_worth,
)
from jaxinfer.decoding.options import check_range
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Proposal, Strategy, Target, current_tokens
from jaxinfer.decoding.trees.pruning import best_nodes, kept_tree
from jaxinfer.decoding.trees.static import MAX_NODES
from jaxinfer.decoding.trees.tree import DraftTree
from jaxinfer.errors import InvalidOption
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.top_k import top_k


@dataclass(frozen=True)
class Suffix(Strategy):
    """Draft a tree of what followed wherever the longest repeated end of the text stood, here or in past answers.

    That end is ``min_match`` to ``max_match`` tokens long; its last ``occurrences`` count. A path is in the tree as it
    was frequent among what followed them, and of equally frequent ones the shortest, then the latest. None is longer
    than ``per_token`` drafts for each token of the match: a long one goes on for longer. A ``min_match`` of 0 is 1 in
    sums of bounded size, or else 2 on a CPU, as for prompt lookup.

    ``past`` is how many tokens of answers to earlier requests are looked through as well, the latest ones, and ``file``
    where they are kept from one process to the next. What stands in the text itself counts as later than these. With a
    past a request's drafts depend on those before it; its tokens do not.
    """

    name: ClassVar[str] = "suffix"
    description: ClassVar[str] = "draft a tree of what followed the text's longest repeated end, by frequency"

    num_draft_tokens: int = 10
    max_match: int = 16
    min_match: int = 0
    occurrences: int = 8
    per_token: int = 2
    past: int = 0
    file: str = ""
    answers: PastAnswers | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_range(self, "num_draft_tokens", 1, MAX_NODES - 1)
        check_range(self, "max_match", 1, 64)
        check_range(self, "min_match", 0, 64)
        check_range(self, "occurrences", 1, 64)
        check_range(self, "per_token", 1, 64)
        check_range(self, "past", 0, 1 << 20)
        if self.file and not self.past:
            raise InvalidOption(f"suffix: file={self.file} keeps answers: say how many tokens of them, as past=16384")
        if self.min_match > self.max_match:
            raise InvalidOption(f"suffix: min_match={self.min_match} exceeds max_match={self.max_match}")

    @property
    def may_draft_nothing(self) -> bool:
        return True

    @property
    def num_kinds(self) -> int:
        return NUM_KINDS if self.answers is None else 2 * NUM_KINDS

    @property
    def keeps_file(self) -> bool:
        return bool(self.file)

    @property
    def parameters(self) -> Any:
        return () if self.answers is None else self.answers.tokens_N

    @property
    def headroom(self) -> int:
        return self.num_draft_tokens + 1

    @property
    def max_depth(self) -> int:
        return min(self.num_draft_tokens, self.max_match * self.per_token)

    def resolve(self, target: Target) -> "Suffix":
        """Choose the shortest match for the device, and read past answers."""
        answers = self.answers
        if self.past and answers is None:
            answers = PastAnswers(self.past, target.config.num_tokens, named_path(self.file) if self.file else None)
        shortest = self.min_match or min(shortest_worth(target), self.max_match)
        return replace(self, min_match=shortest, answers=answers)

    def learn(self, answer: Sequence[int]) -> None:
        if self.answers is not None:
            self.answers.add(answer)

    def bounded(self, nodes: int) -> "Suffix":
        # So many nodes are verified in any case: what a single token predicts takes the place of what is less likely.
        return replace(self, num_draft_tokens=min(self.num_draft_tokens, nodes - 1), min_match=self.min_match or 1)

    def propose(self, model: Model, params: Any, state: DecodeState, memory: Any) -> Proposal:
        backend, depth = model.decoder.backend, self.max_depth
        texts, num_past = (state.tokens_BS, state.lengths_B), 0
        matched_BS = match_lengths(*texts, self.max_match)
        if self.answers is not None:
            # Past answers stand before the text.
            num_past = params.shape[0]
            matched_BS = jnp.concatenate([past_matches(params, *texts, self.max_match), matched_BS], axis=1)
        longest_B = jnp.max(matched_BS, axis=1)
        is_longest_BS = matched_BS == jnp.maximum(longest_B, self.min_match or 1)[:, None]
        place_S = jnp.arange(matched_BS.shape[1], dtype=jnp.int32)
        last_BC, _ = top_k(jnp.where(is_longest_BS, place_S, -1), min(self.occurrences, place_S.size), backend)
        follow_BCJ = continuations(*texts, jnp.maximum(last_BC - num_past, 0), depth)
        kinds_B = kinds_of(longest_B)
        if num_past:
            is_past_BC = last_BC < num_past
            past_BCJ = past_continuations(params, jnp.clip(last_BC, 0, num_past - 1), depth)
            follow_BCJ = jnp.where(is_past_BC[..., None], past_BCJ, follow_BCJ)
            kinds_B = jnp.where(is_past_BC[:, 0], NUM_KINDS + kinds_B, kinds_B)
        whole, shares_BM = join_paths(current_tokens(state), follow_BCJ, last_BC >= 0)
        depths_M = np.concatenate([[0], np.repeat(np.arange(1, depth + 1), last_BC.shape[1])])
        valid_BM = whole.valid_BM & (depths_M <= self.per_token * longest_B[:, None]) & (whole.tokens_BM >= 0)
        whole = whole._replace(tokens_BM=jnp.maximum(whole.tokens_BM, 0))
        scores_BM = jnp.where(valid_BM, shares_BM, -1.0)
        num_nodes = 1 + min(self.num_draft_tokens, shares_BM.shape[1] - 1)
        kept_BM = best_nodes(scores_BM, num_nodes, backend)
        goes_on_BM = jnp.pad(chances_after(longest_B, depth), ((0, 0), (1, 0)), constant_values=1.0)[:, depths_M]
        chances_BM = jnp.take_along_axis(shares_BM * goes_on_BM, kept_BM, axis=1)
        tree = kept_tree(whole, kept_BM, valid_BM)
        return Proposal(tree, memory, chances_BM=chances_BM, kinds_B=kinds_B)


def join_paths(
    roots_B: Int[Array, " B"], paths_BCJ: Int[Array, "B C J"], is_there_BC: Bool[Array, "B C"]
) -> tuple[DraftTree, Float[Array, "B M"]]:
    """Return the tree of paths below the roots, and which share of the paths that are there leads through each node.

    After the root come the nodes of all paths at depth 1, then at depth 2, and so on: 1 + J * C in all. What begins as
    an earlier path does is that path's node, and not valid here.
    """
    batch, num_paths, depth = paths_BCJ.shape
    is_pair_BCC = is_there_BC[:, :, None] & is_there_BC[:, None, :]
    is_equal_BCCJ = (paths_BCJ[:, :, None] == paths_BCJ[:, None]) & is_pair_BCC[..., None]
    is_shared_BCCJ = jnp.cumprod(is_equal_BCCJ, axis=-1, dtype=jnp.int32)
    first_BCJ = jnp.argmax(is_shared_BCCJ, axis=2).astype(jnp.int32)
    is_first_BCJ = is_there_BC[..., None] & (first_BCJ == jnp.arange(num_paths)[:, None])
    num_there_B11 = jnp.maximum(jnp.sum(is_there_BC, axis=1), 1)[:, None, None]
    shares_BCJ = jnp.sum(is_shared_BCCJ, axis=2) / num_there_B11
    above_BCJ = jnp.where(jnp.arange(depth) > 0, 1 + (jnp.arange(depth) - 1) * num_paths + jnp.roll(first_BCJ, 1, 2), 0)

    def by_depth(root: Any, values_BCJ: Array) -> Array:
        roots_B1 = jnp.broadcast_to(jnp.asarray(root, values_BCJ.dtype).reshape(-1, 1), (batch, 1))
        return jnp.concatenate([roots_B1, values_BCJ.swapaxes(1, 2).reshape(batch, -1)], axis=1)

    valid_BM = by_depth(True, is_first_BCJ)
    tree = DraftTree(by_depth(roots_B, paths_BCJ), by_depth(0, above_BCJ.astype(jnp.int32)), valid_BM, valid_BM)
    return tree, by_depth(1.0, shares_BCJ.astype(jnp.float32))
