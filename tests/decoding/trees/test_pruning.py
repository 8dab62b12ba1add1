"""A tree is cut down to its likeliest nodes, each with all that lies above it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.decoding.trees.pruning import best_nodes, kept_tree, path_scores
from jaxinfer.decoding.trees.static import lay_out
from jaxinfer.decoding.trees.tree import DraftTree
from tests.toys import float32_backend

PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0))
VOCAB_SIZE = 7


def drafted(seed: int):
    """Return a random tree of several rows and the guesses after those of its nodes that have children."""
    rng, layout = np.random.default_rng(seed), lay_out(PATHS)
    tokens_BM = rng.integers(0, VOCAB_SIZE, (16, len(PATHS) + 1)).astype(np.int32)
    logits_BIV = 2 * rng.standard_normal((16, len(np.unique(layout.parents_M)), VOCAB_SIZE)).astype(np.float32)
    return layout, tokens_BM, logits_BIV


@pytest.mark.parametrize(("least", "count"), [(0.0, 5), (0.1, 11), (0.15, 6), (0.0, 1), (1.0, 4)])
def test_the_likeliest_nodes_stay_where_no_step_to_them_is_too_unlikely(least, count):
    layout, tokens_BM, logits_BIV = drafted(seed=1)
    inner = np.unique(layout.parents_M).tolist()
    parents_BM, all_BM = np.broadcast_to(layout.parents_M, tokens_BM.shape), np.ones(tokens_BM.shape, bool)

    @jax.jit
    def prune(tree, logits_BIV):
        scores_BM = path_scores(layout, tree.tokens_BM, logits_BIV, least)
        kept_BP = best_nodes(scores_BM, count, float32_backend())
        return kept_BP, kept_tree(tree, kept_BP, scores_BM > -jnp.inf)

    kept_BP, pruned = jax.device_get(prune(DraftTree(tokens_BM, parents_BM, all_BM, all_BM), logits_BIV))
    p_BIV = np.exp(logits_BIV) / np.exp(logits_BIV).sum(-1, keepdims=True)
    numbers = set()
    for row in range(len(tokens_BM)):
        likelihood = {0: 1.0}
        for node in range(1, len(PATHS) + 1):
            parent = int(layout.parents_M[node])
            step = float(p_BIV[row, inner.index(parent), tokens_BM[row, node]])
            likelihood[node] = likelihood[parent] * step if step >= least else 0.0
        alive = sorted((node for node in likelihood if likelihood[node] > 0), key=lambda node: -likelihood[node])
        assert set(alive[:count]) <= set(kept_BP[row].tolist())
        assert kept_BP[row].tolist() == sorted(set(kept_BP[row].tolist())), "ascending, as caches keep paths"
        valid = kept_BP[row][np.asarray(pruned.valid_BM[row])].tolist()
        assert sorted(valid) == sorted(alive[:count])
        for at, node in enumerate(kept_BP[row].tolist()):
            assert int(pruned.tokens_BM[row, at]) == tokens_BM[row, node]
            assert kept_BP[row, int(pruned.parents_BM[row, at])] == layout.parents_M[node]
        numbers.add(len(valid))
    assert max(numbers) <= count
    assert len(numbers) > 1 or least in (0.0, 1.0)


def test_guesses_that_are_no_numbers_leave_the_root():
    layout, tokens_BM, logits_BIV = drafted(seed=2)
    scores_BM = path_scores(layout, jnp.asarray(tokens_BM), jnp.full_like(jnp.asarray(logits_BIV), jnp.nan), 0.0)
    kept_BP = best_nodes(scores_BM, 4, float32_backend())
    assert (np.asarray(kept_BP[:, 0]) == 0).all()
    assert np.asarray(scores_BM > -jnp.inf).sum(axis=1).tolist() == [1] * len(tokens_BM)


@pytest.mark.slow
def test_equally_likely_nodes_never_lose_their_parents():
    """Certain steps give a child the score of its parent, and impossible ones give minus infinity to both."""
    layout, tokens_BM, _ = drafted(seed=3)
    for filling in (0.0, -np.inf):
        scores_BM = jnp.full(tokens_BM.shape, filling).at[:, 0].set(0.0)
        for count in range(1, tokens_BM.shape[1] + 1):
            kept = set(np.asarray(best_nodes(scores_BM, count, float32_backend()))[0].tolist())
            assert all(int(layout.parents_M[node]) in kept for node in kept)
