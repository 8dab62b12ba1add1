"""A DFlash drafter learns what decoding will ask of it, by the loss as it is defined, and nothing else learns."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoint.drafters.dflash import read_dflash
from jaxinfer.models.decoder import Decoder
from tests.models.drafters.published_dflash import published_block, settings_for, write_published
from tests.toys import TINY_LLAMA, float32_backend, random_params
from train.dflash.evaluation import count_hits
from train.dflash.loss import DFlashLoss
from train.features.hidden_states import HiddenStates
from train.heads.loss import target_rows
from train.streams.rows import RowSource
from train.texts.packing import Example

CONFIG, BACKEND = replace(TINY_LLAMA, num_layers=4), float32_backend()
TEXTS = (tuple(range(40, 61)), tuple(range(90, 70, -1)), (7, 7, 9, 30, 12, 99, 3, 8, 200))
EXAMPLES = [Example(text, tuple(at >= 4 for at in range(len(text)))) for text in TEXTS]
NUM_TOKENS = sum(map(len, TEXTS))
# Those of both features and, for a teacher, those after the last layer.
HIDDEN_PF = np.random.default_rng(2).standard_normal((NUM_TOKENS, 3 * 32)).astype(np.float16)
IDS = [token for token in range(CONFIG.vocab_size) if token % 7]
PARAMS = random_params(CONFIG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_published(tmp_path_factory.mktemp("published"), settings_for())


def source(num_picks=12, rows_V=None, width=96):
    none_P = np.zeros(NUM_TOKENS, np.int32)
    states = HiddenStates(HIDDEN_PF[:, :width], none_P, none_P, none_P, np.ones(NUM_TOKENS, bool))
    rows_V = target_rows(CONFIG.vocab_size, None) if rows_V is None else rows_V
    return RowSource(EXAMPLES, states, np.arange(len(TEXTS)), 64, num_picks, 0, rows_V)


def dense_logits(folder, batch):
    """Return for each pick with a block its text's place, its anchor and the module's logits, in NumPy."""
    table_VD, head_VD = (np.asarray(PARAMS[one][name]) for one, name in (("embed", "embedding"), ("head", "kernel")))
    starts = np.concatenate([[0], np.cumsum([len(text) for text in TEXTS])])
    for index, pick in enumerate(batch.picks_BP[0]):
        if pick < 0:
            continue
        segment = batch.segments_BT[0, pick]
        first = int(np.flatnonzero(batch.segments_BT[0] == segment)[0])
        text = TEXTS.index(tuple(batch.tokens_BT[0][batch.segments_BT[0] == segment].tolist()))
        anchor = int(pick) + 1 - first
        hidden_TF = HIDDEN_PF[starts[text] : starts[text] + anchor, :64].astype(np.float32)
        states_ND = published_block(folder, hidden_TF, table_VD[[TEXTS[text][anchor], *[7] * 5]])
        yield index, text, anchor, states_ND[1:] @ head_VD.T


@pytest.mark.parametrize("soft", [0.3, pytest.param(0.0, marks=pytest.mark.slow)])
def test_loss_is_the_formula_written_out(folder, soft):
    """Against the published module in NumPy, over a loss vocabulary that lacks some tokens; texts share a row."""
    dflash, params = read_dflash(folder, CONFIG, BACKEND)
    rows_V, gamma = target_rows(CONFIG.vocab_size, IDS), 2.0
    batch = source(rows_V=rows_V).sample(np.array([0]), 0)
    output = {"kernel": PARAMS["head"]["kernel"][jnp.asarray(IDS)]}
    loss = DFlashLoss(Decoder(CONFIG, BACKEND), dflash, BACKEND, gamma, soft)
    tally = jax.jit(loss)(params, {"params": PARAMS, "output": output}, batch, jax.random.key(0))
    starts = np.concatenate([[0], np.cumsum([len(text) for text in TEXTS])])
    total, weights, seen = 0.0, 0.0, 0
    for _, text, anchor, logits_JV in dense_logits(folder, batch):
        for place, logits_V in enumerate(logits_JV, 1):
            target = TEXTS[text][anchor + place] if anchor + place < len(TEXTS[text]) else None
            if target is None or rows_V[target] < 0:
                continue
            log_p = log_softmax(logits_V[IDS])
            one = -log_p[rows_V[target]]
            if soft:
                final_D = HIDDEN_PF[starts[text] + anchor + place - 1, 64:].astype(np.float64)
                normed_D = final_D / np.sqrt(np.mean(final_D**2) + CONFIG.norm_eps) * PARAMS["final_norm"]["scale"]
                teacher = log_softmax(np.asarray(output["kernel"]) @ normed_D)
                one = (1 - soft) * one + soft * np.sum(np.exp(teacher) * (teacher - log_p))
            weight = np.exp(-(place - 1) / gamma)
            total, weights, seen = total + weight * one, weights + weight, seen + 1
    assert seen > 30
    np.testing.assert_allclose(tally.num_tokens, weights, rtol=1e-5)
    np.testing.assert_allclose(tally.loss, total, rtol=1e-4)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.sum(np.exp(logits - logits.max()))) - logits.max()


def test_a_block_is_judged_as_far_as_it_is_right(folder):
    """Ranks at a place count for the blocks alone whose places before agree with the text."""
    dflash, params = read_dflash(folder, CONFIG, BACKEND)
    rows = source(num_picks=40, width=64)
    batch = rows.part(rows.parts()[:1])
    # A target that the drafter itself would write, so that some blocks are right for some places.
    written = {index: logits_JV.argmax(axis=-1) for index, _, _, logits_JV in dense_logits(folder, batch)}
    targets_BT, goal = np.array(batch.targets_BT), {}
    for index, pick in enumerate(batch.picks_BP[0]):
        if pick >= 0 and pick % 4 == 0:
            goal[index] = written[index]
            size = min(3, 64 - int(pick) - 2)
            targets_BT[0, pick + 2 : pick + 2 + size] = written[index][:size]
    batch = batch._replace(targets_BT=targets_BT)
    loss = DFlashLoss(Decoder(CONFIG, BACKEND), dflash, BACKEND, 4.0)
    hits_JR, tries_J = (np.asarray(one) for one in count_hits(loss, 5, params, PARAMS, batch))
    expected_J, tried_J = np.zeros(5), np.zeros(5)
    segments = batch.segments_BT[0]
    for index, pick in enumerate(batch.picks_BP[0]):
        for place in range(5) if pick >= 0 else ():
            at = pick + 2 + place
            if at >= 64 or segments[at] != segments[pick]:
                break
            tried_J[place] += 1
            if written[index][place] != targets_BT[0, at]:
                break
            expected_J[place] += 1
    assert tries_J.tolist() == tried_J.tolist()
    assert hits_JR[:, 0].tolist() == expected_J.tolist()
    assert expected_J[1] > 0
    assert tried_J[0] > tried_J[1] > 0


@pytest.mark.slow
def test_drafters_alone_learn(folder):
    """No gradient reaches the base, and every parameter of the drafter has one."""
    dflash, params = read_dflash(folder, CONFIG, BACKEND)
    batch = source(width=64).sample(np.array([0]), 0)
    loss = DFlashLoss(Decoder(CONFIG, BACKEND), dflash, BACKEND, 4.0)
    key = jax.random.key(0)

    @jax.jit
    def gradients(params, base):
        return jax.grad(lambda *both: loss(both[0], {"params": both[1]}, batch, key).loss, (0, 1))(params, base)

    own, base = gradients(params, PARAMS)
    assert all(np.abs(np.asarray(leaf)).max() > 0 for leaf in jax.tree.leaves(own))
    assert all(np.abs(np.asarray(leaf)).max() == 0 for leaf in jax.tree.leaves(base))
