"""Streams are what their definition says, wherever their token stands in a tree, and no token ever sees one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.decoding.trees.tree import ancestors
from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.drafters.streams import (
    StreamsConfig,
    exit_logits,
    init_streams,
    insert_streams,
    run_streams,
    stream_positions,
    stream_relation,
)
from jaxinfer.models.model import Model
from jaxinfer.ops.masks import causal_ancestors
from tests.models.drafters.dense_streams import dense_streams, random_adapters, random_streams
from tests.models.restack import scanned
from tests.toys import TINY_LLAMA, float32_backend, random_params

CONFIG = replace(TINY_LLAMA, num_layers=3)
NUM_STREAMS = 3
PARENTS = (0, 0, 0, 1, 1, 2, 3)
LENGTHS = (9, 4)  # of the texts before the tree
OWN = jax.tree.map(jnp.asarray, random_streams(CONFIG.model_dim, NUM_STREAMS))


def after_a_text(model, own, num_layers, tokens_BT, lengths_B, tree_BM):
    """Return the logits of a tree's nodes, of their streams and of the early exit, and those of nodes run alone."""
    config, (batch, num_tokens) = model.config, tokens_BT.shape
    cache = create_cache(config, batch, 64, model.decoder.backend, headroom=40)
    positions_BT = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), tokens_BT.shape)
    placements = cache.place(jnp.zeros_like(lengths_B), causal_ancestors(num_tokens)[None], lengths_B)
    _, cache = model.forward(tokens_BT, positions_BT, cache, placements, lengths_B)
    relation_1MM = ancestors(jnp.asarray([PARENTS], jnp.int32))
    positions_BM = lengths_B[:, None] + jnp.sum(relation_1MM, axis=-1, dtype=jnp.int32) - 1
    placements = cache.place(lengths_B, relation_1MM)
    alone_BMD, _ = model.forward(tree_BM, positions_BM, cache, placements, lengths_B)
    first = config.num_layers - num_layers
    hidden_BMD = model.embedded(tree_BM, positions_BM)
    hidden_BMD, cache = model.run_layers(0, first, hidden_BMD, positions_BM, cache, placements, lengths_B)
    run = run_streams(model, own, num_layers, hidden_BMD, lengths_B, relation_1MM, positions_BM, cache, lengths_B)
    return (
        model.logits(run.hidden_BMD),
        model.logits(run.streams_BMJD),
        exit_logits(model, own, hidden_BMD),
        model.logits(alone_BMD),
    )


@pytest.mark.parametrize(
    ("num_layers", "scan_layers", "is_adapted"),
    [
        pytest.param(1, False, False, marks=pytest.mark.slow),
        *(
            pytest.param(2, *each, marks=pytest.mark.exhaustive)
            for each in ((False, False), (True, False), (False, True))
        ),
        (2, True, True),
    ],
)
def test_streams_of_a_tree_equal_their_definition_on_the_text_of_each_path(num_layers, scan_layers, is_adapted):
    rng = np.random.default_rng(0)
    params = random_params(CONFIG)
    own = adapted(num_layers) if is_adapted else OWN
    tokens_BT = rng.integers(0, CONFIG.vocab_size, (2, max(LENGTHS))).astype(np.int32)
    tree_BM = rng.integers(0, CONFIG.vocab_size, (2, len(PARENTS))).astype(np.int32)
    decoder = Decoder(CONFIG, float32_backend(scan_layers))
    run = jax.jit(lambda params, *inputs: after_a_text(Model(decoder, params), own, num_layers, *inputs))
    inputs = (jnp.asarray(tokens_BT), jnp.asarray(LENGTHS, jnp.int32), jnp.asarray(tree_BM))
    nodes_BMV, streams_BMJV, exit_BMV, alone_BMV = run(scanned(CONFIG, params) if scan_layers else params, *inputs)
    np.testing.assert_allclose(nodes_BMV, alone_BMV, atol=1e-5, err_msg="nodes see their streams")
    for row, length in enumerate(LENGTHS):
        for node in range(len(PARENTS)):
            path = [node]
            while path[0]:
                path.insert(0, PARENTS[path[0]])
            text = [*tokens_BT[row, :length].tolist(), *tree_BM[row, path].tolist()]
            dense = dense_streams(CONFIG, params, own, num_layers, text)
            np.testing.assert_allclose(nodes_BMV[row, node], dense.main_TV[-1], atol=1e-4)
            np.testing.assert_allclose(streams_BMJV[row, node], dense.streams_TJV[-1], atol=1e-4)
            np.testing.assert_allclose(exit_BMV[row, node], dense.exit_TV[-1], atol=1e-4)
    # The comparison would notice a stream that is another's, or that sees one it should not.
    assert np.std(np.asarray(streams_BMJV), axis=2).mean() > 0.1


