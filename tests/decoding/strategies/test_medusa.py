"""Medusa drafts what its heads say, takes what the target draws, and with ``match`` changes no token."""

import json
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer.checkpoint.drafters import shipped as drafters
from jaxinfer.checkpoint.drafters.heads import write_heads
from jaxinfer.decoding.acceptance.typical import accept_typical
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategies.medusa import Medusa
from jaxinfer.decoding.strategies.prompt_lookup import PromptLookup
from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from jaxinfer.decoding.strategy import Proposal, Target
from jaxinfer.decoding.trees.dynamic import Growth
from jaxinfer.decoding.trees.static import PUBLISHED_TREES
from jaxinfer.decoding.trees.tree import DraftTree, ancestors
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint, InvalidOption
from jaxinfer.models.drafters import four_bits
from jaxinfer.models.drafters.four_bits import FORM
from jaxinfer.models.model import Model
from tests.decoding.fitted_heads import expected_acceptance, expected_steps, fit_conditioned, fit_plain, sharpened
from tests.decoding.rows import LEAST_MARGIN, SAMPLINGS, least_margin, request, run
from tests.toys import encode_bytes, fable_tokens

PROMPTS = ("The quick", "O", "A small otter watched the", "One grey heron f", "The old badger")
LIMITS = (40, 37, 33, 39, 36)
TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 1, 0), (1, 0, 1))
NUM_HEADS = 3
GROWTH = Growth(12, NUM_HEADS)


@pytest.fixture(scope="module")
def lm(trained_folder):
    return jaxinfer.load(trained_folder)


@pytest.fixture(scope="module")
def requests():
    return [request(encode_bytes(text), limit, one) for text, limit, one in zip(PROMPTS, LIMITS, SAMPLINGS)]


@pytest.fixture(scope="module")
def oracle(lm, requests):
    return run(lm, requests)


@pytest.fixture(scope="module")
def fitted(lm):
    tokens = fable_tokens(60, seed=5)
    return {"plain": fit_plain(lm, tokens, NUM_HEADS), "conditioned": fit_conditioned(lm, tokens, NUM_HEADS)}


def resolve(lm, strategy):
    return lm.resolve(strategy)


def random_heads(conditioned: bool, share: bool, with_ids: bool, width: int = 48, vocab_size: int = 258):
    rng = np.random.default_rng(4)

    def draw(*shape: int):
        return jnp.asarray(rng.standard_normal(shape) * shape[-1] ** -0.5, jnp.float32)

    ids = {"ids": jnp.asarray(rng.permutation(vocab_size)[:100], jnp.int32)} if with_ids else {}
    heads = []
    for index in range(NUM_HEADS):
        blocks = ({"kernel": draw(width, width * (index + 2 if conditioned else 1)), "bias": draw(width)},)
        own = {} if share else {"output": {"kernel": draw(100 if with_ids else vocab_size, width)}}
        heads.append({"blocks": blocks, **own})
    return {"heads": tuple(heads), **ids}


@pytest.mark.slow
def test_texts_of_this_file_are_screened(lm, requests, oracle):
    assert [len(row.tokens) for row in oracle] == list(LIMITS)
    assert min(least_margin(lm, *one) for one in zip(requests, [row.tokens for row in oracle])) > LEAST_MARGIN


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "conditioned"])
def test_heads_that_predict_well_are_taken_as_their_definition_has_it(lm, requests, oracle, fitted, kind, monkeypatch):
    """Step by step against NumPy: hidden state, path and rank of every draft are the right ones."""
    if kind == "conditioned":
        # Rows that are rounded would cost these small heads what they draft at the last depth.
        monkeypatch.setattr(four_bits, "drafting_matrix", lambda matrix, backend: matrix)
    strategy = resolve(lm, Medusa(params=fitted[kind], paths=TREE))
    rows = run(lm, requests, strategy)
    assert [row.tokens for row in rows] == [row.tokens for row in oracle]
    expected = [
        expected_acceptance(lm, strategy.params, TREE, [*asked.prompt, *row.tokens], len(asked.prompt))
        for asked, row in zip(requests, oracle)
    ]
    assert [(row.counts.steps, row.counts.accepted_by_depth) for row in rows] == [one[:2] for one in expected]
    assert [row.counts.drafted for row in rows] == [len(TREE) * one.steps for one in expected]
    # None of it holds for want of drafts: some are taken at every depth, some are not, some are no first sibling.
    assert min(sum(one.accepted_by_depth[depth] for one in expected) for depth in range(NUM_HEADS)) > 0
    assert sum(one.accepted_by_depth[0] < one.steps for one in expected) > 0
    assert sum(one.later_siblings for one in expected) > 0


