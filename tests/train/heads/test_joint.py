"""Medusa-2: a model and its heads learn together, by the loss as it is defined, quantized or not; exported whole."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer.checkpoint.drafters.heads import write_heads
from jaxinfer.models.decoder import Decoder, output_logits
from jaxinfer.models.fingerprint import fingerprint
from jaxinfer.ops.backend import choose_backend
from tests.toys import TINY_LLAMA, encode_bytes, fable, random_params
from tests.train.heads.test_medusa import train_heads
from train.heads.joint_loss import JointEvaluation, JointLoss, as_joint_batch, as_windows, ramp_at
from train.heads.loss import HeadLoss, target_rows
from train.heads.shapes import HeadShape, frozen_heads, init_heads
from train.loop.fit import read_metrics
from train.loop.whole_text import text_hidden
from train.model.lora import init_lora, with_lora
from train.model.quantized import dequantized, quantize_base
from train.texts.packing import Example, pack

BACKEND = choose_backend("float32", "cpu", scan_layers=True)
KEY = jax.random.key(0)
DECODER = Decoder(TINY_LLAMA, BACKEND)
SHAPE = HeadShape(2, draft_ids=tuple(range(30, 130)))


@pytest.fixture(scope="module")
def batch():
    texts = [tuple(encode_bytes(fable(1, seed))[:size]) for seed, size in ((0, 30), (1, 21), (2, 11))]
    examples = [Example(text, tuple(at >= 5 for at in range(len(text)))) for text in texts]
    rows = as_joint_batch(pack(examples, 40, 0), target_rows(TINY_LLAMA.vocab_size, SHAPE.draft_ids), 0.3)
    return jax.tree.map(jnp.asarray, rows)


@pytest.fixture(scope="module")
def learned():
    params = random_params(TINY_LLAMA, scan_layers=True)
    heads = init_heads(SHAPE, TINY_LLAMA, params, jax.random.key(1))
    lora = init_lora(params, 2, jax.random.key(2))
    noisy = lambda leaf: leaf + 0.05 * jax.random.normal(jax.random.key(leaf.size), leaf.shape)  # noqa: E731
    frozen = {"params": params, "heads": frozen_heads(SHAPE, TINY_LLAMA, params)}
    return jax.tree.map(noisy, {"heads": heads, "lora": lora}), frozen


def test_positions_and_texts_are_each_texts_own(batch):
    for segments_T, positions_T in zip(batch.segments_BT, batch.positions_BT):
        for segment in range(1, segments_T.max() + 1):
            size = np.count_nonzero(segments_T == segment)
            assert positions_T[segments_T == segment].tolist() == list(range(size))
    windows = as_windows(batch, jnp.zeros((*batch.tokens_BT.shape, 1)))
    # A text of n tokens of which 5 are its prompt has states from the last of these on.
    assert np.count_nonzero(np.asarray(windows.texts_BT) >= 0) == np.count_nonzero(batch.mask_BT) + 3


@pytest.fixture(scope="module")
def hidden(batch, learned):
    """The states of the model that learns and of the base, and their logarithms of probabilities."""
    trained, frozen = learned

    @jax.jit
    def run(params):
        hidden_BTD = text_hidden(DECODER, params, batch.tokens_BT, batch.segments_BT)
        return hidden_BTD, jax.nn.log_softmax(output_logits(DECODER, params, hidden_BTD))

    return run(with_lora(frozen["params"], trained["lora"], 0.5)), run(frozen["params"])


@pytest.fixture(scope="module")
def judged(batch, learned):
    """Each recipe's tally, and the gradients of self-distillation by what is trained and by what is frozen."""

    @jax.jit
    def run(trained, frozen):
        distilled, staged = (
            JointLoss(HeadLoss(DECODER, decay=0.8), recipe, scale=0.5) for recipe in ("self-distillation", "two-stage")
        )
        total = lambda *both: ((tally := distilled(*both, batch, KEY)).loss, tally)  # noqa: E731
        (_, tally), gradients = jax.value_and_grad(total, argnums=(0, 1), has_aux=True, allow_int=True)(trained, frozen)
        return {"self-distillation": tally, "two-stage": staged(trained, frozen, batch, KEY)}, gradients

    return run(*learned)