@pytest.mark.slow
def test_adapters_change_streams_and_not_a_bit_of_their_tokens():
    rng = np.random.default_rng(2)
    tokens_BT = jnp.asarray(rng.integers(0, 258, (2, 9)), jnp.int32)
    tree_BM = jnp.asarray(rng.integers(0, 258, (2, len(PARENTS))), jnp.int32)
    model = Model(Decoder(CONFIG, float32_backend()), random_params(CONFIG))
    inputs = (tokens_BT, jnp.asarray(LENGTHS, jnp.int32), tree_BM)
    run = jax.jit(lambda own: after_a_text(model, own, 2, *inputs))
    plain, found = run(OWN), run(adapted(2))
    np.testing.assert_array_equal(found[0], plain[0])
    np.testing.assert_array_equal(found[2], plain[2])
    assert np.abs(found[1] - plain[1]).mean() > 0.1


def adapted(num_layers):
    return jax.tree.map(jnp.asarray, {**OWN, "blocks": random_adapters(CONFIG, num_layers)})


@pytest.mark.slow
def test_windows_count_a_stream_at_its_own_position():
    """A ring reads a stream's place off its number of ancestors."""
    windowed = replace(CONFIG, layer_pattern=(LayerKind(Rope(10000.0, 8), window=6),))
    rng = np.random.default_rng(1)
    tokens_BT = jnp.asarray(rng.integers(0, 258, (2, 9)), jnp.int32)
    tree_BM = jnp.asarray(rng.integers(0, 258, (2, len(PARENTS))), jnp.int32)
    model = Model(Decoder(windowed, float32_backend()), random_params(windowed))
    inputs = (tokens_BT, jnp.asarray(LENGTHS, jnp.int32), tree_BM)
    found = jax.jit(lambda *inputs: after_a_text(model, OWN, 2, *inputs))(*inputs)
    wide = Model(Decoder(CONFIG, float32_backend()), model.params)
    unbounded = jax.jit(lambda *inputs: after_a_text(wide, OWN, 2, *inputs))(*inputs)
    # The root of the second row has all its text within the window; its second stream has lost the first token.
    np.testing.assert_allclose(found[1][1, 0, 0], unbounded[1][1, 0, 0], atol=1e-5)
    assert np.abs(found[1][1, 0, 1] - unbounded[1][1, 0, 1]).max() > 1e-2
    np.testing.assert_allclose(found[0], found[3], atol=1e-5)


def test_the_relation_of_a_small_tree_is_as_drawn_by_hand():
    """Two nodes, the second after the first, with two streams each."""
    relation = stream_relation(jnp.asarray([[[1, 0], [1, 1]]], bool), 2)[0]
    drawn = ["1.....", "11....", "1.1...", "1.11..", "11..1.", "11..11"]
    assert ["".join("1" if seen else "." for seen in row) for row in np.asarray(relation)] == drawn
    positions = stream_positions(jnp.asarray([[7, 8]], jnp.int32), 2)
    assert positions.tolist() == [[7, 8, 8, 9, 9, 10]]
    assert positions.tolist()[0] == (np.asarray(relation).sum(axis=-1) + 6).tolist(), "caches read depths off it"


@pytest.mark.slow
def test_new_streams_begin_as_their_token_and_exit_as_the_model_would():
    backend = float32_backend()
    streams = StreamsConfig(NUM_STREAMS, 2, 4, 5, adapter_rank=3)
    own = init_streams(streams, CONFIG, backend, jax.random.key(0))
    shapes = jax.tree_util.tree_leaves_with_path(jax.tree.map(jnp.shape, own), is_leaf=lambda leaf: type(leaf) is tuple)
    assert {".".join(key.key for key in path): shape for path, shape in shapes} == dict(streams.shapes(CONFIG))
    hidden_BMD = jax.random.normal(jax.random.key(1), (2, 4, CONFIG.model_dim))
    rows_BTD = insert_streams(own, hidden_BMD, backend)
    np.testing.assert_array_equal(rows_BTD[:, :4], hidden_BMD)
    begun_BMJD = rows_BTD[:, 4:].reshape(2, 4, NUM_STREAMS, -1)
    np.testing.assert_allclose(begun_BMJD, hidden_BMD[:, :, None] + own["identifiers"], atol=1e-6)
    assert len(np.unique(np.asarray(own["identifiers"]), axis=0)) == NUM_STREAMS
    model = Model(Decoder(CONFIG, backend), random_params(CONFIG))
    np.testing.assert_allclose(exit_logits(model, own, hidden_BMD), model.logits(model.normed(hidden_BMD)), atol=1e-5)
