"""Ancestors, depths and the accepted path of arbitrary trees, against walking them node by node."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.decoding.acceptance.walk import match
from jaxinfer.decoding.trees.tree import DraftTree, ancestors, depths

NODES = 6
few = settings(derandomize=True, max_examples=60, deadline=None)
parent_lists = st.tuples(*[st.integers(0, max(node - 1, 0)) for node in range(NODES)])


def path_to(parents, node):
    path = [node]
    while path[-1]:
        path.append(parents[path[-1]])
    return path


@jax.jit
def related(parents_BM):
    relation_BMM = ancestors(parents_BM)
    return relation_BMM, depths(relation_BMM)


@few
@given(st.lists(parent_lists, min_size=2, max_size=2))
def test_ancestors_and_depths_equal_walking_up(rows):
    relation_BMM, depth_BM = jax.device_get(related(jnp.array(rows, jnp.int32)))
    for row, parents in enumerate(rows):
        for node in range(NODES):
            path = path_to(parents, node)
            assert set(np.flatnonzero(relation_BMM[row, node])) == set(path)
            assert depth_BM[row, node] == len(path) - 1


flags = st.lists(st.booleans(), min_size=NODES, max_size=NODES)
matched = jax.jit(match, static_argnums=2)
small_tokens = st.lists(st.integers(0, 2), min_size=NODES, max_size=NODES)


@few
@given(parent_lists, small_tokens, small_tokens, flags, flags)
def test_the_accepted_path_follows_what_the_target_drew(parents, tokens, draws, valid, acceptable):
    """At each node to the first child, of those that count, whose token was drawn there; an invalid node has none."""
    expected = [0]
    while True:
        fits = [
            node
            for node in range(1, NODES)
            if parents[node] == expected[-1]
            and tokens[node] == draws[expected[-1]]
            and valid[node]
            and acceptable[node]
        ]
        if not fits:
            break
        expected.append(fits[0])
    arrays = [jnp.array([one]) for one in (tokens, parents, valid, acceptable)]
    walk = jax.device_get(matched(DraftTree(*arrays), jnp.array([draws]), NODES - 1))
    assert int(walk.taken_B[0]) == len(expected)
    assert walk.path_BM[0, : len(expected)].tolist() == expected
    assert set(walk.path_BM[0, len(expected) :].tolist()) <= {expected[-1]}