@pytest.mark.parametrize("recipe", [pytest.param("two-stage", marks=pytest.mark.slow), "self-distillation"])
def test_the_loss_is_the_bases_and_the_weighed_heads(batch, learned, hidden, judged, recipe):
    """Added up token by token from the definition."""
    trained, frozen = learned
    (hidden_BTD, adapted_BTV), (_, original_BTV) = hidden
    tally = judged[0][recipe]
    logprobs, original = np.asarray(adapted_BTV, np.float64), np.asarray(original_BTV, np.float64)
    base, count = 0.0, 0
    for row, at in np.argwhere(batch.mask_BT):
        own = logprobs[row, at - 1]
        teacher = original[row, at - 1]
        base += -own[batch.tokens_BT[row, at]] if recipe == "two-stage" else np.exp(teacher) @ (teacher - own)
        count += 1
    params = with_lora(frozen["params"], trained["lora"], 0.5)
    heads = jax.jit(HeadLoss(DECODER, decay=0.8))(
        trained["heads"], {**frozen, "params": params}, as_windows(batch, hidden_BTD), KEY
    )
    assert float(tally.num_tokens) == count
    assert float(tally.others["base_loss"][0]) == pytest.approx(base, rel=1e-4)
    assert float(tally.loss) == pytest.approx(base + 0.3 * 0.8 * float(heads.loss), rel=1e-4)


def test_gradients_reach_adapters_and_heads_and_nothing_frozen(judged):
    own, theirs = judged[1]
    assert all(np.any(leaf) for leaf in jax.tree.leaves(own))
    floats = [leaf for leaf in jax.tree.leaves(theirs) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert len(floats) >= 10
    for leaf in floats:
        np.testing.assert_array_equal(leaf, 0)


def test_what_was_not_changed_is_no_divergence(batch, learned):
    trained, frozen = learned
    still = {**trained, "lora": init_lora(frozen["params"], 2, jax.random.key(2))}
    loss = jax.jit(JointLoss(HeadLoss(DECODER), "self-distillation", 1.0))
    assert float(loss(still, frozen, batch, KEY).others["base_loss"][0]) == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_a_quantized_base_computes_with_the_numbers_that_it_stands_for(batch, learned):
    quantized = quantize_base(learned[1]["params"], "nf4")
    plain = dequantized(quantized)
    assert jax.tree.structure(plain) == jax.tree.structure(learned[1]["params"])
    run = jax.jit(lambda params: text_hidden(DECODER, params, batch.tokens_BT, batch.segments_BT))
    np.testing.assert_allclose(run(quantized), run(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_rematerialized_and_quantized_bases_have_the_same_step(batch, learned):
    trained, frozen = learned
    quantized = {**frozen, "params": quantize_base(frozen["params"], "nf4")}
    plain = {**frozen, "params": dequantized(quantized["params"])}
    assert jax.tree.structure(plain) == jax.tree.structure(frozen)
    remat = Decoder(TINY_LLAMA, replace(BACKEND, remat_layers=True))

    def step(decoder, held):
        loss = JointLoss(HeadLoss(decoder), "two-stage", 0.5)
        return jax.jit(jax.value_and_grad(lambda one: loss(one, held, batch, KEY).loss))(trained)

    results = [step(DECODER, plain), step(DECODER, quantized), step(remat, quantized)]
    for value, gradient in results[1:]:
        np.testing.assert_allclose(value, results[0][0], rtol=1e-5)
        jax.tree.map(lambda *leaves: np.testing.assert_allclose(*leaves, rtol=1e-3, atol=1e-3), gradient, results[0][1])


@pytest.mark.parametrize(("bits", "most"), [("nf4", 0.16), ("int4", 0.13), ("int8", 0.006)])
def test_quantized_kernels_are_near_and_small(bits, most):
    params = random_params(TINY_LLAMA, scan_layers=True)
    stored = quantize_base(params, bits)
    for (path, was), now in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(dequantized(stored)), strict=True
    ):
        if "kernel" in str(path[-1]) and "blocks" in str(path[0]):
            assert 0 < float(jnp.abs(now - was).max()) <= most * float(jnp.abs(was).max())
        else:
            np.testing.assert_array_equal(now, was)


def test_the_ramp_of_the_heads_weight():
    assert [ramp_at("sine", step, 8) for step in (0, 4, 8)] == pytest.approx([0, math.sqrt(0.5), 1])
    assert [ramp_at("linear", step, 8) for step in (0, 2, 8)] == [0, 0.25, 1]
    assert ramp_at("constant", 0, 8) == 1


def test_evaluation_counts_what_the_model_says(batch, learned, judged):
    """The next token's loss is the two-stage loss of the base."""
    trained, frozen = learned
    loss = judged[0]["two-stage"].others["base_loss"]
    figures = JointEvaluation(DECODER, frozen, [batch], 0.5)(trained)
    assert figures["next_token_loss"] == pytest.approx(float(loss[0] / loss[1]), abs=1e-3)
    assert figures["score"] >= 1


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "fables.jsonl"
    lines = [f'{{"text": "{line}"}}\n' for line in fable(80, seed=3).splitlines()]
    path.write_text("".join(lines))
    return path


OPTIONS = ("--held-out", 0.1, "--eval-every", 10, "--batch-size", 4, "--dtype", "float32", "--learning-rate", 2e-3)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("self-distillation", marks=pytest.mark.slow),
        pytest.param("two-stage", marks=pytest.mark.exhaustive),
    ],
)
def test_the_exported_model_is_the_one_that_was_trained(trained_folder, texts, tmp_path, capsys, recipe):
    """Its heads are for its weights and no others, and draft for it without changing a token.

    All weights are trained by self-distillation, adapters on a base of four bits in two stages.
    """
    same = ("--model", trained_folder, "--data", texts, *OPTIONS)
    extra = ("--lora-rank", 0)
    if recipe == "two-stage":
        assert train_heads(*same, "--heads", 2, "--share-lm-head", "--out", tmp_path / "first", "--epochs", 1) == 0
        extra = ("--lora-rank", 4, "--quantize", "nf4", "--heads-from", tmp_path / "first" / "heads")
    else:
        extra = (*extra, "--heads", 2, "--share-lm-head")
    out = tmp_path / "run"
    arguments = (*same, "--out", out, "--joint", recipe, "--row-length", 128, *extra)
    is_long = recipe == "two-stage"
    more = ("--epochs", 6, "--remat", "--soft-targets", 0.3) if is_long else ("--epochs", 0.7)
    assert train_heads(*arguments, *more) == 0
    lines = [line for line in read_metrics(out / "metrics.jsonl") if "evaluation" in line]
    assert lines[-1]["evaluation"]["score"] > (1.02 if is_long else 1)
    lm = jaxinfer.load(out / "model")
    base = jaxinfer.load(trained_folder)
    assert lm.fingerprint == fingerprint(lm.params) != base.fingerprint
    assert lm.fingerprint in (out / "model" / "README.md").read_text()
    strategy = f"medusa:heads={out / 'heads'}"
    lm.resolve(strategy)
    if is_long:
        prompts = [line[:9] for line in fable(2, seed=77).splitlines()]
        plain, drafted = (lm.generate(prompts, max_new_tokens=24, strategy=one) for one in ("autoregressive", strategy))
        assert [one.tokens for one in plain] == [one.tokens for one in drafted]
    with pytest.raises(jaxinfer.errors.InvalidCheckpoint, match=f"is for the weights {lm.fingerprint}"):
        base.resolve(strategy)


