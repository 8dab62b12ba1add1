"""Heads learn the right tokens, by the loss as it is defined, and nothing else learns."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer.decoding.tuning.head_accuracy import measure_accuracies
from jaxinfer.errors import InvalidCheckpoint, InvalidOption, WriteFailed
from jaxinfer.models.drafters.heads import head_logits, head_states
from jaxinfer.models.fingerprint import fingerprint
from jaxinfer.models.model import Model
from tests.decoding.fitted_heads import head_scores
from tests.models.restack import scanned
from tests.toys import TINY_LLAMA, encode_bytes, fable, random_params
from train.features.hidden_states import HiddenStates, cache_hidden_states
from train.heads.card import describe_accuracies
from train.heads.evaluation import HeadEvaluation
from train.heads.loss import HeadLoss, WindowSource, frequent_tokens, look_ahead, target_rows
from train.heads.shapes import HeadShape, frozen_heads, init_heads
from train.heads.trees import best_tree
from train.texts.packing import Example

DRAFT_IDS = tuple(range(30, 130))
SHAPES = {
    "medusa": HeadShape(3, num_blocks=2, draft_ids=DRAFT_IDS),
    "own matrices": HeadShape(2, shared=False),
    "hydra": HeadShape(3, conditioned=True, inner=24, draft_ids=DRAFT_IDS),
}


@pytest.fixture(scope="module")
def lm(tiny_llama_folder):
    return jaxinfer.load(tiny_llama_folder())


@pytest.fixture(scope="module")
def states(lm, tmp_path_factory):
    texts = [encode_bytes(fable(1, seed)) for seed in range(4)]
    examples = [Example(tuple(text), tuple(at >= 7 for at in range(len(text)))) for text in texts]
    return cache_hidden_states(lm, examples, tmp_path_factory.mktemp("states") / "cache")


def random_heads(shape, lm, seed=0):
    """Heads as they might be after some training: nothing in them is zero."""
    heads = init_heads(shape, lm.config, lm.params, jax.random.key(seed))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + 0.3 * rng.standard_normal(leaf.shape).astype(np.float32), heads)


def frozen_of(shape, lm):
    return {"params": lm.params, "heads": frozen_heads(shape, lm.config, lm.params)}


def test_head_k_looks_k_plus_two_tokens_ahead_along_the_path_and_never_into_another_text(lm):
    """A text that counts up is its own oracle: after token n, head k is to say n + 2 + k."""
    tokens = np.array([*range(50, 70), *range(100, 112)], np.int32)
    texts = np.array([0] * 20 + [1] * 12, np.int32)
    positions = np.concatenate([np.arange(20), np.arange(12)]).astype(np.int32)
    hidden, predicted = np.zeros((32, lm.config.model_dim), np.float16), np.ones(32, bool)
    states = HiddenStates(hidden, tokens, positions, texts, predicted)
    source = WindowSource(states, 8, 3, target_rows(lm.config.vocab_size, None))
    head_params = random_heads(HeadShape(3, conditioned=True), lm)
    table_VD = np.asarray(lm.params["embed"]["embedding"])
    seen = np.zeros(3, int)
    for window in range(source.count):
        batch = source.take(np.array([window]))
        views = look_ahead(Model(lm.programs.decoder, lm.params), head_params, batch, 8)
        for head in range(3):
            path_TD = np.asarray(views.path(head, True))[0]
            for at in range(8):
                place = window * 8 + at
                is_inside = place + 2 + head < 32 and texts[place + 2 + head] == texts[place]
                assert bool(views.valid[head][0, at]) == is_inside
                if is_inside:
                    seen[head] += 1
                    assert int(views.targets[head][0, at]) == tokens[place] + 2 + head
                    along = tokens[place] + 1 + np.arange(head + 1)
                    np.testing.assert_array_equal(path_TD[at], table_VD[along].reshape(-1))
    assert seen.tolist() == [28, 26, 24]


@pytest.mark.parametrize(
    ("name", "soft"),
    [
        ("medusa", 0.3),
        ("own matrices", 0.0),
        ("hydra", 0.3),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("medusa", 0.0), ("own matrices", 0.3), ("hydra", 0.0))
        ),
    ],
)
def test_loss_is_the_formula_written_out_and_heads_alone_learn(lm, states, name, soft):
    shape = SHAPES[name]
    heads, frozen = random_heads(shape, lm), frozen_of(shape, lm)
    rows_V = target_rows(lm.config.vocab_size, shape.draft_ids)
    windows = WindowSource(states, 64, shape.num_heads, rows_V)
    assert windows.count > 1
    batch = windows.take(np.arange(windows.count))
    loss = HeadLoss(lm.programs.decoder, 0.8, soft)

    def differentiate(heads, frozen):
        total = lambda *both: ((tally := loss(*both, batch, jax.random.key(0))).loss, tally)  # noqa: E731
        return jax.value_and_grad(total, argnums=(0, 1), has_aux=True, allow_int=True)(heads, frozen)

    (_, tally), gradients = jax.jit(differentiate)(heads, frozen)
    assert_only_heads_learn(lm, *gradients)

    hidden_PD, tokens, texts = np.asarray(states.hidden_PD, np.float64), states.tokens_P, states.texts_P
    table_VD = np.asarray(lm.params["embed"]["embedding"], np.float64)
    output_WD = np.asarray(lm.params["head"]["kernel"], np.float64)
    output_WD = output_WD[list(shape.draft_ids)] if shape.draft_ids else output_WD
    total, count = 0.0, 0
    for index, head in enumerate(heads["heads"]):
        blocks, output = head["blocks"], head.get("output", {"kernel": output_WD})
        for at in range(len(tokens) - 2 - index):
            if texts[at + 2 + index] != texts[at]:
                continue
            count += index == 0
            row = rows_V[tokens[at + 2 + index]]
            if row < 0:
                continue
            state_D = hidden_PD[at]
            for layer, block in enumerate(blocks):
                along = table_VD[tokens[at + 1 : at + 2 + index]] if layer == 0 else np.zeros((0, len(state_D)))
                eye = {"blocks": (block,), "output": {"kernel": np.eye(len(state_D))}}
                state_D = head_scores(eye, state_D, along)
            logprobs_W = log_softmax(np.asarray(output["kernel"], np.float64) @ state_D)
            teacher_W = log_softmax(output_WD @ hidden_PD[at + 1 + index])
            divergence = np.sum(np.exp(teacher_W) * (teacher_W - logprobs_W))
            total += 0.8**index * ((1 - soft) * -logprobs_W[row] + soft * divergence)
    assert int(tally.num_tokens) == count
    np.testing.assert_allclose(tally.loss, total, rtol=2e-4)


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.sum(np.exp(shifted)))


def assert_only_heads_learn(lm, of_heads, of_frozen):
    floats = [leaf for leaf in jax.tree.leaves(of_frozen) if leaf.dtype == jnp.float32]
    assert len(floats) >= len(jax.tree.leaves(lm.params))
    assert all(not np.asarray(leaf).any() for leaf in floats)
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(of_heads))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_frozen_parameters_have_no_gradient_at_all_under_dropout(lm, states, name):
    shape = SHAPES[name]
    heads, frozen = random_heads(shape, lm), frozen_of(shape, lm)
    batch = WindowSource(states, 64, shape.num_heads, target_rows(lm.config.vocab_size, shape.draft_ids)).take(
        np.arange(2)
    )
    loss = HeadLoss(lm.programs.decoder, soft=0.5, dropout=0.1)

    def total(heads, frozen):
        return loss(heads, frozen, batch, jax.random.key(0)).loss

    assert_only_heads_learn(lm, *jax.jit(jax.grad(total, argnums=(0, 1), allow_int=True))(heads, frozen))


def test_new_heads_repeat_the_models_own_prediction(lm, states):
    """What they add is zero, so that training starts from what the model knows."""
    hidden_PD = jnp.asarray(states.hidden_PD[:5], jnp.float32)
    model = Model(lm.programs.decoder, lm.params)
    for shape in SHAPES.values():
        heads = init_heads(shape, lm.config, lm.params, jax.random.key(0))
        path_PD = jnp.ones((5, lm.config.model_dim)) if shape.conditioned else None
        head_params = {**heads, **frozen_heads(shape, lm.config, lm.params)}
        found = head_logits(model, head_params, 0, head_states(heads["heads"][0], hidden_PD, path_PD, lm.backend))
        ids = jnp.arange(lm.config.vocab_size) if shape.draft_ids is None else jnp.asarray(shape.draft_ids)
        np.testing.assert_allclose(found, model.logits(hidden_PD)[:, ids], rtol=1e-5, atol=1e-5)


def test_cached_states_are_those_of_the_answers(lm, states):
    """From the token before the first that is predicted; their logits are the model's."""
    text = encode_bytes(fable(1, 2))
    own_P = states.texts_P == 2
    assert np.asarray(states.tokens_P)[own_P].tolist() == text[6:]
    assert np.asarray(states.positions_P)[own_P].tolist() == list(range(6, len(text)))
    model = Model(lm.programs.decoder, lm.params)
    found_PV = model.logits(jnp.asarray(states.hidden_PD[own_P], jnp.float32))
    np.testing.assert_allclose(found_PV, lm.logits([text])[0, 6:], atol=2e-2)  # states are kept in float16


