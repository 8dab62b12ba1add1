"""Prompt lookup: the text itself as the drafter (Saxena, prompt-lookup-decoding, 2023)."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from jaxinfer.decoding.options import check_choice, check_range
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Proposal, Strategy, Target, current_tokens
from jaxinfer.decoding.tree import chain
from jaxinfer.errors import InvalidOption
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Int


@dataclass(frozen=True)
class PromptLookup(Strategy):
    """Draft what followed the last time that the text ended as it does now.

    The longest match of ``min_ngram`` to ``max_ngram`` tokens is taken, of equally long ones the ``last`` or the
    ``first``. Where the match reaches into its own continuation, the draft goes on periodically. A ``min_ngram`` of 0
    is 1, as published, or 2 on a CPU in float32, where the nodes of a step cost more than what single tokens predict
    is worth.
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
    def headroom(self) -> int:
        return self.num_draft_tokens + 1

    @property
    def branches(self) -> bool:
        return False

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    def propose(self, model: Model, own: Any, state: DecodeState, memory: Any) -> Proposal:
        matched_BS = match_lengths(state.tokens_BS, state.lengths_B, self.max_ngram)
        num_slots = matched_BS.shape[1]
        place_S = jnp.arange(num_slots)
        preference_S = place_S if self.match == "last" else num_slots - 1 - place_S
        best_B = jnp.argmax(matched_BS * num_slots + preference_S[None, :], axis=1)
        is_found_B = jnp.take_along_axis(matched_BS, best_B[:, None], axis=1)[:, 0] >= max(self.min_ngram, 1)
        period_B1 = jnp.maximum(state.lengths_B - 1 - best_B, 1)[:, None]
        source_BG = best_B[:, None] + 1 + jnp.arange(self.num_draft_tokens)[None, :] % period_B1
        drafts_BG = jnp.take_along_axis(state.tokens_BS, source_BG, axis=1, mode="clip")
        tokens_BM = jnp.concatenate([current_tokens(state)[:, None], drafts_BG], axis=1)
        is_root_1M = jnp.arange(tokens_BM.shape[1])[None, :] == 0
        return Proposal(chain(tokens_BM, is_root_1M | is_found_B[:, None]), memory)


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
