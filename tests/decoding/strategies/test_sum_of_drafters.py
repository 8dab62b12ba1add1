"""A sum of drafters verifies every path that any of them drafted, each once, and changes no token."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jaxinfer
from jaxinfer.decoding.acceptance.walk import Walk
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.step import last_node
from jaxinfer.decoding.strategies.prompt_lookup import PromptLookup
from jaxinfer.decoding.strategies.sum_of_drafters import Chances, SumMemory, SumOfDrafters
from jaxinfer.decoding.strategy import Proposal, Target, Verified
from jaxinfer.decoding.trees.merge import merge, select
from jaxinfer.decoding.trees.tree import DraftTree, ancestors, chain
from jaxinfer.errors import InvalidOption
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.model import Model
from tests.decoding.rows import LEAST_MARGIN, SAMPLINGS, least_margin, request, run
from tests.toys import TINY_LLAMA, encode_bytes, fable, float32_backend

SIZES = (4, 5, 3)
UNUSED = Model(Decoder(TINY_LLAMA, float32_backend()), {})
few = settings(derandomize=True, max_examples=60, deadline=None)
trees = st.tuples(
    *[
        st.tuples(
            *[st.tuples(st.integers(0, max(node - 1, 0)), st.integers(1, 3), st.booleans()) for node in range(size)]
        )
        for size in SIZES
    ]
)


def build(nodes) -> DraftTree:
    parents, tokens = [parent for parent, _, _ in nodes], [token for _, token, _ in nodes]
    valid = [True]
    for parent, _, is_valid in nodes[1:]:
        valid.append(is_valid and valid[parent])
    tokens[0] = parents[0] = 0
    return DraftTree(*(jnp.asarray([values]) for values in (tokens, parents, valid, [True] * len(nodes))))


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """Return the tokens on the way to each node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens_BM[0].tolist()[1:], tree.parents_BM[0].tolist()[1:]):
        paths.append((*paths[parent], token))
    return paths


def valid_paths(tree: DraftTree) -> list[tuple[int, ...]]:
    return [path for path, is_valid in zip(paths_of(tree), tree.valid_BM[0].tolist()) if is_valid]


joined = jax.jit(merge)
selected = jax.jit(select, static_argnums=(3, 4))


@few
@given(trees)
def test_the_union_holds_every_path_once(drawn):
    parts = [build(nodes) for nodes in drawn]
    tree, places = joined(parts)
    merged = valid_paths(tree)
    first = valid_paths(parts[0])
    later = {path for part in parts[1:] for path in valid_paths(part)}
    # A drafter that repeats itself is taken at its word; what comes after it is not repeated.
    assert sorted(merged) == sorted([*first, *(later - set(first))])
    for part, places_BM in zip(parts, places):
        found = [paths_of(tree)[place] for place in places_BM[0].tolist()]
        for path, other, is_valid in zip(paths_of(part), found, part.valid_BM[0].tolist()):
            assert path == other or not is_valid


@pytest.mark.slow
@few
@given(trees, st.lists(st.floats(0, 1, width=32), min_size=10, max_size=10), st.integers(2, 10))
@example((((0, 1, False), (0, 1, True), (0, 1, True), (0, 1, False)), ((0, 1, False),) * 5, ((0, 1, False),) * 3),
         [0.0, 0.0, 1.0, *[0.0] * 7], 2)  # fmt: skip