def test_cached_features_are_those_of_whole_texts_and_of_their_layers_alone(lm, tmp_path):
    """Side by side, from the first token on; after the last layer, normed, they give the model's logits."""
    texts, last = [encode_bytes(fable(1, seed)) for seed in range(2)], lm.config.num_layers
    examples = [Example(tuple(text), tuple(at >= 7 for at in range(len(text)))) for text in texts]
    states = cache_hidden_states(lm, examples, tmp_path / "several", layers=(0, 1, last))
    own_P = states.texts_P == 1
    assert np.asarray(states.tokens_P)[own_P].tolist() == texts[1]
    assert states.predicted_P[own_P].tolist() == list(examples[1].mask)
    model, tokens_BT = Model(lm.programs.decoder, lm.params), jnp.asarray([texts[1]])
    first_TD, middle_TD, last_TD = np.split(np.asarray(states.hidden_PD[own_P], np.float32), 3, axis=1)
    embedded_BTD = model.embedded(tokens_BT, jnp.arange(len(texts[1]))[None])
    np.testing.assert_allclose(first_TD, embedded_BTD[0], atol=2e-3)
    np.testing.assert_allclose(model.logits(model.normed(jnp.asarray(last_TD)[None])), lm.logits([texts[1]]), atol=2e-2)
    before_last = cache_hidden_states(lm, examples, tmp_path / "one", num_top=last - 1)
    np.testing.assert_array_equal(middle_TD, np.asarray(before_last.hidden_PD[own_P], np.float32))
    with pytest.raises(InvalidCheckpoint, match=r"holds hidden states with before_layers \[0, 1, 2\], not \[1\]"):
        cache_hidden_states(lm, examples, tmp_path / "several", layers=(1,))