@pytest.mark.parametrize(
    "kind", [pytest.param("plain", marks=pytest.mark.exhaustive), pytest.param("conditioned", marks=pytest.mark.slow)]
)
def test_heads_grow_the_tree_that_the_definition_grows_and_change_no_token(lm, requests, oracle, fitted, kind):
    strategy = resolve(lm, Medusa(params=sharpened(fitted[kind]), growth=GROWTH))
    rows = run(lm, requests, strategy)
    assert [row.tokens for row in rows] == [row.tokens for row in oracle]
    expected = [
        expected_steps(lm, strategy.params, GROWTH, [*asked.prompt, *row.tokens], len(asked.prompt))
        for asked, row in zip(requests, oracle)
    ]
    assert [(row.counts.steps, row.counts.accepted_by_depth) for row in rows] == expected
    assert [row.counts.drafted for row in rows] == [(GROWTH.num_nodes - 1) * steps for steps, _ in expected]
    assert min(sum(accepted[depth] for _, accepted in expected) for depth in range(2)) > 0


@pytest.mark.exhaustive
def test_a_sum_keeps_the_nodes_that_their_drafter_holds_likeliest(lm, requests, oracle, fitted):
    """Beside a drafter that finds nothing, the best 8 of 16 nodes are the tree of 8: both grow from as many beams."""
    params = sharpened(fitted["plain"])
    alone = run(lm, requests, resolve(lm, Medusa(params=params, growth=Growth(8, NUM_HEADS))))
    silent = PromptLookup(min_ngram=12, max_ngram=12, num_draft_tokens=3)
    parts = (Medusa(params=params, growth=Growth(16, NUM_HEADS)), silent)
    rows = run(lm, requests, resolve(lm, SumOfDrafters(parts=parts, nodes=8)))
    assert [row.tokens for row in rows] == [row.tokens for row in oracle]
    assert [row.counts.steps for row in rows] == [row.counts.steps for row in alone]


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "conditioned"])
def test_a_tree_of_ranks_knows_the_chances_that_a_dynamic_one_grows_by(lm, fitted, kind):
    rng, params = np.random.default_rng(3), sharpened(fitted[kind])
    state = DecodeState(**dict.fromkeys(DecodeState._fields))._replace(
        tokens_BS=jnp.asarray(rng.integers(2, 258, (3, 16)), jnp.int32), lengths_B=jnp.asarray([5, 1, 16], jnp.int32)
    )
    hidden_BD = jnp.asarray(rng.standard_normal((3, lm.config.model_dim)), jnp.float32)
    model, chances = Model(lm.programs.decoder, lm.params), []
    for given in (Medusa(params=params, paths=TREE), Medusa(params=params, growth=GROWTH)):
        strategy = resolve(lm, given)
        propose = jax.jit(lambda *given, strategy=strategy: strategy.propose(model, strategy.params, *given))
        drafted = jax.device_get(propose(state, hidden_BD))
        chances.append([chances_of_paths(drafted, row) for row in range(3)])
    for of_ranks, dynamic in zip(*chances):
        assert len(of_ranks) == 1 + len(TREE)
        common = of_ranks.keys() & dynamic.keys()
        assert len(common) > 4
        np.testing.assert_allclose([of_ranks[path] for path in common], [dynamic[path] for path in common], rtol=1e-5)


def chances_of_paths(drafted: Proposal, row: int) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(drafted.tree.tokens_BM[row, 1:].tolist(), drafted.tree.parents_BM[row, 1:].tolist()):
        paths.append((*paths[parent], token))
    return dict(zip(paths, drafted.chances_BM[row].tolist()))


