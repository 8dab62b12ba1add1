"""Prompt lookup: the text itself as the drafter (Saxena, prompt-lookup-decoding, 2023)."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from jaxinfer.decoding.drafting.text_matches import (
    GOES_ON,
    NUM_KINDS,
    chances_after,
    continuations,
    kinds_of,
    match_lengths,
    shortest_worth,
)
from jaxinfer.decoding.options import check_choice, check_range
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Proposal, Strategy, Target, current_tokens
from jaxinfer.decoding.trees.tree import chain
from jaxinfer.errors import InvalidOption
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Int


@dataclass(frozen=True)
class PromptLookup(Strategy):
    """Draft what followed the last time that the text ended as it does now.

    The longest match of ``min_ngram`` to ``max_ngram`` tokens is taken, of equally long ones the ``last`` or the
    ``first``. Where the match reaches into its own continuation, the draft goes on periodically. A ``min_ngram`` of 0
    is 1 with the published rule and in sums of bounded size, or else 2 on a CPU, where the nodes of a step cost more
    than what single tokens predict is worth.

    ``rule=published`` is the rule of the first implementation: the first match that has all ``num_draft_tokens`` after
    it, else the next one, else one of a shorter n-gram. It drafts nothing from matches near the text's end.
    """

    name: ClassVar[str] = "prompt_lookup"
    description: ClassVar[str] = "draft what followed the longest match of the text's end earlier in the text"

    num_draft_tokens: int = 10
    max_ngram: int = 3
    min_ngram: int = 0
    match: Literal["last", "first"] = "last"
    rule: Literal["longest", "published"] = "longest"

    def __post_init__(self) -> None:
        check_range(self, "num_draft_tokens", 1, 64)
        check_range(self, "max_ngram", 1, 64)
        check_range(self, "min_ngram", 0, 64)
        check_choice(self, "match", ("last", "first"))
        check_choice(self, "rule", ("longest", "published"))
        if self.min_ngram > self.max_ngram:
            raise InvalidOption(f"prompt_lookup: min_ngram={self.min_ngram} exceeds max_ngram={self.max_ngram}")

    @property
    def may_draft_nothing(self) -> bool:
        return True

    def resolve(self, target: Target) -> "PromptLookup":
        """Choose the shortest match for the device."""
        shortest = 1 if self.rule == "published" else min(shortest_worth(target), self.max_ngram)
        return self if self.min_ngram else replace(self, min_ngram=shortest)

    @property
    def num_kinds(self) -> int:
        return NUM_KINDS

    def bounded(self, nodes: int) -> "PromptLookup":
        # So many nodes are verified in any case: what a single token predicts takes the place of what is less likely.
        shortest = self.min_ngram or 1
        return replace(self, num_draft_tokens=min(self.num_draft_tokens, nodes - 1), min_ngram=shortest)

    @property
    def headroom(self) -> int:
        return self.num_draft_tokens + 1

    @property
    def branches(self) -> bool:
        return False

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    def propose(self, model: Model, params: Any, state: DecodeState, memory: Any) -> Proposal:
        matched_BS = match_lengths(state.tokens_BS, state.lengths_B, self.max_ngram)
        num_slots = matched_BS.shape[1]
        place_S = jnp.arange(num_slots)
        takes_last = self.match == "last" and self.rule == "longest"
        if self.rule == "published":
            after_BS = state.lengths_B[:, None] - 1 - place_S
            # An n-gram may not reach into the last n tokens, which are the text's end.
            usable_BS = jnp.minimum(matched_BS, after_BS - 1)
            matched_BS = jnp.where(after_BS >= self.num_draft_tokens, jnp.maximum(usable_BS, 0), 0)
        preference_S = place_S if takes_last else num_slots - 1 - place_S
        best_B = jnp.argmax(matched_BS * num_slots + preference_S[None, :], axis=1)
        is_found_B = jnp.take_along_axis(matched_BS, best_B[:, None], axis=1)[:, 0] >= max(self.min_ngram, 1)
        drafts_BJ = continuations(state.tokens_BS, state.lengths_B, best_B[:, None], self.num_draft_tokens)[:, 0]
        tokens_BM = jnp.concatenate([current_tokens(state)[:, None], drafts_BJ], axis=1)
        is_root_1M = jnp.arange(tokens_BM.shape[1])[None, :] == 0
        tree = chain(tokens_BM, is_root_1M | is_found_B[:, None])
        length_B = _length_at(best_B, state.tokens_BS, state.lengths_B, len(GOES_ON))
        chances_BM = jnp.pad(chances_after(length_B, self.num_draft_tokens), ((0, 0), (1, 0)), constant_values=1.0)
        return Proposal(tree, memory, chances_BM=chances_BM, kinds_B=kinds_of(length_B))


def _length_at(
    place_B: Int[Array, " B"], tokens_BS: Int[Array, "B S"], lengths_B: Int[Array, " B"], most: int
) -> Int[Array, " B"]:
    """Return how many tokens up to and with one place equal those at the text's end, counted up to ``most``."""
    back_1J = jnp.arange(most)[None, :]
    ends_BJ, places_BJ = (each_B[:, None] - back_1J for each_B in (lengths_B - 1, place_B))
    last_BJ, there_BJ = (
        jnp.take_along_axis(tokens_BS, jnp.maximum(at_BJ, 0), axis=1) for at_BJ in (ends_BJ, places_BJ)
    )
    is_equal_BJ = (last_BJ == there_BJ) & (places_BJ >= 0)
    return jnp.sum(jnp.cumprod(is_equal_BJ, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
