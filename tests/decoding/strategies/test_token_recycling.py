"""Token recycling drafts the latest answer after the longest context, as kept in a plain list."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.decoding.acceptance.walk import Walk
from jaxinfer.decoding.strategies import token_recycling
from jaxinfer.decoding.strategies.token_recycling import (
    PUBLISHED_TREE,
    Answers,
    Asked,
    TokenRecycling,
    node_contexts,
    tokens_before,
)
from jaxinfer.decoding.strategy import Prefilled, Proposal, Target, Verified
from jaxinfer.decoding.trees.dynamic import Growth
from jaxinfer.decoding.trees.static import check_tree, tree_depth
from jaxinfer.decoding.trees.tree import DraftTree
from jaxinfer.errors import InvalidOption
from jaxinfer.ops.backend import choose_backend
from tests.decoding.drafted_alone import NUM_SLOTS, UNUSED, propose, state_of
from tests.toys import TINY_LLAMA

VOCAB_SIZE, NUM_RANKS = 6, 8
BACKEND = UNUSED.decoder.backend
look_up = jax.jit(token_recycling.look_up, static_argnums=2)
TRUST = (0.0, 0.3, 0.6, 0.8)
# A context, the nearest token first, and the answers after it with their log-probabilities.
Entry = tuple[tuple[int, ...], list[int], list[float]]


def random_answers(rng: np.random.Generator, num_entries: int, written: int) -> tuple[Answers, list[Entry]]:
    """Return the answers of one row, a quarter of them empty, and its entries, the oldest first."""
    contexts_JE = rng.integers(0, VOCAB_SIZE, (3, num_entries))
    contexts_JE[:, rng.random(num_entries) < 0.25] = -1
    tokens_RE = rng.integers(0, VOCAB_SIZE, (NUM_RANKS, num_entries))
    log_p_RE = np.log(rng.random((NUM_RANKS, num_entries))).astype(np.float32)
    contexts_BJE, tokens_BRE, log_p_BRE = (jnp.asarray(each)[None] for each in (contexts_JE, tokens_RE, log_p_RE))
    answers = Answers(contexts_BJE, tokens_BRE, log_p_BRE, jnp.asarray([written]))
    slots = [(written + age) % num_entries for age in range(num_entries)]
    columns = [(contexts_JE[:, slot], tokens_RE[:, slot], log_p_RE[:, slot]) for slot in slots]
    return answers, [(tuple(context.tolist()), tokens.tolist(), log_p.tolist()) for context, tokens, log_p in columns]


def length_of(known: tuple[int, ...], asked: tuple[int, ...]) -> int:
    return next((length for length, pair in enumerate(zip(known, asked)) if pair[0] != pair[1]), len(asked))


def expected(entries: list[Entry], asked: tuple[int, ...]) -> tuple[int, list[int], list[float]]:
    """Return how many tokens the best entry shares, and what it answers."""
    best = max(range(len(entries)), key=lambda at: (length_of(entries[at][0], asked), at))
    return length_of(entries[best][0], asked), *entries[best][1:]


@pytest.mark.parametrize(("written", "platform"), [(0, "cpu"), (5, "tpu"), (40 * 7 + 13, "cpu")])
def test_the_latest_of_the_longest_matches_is_found(written, platform):
    rng = np.random.default_rng(written)
    answers, entries = random_answers(rng, 40, written)
    contexts_JW = rng.integers(0, VOCAB_SIZE + 2, (3, 30))
    log_p_BRW, tokens_BRW, length_BW = look_up(
        answers, jnp.asarray(contexts_JW)[None], choose_backend("bfloat16", platform)
    )
    for place in range(30):
        length, tokens, log_p = expected(entries, tuple(contexts_JW[:, place].tolist()))
        assert length_BW[0, place] == length
        if length:
            assert tokens_BRW[0, :, place].tolist() == tokens
            assert log_p_BRW[0, :, place].tolist() == log_p


@pytest.mark.parametrize("paths", [(), ((0,), (1,), (0, 0), (0, 2), (0, 2, 1))])
def test_every_node_is_an_answer_after_the_tokens_that_lead_to_it(paths):
    """With the chance that this answer had, as far as its context is trusted; what has no answer drafts nothing."""
    strategy = replace(TokenRecycling(), growth=Growth(7, 3), paths=paths)
    text = [3, 1, 4, 1, 5]
    answers, entries = random_answers(np.random.default_rng(1), 40, 9)
    proposal = propose(strategy, state_of([text]), answers)
    tree = proposal.tree
    tokens, parents, valid = (np.asarray(field)[0] for field in (tree.tokens_BM, tree.parents_BM, tree.valid_BM))
    assert tokens[0] == text[-1]
    assert valid.sum() > 3
    leads, chances = [text], [1.0]
    for node in range(1, len(tokens)):
        lead, token = leads[parents[node]], int(tokens[node])
        length, answered, log_p = expected(entries, tuple(lead[:-4:-1]))
        possible = [TRUST[length] * np.exp(log_p[rank]) for rank in range(NUM_RANKS) if answered[rank] == token]
        leads.append([*lead, token])
        chance = float(proposal.chances_BM[0, node])
        assert valid[node] == (length > 0 and valid[parents[node]])
        if valid[node]:
            assert np.isclose([chances[parents[node]] * one for one in possible], chance, rtol=1e-5).any()
        chances.append(chance)
    contexts_JM = np.asarray(proposal.memory.contexts_BJM)[0]
    assert [tuple(contexts_JM[:, node].tolist()) for node in range(len(tokens))] == [
        tuple(lead[:-4:-1]) for lead in leads
    ]


@pytest.mark.slow
def test_a_prompts_tokens_are_known_from_the_start():
    """The last of them is the newest; before the text's beginning nothing is."""
    text = [7, 8, 9, 7, 8]
    state = state_of([text, [4, 5]])
    strategy = TokenRecycling()
    answers = strategy.start(UNUSED, (), state, Prefilled(jnp.zeros((2, 1)), 16))
    for row, (ends, follows) in enumerate([((8, 7), 9), ((4, -2), 5)]):
        contexts_BJW = jnp.asarray([[[ends[0]], [ends[1]], [-7]]] * 2)
        log_p_BRW, tokens_BRW, length_BW = look_up(answers, contexts_BJW, BACKEND)
        assert length_BW[row, 0] == 2
        assert tokens_BRW[row, 0, 0] == follows
        np.testing.assert_allclose(jnp.exp(log_p_BRW[row, :, 0]), [0.5, *[0.0] * (answers.tokens_BRE.shape[1] - 1)])
    # The current token has no answer yet, and no row knows another's text.
    assert look_up(answers, jnp.asarray([[[4]], [[7]]]), BACKEND)[2].tolist() == [[0], [0]]
    proposal = propose(strategy, state, answers)
    assert 9 in np.asarray(proposal.tree.tokens_BM)[0, np.asarray(proposal.tree.valid_BM)[0]]
    assert proposal.tree.valid_BM[1].sum() == 1


