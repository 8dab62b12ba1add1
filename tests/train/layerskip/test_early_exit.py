"""LayerSkip's schedules by hand, and its loss against layers that are run one after another."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.errors import InvalidOption
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.model import Model
from tests.toys import TINY_LLAMA, encode_bytes, fable, float32_backend, random_params
from tests.train.loop.test_step import same_tree
from train.layerskip.evaluation import ExitEvaluation, choose_exit
from train.layerskip.loss import ExitBatch, ExitLoss, check_layers, visit_layers
from train.layerskip.schedules import CURRICULA, ExitSchedule
from train.loop.position_pieces import sum_by_pieces
from train.loop.step import Schedule, compile_step, initial_state
from train.loop.whole_text import place_text, predicted
from train.texts.batches import Batch, window_batches
from train.texts.packing import Example, pack

CONFIG = replace(TINY_LLAMA, num_layers=3, model_dim=16, ffn_dim=32, num_heads=2, num_kv_heads=1)
DECODER = Decoder(CONFIG, float32_backend(scan_layers=True))
TEXTS = [list(range(40, 61)), list(range(90, 70, -1)), [7, 7, 9, 30, 12, 99, 3]]


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, scan_layers=True)


@pytest.fixture(scope="module")
def rows():
    """Two rows: of two texts, and of one that is predicted in part."""
    masks = [(True,) * 21, (True,) * 20, (False,) * 4 + (True,) * 3]
    return pack([Example(tuple(text), mask) for text, mask in zip(TEXTS, masks)], 44, seed=1)


def exit_batch(rows, rates, weights):
    count = len(rows.tokens_BT)
    rates_BL = np.broadcast_to(np.asarray(rates, np.float32), (count, CONFIG.num_layers))
    return ExitBatch(rows, rates_BL, np.broadcast_to(np.asarray(weights, np.float32), rates_BL.shape))


def test_layers_are_dropped_more_with_depth_and_time():
    """By hand: D is 0, sqrt(2) - 1 and 1 for three layers; S the same over three steps."""
    half = math.sqrt(2) - 1
    continued = ExitSchedule(3, 3, max_drop=0.2)
    for step in range(3):
        np.testing.assert_allclose(continued.drop_rates(step), [0, 0.2 * half, 0.2], rtol=1e-6)
    scratch = replace(continued, from_scratch=True)
    np.testing.assert_array_equal(scratch.drop_rates(0), [0, 0, 0])
    np.testing.assert_allclose(scratch.drop_rates(1), [0, 0.2 * half * half, 0.2 * half], rtol=1e-6)
    np.testing.assert_allclose(scratch.drop_rates(2), [0, 0.2 * half, 0.2], rtol=1e-6)
    assert ExitSchedule(1, 1, from_scratch=True).drop_rates(0).tolist() == [0.0]


def test_exits_weigh_more_with_depth():
    """By hand, e_scale 0.5: e = 0.5, 1.5, 3, and 4 + 0.5 * 6 = 7 for the last of four layers."""
    schedule = ExitSchedule(4, 10, exit_scale=0.5, curriculum="none")
    np.testing.assert_allclose(schedule.exit_weights(0), np.array([0.5, 1.5, 3, 7]) / 12, rtol=1e-6)
    np.testing.assert_array_equal(schedule.exit_weights(7), schedule.all_exits())
    plain = replace(schedule, exit_scale=0.0)
    assert plain.exit_weights(3).tolist() == [0, 0, 0, 1]


def test_the_rotational_curriculum_has_every_exit_learn_in_turn():
    schedule = ExitSchedule(5, 100, exit_scale=1.0, curriculum="rotational", every=3)
    learns = [np.flatnonzero(schedule.exit_weights(step)).tolist() for step in range(4)]
    assert learns == [[0, 3, 4], [1, 4], [2, 4], [0, 3, 4]]
    np.testing.assert_allclose(schedule.exit_weights(1), np.array([0, 3, 0, 0, 15]) / 18, rtol=1e-6)


def test_the_gradual_curriculum_adds_exits_from_the_last_to_the_first():
    schedule = ExitSchedule(4, 80, exit_scale=1.0, curriculum="gradual")
    starts = [next(t for t in range(80) if schedule.exit_weights(t)[layer] > 0) for layer in range(4)]
    assert starts == [40, 30, 20, 0]  # half of the steps, times (L - l) / L; the last always learns
    np.testing.assert_array_equal(schedule.exit_weights(79), schedule.all_exits())


@pytest.mark.parametrize("curriculum", CURRICULA)
def test_weights_always_add_up_to_one(curriculum):
    schedule = ExitSchedule(6, 30, curriculum=curriculum, every=4)
    sums = [schedule.exit_weights(step).sum() for step in range(30)]
    np.testing.assert_allclose(sums, 1, rtol=1e-5)


@jax.jit
def exit_logits(params, rows):
    """Each exit's logits, by running the layers up to it alone."""
    model, found = Model(DECODER, params), []
    text = place_text(CONFIG, rows.tokens_BT, rows.segments_BT)
    for stop in range(1, CONFIG.num_layers + 1):
        hidden_BTD = model.embedded(rows.tokens_BT, text.positions_BT)
        hidden_BTD, _ = model.run_layers(
            0, stop, hidden_BTD, text.positions_BT, text.cache, text.placements, text.lengths_B
        )
        found.append(model.logits(model.normed(hidden_BTD)))
    return found