def test_states_that_were_interrupted_are_gone_on_with(lm, tmp_path, monkeypatch):
    """From what is there on, to the same files; meanwhile the folder belongs to one process and one recipe."""
    monkeypatch.setattr("train.features.hidden_states._TOKENS_AT_ONCE", 64)  # a text or two at once
    examples = [Example(tuple(encode_bytes(fable(1, seed))), (True,) * len(fable(1, seed))) for seed in range(8)]
    whole = cache_hidden_states(lm, examples, tmp_path / "whole")
    seen = []

    def report(done, said):
        seen.append(done)
        if len(seen) == 3:
            with pytest.raises(InvalidOption, match="another process is filling it"):
                cache_hidden_states(lm, examples, tmp_path / "part")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache_hidden_states(lm, examples, tmp_path / "part", report)
    with pytest.raises(InvalidCheckpoint, match="holds hidden states with num_texts 8, not 7"):
        cache_hidden_states(lm, examples[:7], tmp_path / "part")
    part = cache_hidden_states(lm, examples, tmp_path / "part", lambda done, said: seen.append(done))
    assert seen == sorted(set(seen))
    assert seen[-1] == 8
    for found, expected in zip(part, whole):
        np.testing.assert_array_equal(found, expected)
    assert sorted(path.name for path in (tmp_path / "part").iterdir()) == sorted(
        path.name for path in (tmp_path / "whole").iterdir()
    )


