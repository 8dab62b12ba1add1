"""Streams draft what their definition says, and change no token, whatever they predict."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer.checkpoint.drafters.streams import write_streams
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategies.streams import Streams
from jaxinfer.decoding.trees.static import CAUTION, lay_out, read_tree
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint, InvalidOption
from jaxinfer.models.drafters.streams import StreamsConfig
from jaxinfer.models.model import Model
from tests.decoding.fitted_streams import expected_acceptance, fit_streams
from tests.decoding.rows import LEAST_MARGIN, SAMPLINGS, least_margin, request, run
from tests.models.drafters.dense_streams import random_adapters, random_streams
from tests.toys import encode_bytes, fable_tokens

PROMPTS = ("The quick", "O", "A small otter watched the", "One grey heron f", "The old badger")
LIMITS = (40, 37, 33, 39, 36)
STREAMS = StreamsConfig(num_streams=3, num_layers=1, rank=16, exit_rank=8, adapter_rank=4)
TREE = read_tree("4.2.1")


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
    return fit_streams(lm, STREAMS, fable_tokens(60, seed=5))


@pytest.fixture(scope="module")
def folder(lm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads") / "random"
    own = {**random_streams(lm.config.model_dim, 3, 16, 8), "blocks": random_adapters(lm.config, 1, 4)}
    tree = {"tree.json": "[[0], [1], [0, 0], [0, 0, 0]]"}
    write_streams(folder, STREAMS, own, lm.config, base_fingerprint=lm.fingerprint, beside=tree)
    return folder


def check_same(lm, requests, oracle, strategy):
    rows = run(lm, requests, lm.resolve(strategy))
    assert [row.tokens for row in rows] == [row.tokens for row in oracle]
    assert [row.counts.target_passes for row in rows] == pytest.approx([row.counts.steps for row in rows])
    return rows


@pytest.mark.slow
def test_texts_of_this_file_are_screened(lm, requests, oracle):
    assert [len(row.tokens) for row in oracle] == list(LIMITS)
    assert min(least_margin(lm, *one) for one in zip(requests, [row.tokens for row in oracle])) > LEAST_MARGIN


@pytest.mark.slow
def test_streams_that_predict_well_are_taken_as_their_definition_has_it(lm, requests, oracle, fitted):
    """Step by step against NumPy: the streams of the right token, in the right layers, at the right depth."""
    rows = check_same(lm, requests, oracle, Streams(params=fitted, num_layers=1, paths=TREE))
    expected = [
        expected_acceptance(lm, fitted, 1, TREE, [*asked.prompt, *row.tokens], len(asked.prompt))
        for asked, row in zip(requests, oracle)
    ]
    assert [(row.counts.steps, row.counts.accepted_by_depth) for row in rows] == [one[:2] for one in expected]
    assert [row.counts.drafted for row in rows] == [len(TREE) * one.steps for one in expected]
    # None of it holds for want of drafts: some are taken at every depth, some are not, some are no first sibling.
    assert min(sum(one.accepted_by_depth[depth] for one in expected) for depth in range(3)) > 0
    assert sum(one.accepted_by_depth[0] < one.steps for one in expected) > 0
    assert sum(one.later_siblings for one in expected) > 0


@pytest.mark.exhaustive
def test_pruning_drops_drafts_and_changes_no_token(lm, requests, oracle, fitted):
    strategy = Streams(params=fitted, num_layers=1, paths=TREE, keep_nodes=8, prune_below=0.05)
    assert strategy.num_kept == 9
    rows = check_same(lm, requests, oracle, strategy)
    drafted, steps = sum(row.counts.drafted for row in rows), sum(row.counts.steps for row in rows)
    assert steps < drafted < 8 * steps
    assert sum(row.counts.accepted_by_depth[1] for row in rows) > 0
    # The likelier nodes are the ones that are taken: what is kept gives most of what the whole tree would.
    expected = [
        expected_acceptance(lm, fitted, 1, TREE, [*asked.prompt, *row.tokens], len(asked.prompt))
        for asked, row in zip(requests, oracle)
    ]
    assert sum(row.counts.accepted for row in rows) > 0.7 * sum(sum(one.accepted_by_depth) for one in expected)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("tree=2.1", marks=pytest.mark.exhaustive),
        pytest.param("tree=chain:3,prune_below=0.002", marks=pytest.mark.slow),
    ],
)
def test_random_streams_on_disk_change_no_token(lm, requests, oracle, folder, options):
    spec = f"streams:heads={folder},{options}"
    strategy = lm.resolve(spec)
    assert lm.resolve(spec) is strategy, "streams are read once"
    rows = check_same(lm, requests, oracle, strategy)
    assert sum(row.counts.drafted for row in rows) > 0
    assert sum(row.counts.accepted < row.counts.drafted for row in rows) == len(rows)


@pytest.mark.slow
def test_in_a_bounded_sum_streams_tell_how_likely_their_tokens_are(lm, fitted, folder):
    rng, alone = np.random.default_rng(6), Streams(params=fitted, num_layers=1, paths=TREE)
    model = Model(lm.programs.decoder, lm.params)
    streams_BJD = jnp.asarray(rng.standard_normal((2, 3, lm.config.model_dim)), jnp.float32)
    state = DecodeState(**dict.fromkeys(DecodeState._fields))._replace(
        tokens_BS=jnp.ones((2, 8), jnp.int32), lengths_B=jnp.asarray([3, 8], jnp.int32)
    )
    bounded, unbounded = lm.resolve(alone.bounded(8)), lm.resolve(alone)
    propose = jax.jit(
        lambda one: one.propose(model, one.params, state, one._best(model, streams_BJD)), static_argnums=0
    )
    drafted = jax.device_get(propose(bounded))
    log_p_BJV = jax.nn.log_softmax(model.logits(streams_BJD) / CAUTION, axis=-1)
    best_BJV = -np.sort(-np.asarray(log_p_BJV), axis=-1)
    layout = lay_out(TREE)
    for node, path in enumerate([(), *sorted(TREE, key=lambda path: (len(path), path))]):
        assert len(path) == layout.depths_M[node]
        expected_B = np.exp(sum((best_BJV[:, stream, rank] for stream, rank in enumerate(path)), np.zeros(2)))
        np.testing.assert_allclose(drafted.chances_BM[:, node], expected_B, rtol=1e-5)
    plain = propose(unbounded)
    assert plain.chances_BM is None
    np.testing.assert_array_equal(plain.tree.tokens_BM, drafted.tree.tokens_BM)
    cut, named = (
        lm.resolve(f"streams:heads={folder}{tree}+prompt_lookup+nodes=3").parts[0] for tree in ("", ",tree=2.1")
    )
    assert cut.paths == ((0,), (1,), (0, 0))
    assert len(cut.params["identifiers"]) == 2
    assert len(named.paths) == 4


@pytest.mark.slow
def test_a_tree_may_be_named_by_how_many_tokens_of_each_stream_it_combines(lm, fitted, folder):
    assert read_tree("2.1.2") == (
        (0,), (1,), (0, 0), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)
    )  # fmt: skip
    assert read_tree("chain:2") == ((0,), (0, 0))
    own = ((0,), (1,), (0, 0), (0, 0, 0))
    assert lm.resolve(f"streams:heads={folder},tree=own").paths == own, "it comes with the streams"
    assert lm.resolve(f"streams:heads={folder}").paths == own[:3], "a CPU serves few nodes"
    assert lm.resolve(f"streams:heads={folder},keep_nodes=2").paths == own, "to be pruned"
    assert lm.resolve(Streams(params=fitted, num_layers=1)).paths == TREE
    strategy = lm.resolve(Streams(params=fitted, num_layers=1, tree="4.2"))
    assert (strategy.max_depth, strategy.num_kept, strategy.headroom) == (2, 13, 13 * 3)
    assert strategy.parameters["identifiers"].shape == (2, 48), "the third stream need not run"
    pruned = Streams(paths=TREE, keep_nodes=3)
    assert (pruned.num_kept, pruned.headroom, pruned.prunes) == (4, 21, True)
    options = jaxinfer.strategies()["streams"]
    assert options["options"] == {"heads": "", "tree": "", "prune_below": 0.0, "keep_nodes": 0}
    assert (options["exactness"], parse_strategy("streams:tree=3.3")) == ("identical", Streams(tree="3.3"))


MISTAKES = {
    "no streams": ("streams", InvalidOption, "no streams come with the package for these weights"),
    "no folder": ("streams:heads=/nowhere/heads", CheckpointNotFound, "/nowhere/heads: no such folder of streams"),
    "no such tree": ("streams:heads=FOLDER,tree=oak", InvalidOption, "tree 'oak' is none of"),
    "a width of nothing": ("streams:heads=FOLDER,tree=2.0", InvalidOption, "tree '2.0' is none of"),
    "a huge tree": ("streams:heads=FOLDER,tree=99.99", InvalidOption, "tree 99.99: has 9901 nodes, more than 1024"),
    "a deep tree": ("streams:heads=FOLDER,tree=1.1.1.1", InvalidOption, "1.1.1.1 is 4 deep, but .* are 3: .*chain:3"),
    "a rank past the vocabulary": ("streams:heads=FOLDER,tree=300", InvalidOption, "asks for rank 299 of 258 tokens"),
    "a probability": ("streams:prune_below=2", InvalidOption, "prune_below=2.0 is not a number from 0 to 1"),
    "half a node": ("streams:keep_nodes=1.5", InvalidOption, "keep_nodes of strategy streams needs .* int, got '1.5'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_in_one_line(lm, folder, name):
    spec, kind, pattern = MISTAKES[name]
    with pytest.raises(kind, match=pattern) as caught:
        lm.generate("The", strategy=spec.replace("FOLDER", str(folder)))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_streams_that_do_not_fit_are_refused(lm, tiny_llama_folder, folder):
    other = jaxinfer.load(tiny_llama_folder())
    with pytest.raises(InvalidCheckpoint, match="trained on a model of 48 hidden channels, but this one has 32"):
        other.generate("The", strategy=f"streams:heads={folder}")
    retrained = jaxinfer.LanguageModel(lm.config, jax.tree.map(lambda leaf: 1.1 * leaf, lm.params), lm.backend)
    of, own = lm.fingerprint, retrained.fingerprint
    with pytest.raises(InvalidCheckpoint, match=f"is for the weights {of}, but this model's are {own}: load"):
        retrained.resolve(f"streams:heads={folder}")
    own = jax.tree.map(jnp.asarray, random_streams(48))
    none = {**own, "identifiers": own["identifiers"][:0]}
    refused = {
        "have 32 channels, but hidden states have 48": Streams(params=random_streams(32), num_layers=1),
        "num_layers=2 of the streams given is not inside the model's 2": Streams(params=own, num_layers=2),
        "num_layers=0 of the streams given is not inside": Streams(params=own),
        "the streams given are 0 streams": Streams(params=none, num_layers=1),
    }
    for pattern, strategy in refused.items():
        with pytest.raises(InvalidOption, match=pattern) as caught:
            lm.generate("The", strategy=strategy)
        assert "\n" not in str(caught.value)
