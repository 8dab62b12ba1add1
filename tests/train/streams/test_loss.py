"""Streams learn what decoding will ask of them, by the loss as it is defined, and nothing else learns."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.drafters.streams import run_streams
from jaxinfer.models.model import Model
from jaxinfer.ops.masks import causal_ancestors
from tests.models.drafters.dense_streams import dense_streams, random_adapters, random_streams
from tests.models.restack import scanned
from tests.toys import TINY_LLAMA, float32_backend, random_params
from train.heads.loss import target_rows
from train.model.lora import init_lora
from train.streams.loss import StreamLoss, look_ahead, run_rows
from train.streams.rows import RowSource
from train.texts.packing import Example

CONFIG = replace(TINY_LLAMA, num_layers=3)
WINDOWED = replace(CONFIG, layer_pattern=(LayerKind(Rope(10000.0, 8)), LayerKind(Rope(10000.0, 8), window=5)))
TEXTS = (tuple(range(40, 61)), tuple(range(90, 70, -1)), (7, 7, 9, 30, 12, 99, 3, 8, 200))
EXAMPLES = [Example(text, tuple(at >= 4 for at in range(len(text)))) for text in TEXTS]
STREAMS = jax.tree.map(jnp.asarray, {**random_streams(CONFIG.model_dim), "blocks": random_adapters(CONFIG, 2)})


def source(examples=EXAMPLES, num_picks=40, rows_V=None, length=64):
    rows_V = target_rows(CONFIG.vocab_size, None) if rows_V is None else rows_V
    return RowSource(examples, None, np.arange(len(examples)), length, num_picks, 0, rows_V)


@pytest.mark.parametrize(
    ("config", "scan_layers"),
    [pytest.param(WINDOWED, True, marks=pytest.mark.slow), pytest.param(CONFIG, False, marks=pytest.mark.exhaustive)],
    ids=["windowed", "dense"],
)
def test_streams_in_training_are_those_of_inference(config, scan_layers):
    """Texts side by side, a few of their tokens picked; against each text alone in a cache, all its streams run."""
    params = random_params(config)
    params = scanned(config, params) if scan_layers else params
    decoder = Decoder(config, float32_backend(scan_layers))
    batch = source(num_picks=12).sample(np.array([0]), 3)
    run = jax.jit(lambda params, batch: run_rows(Model(decoder, params), STREAMS, 2, batch))(params, batch)

    @jax.jit
    def alone(params, tokens_1T):
        model, (_, count) = Model(decoder, params), tokens_1T.shape
        relation_1TT, zero_1 = causal_ancestors(count)[None], jnp.zeros((1,), jnp.int32)
        positions_1T, count_1 = jnp.arange(count, dtype=jnp.int32)[None], jnp.full((1,), count, jnp.int32)
        cache = create_cache(config, 1, 128, decoder.backend, headroom=4 * count)
        places = cache.place(zero_1, relation_1TT)
        hidden_1TD, cache = model.run_layers(
            0, 1, model.embedded(tokens_1T, positions_1T), positions_1T, cache, places, count_1
        )
        found = run_streams(model, STREAMS, 2, hidden_1TD, zero_1, relation_1TT, positions_1T, cache, count_1)
        return found.hidden_BMD[0], found.streams_BMJD[0]

    compared = 0
    for segment in (1, 2, 3):
        (places,) = np.nonzero(batch.segments_BT[0] == segment)
        states_TD, streams_TJD = alone(params, jnp.asarray(batch.tokens_BT[:, places]))
        np.testing.assert_allclose(run.final_BTD[0, places], states_TD, atol=2e-5)
        for index, pick in enumerate(batch.picks_BP[0]):
            if pick in places:
                compared += 1
                np.testing.assert_allclose(run.streams_BPJD[0, index], streams_TJD[pick - places[0]], atol=2e-5)
    assert compared == 12
    assert np.std(np.asarray(run.streams_BPJD), axis=(1, 2)).mean() > 0.1


def test_stream_j_foresees_the_token_j_plus_one_places_on_and_never_one_of_another_text():
    """Texts that count up are their own oracle: after token n stand n + 1, then n + 2 for the first stream."""
    examples = [
        Example(tuple(range(first, first + count)), (False,) * 4 + (True,) * (count - 4))
        for first, count in ((50, 20), (100, 12), (150, 9))
    ]
    rows = source(examples)
    batch = rows.part(rows.parts()[:1])
    targets, picks = look_ahead(batch, 8), batch.picks_BP[0]  # past the next text's prompt, too
    seen = np.zeros(8, int)
    for index, pick in enumerate(picks):
        token = batch.tokens_BT[0, pick]
        of = next(example for example in examples if pick >= 0 and token in example.tokens) if pick >= 0 else None
        for ahead in range(8):
            is_there = of is not None and token + ahead + 1 <= of.tokens[-1]
            assert bool(targets.is_valid_BPA[0, index, ahead]) == is_there
            if is_there:
                seen[ahead] += 1
                assert int(targets.rows_BPA[0, index, ahead]) == token + ahead + 1
    # From the token before the answer's first on, as decoding drafts from there, to the last with two after it.
    assert sorted(batch.tokens_BT[0, picks[picks >= 0]]) == [*range(53, 68), *range(103, 110), *range(153, 157)]
    assert seen.tolist() == [26, 26, 23, 20, 17, 14, 12, 10]


def test_every_token_is_judged_once_and_samples_are_a_function_of_the_step():
    rows = source(num_picks=7)
    found = [int(pick) for part in rows.parts() for pick in rows.part([part]).picks_BP[0] if pick >= 0]
    assert len(found) == len(set(found)) == rows.num_candidates
    assert rows.num_candidates == sum(len(text) - 5 for text in TEXTS)
    first, again, other = (rows.sample(np.array([0]), step).picks_BP[0].tolist() for step in (5, 5, 6))
    assert first == again != other
    assert set(first) | set(other) < set(found)
    assert len(set(first)) == 7
    assert rows.parts(1) == [(0, 0)]
    assert rows.part([(-1, 0)]).picks_BP.tolist() == [[-1] * 7]


@pytest.mark.parametrize("soft", [0.3, pytest.param(0.0, marks=pytest.mark.slow)])
def test_loss_is_the_formula_written_out(soft):
    """Against NumPy, over a loss vocabulary that lacks some of the tokens."""
    params, ids = random_params(CONFIG), [token for token in range(CONFIG.vocab_size) if token % 7]
    rows_V, alpha = target_rows(CONFIG.vocab_size, ids), (0.5, 0.25)
    batch = source(rows_V=rows_V).sample(np.array([0]), 0)
    output = {"kernel": params["head"]["kernel"][jnp.asarray(ids)]}
    loss = StreamLoss(Decoder(CONFIG, float32_backend()), 2, alpha, soft)
    tally = jax.jit(loss)({"streams": STREAMS}, {"params": params, "output": output}, batch, jax.random.key(0))
    total, count, known = 0.0, 0, 0
    for example in EXAMPLES:
        dense = dense_streams(CONFIG, params, STREAMS, 2, example.tokens)
        for at in range(3, len(example.tokens) - 2):
            count += 1
            guesses = [dense.exit_TV[at], *dense.streams_TJV[at]]
            for ahead, (guess_V, weight) in enumerate(zip(guesses, (0.5, 0.5, 0.25, 0.25))):
                if at + 1 + ahead >= len(example.tokens) or rows_V[example.tokens[at + 1 + ahead]] < 0:
                    continue
                known += 1
                logprobs_W = log_softmax(guess_V[ids])
                teacher_W = log_softmax(dense.main_TV[at + ahead][ids])
                hard = -logprobs_W[rows_V[example.tokens[at + 1 + ahead]]]
                divergence = np.sum(np.exp(teacher_W) * (teacher_W - logprobs_W))
                total += weight * ((1 - soft) * hard + soft * divergence)
    assert int(tally.num_tokens) == count
    assert sum(int(tries) for name, (_, tries) in tally.others.items() if name.endswith("loss")) == known
    np.testing.assert_allclose(tally.loss, total, rtol=2e-5)


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.sum(np.exp(shifted)))


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["joint", "frozen"])
def gradients(request):
    """Return what each part learns, from two batches of parameters that differ in the early exit alone."""
    params = random_params(CONFIG)
    lora = jax.tree.map(lambda leaf: leaf + 0.01, init_lora(params, 2, jax.random.key(0)))
    other = {**STREAMS, "exit": jax.tree.map(lambda leaf: 2 * leaf, STREAMS["exit"])}
    batch = source().sample(np.array([0]), 0)

    def both(learned, params):
        loss = StreamLoss(Decoder(CONFIG, float32_backend()), 2, soft=0.5)
        return jax.grad(lambda *parts: loss(parts[0], {"params": parts[1]}, batch, jax.random.key(0)).loss, (0, 1))(
            learned, params
        )

    run, more = jax.jit(both), {"lora": lora} if request.param else {}
    return [run({"streams": one, **more}, params) for one in (STREAMS, other)]


@pytest.mark.slow
def test_frozen_parameters_have_no_gradient_at_all_and_all_others_one(gradients):
    for learned, frozen in gradients:
        assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(frozen))
        assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(learned))


def test_nothing_but_the_early_exit_learns_from_the_early_exit(gradients):
    exits = [found["streams"]["exit"] for found, _ in gradients]
    assert not np.array_equal(exits[0]["up"], exits[1]["up"])
    rest = [{**found, "streams": {**found["streams"], "exit": {}}} for found, _ in gradients]
    jax.tree.map(np.testing.assert_array_equal, *rest)


def test_a_base_that_learns_too_learns_to_end_its_texts():
    """The last token of every answer is a target of it, though no stream has one there."""
    rows_V = target_rows(CONFIG.vocab_size, None)
    numbers = (64, 40, 0)
    whole = RowSource(EXAMPLES, None, np.arange(len(EXAMPLES)), *numbers, rows_V, to_the_end=True)
    assert whole.num_candidates == source().num_candidates + len(EXAMPLES)
    batch = whole.sample(np.array([0]), 0)
    picked = np.asarray(batch.picks_BP)[0]
    targets = {int(batch.tokens_BT[0, at + 1]) for at in picked[picked >= 0]}
    assert {text[-1] for text in TEXTS} <= targets


@pytest.mark.slow
def test_the_model_learns_to_predict_in_joint_training():
    """New adapters change nothing, so that the loss is that of the streams and the plain cross-entropy."""
    params = random_params(CONFIG)
    batch = source().sample(np.array([0]), 0)
    loss = StreamLoss(Decoder(CONFIG, float32_backend()), 2, lora_scale=2.0)
    lora = init_lora(params, 2, jax.random.key(0))
    alone, joint = (
        jax.jit(loss)(learned, {"params": params}, batch, jax.random.key(0))
        for learned in ({"streams": STREAMS}, {"streams": STREAMS, "lora": lora})
    )
    expected = 0.0
    for example in EXAMPLES:
        logits_TV = dense_streams(CONFIG, params, STREAMS, 2, example.tokens).main_TV
        expected -= sum(log_softmax(logits_TV[at])[example.tokens[at + 1]] for at in range(3, len(example.tokens) - 2))
    np.testing.assert_allclose(joint.loss - alone.loss, expected, rtol=1e-4)
    assert joint.num_tokens == alone.num_tokens
