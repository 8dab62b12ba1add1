"""Lookahead decoding: n-grams out of Jacobi iterates, verified as guesses (Fu et al., 2402.02057).

A step feeds three things as one tree: the current token; a window, whose rows are the last N - 1 iterates of the W
places ahead and are never taken; and G guesses, n-grams of the pool that begin with the current token.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxinfer.decoding.acceptance.walk import Walk
from jaxinfer.decoding.options import check_range
from jaxinfer.decoding.state import DecodeState, is_stop
from jaxinfer.decoding.strategy import Prefilled, Proposal, Strategy, Verified, current_tokens
from jaxinfer.decoding.trees.tree import DraftTree
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.rows import set_in_rows
from jaxinfer.ops.top_k import top_k


class Window(NamedTuple):
    """Iterates and pool of every row.

    ``levels_BJW``: the last N - 1 iterates, oldest first; column 0 of the oldest is the current token's place and its
    value there is not used. ``grams_BCE``: n-grams, the key first; ``ages_BC``: when each entered, 0 for an empty
    place. ``clock`` counts steps.
    """

    levels_BJW: Any
    grams_BCE: Any
    ages_BC: Any
    clock: Any


@dataclass(frozen=True)
class Lookahead(Strategy):
    """Draft n-grams that the target itself has formed while iterating on a window ahead.

    ``window`` is W, ``ngram`` N, ``guesses`` G; ``pool`` is how many n-grams a row remembers, the oldest making room,
    and ``pool_from_prompt`` fills it with the prompt's own first.
    """

    name: ClassVar[str] = "lookahead"
    description: ClassVar[str] = "draft n-grams collected from Jacobi iterations on a window ahead of the text"

    window: int = 15
    ngram: int = 5
    guesses: int = 15
    pool: int = 1024
    pool_from_prompt: bool = False

    def __post_init__(self) -> None:
        check_range(self, "window", 1, 128)
        check_range(self, "ngram", 2, 16)
        check_range(self, "guesses", 1, 128)
        check_range(self, "pool", max(self.window, self.guesses), 1 << 16)

    @property
    def headroom(self) -> int:
        return (self.window + self.guesses) * (self.ngram - 1)

    @property
    def needs_every_node(self) -> bool:
        return True

    @property
    def max_depth(self) -> int:
        return self.ngram - 1

    def start(self, model: Model, params: Any, state: DecodeState, prefilled: Prefilled) -> Window:
        batch, pool, ngram = state.lengths_B.shape[0], self.pool, self.ngram
        levels, width = ngram - 1, self.window
        # Any tokens will do; the prompt's, taken in turn, are as likely as others.
        cells_JW = jnp.arange(levels * width).reshape(levels, width)
        levels_BJW = prompt_tokens(state, cells_JW[None])
        grams_BCE, ages_BC = jnp.zeros((batch, pool, ngram), jnp.int32), jnp.zeros((batch, pool), jnp.int32)
        if self.pool_from_prompt:
            first_BC = state.prompt_lengths_B[:, None] - ngram - jnp.arange(pool)[None, ::-1]
            places_BCE = jnp.maximum(first_BC[..., None] + jnp.arange(ngram), 0)
            grams_BCE = jnp.take_along_axis(state.tokens_BS[:, None], places_BCE, axis=2)
            ages_BC = (first_BC >= 0).astype(jnp.int32)
        return Window(levels_BJW, grams_BCE, ages_BC, jnp.int32(1))

    def propose(self, model: Model, params: Any, state: DecodeState, memory: Window) -> Proposal:
        current_B = current_tokens(state)
        guesses_BRE, is_guess_BR = self._guesses(memory, current_B, model.decoder.backend)
        batch = current_B.shape[0]
        window_BW = memory.levels_BJW.reshape(batch, -1)[:, 1:]
        tokens_BM = jnp.concatenate([current_B[:, None], window_BW, guesses_BRE.reshape(batch, -1)], axis=1)
        shape = tokens_BM.shape
        parents_M, is_guess_M = window_tree(self.window, self.ngram, self.guesses)
        in_window_BM = jnp.ones((batch, self.window * (self.ngram - 1)), bool)
        valid_BM = jnp.concatenate([in_window_BM, jnp.repeat(is_guess_BR, self.ngram - 1, axis=1)], axis=1)
        may_take_M = is_guess_M | (np.arange(shape[1]) == 0)
        tree = DraftTree(
            tokens_BM,
            jnp.broadcast_to(jnp.asarray(parents_M), shape),
            valid_BM,
            jnp.broadcast_to(jnp.asarray(may_take_M), shape),
        )
        return Proposal(tree, memory)

    def observe(
        self,
        model: Model,
        params: Any,
        state: DecodeState,
        proposal: Proposal,
        verified: Verified,
        draws_BM: Any,
        walk: Walk,
    ) -> Window:
        memory: Window = proposal.memory
        tokens_BM, width, ngram = proposal.tree.tokens_BM, self.window, self.ngram
        levels_BJW = tokens_BM[:, : width * (ngram - 1)].reshape(-1, ngram - 1, width)
        answers_BJW = draws_BM[:, : width * (ngram - 1)].reshape(levels_BJW.shape)
        newest_BW = answers_BJW[:, -1]
        # An end in the window would have its place's successors iterate on a text that is over.
        filler_BW = prompt_tokens(state, (memory.clock + jnp.arange(width))[None, None])[:, 0]
        newest_BW = jnp.where(is_stop(state, newest_BW), filler_BW, newest_BW)
        grams_BWE = jnp.concatenate([levels_BJW, newest_BW[:, None]], axis=1).swapaxes(1, 2)
        # Until every level is an iterate, columns hold the filling that they began with.
        is_formed = memory.clock >= ngram - 1
        grams_BCE, ages_BC = insert(memory, grams_BWE, is_formed, model.decoder.backend)
        # The new oldest level begins one place on, where its column 0 is the place of the next current token.
        return Window(
            jnp.concatenate([levels_BJW[:, 1:], newest_BW[:, None]], axis=1), grams_BCE, ages_BC, memory.clock + 1
        )

    def _guesses(self, memory: Window, current_B: Int[Array, " B"], backend: Backend) -> tuple[Array, Array]:
        """Return the latest n-grams that begin with the current token, without it, and which of them exist."""
        fits_BC = jnp.where(memory.grams_BCE[..., 0] == current_B[:, None], memory.ages_BC, 0)
        ages_BR, places_BR = top_k(fits_BC, self.guesses, backend)
        chosen_BRE = jnp.take_along_axis(memory.grams_BCE, places_BR[..., None], axis=1)
        return chosen_BRE[..., 1:], ages_BR > 0


def window_tree(window: int, ngram: int, guesses: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each node's parent, and which nodes are guesses.

    The window comes first, a row for each level: in the oldest row (the current token and what is ahead of it) each
    token follows the one before it; in the others the one of its own column in the row above. Each guess is a chain
    from the current token.
    """
    levels = ngram - 1
    cells_JW = np.arange(levels * window, dtype=np.int32).reshape(levels, window)
    parents_JW = np.concatenate([np.maximum(cells_JW[:1] - 1, 0), cells_JW[:-1]])
    first_guess = levels * window
    chains_RJ = first_guess + np.arange(guesses * levels, dtype=np.int32).reshape(guesses, levels)
    chain_parents_RJ = np.concatenate([np.zeros((guesses, 1), np.int32), chains_RJ[:, :-1]], axis=1)
    parents_M = np.concatenate([parents_JW.reshape(-1), chain_parents_RJ.reshape(-1)])
    return parents_M, np.arange(len(parents_M)) >= first_guess