def test_a_bounded_sum_asks_for_no_drafts_that_it_would_hardly_take(trained_folder, fitted, tmp_path, monkeypatch):
    lm = jaxinfer.load(trained_folder)  # its own, for it remembers what it found
    monkeypatch.setattr(drafters, "DRAFTERS", tmp_path)
    (tmp_path / "this").mkdir()
    beside = {"tree.json": json.dumps([[0], [1], [0, 0], [2], [3], [0, 1], [1, 0], [0, 0, 0]])}
    folder, vocab_size = tmp_path / "this" / "heads", lm.config.vocab_size
    write_heads(folder, fitted["plain"], vocab_size, base_fingerprint=lm.fingerprint, beside=beside)
    bounded, *whole = (
        lm.resolve(spec).parts[0]
        for spec in (
            "medusa+prompt_lookup+nodes=5",
            "medusa+prompt_lookup+nodes=64",
            "medusa:tree=own+prompt_lookup+nodes=5",
            f"medusa:tree={folder / 'tree.json'}+prompt_lookup+nodes=5",
        )
    )
    assert bounded.paths == ((0,), (1,), (0, 0), (2,), (3,))
    assert len(bounded.params["heads"]) == 2
    assert [len(one.paths) for one in whole] == [8, 8, 8]


def test_where_rows_cost_time_the_tree_that_comes_with_heads_is_cut_unless_it_is_named(
    trained_folder, fitted, tmp_path
):
    lm, paths = jaxinfer.load(trained_folder), [[0], [1], [0, 0], [2], [3], [0, 1], [1, 0], [4], [0, 0, 0]]
    beside = {"tree.json": json.dumps(paths)}
    write_heads(tmp_path / "heads", fitted["plain"], lm.config.vocab_size, beside=beside)
    strategy = parse_strategy(f"medusa:heads={tmp_path / 'heads'}")
    on_cpu, on_tpu, own = (
        one.resolve(Target(lm.config, replace(lm.backend, platform=platform), lm.params, fingerprint=lambda: None))
        for one, platform in ((strategy, "cpu"), (strategy, "tpu"), (replace(strategy, tree="own"), "cpu"))
    )
    assert on_cpu.paths == tuple(map(tuple, paths[:7]))
    assert len(on_cpu.params["heads"]) == 2
    assert on_tpu.paths == own.paths == tuple(map(tuple, paths))
    without = replace(strategy, heads="", params=fitted["plain"])
    assert lm.resolve(without).paths == PUBLISHED_TREES["mc_sim_7b_63"][:7]


def test_outputs_are_rounded_for_a_processor_and_not_without_its_kernels(lm, fitted):
    given = Medusa(params=fitted["conditioned"], paths=TREE)
    rounded = resolve(lm, given)
    # Of this model's width those alone that read more than hidden states divide into groups.
    assert rounded.params["heads"][0]["blocks"][0]["kernel"].form == FORM
    plain = given.resolve(Target(lm.config, replace(lm.backend, cpu_kernels=False), lm.params))
    assert plain.params["heads"][0]["blocks"][0]["kernel"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("conditioned", "share", "with_ids"),
    [pytest.param(False, True, False, marks=pytest.mark.slow), (True, True, True)],
)
def test_random_heads_on_disk_change_no_token(lm, requests, oracle, tmp_path, conditioned, share, with_ids):
    folder = tmp_path / "heads"
    write_heads(folder, random_heads(conditioned, share, with_ids), 258)
    strategy = resolve(lm, f"medusa:heads={folder},tree=chain:2")
    assert resolve(lm, f"medusa:heads={folder},tree=chain:2") is strategy, "heads are read once"
    rows = run(lm, requests, strategy)
    assert [row.tokens for row in rows] == [row.tokens for row in oracle]
    assert sum(row.counts.drafted for row in rows) == 2 * sum(row.counts.steps for row in rows)


@pytest.mark.slow
def test_typical_acceptance_says_that_it_is_lossy_and_leaves_greedy_rows_alone(lm, requests, oracle, fitted):
    strategy = resolve(lm, Medusa(params=fitted["plain"], paths=TREE, verify="typical"))
    rows = run(lm, requests, strategy)
    assert (strategy.exactness, Medusa().exactness) == ("lossy", "identical")
    assert rows[0].tokens == oracle[0].tokens
    assert any(row.tokens != plain.tokens for row, plain in zip(rows, oracle))
    assert sum(row.counts.accepted for row in rows) > 0