def exit_losses_one_by_one(params, rows):
    next_ones, losses = predicted(rows), []
    for logits_BTV in exit_logits(params, jax.tree.map(jnp.asarray, rows)):
        logits_BTV = np.asarray(logits_BTV, np.float64)
        logits_BTV -= logits_BTV.max(axis=-1, keepdims=True)
        own_BT = np.take_along_axis(logits_BTV, np.asarray(next_ones.targets_BT)[..., None], axis=-1)[..., 0]
        losses_BT = np.log(np.sum(np.exp(logits_BTV), axis=-1)) - own_BT
        losses.append(np.sum(losses_BT * np.asarray(next_ones.counts_BT)))
    return np.array(losses)


def test_the_loss_is_the_weighted_sum_of_every_exits_own(params, rows):
    tally = jax.jit(ExitLoss(DECODER))(params, None, exit_batch(rows, [0, 0, 0], [0.2, 0.0, 0.8]), jax.random.key(0))
    one_by_one = exit_losses_one_by_one(params, rows)
    assert int(tally.num_tokens) == 20 + 19 + 3
    np.testing.assert_allclose(tally.loss, 0.2 * one_by_one[0] + 0.8 * one_by_one[2], rtol=1e-5)
    np.testing.assert_allclose(tally.others["whole_model_loss"][0], one_by_one[2], rtol=1e-5)
    found = ExitEvaluation(DECODER, lambda params: params, rows, np.array([0.5, 0.25, 0.25])).measure(params)
    np.testing.assert_allclose(np.array(found.losses) * 42, one_by_one, rtol=1e-5)
    assert found.acceptance[2] == 1
    assert 0 <= found.acceptance[0] < 1


def test_a_dropped_layer_is_as_if_it_were_not_there_and_each_row_drops_its_own(params, rows):
    """Of two rows the first skips layer 1; a layer whose outputs are zero adds nothing either."""
    names = [("attention", "output"), ("mlp", "down")]
    outputs = {path: jax.tree.map(lambda leaf: leaf.at[1].set(0), params["blocks"][path[0]][path[1]]) for path in names}
    blocks = {**params["blocks"]} | {one: {**params["blocks"][one], two: leaf} for (one, two), leaf in outputs.items()}
    silent = {**params, "blocks": blocks}
    batch = exit_batch(rows, [0, 0, 0], [0.3, 0.3, 0.4])
    rates_BL = np.zeros((2, 3), np.float32)
    rates_BL[0, 1] = 1
    loss = jax.jit(ExitLoss(DECODER))

    def of_row(params, row, rates_BL):
        mask_BT = np.asarray(rows.mask_BT) & (np.arange(2) == row)[:, None]
        one = batch._replace(texts=rows._replace(mask_BT=mask_BT), rates_BL=rates_BL)
        return float(loss(params, None, one, jax.random.key(3)).loss)

    none_BL = np.zeros_like(rates_BL)
    np.testing.assert_allclose(of_row(params, 0, rates_BL), of_row(silent, 0, none_BL), rtol=1e-5)
    assert of_row(params, 0, rates_BL) != pytest.approx(of_row(params, 0, none_BL), rel=1e-3)
    np.testing.assert_allclose(of_row(params, 1, rates_BL), of_row(params, 1, none_BL), rtol=1e-5)