def test_a_bounded_union_keeps_the_likeliest_nodes_and_their_ancestors(drawn, gains, count):
    tree, _ = joined([build(nodes) for nodes in drawn])
    gains_BM = jnp.asarray([gains])
    chosen, places_BM = selected(tree, ancestors(tree.parents_BM), gains_BM, count, float32_backend())
    assert chosen.tokens_BM.shape == (1, count)
    kept = [node for node, place in enumerate(places_BM[0].tolist()) if place >= 0]
    assert len(kept) == count
    before, after = paths_of(tree), paths_of(chosen)
    for node in kept:
        if tree.valid_BM[0, node]:
            assert after[places_BM[0, node]] == before[node]
            assert bool(chosen.valid_BM[0, places_BM[0, node]])
    relation = np.asarray(ancestors(tree.parents_BM))[0]
    reach = [
        min(gains[other] for other in np.flatnonzero(relation[node]) if other) if node else 2 for node in range(10)
    ]
    left_out = [reach[node] for node in range(10) if node not in kept and tree.valid_BM[0, node]]
    taken = [reach[node] for node in kept if tree.valid_BM[0, node]]
    assert not left_out or max(left_out) <= min(taken) + 1e-6


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param("prompt_lookup:num_draft_tokens=4+jacobi:num_draft_tokens=3", marks=pytest.mark.slow),
        pytest.param(
            "lookahead:window=3,ngram=3,guesses=3+prompt_lookup:num_draft_tokens=4+nodes=15",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_sums_change_no_token_and_accept_what_either_drafts(trained_folder, spec):
    lm = jaxinfer.load(trained_folder)
    texts = [fable(4, seed)[: 60 + 7 * seed] for seed in range(5)]
    asked = [request(encode_bytes(text), 40, sampling) for text, sampling in zip(texts, SAMPLINGS)]
    plain = run(lm, asked)
    assert min(least_margin(lm, one, row.tokens) for one, row in zip(asked, plain)) > LEAST_MARGIN
    rows = run(lm, asked, parse_strategy(spec))
    assert [row.tokens for row in rows] == [row.tokens for row in plain]
    assert sum(row.counts.accepted_by_depth[1] for row in rows) > 0
    assert sum(row.counts.drafted - row.counts.accepted for row in rows) > 0


def test_a_node_that_gains_much_below_one_that_gains_little_waits_for_it():
    """Of the root's two children the second gains more than the first, but less than the first one's child."""
    tree = DraftTree(
        jnp.asarray([[7, 8, 9, 10]]), jnp.asarray([[0, 0, 1, 0]]), jnp.ones((1, 4), bool), jnp.ones((1, 4), bool)
    )
    gains_BM = jnp.asarray([[1.0, 0.1, 0.9, 0.5]])
    for count, tokens in ((2, [7, 10]), (3, [7, 8, 10])):
        chosen, _ = selected(tree, ancestors(tree.parents_BM), gains_BM, count, float32_backend())
        assert chosen.tokens_BM.tolist() == [tokens]


def test_what_is_not_a_number_gains_nothing_and_the_root_stays():
    tree = chain(jnp.asarray([[7, 8, 9, 10]]), jnp.ones((1, 4), bool))
    gains_BM = jnp.asarray([[1.0, *[np.nan] * 3]], jnp.float32)
    chosen, places_BM = selected(tree, ancestors(tree.parents_BM), gains_BM, 2, float32_backend())
    assert chosen.tokens_BM.tolist() == [[7, 8]]
    assert places_BM.tolist() == [[0, 1, -1, -1]]


def test_a_guessed_chance_learns_from_drafts_of_its_own_kind_and_a_known_one_from_none():
    """Two rows draft the same chain, the second's of another kind; the first's has often been right before."""
    tree = DraftTree(
        jnp.asarray([[0, 5, 6]] * 2), jnp.asarray([[0, 0, 1]] * 2), jnp.ones((2, 3), bool), jnp.ones((2, 3), bool)
    )
    chances_BM = jnp.asarray([[1.0, 0.5, 0.25]] * 2)
    guessed = Proposal(tree, (), chances_BM=chances_BM, kinds_B=jnp.asarray([1, 0]))
    union, places_BM = SumOfDrafters(parts=(PromptLookup(num_draft_tokens=2),), nodes=2), jnp.asarray([[0, 1, 2]] * 2)
    memory = SumMemory(((),), (Chances(*[jnp.zeros((2, 3, 3))] * 2),), (guessed,), (places_BM,))
    walk = Walk(*[None] * len(Walk._fields))._replace(path_BM=jnp.asarray([[0, 1, 2]] * 2), taken_B=jnp.asarray([3, 2]))
    state = DecodeState(**dict.fromkeys(DecodeState._fields))
    answers_BM1, cache = jnp.zeros((2, 3, 1)), create_cache(TINY_LLAMA, 2, 16, UNUSED.decoder.backend)
    verified = Verified(answers_BM1, answers_BM1, cache)
    verified = verified._replace(last=last_node(verified, walk))
    for _ in range(30):
        proposal = Proposal(tree, memory)
        memory = union.observe(UNUSED, ((),), state, proposal, verified, jnp.zeros((2, 3), jnp.int32), walk)
        memory = memory._replace(proposals=(guessed,), places=(places_BM,))

    def gains(draft: Proposal) -> np.ndarray:
        return np.asarray(union._gains((2, 3), (draft,), (places_BM,), memory.chances))[:, 1:]

    weight = sum(0.95**step for step in range(30))
    prior, learned = 8 * np.array([0.5, 0.25]), np.array([[weight, weight], [weight, 0.0]])
    np.testing.assert_allclose(gains(guessed), (learned + prior) / (weight + 8), rtol=1e-4)
    swapped = guessed._replace(kinds_B=jnp.asarray([0, 1]))
    np.testing.assert_allclose(gains(swapped), [[0.5, 0.25]] * 2, rtol=1e-4)
    np.testing.assert_allclose(gains(guessed._replace(kinds_B=None)), [[0.5, 0.25]] * 2, rtol=1e-4)
    with jax.enable_x64(True):
        of_float64 = guessed._replace(chances_BM=chances_BM.astype(jnp.float64), kinds_B=None)
        np.testing.assert_allclose(gains(of_float64), [[0.5, 0.25]] * 2, rtol=1e-4)


def test_where_rows_cost_time_a_sum_has_few_nodes_beside_those_that_have_to_be(trained_folder):
    lm = jaxinfer.load(trained_folder)
    elsewhere = Target(lm.config, replace(lm.backend, platform="tpu"), lm.params)
    for spec, on_cpu, on_tpu in (
        ("prompt_lookup+prompt_lookup:match=first", 8, 0),
        ("prompt_lookup+jacobi:num_draft_tokens=3", 11, 0),
        ("prompt_lookup+prompt_lookup:match=first+nodes=5", 5, 5),
    ):
        assert (lm.resolve(spec).nodes, parse_strategy(spec).resolve(elsewhere).nodes) == (on_cpu, on_tpu)
    every = "prompt_lookup:num_draft_tokens=4+jacobi:num_draft_tokens=3"
    assert lm.resolve(f"{every}+nodes=1024").headroom == parse_strategy(every).headroom == 10


def test_what_cannot_be_summed_is_refused_by_name():
    with pytest.raises(InvalidOption, match="layerskip cannot be part of a sum"):
        parse_strategy("prompt_lookup+layerskip")
    with pytest.raises(InvalidOption, match="streams cannot be part of a sum: it does not verify any drafter's tree"):
        parse_strategy("streams:prune_below=0.1+prompt_lookup")
    with pytest.raises(InvalidOption, match="streams cannot be part of a sum: it does not verify any drafter's tree"):
        parse_strategy("streams:keep_nodes=4+prompt_lookup")
    with pytest.raises(InvalidOption, match="streams and streams cannot be parts of one sum"):
        parse_strategy("streams+streams")
    with pytest.raises(InvalidOption, match="beam cannot be part of a sum"):
        parse_strategy("beam+prompt_lookup")
    with pytest.raises(InvalidOption, match="nodes=3 is not a"):
        parse_strategy("jacobi+prompt_lookup+nodes=3")
    assert parse_strategy("jacobi+prompt_lookup").name == "jacobi+prompt_lookup"


def test_fewer_nodes_are_halves_down_to_four():
    bounded = parse_strategy("prompt_lookup+token_recycling+nodes=19")
    assert [(each.nodes, each.num_nodes) for each in bounded.narrower] == [(9, 9), (4, 4)]
    # Lookahead learns from every node of its own.
    assert parse_strategy("lookahead:window=4,ngram=3,guesses=2+prompt_lookup+nodes=16").narrower == ()
    assert parse_strategy("prompt_lookup+token_recycling").narrower == ()