def test_typical_acceptance_follows_the_published_rule():
    """The longest path whose tokens are likelier than min(epsilon, delta exp(-entropy)); then the likeliest."""
    rng = np.random.default_rng(8)
    vocab_size, batch, nodes = 6, 64, 10
    parents_M = np.array([0, 0, 0, 1, 1, 2, 3, 3, 5, 6], np.int32)
    tokens_BM = rng.integers(0, vocab_size, (batch, nodes)).astype(np.int32)
    logits_BMV = 2.5 * rng.standard_normal((batch, nodes, vocab_size))
    p_BMV = np.exp(logits_BMV) / np.exp(logits_BMV).sum(-1, keepdims=True)
    parents_BM = jnp.broadcast_to(jnp.asarray(parents_M), tokens_BM.shape)
    all_BM = jnp.ones(tokens_BM.shape, bool)
    tree = DraftTree(jnp.asarray(tokens_BM), parents_BM, all_BM, all_BM)
    draws_BM = rng.integers(0, vocab_size, tokens_BM.shape).astype(np.int32)
    log_p_BMV = jnp.asarray(np.log(p_BMV), jnp.float32)
    accept = jax.jit(lambda *given: accept_typical(tree, ancestors(parents_BM), *given, 4, 0.3, 0.6))
    walk = jax.device_get(accept(log_p_BMV, draws_BM))
    lengths = set()
    for row in range(batch):
        best, best_key = [0], (0, 0.0)
        for leaf in range(nodes):
            path = [leaf]
            while path[0]:
                path.insert(0, int(parents_M[path[0]]))
            score = 0.0
            for parent, node in pairwise(path):
                p_V = p_BMV[row, parent]
                threshold = min(0.3, 0.6 * np.exp((p_V * np.log(p_V)).sum()))
                score += np.log(p_V[tokens_BM[row, node]]) if p_V[tokens_BM[row, node]] > threshold else -np.inf
            if np.isfinite(score) and (len(path) - 1, score) > best_key:
                best, best_key = path, (len(path) - 1, score)
        taken = int(walk.taken_B[row])
        assert walk.path_BM[row, :taken].tolist() == best
        assert int(walk.next_B[row]) == draws_BM[row, best[-1]]
        lengths.add(taken)
    assert lengths >= {1, 2, 3}


def test_options_are_those_of_the_publication():
    strategy = parse_strategy("medusa:heads=there")
    assert isinstance(strategy, Medusa)
    assert (strategy.tree, strategy.verify, strategy.typical_thresholds) == ("", "match", (0.09, 0.3))
    assert jaxinfer.strategies()["medusa"]["options"].keys() == {"heads", "tree", "verify", "epsilon", "delta"}


def test_a_published_tree_drafts_63_tokens_a_step(lm, fitted):
    params = {"heads": (*fitted["plain"]["heads"], fitted["plain"]["heads"][0])}
    strategy = resolve(lm, Medusa(params=params, tree="zephyr_stage2"))
    assert (strategy.headroom, strategy.max_depth, len(strategy.params["heads"])) == (64, 4, 4)
    assert strategy.paths == PUBLISHED_TREES["zephyr_stage2"]


def test_a_dynamic_tree_is_as_deep_as_there_are_heads(lm, fitted):
    """Or as its growth says, and then heads for more depths are left out."""
    named = resolve(lm, Medusa(params=fitted["plain"], tree="dynamic:8"))
    assert (named.growth, named.headroom, named.branches) == (Growth(8, NUM_HEADS), 8, True)
    shallow = resolve(lm, Medusa(params=fitted["plain"], growth=Growth(8, 2)))
    assert (shallow.max_depth, len(shallow.params["heads"])) == (2, 2)