def test_layers_are_dropped_as_often_as_they_should_be():
    """Over 4,000 texts; a share misses by 0.04 with probability 1e-6 at the most, by Hoeffding's bound."""
    small = replace(CONFIG, num_layers=2)
    decoder = Decoder(small, float32_backend(scan_layers=True))
    params = random_params(small, scan_layers=True)
    tokens_BT = np.full((4000, 1), 65, np.int32)
    texts = Batch(tokens_BT, np.ones_like(tokens_BT, bool))
    kept_LB = jax.random.uniform(jax.random.key(0), (2, 4000)) >= jnp.array([[0.0], [0.3]])
    states_LBD = jax.jit(
        lambda kept_LB: visit_layers(Model(decoder, params), texts, lambda hidden, _: hidden[:, 0], None, kept_LB)
    )(kept_LB)
    skipped_B = np.all(np.asarray(states_LBD[1] == states_LBD[0]), axis=-1)
    assert abs(skipped_B.mean() - 0.3) < 0.04


@pytest.mark.slow
def test_remat_changes_no_gradient(params, rows):
    batch = exit_batch(rows, [0, 0.5, 0.5], [0.2, 0.3, 0.5])

    def gradient(backend):
        loss = ExitLoss(Decoder(CONFIG, backend))
        return jax.jit(jax.grad(lambda params: loss(params, None, batch, jax.random.key(0)).loss))(params)

    backend = float32_backend(scan_layers=True)
    same_tree(gradient(backend), gradient(replace(backend, remat_layers=True)), rtol=1e-4, atol=1e-4)


def test_pieces_change_no_gradient():
    values_BT, weights_BT = np.arange(14.0).reshape(2, 7), np.arange(1.0, 15).reshape(2, 7)
    for at_once in (4, 100):
        pieces = partial(sum_by_pieces, lambda values, weights: jnp.sum(values**2 * weights), at_once=at_once)
        total, slope_BT = jax.value_and_grad(pieces)(jnp.asarray(values_BT), jnp.asarray(weights_BT))
        assert float(total) == np.sum(values_BT**2 * weights_BT)
        np.testing.assert_array_equal(slope_BT, 2 * values_BT * weights_BT)


def test_an_exit_is_chosen_by_what_it_costs():
    """By hand, four layers: one draft of the first at 0.5 brings 1.5 tokens for 1.25 passes, others less."""
    choice = choose_exit([0.5, 0.55, 0.6])
    assert (choice.exit_layer, choice.num_draft_tokens) == (1, 1)
    np.testing.assert_allclose([choice.tokens_per_step, choice.speedup], [1.5, 1.2])
    assert choose_exit([0.05, 0.97, 0.98]).exit_layer == 2
    assert choose_exit([0.5, 0.55, 0.6]).strategy == "layerskip:exit_layer=1,num_draft_tokens=1"


def test_models_without_inner_exits_are_refused():
    with pytest.raises(InvalidOption, match="of one layer has no exit"):
        check_layers(replace(CONFIG, num_layers=1))
    kinds = (CONFIG.layer_pattern[0], replace(CONFIG.layer_pattern[0], window=8))
    with pytest.raises(InvalidOption, match="layers of several kinds"):
        check_layers(replace(CONFIG, layer_pattern=kinds))


def trained_acceptance(schedule, num_steps, seed=0):
    config = replace(CONFIG, num_layers=4, model_dim=32, ffn_dim=64)
    decoder = Decoder(config, float32_backend(scan_layers=True))
    optimizer = Schedule(num_steps, peak_rate=1e-2).build_optimizer()
    step, state = compile_step(ExitLoss(decoder), optimizer), initial_state(decoder, optimizer, seed)
    batches = window_batches(encode_bytes(fable(300)), num_rows=8, length=64, num_steps=num_steps, seed=seed)
    for at, batch in enumerate(batches):
        figures = (np.tile(one, (8, 1)) for one in (schedule.drop_rates(at), schedule.exit_weights(at)))
        state, _ = step(state, None, jax.tree.map(lambda leaf: leaf[None], ExitBatch(batch, *figures)))
    (held_out,) = window_batches(encode_bytes(fable(60, seed=50)), num_rows=16, length=64, num_steps=1, seed=0)
    return ExitEvaluation(decoder, lambda params: params, held_out, schedule.all_exits()).measure(state.params)


@pytest.mark.exhaustive
def test_exits_of_a_model_trained_from_scratch_agree_with_it_far_more_often_than_without():
    """The same steps, texts and seed."""
    plain = ExitSchedule(4, 120, 0.0, 0.0, "none", from_scratch=True)
    without, found = (
        trained_acceptance(schedule, 120)
        for schedule in (plain, ExitSchedule(4, 120, 0.1, 1.0, "rotational", 2, from_scratch=True))
    )
    assert found.acceptance[0] > without.acceptance[0] + 0.1
    assert found.acceptance[1] > without.acceptance[1] + 0.1
    assert found.losses[-1] < without.losses[-1] + 0.4  # and the whole model is not much worse for it
