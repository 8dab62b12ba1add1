"""Jacobi's guesses are what the target drew, in the pass before, behind the tokens that were taken."""

import jax.numpy as jnp

from jaxinfer.decoding.acceptance.walk import Walk
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategies.jacobi import Jacobi
from jaxinfer.decoding.strategy import LastNode, Prefilled, Proposal, Verified
from jaxinfer.decoding.trees.tree import chain
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.model import Model
from tests.toys import TINY_LLAMA, float32_backend

UNUSED = Model(Decoder(TINY_LLAMA, float32_backend()), {})
STATE = DecodeState(**dict.fromkeys(DecodeState._fields))
STRATEGY = Jacobi(num_draft_tokens=3)


def test_the_next_guesses_are_the_draws_behind_the_path():
    """What lies past the last draw repeats it, until an iteration has come so far."""
    draws_BM = jnp.asarray([[10, 11, 12, 13]] * 3)
    walk = Walk(None, jnp.asarray([1, 2, 4]), None)
    tree = chain(draws_BM, jnp.ones_like(draws_BM, bool))
    cache = create_cache(TINY_LLAMA, 3, 16, UNUSED.decoder.backend)
    last = LastNode(walk.taken_B - 1, jnp.zeros((3, 1)), jnp.zeros((3, 1)), None)
    verified = Verified(None, None, cache, last=last)
    found = STRATEGY.observe(UNUSED, (), STATE, Proposal(tree, ()), verified, draws_BM, walk)
    assert found.tolist() == [[11, 12, 13], [12, 13, 13], [13, 13, 13]]


def test_the_first_guesses_are_the_end_of_the_prompt_and_follow_the_current_token():
    state = STATE._replace(
        tokens_BS=jnp.asarray([[5, 6, 7, 8, 9, 0], [4, 3, 0, 0, 0, 0]]),
        prompt_lengths_B=jnp.asarray([4, 1]),
        lengths_B=jnp.asarray([5, 2]),
    )
    guesses_BG = STRATEGY.start(UNUSED, (), state, Prefilled(None, 4))
    assert guesses_BG.tolist() == [[6, 7, 8], [4, 4, 4]]
    tree = STRATEGY.propose(UNUSED, (), state, guesses_BG).tree
    assert tree.tokens_BM.tolist() == [[9, 6, 7, 8], [3, 4, 4, 4]]
    assert tree.parents_BM.tolist() == [[0, 0, 1, 2]] * 2
