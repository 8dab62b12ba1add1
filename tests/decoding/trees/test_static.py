"""Trees as data: the published ones, a user's own, and those grown from accuracies and costs."""

import json
from collections import Counter
from itertools import combinations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.decoding.trees.static import (
    PUBLISHED_TREES,
    build_tree,
    check_tree,
    expected_tokens,
    fill_tree,
    lay_out,
    paths_for,
    read_tree,
    tree_depth,
)
from jaxinfer.decoding.trees.tree import ancestors, depths
from jaxinfer.decoding.tuning.tree_cost import measure_costs
from jaxinfer.errors import InvalidOption
from jaxinfer.models.decoder import Decoder
from tests.toys import TINY_LLAMA, float32_backend, random_params

DEPTHS = {
    "mc_sim_7b_63": {1: 10, 2: 28, 3: 23, 4: 2},
    "vicuna_7b_stage2": {1: 10, 2: 23, 3: 23, 4: 7},
    "zephyr_stage2": {1: 10, 2: 27, 3: 23, 4: 3},
    "vicuna_33b_stage1": {1: 10, 2: 34, 3: 19},
}


@pytest.mark.parametrize("name", PUBLISHED_TREES)
def test_published_trees_have_the_specified_shape(name):
    paths = read_tree(name)
    assert check_tree(paths, name) == paths, "every node's parent is there, none twice"
    assert len(paths) == 63
    assert dict(sorted(Counter(map(len, paths)).items())) == DEPTHS[name]
    assert max(rank for path in paths for rank in path) == 9


def test_the_first_published_tree_has_as_many_leaves_as_specified():
    inner = {path[:-1] for path in PUBLISHED_TREES["mc_sim_7b_63"]}
    assert sum(path not in inner for path in PUBLISHED_TREES["mc_sim_7b_63"]) == 42


def test_a_tree_is_laid_out_as_drawn_by_hand():
    """The root; then 0 and 2; then 0-1, 2-0 and 2-3; then 2-0-0: by depth, and then by path."""
    layout = lay_out(((2,), (0,), (2, 0), (2, 0, 0), (0, 1), (2, 3)))
    assert layout.parents_M.tolist() == [0, 0, 0, 1, 2, 2, 4]
    assert layout.depths_M.tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert layout.ranks_M.tolist() == [0, 0, 2, 1, 0, 3, 0]
    relation_1MM = ancestors(jnp.asarray(layout.parents_M)[None])
    assert np.asarray(relation_1MM[0]).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 0, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 1, 0, 1],
    ]
    assert np.asarray(depths(relation_1MM)[0]).tolist() == layout.depths_M.tolist()


def test_a_tree_is_filled_by_rank_and_as_likely_as_the_path_to_them():
    layout = lay_out(((0,), (1,), (0, 0), (1, 1), (1, 1, 0)))
    log_p_BKR = jnp.log(jnp.asarray([[[0.5, 0.25], [0.8, 0.1], [0.4, 0.2]]]))
    tokens_BKR = jnp.asarray([[[10, 11], [20, 21], [30, 31]]])
    tokens_BM, scores_BM = fill_tree(layout, jnp.asarray([7]), log_p_BKR, tokens_BKR)
    assert tokens_BM.tolist() == [[7, 10, 11, 20, 21, 30]]
    np.testing.assert_allclose(jnp.exp(scores_BM), [[1, 0.5, 0.25, 0.4, 0.025, 0.01]], rtol=1e-5)


def test_what_is_drafted_for_few_nodes_is_a_tree():
    """As many as there are below its root, for a sum a quarter more, and what stands above them."""
    paths = ((1, 0), (0,), (0, 0), (1,), (2,), (3,), (4,))
    assert paths_for(paths, 2, False) == ((1, 0), (1,))
    assert paths_for(paths, 4, False) == paths[:4]
    assert paths_for(paths, 2, True) == ((1, 0), (0,), (1,))
    assert paths_for(paths, 3, True) == ((1, 0), (0,), (0, 0), (1,))
    assert paths_for(paths, 5, True) == paths[:5]
    assert all(paths_for(paths, nodes, is_summed) == paths for nodes in (None, 64) for is_summed in (False, True))


def test_a_chain_and_a_file_name_trees_too(tmp_path):
    assert read_tree("chain:3") == ((0,), (0, 0), (0, 0, 0))
    (tmp_path / "tree.json").write_text(json.dumps([[0], [4], [4, 1]]))
    assert read_tree(str(tmp_path / "tree.json")) == ((0,), (4,), (4, 1))


