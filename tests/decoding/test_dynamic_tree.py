"""Trees grow to the nodes that heads find likeliest, against a definition in NumPy; and they change no token."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer.decoding.dynamic_tree import Growth, grow, read_growth
from jaxinfer.decoding.medusa import _CAUTION, Medusa
from jaxinfer.decoding.prompt_lookup import PromptLookup
from jaxinfer.decoding.union import Union
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.ops.backend import choose_backend
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.strategies import planned_strategy
from tests.decoding.fitted_heads import fit_conditioned, fit_plain, head_scores, hidden_states
from tests.decoding.rows import SAMPLINGS, request, run
from tests.toys import TINY_LLAMA, encode_bytes, fable_tokens

PROMPTS = ("The quick", "O", "A small otter watched the")
LIMITS = (40, 37, 33)
GROWTH = Growth(12, 3)
Path = tuple[int, ...]


def best_paths(growth: Growth, log_p_after: Callable[[Path], Sequence[float]]) -> dict[Path, float]:
    """Return the paths of a grown tree, tokens from the root on, with their log-probabilities, by the definition."""
    beams: list[tuple[float, Path]] = [(0.0, ())]
    grown: list[tuple[float, Path]] = []
    for _ in range(growth.max_depth):
        level = []
        for score, path in beams:
            log_p_V = np.asarray(log_p_after(path), np.float64)
            best = np.argsort(-log_p_V, kind="stable")[: growth.num_ranks]
            level += [(score + float(log_p_V[token]), (*path, int(token))) for token in best]
        beams = sorted(level, key=lambda node: -node[0])[: growth.num_beams]
        grown += level
    chosen = sorted(grown, key=lambda node: -node[0])[: growth.num_nodes - 1]
    return {path: score for score, path in chosen}


def paths_of(tokens_M: np.ndarray, parents_M: np.ndarray) -> list[Path]:
    paths: list[Path] = [()]
    for node in range(1, len(tokens_M)):
        assert parents_M[node] < node, "parents stand before their children"
        paths.append((*paths[parents_M[node]], int(tokens_M[node])))
    return paths


@pytest.mark.parametrize("num_nodes", [2, 7, 16, 40])
def test_the_likeliest_nodes_are_kept_with_all_their_ancestors(num_nodes):
    """Every row has chances of its own, which depend on the whole path."""
    growth, batch, vocab_size = Growth(num_nodes, 3), 3, 12
    chances: dict[tuple[int, Path], np.ndarray] = {}

    def log_p_after(row: int, path: Path) -> np.ndarray:
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
        tokens_BWR = np.argsort(-log_p_BWV, axis=-1, kind="stable")[..., : growth.num_ranks]
        log_p_BWR = np.take_along_axis(log_p_BWV, tokens_BWR, axis=-1)
        return jnp.asarray(log_p_BWR, jnp.float32), jnp.asarray(tokens_BWR, jnp.int32), paths

    tree, scores_BM = grow(growth, jnp.arange(batch, dtype=jnp.int32), guess, choose_backend("float32", "cpu"))
    assert tree.tokens_BM.shape == (batch, num_nodes)
    assert np.asarray(tree.tokens_BM)[:, 0].tolist() == [0, 1, 2]
    for row in range(batch):
        expected = best_paths(growth, lambda path, row=row: log_p_after(row, path))
        paths = paths_of(np.asarray(tree.tokens_BM)[row], np.asarray(tree.parents_BM)[row])
        assert set(paths[1:]) == set(expected)
        np.testing.assert_allclose(scores_BM[row, 1:], [expected[path] for path in paths[1:]], atol=1e-5)


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
    """Heads fitted by least squares score a token from 0 to 1; ten times as much makes them as sure as trained ones."""
    tokens = fable_tokens(60, seed=5)
    both = {"plain": fit_plain(lm, tokens, 3), "conditioned": fit_conditioned(lm, tokens, 3)}
    for extra in both.values():
        sure = [{**head, "output": {"kernel": 10 * head["output"]["kernel"]}} for head in extra["heads"]]
        extra["heads"] = tuple(sure)
    return both


def expected_steps(lm, extra, text, prompt_length):
    """Draft along a finished text by the definition, in NumPy: return the steps, and drafts taken by depth."""
    hidden_TD, table_VD = hidden_states(lm, text), np.asarray(lm.params["embed"]["embedding"])
    ids = np.asarray(extra.get("ids", np.arange(lm.config.vocab_size)))
    steps, current, taken_by_depth = 0, prompt_length, np.zeros(GROWTH.max_depth, int)
    while current < len(text) - 1:

        def log_p_after(path: Path, current: int = current) -> np.ndarray:
            along_PD = table_VD[[text[current], *path]]
            scores_W = head_scores(extra["heads"][len(path)], hidden_TD[current - 1], along_PD) / _CAUTION
            log_p_V = np.full(lm.config.vocab_size, -1e9)
            log_p_V[ids] = scores_W - np.log(np.exp(scores_W - scores_W.max()).sum()) - scores_W.max()
            return log_p_V

        tree, taken = best_paths(GROWTH, log_p_after), 0
        while tuple(text[current + 1 : current + 2 + taken]) in tree and current + taken + 1 < len(text):
            taken += 1
        taken_by_depth[:taken] += 1
        steps += 1
        current += taken + 1
    return steps, tuple(taken_by_depth.tolist())


@pytest.mark.parametrize("kind", ["plain", "conditioned"])
def test_heads_grow_the_tree_that_the_definition_grows_and_change_no_token(lm, requests, oracle, fitted, kind):
    rows = run(lm, requests, lm.resolve(Medusa(extra=fitted[kind], growth=GROWTH)))
    assert [row.tokens for row in rows] == [row.tokens for row in oracle]
    expected = [
        expected_steps(lm, fitted[kind], [*asked.prompt, *row.tokens], len(asked.prompt))
        for asked, row in zip(requests, oracle)
    ]
    assert [(row.counts.steps, row.counts.accepted_by_depth) for row in rows] == expected
    assert [row.counts.drafted for row in rows] == [(GROWTH.num_nodes - 1) * steps for steps, _ in expected]
    deepest = {"plain": 2, "conditioned": 3}[kind]
    assert min(sum(taken[depth] for _, taken in expected) for depth in range(deepest)) > 0


def test_a_sum_keeps_the_nodes_that_their_drafter_holds_likeliest(lm, requests, oracle, fitted):
    """Beside a drafter that finds nothing, the best 8 of 16 nodes are the tree of 8: both grow from as many beams."""
    alone = run(lm, requests, lm.resolve(Medusa(extra=fitted["plain"], growth=Growth(8, 3))))
    silent = PromptLookup(min_ngram=12, max_ngram=12, num_draft_tokens=3)
    parts = (Medusa(extra=fitted["plain"], growth=Growth(16, 3)), silent)
    rows = run(lm, requests, lm.resolve(Union(parts=parts, nodes=8)))
    assert [row.tokens for row in rows] == [row.tokens for row in oracle]
    assert [row.counts.steps for row in rows] == [row.counts.steps for row in alone]


def test_mistakes_are_named(lm, fitted):
    assert (read_growth("dynamic:16"), read_growth("chain:3"), read_growth("dynamic:x")) == (16, None, None)
    for name in ("dynamic:1", "dynamic:0", "dynamic:2000"):
        with pytest.raises(InvalidOption, match=f"tree {name}: a dynamic tree has 2 to"):
            lm.resolve(Medusa(extra=fitted["plain"], tree=name))
    with pytest.raises(InvalidOption, match="3 heads grow at most 211 nodes"):
        lm.resolve(Medusa(extra=fitted["plain"], tree="dynamic:300"))
    few = {"heads": fitted["plain"]["heads"], "ids": jnp.arange(5)}
    with pytest.raises(InvalidOption, match="knows 258 tokens, but needs to know 5"):
        lm.resolve(Medusa(extra=few, tree="dynamic:8"))


def test_a_dynamic_tree_is_planned():
    config: DecoderConfig = TINY_LLAMA
    strategy = planned_strategy("medusa:tree=dynamic:64", config, MeshConfig(), "bfloat16")
    assert (strategy.headroom, strategy.max_depth, strategy.branches) == (64, 4, True)
