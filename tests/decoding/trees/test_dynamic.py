"""Trees grow to the nodes that heads find likeliest, against a definition in NumPy."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.decoding.trees.dynamic import Growth, Guess, follow, grow, read_growth
from jaxinfer.errors import InvalidOption
from jaxinfer.ops.backend import choose_backend
from tests.decoding.fitted_heads import TokenPath, best_paths

LogPAfter = Callable[[int, TokenPath], np.ndarray]


def paths_of(tokens_M: np.ndarray, parents_M: np.ndarray) -> list[TokenPath]:
    paths: list[TokenPath] = [()]
    for node in range(1, len(tokens_M)):
        assert parents_M[node] < node, "parents stand before their children"
        paths.append((*paths[parents_M[node]], int(tokens_M[node])))
    return paths


def guess_by_paths(batch: int, num_ranks: int) -> tuple[Guess, LogPAfter]:
    """Return a guess whose chances depend on the row and the whole path, and these chances themselves."""
    vocab_size = 12
    chances: dict[tuple[int, TokenPath], np.ndarray] = {}

    def log_p_after(row: int, path: TokenPath) -> np.ndarray:
        rng = np.random.default_rng([row, *path])
        logits_V = rng.standard_normal(vocab_size) * rng.uniform(0.5, 4)
        return chances.setdefault((row, path), logits_V - np.log(np.exp(logits_V).sum()))

    def guess(depth, beams, paths):
        tokens_BW, origins_BW = np.asarray(beams.tokens_BW), np.asarray(beams.origins_BW)
        if paths is None:
            paths = [[()] for _ in range(batch)]
        else:
            paths = [[(*before[o], int(t)) for o, t in zip(*row)] for before, *row in zip(paths, origins_BW, tokens_BW)]
        log_p_BWV = np.array([[log_p_after(row, path) for path in paths[row]] for row in range(batch)])
        tokens_BWR = np.argsort(-log_p_BWV, axis=-1, kind="stable")[..., :num_ranks]
        log_p_BWR = np.take_along_axis(log_p_BWV, tokens_BWR, axis=-1)
        return jnp.asarray(log_p_BWR, jnp.float32), jnp.asarray(tokens_BWR, jnp.int32), paths

    return guess, log_p_after


@pytest.mark.parametrize("num_nodes", [2, 7, 16, 40])
def test_the_likeliest_nodes_are_kept_with_all_their_ancestors(num_nodes):
    growth, batch = Growth(num_nodes, 3), 3
    guess, log_p_after = guess_by_paths(batch, growth.num_ranks)
    tree, scores_BM = grow(growth, jnp.arange(batch, dtype=jnp.int32), guess, choose_backend("float32", "cpu"))
    assert tree.tokens_BM.shape == (batch, num_nodes)
    assert np.asarray(tree.tokens_BM)[:, 0].tolist() == [0, 1, 2]
    for row in range(batch):
        expected = best_paths(growth, lambda path, row=row: log_p_after(row, path).tolist())
        paths = paths_of(np.asarray(tree.tokens_BM)[row], np.asarray(tree.parents_BM)[row])
        assert set(paths[1:]) == set(expected)
        np.testing.assert_allclose(scores_BM[row, 1:], [expected[path] for path in paths[1:]], atol=1e-5)


def test_a_tree_of_ranks_follows_what_is_guessed_after_each_path():
    ranks, batch = ((0,), (2,), (0, 1), (2, 0), (2, 3), (0, 1, 1), (2, 3, 0)), 2
    guess, log_p_after = guess_by_paths(batch, 4)
    tree, scores_BM = follow(ranks, jnp.arange(batch, dtype=jnp.int32), guess)
    for row in range(batch):
        expected: dict[TokenPath, float] = {}
        for path in ranks:
            tokens, total = (), 0.0
            for rank in path:
                log_p_V = log_p_after(row, tokens)
                token = int(np.argsort(-log_p_V, kind="stable")[rank])
                tokens, total = (*tokens, token), total + log_p_V[token]
            expected[tokens] = total
        paths = paths_of(np.asarray(tree.tokens_BM)[row], np.asarray(tree.parents_BM)[row])
        assert paths[1:] == list(expected)
        np.testing.assert_allclose(scores_BM[row, 1:], list(expected.values()), atol=1e-5)


def test_certain_heads_grow_a_chain_before_anything_else():
    """Where a child is as likely as its parent, which has to be there for it, the parent comes first."""
    growth = Growth(4, 3)

    def guess(depth, beams, _):
        shape = (*beams.tokens_BW.shape, growth.num_ranks)
        log_p_R = jnp.where(jnp.arange(growth.num_ranks) == 0, 0.0, -50.0)
        tokens_R = jnp.arange(growth.num_ranks) + 10 * depth
        return jnp.broadcast_to(log_p_R, shape), jnp.broadcast_to(tokens_R, shape), None

    tree, _ = grow(growth, jnp.array([5], jnp.int32), guess, choose_backend("float32", "cpu"))
    assert np.asarray(tree.tokens_BM).tolist() == [[5, 10, 20, 30]]
    assert np.asarray(tree.parents_BM).tolist() == [[0, 0, 1, 2]]


@pytest.mark.parametrize(
    "count",
    ["", ":", ":x", ":0", ":1", ":-3", ":1025", ":99999999", ":16:2", pytest.param(":" + "9" * 5000, id="huge")],
)
def test_a_malformed_number_of_nodes_is_named(count):
    name = f"dynamic{count}"
    # A name of many digits is cut in the middle.
    with pytest.raises(
        InvalidOption, match=f"tree {name[:100]!r}"[:-1] + ".*: a dynamic tree has 2 to 1024 nodes, as in"
    ):
        read_growth(name)


@pytest.mark.parametrize(
    ("name", "num_nodes"),
    [("dynamic:2", 2), ("dynamic:16", 16), ("dynamic:1024", 1024)]
    + [(name, None) for name in ("own", "chain:3", "mc_sim_7b_63", "dynamics", "trees/dynamic:8")],
)
def test_the_name_of_a_dynamic_tree_says_how_many_nodes_it_has(name, num_nodes):
    assert read_growth(name) == num_nodes