MISTAKES = {
    "no parent": ([[0], [0, 1, 2]], r"path \[0, 1, 2\] has no parent: list \[0, 1\] too"),
    "twice": ([[0], [1], [0]], r"path \[0\] is listed twice"),
    "the root itself": ([[], [0]], r"\[\] is not a path of ranks"),
    "a negative rank": ([[-1]], r"\[-1\] is not a path of ranks"),
    "a broken rank": ([[0.5]], r"\[0.5\] is not a path of ranks"),
    "no list": ({"0": 1}, "needs a list of 1 to 1023 paths"),
    "no nodes": ([], "needs a list of 1 to 1023 paths"),
    "too many": ([[rank] for rank in range(1024)], "needs a list of 1 to 1023 paths"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_malformed_tree_is_named_in_one_line(tmp_path, name):
    listed, pattern = MISTAKES[name]
    (tmp_path / "tree.json").write_text(json.dumps(listed))
    with pytest.raises(InvalidOption, match=pattern) as caught:
        read_tree(str(tmp_path / "tree.json"))
    assert "\n" not in str(caught.value)
    assert "tree.json" in str(caught.value)


@pytest.mark.parametrize(("name", "pattern"), [("chain:0", "1 to 64"), ("chain:x", "1 to 64"), ("oak", "none of own")])
def test_an_unknown_tree_is_named(name, pattern):
    with pytest.raises(InvalidOption, match=f"tree '{name}'.*{pattern}"):
        read_tree(name)


def test_broken_json_is_no_tree(tmp_path):
    (tmp_path / "tree.json").write_text("[[0],")
    with pytest.raises(InvalidOption, match="no JSON list of paths"):
        read_tree(str(tmp_path / "tree.json"))


ACCURACIES = ((0.6, 0.2, 0.05), (0.4, 0.25), (0.3,))


def test_a_grown_tree_is_the_best_of_all_of_its_size():
    """Against every prefix-closed choice of nodes, at a cost that makes just this size worth while."""
    nodes = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(2)]
    nodes += [(a, b, 0) for a in range(3) for b in range(2)]
    for size in (2, 4, 6):
        trees = [tree for tree in combinations(nodes, size) if all(len(one) == 1 or one[:-1] in tree for one in tree)]
        best = max(expected_tokens(tree, ACCURACIES) for tree in trees)
        grown = build_tree(ACCURACIES, {1: 1.0, size + 1: 1.001, size + 2: 10.0})
        assert len(grown) == size
        assert expected_tokens(grown, ACCURACIES) == pytest.approx(best)
        assert check_tree(grown, "grown") == grown


def test_a_grown_tree_weighs_its_nodes_against_their_cost():
    rate = {count: 1.0 + 0.02 * (count - 1) for count in (1, 2, 4, 8, 16)}
    grown = build_tree(ACCURACIES, rate)
    gains = [expected_tokens([path], ACCURACIES) - 1 for path in grown]
    assert gains == sorted(gains, reverse=True)
    value = expected_tokens(grown, ACCURACIES)
    least_rate = value / (1 + 0.02 * len(grown))
    assert gains[-1] > 0.02 * least_rate, "the last node is worth its cost"
    assert build_tree(ACCURACIES, {1: 1.0, 2: 5.0}) == (), (
        "where verifying costs more than it brings, nothing is drafted"
    )
    assert tree_depth(build_tree(ACCURACIES, {1: 1.0, 64: 1.0})) == 3, "where it costs nothing, all heads are used"


@pytest.mark.parametrize(
    ("accuracies", "costs"), [((), {1: 1.0}), (((0.5,), ()), {1: 1.0}), (((1.5,),), {1: 1.0}), (((0.5,),), {0: 1.0})]
)
def test_figures_that_are_none_grow_no_tree(accuracies, costs):
    with pytest.raises(InvalidOption, match="a tree is built from"):
        build_tree(accuracies, costs)


def test_the_cost_of_nodes_is_measured():
    decoder, params = Decoder(TINY_LLAMA, float32_backend()), random_params(TINY_LLAMA)
    # 256 times the arithmetic: on a machine whose cores others use, too, it must seem the cheaper one ten times over.
    for _ in range(10):
        costs = measure_costs(decoder, params, (1, 256), num_slots=64, num_steps=4, trials=2)
        assert list(costs) == [1, 256]
        if 0 < costs[1] < costs[256]:
            break
    else:
        pytest.fail(f"one node never cost less than 256: {costs}")