@pytest.mark.parametrize("name", ["thesis.txt", "tokens.npy"])
def test_a_folder_of_other_files_is_left_as_it_is(lm, tmp_path, name):
    (tmp_path / name).write_text("mine")
    examples = [Example(tuple(encode_bytes(fable(1))), (True,) * len(fable(1)))]
    with pytest.raises(InvalidCheckpoint, match="is not empty and holds no hidden states"):
        cache_hidden_states(lm, examples, tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_damaged_states_are_told(lm, tmp_path):
    examples = [Example(tuple(encode_bytes(fable(1))), (True,) * len(fable(1)))]
    for name, damage in (("begun.json", ""), ("begun.json", "[]"), ("cache.json", "{")):
        folder = tmp_path / f"{name}{len(damage)}"
        folder.mkdir()
        (folder / name).write_text(damage)
        with pytest.raises(InvalidCheckpoint, match="is damaged; remove"):
            cache_hidden_states(lm, examples, folder)


KILLED = """
import os, signal, sys
import jaxinfer
from tests.toys import encode_bytes, fable
from train.features import filling
from train.features import hidden_states
from train.texts.packing import Example

filling._SECONDS_BETWEEN_MARKS, hidden_states._TOKENS_AT_ONCE = 0, 64
examples = [Example(tuple(encode_bytes(fable(1, seed))), (True,) * len(fable(1, seed))) for seed in range(8)]
kill = lambda done, said: done > 3 and os.kill(os.getpid(), signal.SIGKILL)
hidden_states.cache_hidden_states(jaxinfer.load(sys.argv[1]), examples, __import__("pathlib").Path(sys.argv[2]), kill)
"""


@pytest.mark.slow
def test_states_of_a_killed_process_are_gone_on_with(lm, tiny_llama_folder, tmp_path, monkeypatch):
    command = [sys.executable, "-c", KILLED, str(tiny_llama_folder()), str(tmp_path / "part")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    killed = subprocess.run(command, env=environment, cwd=Path(__file__).parents[3], stderr=subprocess.DEVNULL)
    assert killed.returncode == -signal.SIGKILL
    monkeypatch.setattr("train.features.hidden_states._TOKENS_AT_ONCE", 64)
    examples = [Example(tuple(encode_bytes(fable(1, seed))), (True,) * len(fable(1, seed))) for seed in range(8)]
    seen = []
    part = cache_hidden_states(lm, examples, tmp_path / "part", lambda done, said: seen.append(done))
    assert seen
    assert seen[0] > 4
    whole = cache_hidden_states(lm, examples, tmp_path / "whole")
    for found, expected in zip(part, whole):
        np.testing.assert_array_equal(found, expected)


def test_a_full_disk_is_told_before_anything_is_computed(lm, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    examples = [Example(tuple(encode_bytes(fable(1))), (True,) * len(fable(1)))]
    with monkeypatch.context() as patch:
        patch.setattr("train.features.filling.os.posix_fallocate", full)
        with pytest.raises(WriteFailed, match="No space left on device; free some space or give another --cache"):
            cache_hidden_states(lm, examples, tmp_path / "cache", lambda done, said: pytest.fail("computed"))
    assert not list((tmp_path / "cache").glob("*.npy"))
    assert cache_hidden_states(lm, examples, tmp_path / "cache").num_texts == 1


@pytest.mark.parametrize("name", ["hydra", pytest.param("medusa", marks=pytest.mark.slow)])
def test_accuracies_from_cached_states_are_those_of_whole_forward_passes(lm, tmp_path, name):
    shape = SHAPES[name]
    texts = [encode_bytes(fable(2, seed)) for seed in range(3)]
    examples = [Example(tuple(text), (True,) * len(text)) for text in texts]
    states = cache_hidden_states(lm, examples, tmp_path / "cache")
    heads, frozen = random_heads(shape, lm), frozen_of(shape, lm)
    source = WindowSource(states, 32, 3, target_rows(lm.config.vocab_size, shape.draft_ids))
    evaluation = HeadEvaluation(lm.programs.decoder, frozen, source, num_ranks=4)
    found = evaluation.accuracies(heads)
    expected = measure_accuracies(lm.programs.decoder, lm.params, {**heads, **frozen["heads"]}, texts, 4)
    num_tokens = sum(map(len, texts))
    np.testing.assert_allclose(found, expected, atol=1.5 / num_tokens)  # a near-tie may fall otherwise in float16
    assert np.max(found) > 0
    figures = evaluation(heads)
    assert figures["score"] > 1
    assert len(best_tree(found, 16)) <= 15


def test_a_card_adds_up_the_best_ranks():
    (row,) = (line for line in describe_accuracies("head", [[0.5, 0.2, *[0.03] * 8]], {16: 1.5}) if "| 1 |" in line)
    assert row == "| 1 | 50.0% | 70.0% | 79.0% | 94.0% |"


def test_the_draft_vocabulary_is_what_is_frequent():
    tokens = np.array([5] * 9 + [7] * 8 + [2] * 8 + [9] * 3 + [1])
    assert frequent_tokens(tokens, 12, 4) == [2, 5, 7, 9]
    assert frequent_tokens(tokens, 12, 3, always=[11]) == [2, 5, 11]
    assert frequent_tokens(tokens, 12, 7) == [0, 1, 2, 3, 5, 7, 9]
    predicted = np.isin(tokens, [7, 1])
    assert frequent_tokens(tokens, 12, 2, predicted=predicted) == [1, 7]
    assert frequent_tokens(tokens, 12, 5, always=[11], predicted=predicted) == [1, 2, 5, 7, 11]
    assert target_rows(12, [2, 5, 11]).tolist() == [-1, -1, 0, -1, -1, 1, -1, -1, -1, -1, -1, 2]


def test_a_fingerprint_is_of_the_weights_and_of_nothing_else():
    params = random_params(TINY_LLAMA)
    own = fingerprint(params)
    assert own == fingerprint(scanned(TINY_LLAMA, params))
    assert own == fingerprint(jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params))
    assert own != fingerprint(random_params(TINY_LLAMA, seed=1))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        changed = jax.tree_util.tree_map_with_path(
            lambda place, one, path=path: one * 1.05 if place == path else one, params
        )
        assert fingerprint(changed) != own, f"{path} of {leaf.shape} does not count"


def test_of_a_conversation_only_answers_are_foreseen(lm, tmp_path):
    """What the user says between them is in the states, and no target."""
    tokens = tuple(encode_bytes(fable(1, 0))[:20])
    mask = tuple(4 <= at < 8 or 14 <= at < 18 for at in range(20))
    states = cache_hidden_states(lm, [Example(tokens, mask)], tmp_path / "cache")
    source = WindowSource(states, 24, 2, target_rows(lm.config.vocab_size, None))
    head_params = random_heads(HeadShape(2), lm)
    views = look_ahead(Model(lm.programs.decoder, lm.params), head_params, source.take(np.arange(1)), 24)
    # States are kept from token 3 on, and a first head foresees the token after the next.
    found = np.flatnonzero(np.asarray(views.valid[0])[0]) + 3 + 2
    assert found.tolist() == [5, 6, 7, 14, 15, 16, 17]