@pytest.mark.slow
def test_mistakes_end_in_one_line(trained_folder, texts, tiny_llama_folder, tmp_path, capsys):
    same = ("--data", texts, "--out", tmp_path / "run", "--model", trained_folder)
    heads = {"blocks": ({"kernel": np.zeros((48, 48), np.float32), "bias": np.zeros(48, np.float32)},)}
    write_heads(tmp_path / "others", {"heads": (heads,)}, 258, base_fingerprint="0123456789abcdef")
    cases = {
        "two-stage goes on with heads": (*same, "--joint", "two-stage"),
        "--quantize freezes the base": (
            *(*same, "--joint", "self-distillation", "--quantize", "nf4", "--lora-rank", 0),
        ),
        "--quantize belongs to --joint": (*same, "--quantize", "nf4"),
        "--window belongs to training on a frozen base": (*same, "--joint", "self-distillation", "--window", 8),
        "is for the weights 0123456789abcdef": (*same, "--joint", "two-stage", "--heads-from", tmp_path / "others"),
        "'1e30' is not": (*same, "--seed", "1e30"),
        "invalid choice: 'float31'": (*same, "--dtype", "float31"),
    }
    for complaint, arguments in cases.items():
        assert train_heads(*arguments) == 2, complaint
        errors = capsys.readouterr().err
        assert complaint in errors
        assert errors.count("\n") == 1