def prompt_tokens(state: DecodeState, cells: Int[Array, "#B J W"]) -> Int[Array, "B J W"]:
    """Return the prompt's tokens at these places, counted around its end."""
    places_BJW = cells % state.prompt_lengths_B[:, None, None]
    batch = places_BJW.shape[0]
    return jnp.take_along_axis(state.tokens_BS, places_BJW.reshape(batch, -1), axis=1).reshape(places_BJW.shape)


def insert(memory: Window, grams_BWE: Int[Array, "B W E"], is_formed: Any, backend: Backend) -> tuple[Array, Array]:
    """Return n-grams and ages with new ones in the place of the oldest; one that comes again is new again."""
    width = grams_BWE.shape[1]
    order_W = jnp.arange(width, dtype=jnp.int32)
    is_known_BWC = (grams_BWE[:, :, None] == memory.grams_BCE[:, None]).all(axis=-1)
    ages_BC = jnp.where(is_known_BWC.any(axis=1), 0, memory.ages_BC)
    comes_again_BWW = (grams_BWE[:, :, None] == grams_BWE[:, None]).all(axis=-1) & (order_W[None, :] > order_W[:, None])
    new_ages_BW = jnp.where(comes_again_BWW.any(axis=-1), 0, memory.clock * width + order_W[None, :] + 1)
    _, oldest_BW = top_k(-ages_BC, width, backend)
    grams_BCE = set_in_rows(memory.grams_BCE, oldest_BW, grams_BWE)
    ages_BC = set_in_rows(ages_BC, oldest_BW, new_ages_BW)
    return jnp.where(is_formed, grams_BCE, memory.grams_BCE), jnp.where(is_formed, ages_BC, memory.ages_BC)
