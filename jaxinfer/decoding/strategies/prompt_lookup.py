"""Prompt lookup: the text itself as the drafter (Saxena, prompt-lookup-decoding, 2023)."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from jaxinfer.decoding.options import check_choice, check_range
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Proposal, Strategy, Target, current_tokens
from jaxinfer.decoding.trees.tree import chain
from jaxinfer.errors import InvalidOption
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Int

# How often the token that followed a match of 1, 2, ... tokens, and of the last number or more, was the next one again:
# along 52 plain texts, the default model's greedy answers to Spec-Bench prompts. A draft that was right so far is a
# longer match, and its further tokens were right as often as those of one.
_GOES_ON = (0.22, 0.49, 0.65, 0.66, 0.75, 0.9)
# Of texts, too, it differs how often: matches of one, of two, and of more tokens are counted apart.
_KINDS = 3


@dataclass(frozen=True)
class PromptLookup(Strategy):
    """Draft what followed the last time that the text ended as it does now.

    The longest match of ``min_ngram`` to ``max_ngram`` tokens is taken, of equally long ones the ``last`` or the
    ``first``. Where the match reaches into its own continuation, the draft goes on periodically. A ``min_ngram`` of 0
    is 1, as published and in sums of bounded size, or else 2 on a CPU, where the nodes of a step cost more than what
    single tokens predict is worth.
    """

    name: ClassVar[str] = "prompt_lookup"
    description: ClassVar[str] = "draft what followed the longest match of the text's end earlier in the text"

    num_draft_tokens: int = 10
    max_ngram: int = 3
    min_ngram: int = 0
    match: Literal["last", "first"] = "last"

    def __post_init__(self) -> None:
        check_range(self, "num_draft_tokens", 1, 64)
        check_range(self, "max_ngram", 1, 64)
        check_range(self, "min_ngram", 0, 64)
        check_choice(self, "match", ("last", "first"))
        if self.min_ngram > self.max_ngram:
            raise InvalidOption(f"prompt_lookup: min_ngram={self.min_ngram} exceeds max_ngram={self.max_ngram}")

    @property
    def may_draft_nothing(self) -> bool:
        return True

    def resolve(self, target: Target) -> "PromptLookup":
        """Choose the shortest match for the device."""
        shortest = min(1 if target.backend.has_free_rows else 2, self.max_ngram)
        return self if self.min_ngram else replace(self, min_ngram=shortest)

    @property
    def num_kinds(self) -> int:
        return _KINDS

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
        preference_S = place_S if self.match == "last" else num_slots - 1 - place_S
        best_B = jnp.argmax(matched_BS * num_slots + preference_S[None, :], axis=1)
        is_found_B = jnp.take_along_axis(matched_BS, best_B[:, None], axis=1)[:, 0] >= max(self.min_ngram, 1)
        period_B1 = jnp.maximum(state.lengths_B - 1 - best_B, 1)[:, None]
        source_BJ = best_B[:, None] + 1 + jnp.arange(self.num_draft_tokens)[None, :] % period_B1
        drafts_BJ = jnp.take_along_axis(state.tokens_BS, source_BJ, axis=1, mode="clip")
        tokens_BM = jnp.concatenate([current_tokens(state)[:, None], drafts_BJ], axis=1)
        is_root_1M = jnp.arange(tokens_BM.shape[1])[None, :] == 0
        length_B = _length_at(best_B, state.tokens_BS, state.lengths_B, len(_GOES_ON))
        tree, kinds_B = chain(tokens_BM, is_root_1M | is_found_B[:, None]), jnp.clip(length_B, 1, _KINDS) - 1
        chances_BM = _chances(length_B, self.num_draft_tokens)
        return Proposal(tree, memory, chances_BM=chances_BM, kinds_B=kinds_B)


def _chances(length_B: Int[Array, " B"], num_drafts: int) -> Float[Array, "B M"]:
    """Return how likely the root and each further token after matches of these lengths are right."""
    longer_BJ = jnp.clip(length_B[:, None] + jnp.arange(num_drafts), 1, len(_GOES_ON))
    goes_on_BJ = jnp.asarray(_GOES_ON, jnp.float32)[longer_BJ - 1]
    return jnp.pad(jnp.cumprod(goes_on_BJ, axis=1), ((0, 0), (1, 0)), constant_values=1.0)


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


def match_lengths(tokens_BS: Int[Array, "B S"], lengths_B: Int[Array, " B"], most: int) -> Int[Array, "B S"]:
    """Return how many tokens up to and with each place equal those at the text's end, counted up to ``most``.

    The end itself, and what stands past it, count as no match.
    """
    place_1S = jnp.arange(tokens_BS.shape[1])[None, :]
    is_before_BS = place_1S < lengths_B[:, None] - 1
    count_BS = jnp.zeros(tokens_BS.shape, jnp.int32)
    alive_BS = is_before_BS
    for back in range(most):
        last_B1 = jnp.take_along_axis(tokens_BS, jnp.maximum(lengths_B[:, None] - 1 - back, 0), axis=1)
        shifted_BS = jnp.pad(tokens_BS, ((0, 0), (back, 0)))[:, : tokens_BS.shape[1]]
        alive_BS = alive_BS & (shifted_BS == last_B1) & (place_1S >= back) & (lengths_B[:, None] > back)
        count_BS = count_BS + alive_BS
    return count_BS
