"""In a sum, each part sees its own nodes in its own numbering, with the target's answer at each, or none."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.decoding.acceptance.walk import Walk, match
from jaxinfer.decoding.drafting.part_view import PartView, part_view
from jaxinfer.decoding.step import last_node
from jaxinfer.decoding.strategy import Proposal, Verified
from jaxinfer.decoding.trees.merge import merge, select
from jaxinfer.decoding.trees.tree import DraftTree, ancestors
from tests.decoding.scripted import Chain
from tests.decoding.strategies.test_sum_of_drafters import SIZES, build, paths_of, trees
from tests.toys import float32_backend

# No drawn tree is deeper.
DEPTH = max(SIZES) - 1
PART = Chain(depth=DEPTH)
VERIFIES = (True, False, False)


def number(path: tuple[int, ...]) -> int:
    """Return what stands for the target's answer after a path: no two paths have the same."""
    return sum((token + 1) * 5**depth for depth, token in enumerate(path))


def draw(path: tuple[int, ...]) -> int:
    """Return the target's token after a path: one that drafters often have."""
    return 1 + number(path) % 2


def answer(tree: DraftTree) -> tuple[Verified, jax.Array, Walk]:
    """Answer every node of a sum by its path."""
    paths = paths_of(tree)
    numbers_BM1 = jnp.asarray([[number(path) for path in paths]])[..., None]
    draws_BM = jnp.asarray([[draw(path) for path in paths]])
    walk = match(tree, draws_BM, DEPTH)
    verified = Verified(numbers_BM1, numbers_BM1 + 1, LayeredCache(()), aux={"of_streams": numbers_BM1[..., None] + 2})
    return verified._replace(last=last_node(verified, walk)), draws_BM, walk


@jax.jit
def sum_of(parts: list[DraftTree], gains_BM: Any) -> tuple[DraftTree, tuple[Any, ...]]:
    """Join trees and keep a third of the nodes."""
    whole, places = merge(parts)
    tree, moved_BM = select(whole, ancestors(whole.parents_BM), gains_BM, sum(SIZES) // 3, float32_backend())
    return tree, tuple(jnp.take_along_axis(moved_BM, places_BM, axis=1) for places_BM in places)


views = jax.jit(part_view, static_argnums=(0, 7))


def check_nodes(part: DraftTree, places_BM: Any, view: PartView, verifies: bool) -> None:
    """Each node is answered as its path is; one that found no place is not valid, and reads as the root."""
    tree, verified = view.proposal.tree, view.verified
    assert (verified.aux is None) == (verified.last.aux is None) == (not verifies)
    for node, path in enumerate(paths_of(part)):
        is_kept = int(places_BM[0, node]) >= 0
        assert bool(tree.valid_BM[0, node]) == (is_kept and bool(part.valid_BM[0, node]))
        if bool(part.valid_BM[0, node]) or not is_kept:
            seen = path if is_kept else ()
            assert int(tree.tokens_BM[0, node]) == (seen[-1] if seen else 0)
            assert int(view.draws_BM[0, node]) == draw(seen)
            assert int(verified.logits_BMV[0, node, 0]) == number(seen)
            assert int(verified.hidden_BMD[0, node, 0]) == number(seen) + 1
            assert not verifies or int(verified.aux["of_streams"][0, node, 0, 0]) == number(seen) + 2


def check_walk(part: DraftTree, view: PartView, taken: tuple[int, ...]) -> None:
    """A part's path is the sum's, as far as it leads along nodes of the part; the last node is the sum's for all."""
    paths = paths_of(part)
    valid = {path for path, is_valid in zip(paths, view.proposal.tree.valid_BM[0].tolist()) if is_valid} | {()}
    known = next(depth for depth in range(len(taken) + 1) if depth == len(taken) or taken[: depth + 1] not in valid)
    steps = view.walk.path_BM[0].tolist()
    assert [paths[node] for node in steps[: known + 1]] == [taken[:depth] for depth in range(known + 1)]
    assert steps[known:] == [steps[known]] * (DEPTH + 1 - known)
    assert (int(view.walk.taken_B[0]), int(view.walk.next_B[0])) == (known + 1, draw(taken[:known]))
    last = view.verified.last
    assert (int(last.depth_B[0]), int(last.logits_BV[0, 0])) == (len(taken), number(taken))


@settings(derandomize=True, max_examples=30, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(trees, st.lists(st.floats(0, 1, width=32), min_size=10, max_size=10))
@example((((0, 1, True),) * 4, ((0, 2, True),) * 5, ((0, 3, True),) * 3), [0.1 * node for node in range(10)])
def test_parts_see_their_own_nodes(drawn, gains):
    parts = [build(nodes) for nodes in drawn]
    tree, places = sum_of(parts, jnp.asarray([gains]))
    verified, draws_BM, walk = answer(tree)
    path = walk.path_BM[0, : int(walk.taken_B[0])].tolist()
    taken = tuple(tree.tokens_BM[0, np.array(path[1:], int)].tolist())
    for part, places_BM, verifies in zip(parts, places, VERIFIES):
        draft = Proposal(part, ())
        view = views(PART, draft, places_BM, tree, verified, draws_BM, walk, verifies)
        check_nodes(part, places_BM, view, verifies)
        check_walk(part, view, taken)
