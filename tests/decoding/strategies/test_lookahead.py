"""Lookahead's tree against the rule that its publication's layout comes down to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.decoding.strategies import lookahead
from jaxinfer.decoding.strategies.lookahead import Window, window_tree
from jaxinfer.decoding.trees import tree
from tests.toys import float32_backend

BACKEND = float32_backend()
ancestors, depths = jax.jit(tree.ancestors), jax.jit(tree.depths)
insert = jax.jit(lookahead.insert, static_argnums=3)


def layout(window: int, ngram: int, guesses: int) -> tuple[np.ndarray, np.ndarray]:
    """Return who attends to whom, and each token's distance from the current one, written out token by token.

    The oldest level (the current token first) is causal. Column j of level l sees columns 0 .. j of the oldest and its
    own column of the levels between. A guess sees the current token and its own n-gram up to itself.
    """
    levels = ngram - 1
    size = (window + guesses) * levels
    sees = np.zeros((size, size), bool)
    ahead = np.zeros(size, int)
    for level in range(levels):
        for column in range(window):
            own = level * window + column
            ahead[own] = level + column
            sees[own, : column + 1] = True
            for between in range(1, level + 1):
                sees[own, between * window + column] = True
    for guess in range(guesses):
        first = levels * window + guess * levels
        for place in range(levels):
            ahead[first + place] = 1 + place
            sees[first + place, 0] = True
            sees[first + place, first : first + place + 1] = True
    return sees, ahead


@pytest.mark.parametrize(
    "sizes",
    [(5, 4, 2), (15, 5, 15), (7, 5, 7), (10, 3, 0), (1, 2, 1), (4, 2, 3)],
    ids=lambda sizes: "-".join(map(str, sizes)),
)
def test_mask_and_positions_follow_the_closed_rule(sizes):
    parents_M, is_guess_M = window_tree(*sizes)
    relation_1MM = ancestors(jnp.asarray(parents_M)[None])
    sees, ahead = layout(*sizes)
    np.testing.assert_array_equal(relation_1MM[0], sees)
    np.testing.assert_array_equal(depths(relation_1MM)[0], ahead)
    window, ngram, _ = sizes
    np.testing.assert_array_equal(is_guess_M, np.arange(len(ahead)) >= window * (ngram - 1))


def test_the_pool_forgets_the_oldest_and_renews_what_comes_again():
    def memory(grams, ages, clock):
        empty = jnp.zeros((1, 2, 2), jnp.int32)
        return Window(empty, jnp.asarray([grams], jnp.int32), jnp.asarray([ages], jnp.int32), jnp.int32(clock))

    def pool(grams_PN, ages_P):
        return {tuple(map(int, gram)): int(age) for gram, age in zip(grams_PN[0], ages_P[0]) if age > 0}

    before = memory([[1, 2, 3], [4, 5, 6], [7, 8, 9], [0, 0, 0]], [2, 5, 3, 0], 4)
    coming = jnp.asarray([[[1, 2, 3], [6, 6, 6]]], jnp.int32)
    # Two wide at the fourth step: what enters is of ages 9 and 10. One place was empty, one was the known n-gram's.
    assert pool(*insert(before, coming, jnp.bool_(True), BACKEND)) == {
        (1, 2, 3): 9,
        (4, 5, 6): 5,
        (7, 8, 9): 3,
        (6, 6, 6): 10,
    }
    full = memory([[1, 2, 3], [4, 5, 6], [7, 8, 9], [2, 2, 2]], [2, 5, 3, 4], 4)
    twice = jnp.asarray([[[5, 5, 5], [5, 5, 5]]], jnp.int32)
    found = pool(*insert(full, twice, jnp.bool_(True), BACKEND))
    assert found[5, 5, 5] == 10
    assert (1, 2, 3) not in found
    assert (4, 5, 6) in found
    unformed = insert(before, coming, jnp.bool_(False), BACKEND)
    assert pool(*unformed) == {(1, 2, 3): 2, (4, 5, 6): 5, (7, 8, 9): 3}
