"""Drafting a chain token by token with a model: the loop that drafters with weights share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Strategy, current_tokens
from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.rows import set_in_rows
from jaxinfer.sampling.draw import draw, drawing_distribution, log_probabilities
from jaxinfer.sampling.grammar import states_after
from jaxinfer.sampling.history import History
from jaxinfer.sampling.noise import ROLE_DRAFT, ROLE_TARGET, role

# From a node's token [B], the node's index and a carry: the logits [B, V] after it, and the carry.
NextLogits = Callable[[Int[Array, " B"], Int[Array, ""], Any], tuple[Float[Array, "B V"], Any]]


class ChainDraft(NamedTuple):
    """The current token and the drafts after it, as nodes of a chain.

    ``drafted_BM`` tells which nodes count: the root, and drafts up to where a row stopped. ``log_q_BMV`` is what each
    node's child was drawn from, kept only for rejection.
    """

    tokens_BM: Any
    drafted_BM: Any
    log_q_BMV: Any
    carry: Any


@dataclass(frozen=True)
class ChainStrategy(Strategy):
    """A strategy, inside another one, that drafts a chain of ``num_draft_tokens``."""

    num_draft_tokens: int = 1

    @property
    def headroom(self) -> int:
        return self.num_draft_tokens + 1

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    @property
    def branches(self) -> bool:
        return False


def draft_chain(
    state: DecodeState,
    next_logits: NextLogits,
    carry: Any,
    most: int,
    count: Int[Array, ""] | int,
    acceptance: str,
    vocab_size: int,
    confidence: float | None = None,
    first_logits: NextLogits | None = None,
) -> ChainDraft:
    """Draft ``count`` <= ``most`` tokens after the current one of each row.

    Under ``match`` a draft has the target's own noise, so that a drafter that agrees with the target drafts what it
    will draw; under ``rejection`` it has noise of its own. Both have the row's sampling transforms, with penalties
    over the drafts before. A row stops after a draft that the drafter itself gave less than ``confidence``.
    ``first_logits`` takes the place of ``next_logits`` for the current token; it is then run in any case.
    """
    batch, length_B = state.lengths_B.shape[0], state.lengths_B
    own_noise = acceptance == "rejection"
    kind = role(ROLE_DRAFT) if own_noise else ROLE_TARGET
    tokens_BM = jnp.zeros((batch, most + 1), jnp.int32).at[:, 0].set(current_tokens(state))
    drafted_BM = jnp.zeros((batch, most + 1), bool).at[:, 0].set(True)
    log_q_BMV = jnp.zeros((batch, most + 1, vocab_size), jnp.float32) if own_noise else None

    def draft(loop: tuple[Any, ...], next_logits: NextLogits = next_logits) -> tuple[Any, ...]:
        index, goes_on_B, text_BS, tokens_BM, drafted_BM, log_q_BMV, states_B, carry = loop
        logits_BV, carry = next_logits(tokens_BM[:, index], index, carry)
        history = History(text_BS, state.prompt_lengths_B, length_B + index, grammar_states_BM=states_B[:, None])
        position_B1 = (length_B + index)[:, None]
        drawn_B = draw(logits_BV[:, None], position_B1, state.sampling, history, kind)[:, 0]
        if own_noise:
            log_q_BV = drawing_distribution(logits_BV[:, None], position_B1, state.sampling, history)[:, 0]
            log_q_BMV = log_q_BMV.at[:, index].set(log_q_BV)
        states_B = states_after(state.sampling, states_B, drawn_B)
        text_BS = set_in_rows(text_BS, position_B1, drawn_B[:, None])
        tokens_BM = tokens_BM.at[:, index + 1].set(drawn_B)
        drafted_BM = drafted_BM.at[:, index + 1].set(goes_on_B)
        if confidence is not None:
            log_p_B = log_probabilities(logits_BV[:, None], drawn_B[:, None])[:, 0]
            goes_on_B = goes_on_B & (jnp.exp(log_p_B) >= confidence)
        return index + 1, goes_on_B, text_BS, tokens_BM, drafted_BM, log_q_BMV, states_B, carry

    states_B = state.grammar_states_B
    loop = (jnp.int32(0), ~state.finished_B, state.tokens_BS, tokens_BM, drafted_BM, log_q_BMV, states_B, carry)
    if first_logits is not None:
        loop = draft(loop, first_logits)
    loop = jax.lax.while_loop(lambda loop: (loop[0] < count) & loop[1].any(), draft, loop)
    _, _, _, tokens_BM, drafted_BM, log_q_BMV, _, carry = loop
    return ChainDraft(tokens_BM, drafted_BM, log_q_BMV, carry)