@pytest.mark.slow
def test_a_step_leaves_an_entry_for_each_valid_node_over_the_oldest():
    strategy = replace(TokenRecycling(), growth=Growth(3, 2))
    rng = np.random.default_rng(4)
    answers, _ = random_answers(rng, 6, 9)
    valid_BM = jnp.asarray([[True, True, False]])
    tree = DraftTree(jnp.asarray([[5, 2, 3]]), jnp.asarray([[0, 0, 1]]), valid_BM, valid_BM)
    contexts_BJM = node_contexts(tree, jnp.asarray([[[5], [1], [4]]]))
    logits_BMV = jnp.asarray(rng.standard_normal((1, 3, 40)), jnp.float32)
    proposal = Proposal(tree, Asked(answers, contexts_BJM))
    verified = Verified(logits_BMV, None, None)  # pyright: ignore[reportArgumentType]
    walk = Walk(*(jnp.zeros((1, 1), jnp.int32),) * 3)
    after = strategy.observe(UNUSED, (), state_of([[4, 1, 5]]), proposal, verified, None, walk)
    assert after.written_B.tolist() == [12]
    assert after.contexts_BJE[0, :, 3:].T.tolist() == [[5, 1, 4], [2, 5, 1], [-1, -1, -1]]
    np.testing.assert_array_equal(after.contexts_BJE[..., :3], answers.contexts_BJE[..., :3])
    best_MR = np.argsort(-np.asarray(logits_BMV)[0], axis=-1)[:, :NUM_RANKS]
    np.testing.assert_array_equal(after.tokens_BRE[0, :, 3:].T, best_MR)
    log_p_MV = np.asarray(logits_BMV - jnp.log(jnp.exp(logits_BMV).sum(-1, keepdims=True)))[0]
    np.testing.assert_allclose(after.log_p_BRE[0, :, 3:].T, np.take_along_axis(log_p_MV, best_MR, -1), atol=1e-5)


def test_contexts_end_where_the_text_begins():
    state = state_of([[7, 8, 9]])
    assert tokens_before(state, jnp.asarray([[2, 0, -1]]), 3)[0].T.tolist() == [[9, 8, 7], [7, -2, -2], [-2, -2, -2]]
    assert NUM_SLOTS > 3


@pytest.mark.parametrize(
    ("platform", "spec", "num_nodes", "depth"),
    [
        ("cpu", TokenRecycling(), 8, 6),
        ("tpu", TokenRecycling(), 64, 6),
        ("cpu", TokenRecycling().bounded(4), 4, 3),
        ("cpu", TokenRecycling().bounded(900), 64, 6),
        ("cpu", TokenRecycling(tree="dynamic:16").bounded(8), 16, 6),
        ("tpu", TokenRecycling(tree="published"), 81, 6),
        ("cpu", TokenRecycling(tree="3.2"), 10, 2),
    ],
)
def test_trees_are_those_of_the_device_or_given(platform, spec, num_nodes, depth):
    backend = replace(choose_backend("bfloat16", platform), cpu_kernels=platform == "cpu")
    resolved = spec.resolve(Target(TINY_LLAMA, backend, {}))
    assert (resolved.headroom, resolved.max_depth) == (num_nodes, depth)


def test_the_published_tree_has_its_levels():
    assert check_tree(PUBLISHED_TREE, "published") == PUBLISHED_TREE
    assert [sum(len(path) == depth for path in PUBLISHED_TREE) for depth in range(1, 7)] == [8, 21, 25, 15, 8, 3]
    assert tree_depth(PUBLISHED_TREE) == 6


def test_more_ranks_than_tokens_are_refused():
    with pytest.raises(InvalidOption, match="the tree has 999 ranks, the vocabulary 258"):
        TokenRecycling(tree="999").resolve(Target(TINY_LLAMA, choose_backend("float32", "cpu"), {}))