def test_heads_that_come_with_the_package_are_found_by_the_weights_they_are_for(
    trained_folder, fitted, tmp_path, monkeypatch
):
    """And no other weights get them, nor heads of a folder that names other weights."""
    lm = jaxinfer.load(trained_folder)  # its own, for it remembers what it found
    monkeypatch.setattr(drafters, "DRAFTERS", tmp_path)
    vocab_size = lm.config.vocab_size
    for name, weights in (("another", "0123456789abcdef"), ("this", lm.fingerprint)):
        folder = tmp_path / name / "heads"
        folder.parent.mkdir()
        write_heads(folder, fitted["plain"], vocab_size, base_fingerprint=weights, beside={"tree.json": "[[0], [1]]"})
    strategy = lm.resolve(Medusa())
    assert strategy.paths == ((0,), (1,))
    with pytest.raises(InvalidCheckpoint, match=f"is for the weights 0123456789abcdef.*are {lm.fingerprint}"):
        lm.resolve(f"medusa:heads={tmp_path / 'another' / 'heads'}")


MISTAKES = {
    "no heads": (
        "medusa",
        InvalidOption,
        "no heads come with the package for these weights .[0-9a-f]{16}.: name a folder",
    ),
    "no folder": ("medusa:heads=/nowhere/heads", CheckpointNotFound, "/nowhere/heads: no such folder"),
    "no such tree": ("medusa:heads=x,tree=oak", InvalidOption, "tree 'oak' is none of own, mc_sim_7b_63"),
    "another way to verify": ("medusa:verify=rejection", InvalidOption, "verify.*match, typical"),
    "a threshold": ("medusa:epsilon=2", InvalidOption, "epsilon=2.0 is not a number from 0 to 1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_in_one_line(lm, name):
    strategy, kind, pattern = MISTAKES[name]
    with pytest.raises(kind, match=pattern) as caught:
        lm.generate("The", strategy=strategy)
    assert "\n" not in str(caught.value)


HEADS_MISTAKES = {
    "a tree deeper than the heads": (
        {"tree": "mc_sim_7b_63"},
        {},
        "tree mc_sim_7b_63 is 4 deep, but the heads given has 3",
    ),
    "another width": ({"tree": "chain:1"}, {"width": 32}, "reads 32 channels, but hidden states have 48"),
    "another vocabulary": ({"tree": "chain:1"}, {"vocab_size": 300}, "knows 300 tokens, but needs to know 258"),
    "a rank past the vocabulary": ({"paths": ((300,),)}, {}, "rank 300, but the heads choose among 258"),
    "a node without parent": ({"paths": ((0,), (1, 0))}, {}, r"path \[1, 0\] has no parent"),
    "a dynamic tree of the root alone": (
        {"tree": "dynamic:1"},
        {},
        "tree 'dynamic:1': a dynamic tree has 2 to 1024 nodes, as in dynamic:16",
    ),
    "a dynamic tree of nothing": ({"tree": "dynamic:0"}, {}, "tree 'dynamic:0': a dynamic tree has 2 to"),
    "a huge dynamic tree": ({"tree": "dynamic:2000"}, {}, "tree 'dynamic:2000': a dynamic tree has 2 to"),
    "a dynamic tree without a number": ({"tree": "dynamic"}, {}, "tree 'dynamic': a dynamic tree has 2 to"),
    "a dynamic tree larger than it grows": ({"tree": "dynamic:300"}, {}, "3 levels grow at most 211 nodes"),
}


@pytest.mark.parametrize("name", HEADS_MISTAKES)
def test_heads_that_do_not_fit_are_refused(lm, name):
    options, heads, pattern = HEADS_MISTAKES[name]
    params = random_heads(False, False, False, **heads)
    with pytest.raises(InvalidOption, match=pattern) as caught:
        lm.generate("The", strategy=Medusa(params=params, **options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("vocab_size", "pattern"),
    [(258, "knows 258 tokens, but needs to know 5"), (5, "asks for rank 7, but the heads choose among 5 tokens")],
)
def test_a_dynamic_tree_needs_heads_of_enough_tokens(lm, vocab_size, pattern):
    few = {**random_heads(False, False, False, vocab_size=vocab_size), "ids": jnp.arange(5)}
    with pytest.raises(InvalidOption, match=pattern):
        resolve(lm, Medusa(params=few, tree="dynamic:8"))
