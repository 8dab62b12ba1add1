"""An EAGLE drafter learns the target's distribution, on its own outputs as it would draft, by the loss as defined."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxinfer
from jaxinfer.models.drafters.eagle import draft_logits
from jaxinfer.models.drafters.heads import vocabulary_rows
from jaxinfer.models.model import Model
from tests.cache.test_features import expected
from tests.decoding.fitted_eagle import random_eagle
from tests.decoding.published_eagle import PublishedDrafter
from tests.toys import encode_bytes, fable
from train.eagle.loss import EagleLoss
from train.eagle.rows import RowSource
from train.eagle.unroll import ahead, is_asked, read_features, unroll
from train.features.hidden_states import cache_hidden_states
from train.loop.step import StepSettings, TrainState, train_step
from train.texts.packing import Example, split_batch

IDS = tuple(range(40, 130))
STEPS = 3
LAYERS = (0, 1, 2)


@pytest.fixture(scope="module")
def lm(tiny_llama_folder):
    return jaxinfer.load(tiny_llama_folder())


@pytest.fixture(scope="module")
def examples():
    texts = [encode_bytes(fable(1, seed))[:20] for seed in range(4)]
    return [Example(tuple(text), tuple(at >= 6 for at in range(len(text)))) for text in texts]


@pytest.fixture(scope="module")
def sources(lm, examples, tmp_path_factory):
    """Rows of two texts each, with features that are kept and without."""
    states = cache_hidden_states(lm, examples, tmp_path_factory.mktemp("states") / "cache", layers=LAYERS)
    return [RowSource(examples, each, np.arange(4), 44, 0) for each in (states, None)]


@pytest.fixture(scope="module")
def drafter(lm):
    """A drafter's shape and parameters by this library's names, and by those of published files."""
    shape, params = random_eagle(lm, ids=IDS)
    params["attention"]["output"]["kernel"] *= 4  # what places attend to is to matter
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    tensors = {f"self_attn.{theirs}.weight": params["attention"][ours]["kernel"] for ours, theirs in names.items()}
    tensors |= {f"mlp.{name}_proj.weight": params["mlp"][name]["kernel"] for name in ("gate", "up", "down")}
    tensors |= {
        "fc.weight": params["fc"]["kernel"],
        "hidden_norm.weight": params["feature_norm"]["scale"],
        "input_layernorm.weight": params["embedding_norm"]["scale"],
        "post_attention_layernorm.weight": params["mlp_norm"]["scale"],
        "norm.weight": params["final_norm"]["scale"],
    }
    return shape, params, {name: np.asarray(array, np.float64) for name, array in tensors.items()}


def parts(lm, params):
    fixed = {"ids": params["ids"]}
    return {name: value for name, value in params.items() if name != "ids"}, {"params": lm.params, "drafter": fixed}


@pytest.mark.parametrize("kept", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_the_loss_is_that_of_drafting_along_each_text(lm, examples, sources, drafter, kept):
    """Step i after token t drafts along the text's next tokens, from features up to t: by the published module."""
    shape, params, tensors = drafter
    learned, frozen = parts(lm, params)
    source = sources[0 if kept else 1]
    assert source.count == 2
    tally = jax.jit(EagleLoss(lm.programs.decoder, shape, STEPS))(learned, frozen, source.take(np.arange(2)))
    table_VD, ids = np.asarray(lm.params["embed"]["embedding"], np.float64), np.asarray(IDS)
    total, counts, hits = 0.0, np.zeros(STEPS), np.zeros(STEPS)
    texts = [list(tokens) for tokens, _ in examples]
    features_BTF, logits_BTV = expected(lm, texts, LAYERS).astype(np.float64), np.asarray(lm.logits(texts), np.float64)
    for (tokens, mask), features_TF, logits_TV in zip(examples, features_BTF, logits_BTV):
        for last in range(len(tokens) - 2):
            module = PublishedDrafter(tensors, table_VD, features_TF, tokens[: last + 2])
            for step in range(min(STEPS, len(tokens) - last - 2)):
                if not mask[last + 2 + step]:
                    continue
                counts[step] += 1
                target_V = logits_TV[last + 1 + step]
                if target_V.argmax() not in IDS:
                    continue
                output_D = module.output_after(tokens[last + 2 : last + 2 + step])
                logits_U = np.asarray(params["output"]["kernel"], np.float64) @ output_D
                p_U = np.exp(target_V[ids] - target_V[ids].max())
                log_q_U = logits_U - logits_U.max() - np.log(np.exp(logits_U - logits_U.max()).sum())
                total -= 0.8**step * (p_U / p_U.sum()) @ log_q_U
                hits[step] += logits_U.argmax() == target_V[ids].argmax()
    assert float(tally.num_tokens) == counts[0]
    # Features are kept in float16.
    np.testing.assert_allclose(float(tally.loss), total, rtol=3e-3 if kept else 2e-5)
    for step in range(STEPS):
        assert float(tally.others[f"step_{step}_top1"][1]) == counts[step]
        assert abs(float(tally.others[f"step_{step}_top1"][0]) - hits[step]) <= 1


def plain_loss(decoder, shape, params, frozen, batch):
    """The loss with the logits of all places at once, by the formula of `train.eagle.loss`."""
    model, drafter = Model(decoder, frozen["params"]), {**params, **frozen["drafter"]}
    features = read_features(shape, model, batch)
    teacher_BTV, ids = model.logits(features.final_BTD), drafter.get("ids", jnp.arange(model.config.vocab_size))
    p_BTU, is_known_BT = jax.nn.softmax(teacher_BTV[..., ids]), jnp.isin(jnp.argmax(teacher_BTV, axis=-1), ids)
    total = 0.0
    for step, hidden_BTD in enumerate(unroll(shape, model, drafter, features.read_BTF, batch, STEPS)):
        log_q_BTU = jax.nn.log_softmax(draft_logits(shape, model, drafter, hidden_BTD))
        losses_BT = -jnp.sum(ahead(p_BTU, step + 1) * log_q_BTU, axis=-1)
        total += 0.8**step * jnp.sum(jnp.where(is_asked(batch, step) & ahead(is_known_BT, step + 1), losses_BT, 0))
    return total


@pytest.mark.parametrize(
    ("has_ids", "shares"),
    [(True, False), pytest.param(True, True, marks=pytest.mark.exhaustive), (False, True)],
)
def test_gradients_are_those_of_all_places_at_once(lm, sources, drafter, monkeypatch, has_ids, shares):
    """Of a drafter that learns its output matrix, and of one that reads the model's; in pieces of six places."""
    shape, params, _ = drafter
    monkeypatch.setattr(EagleLoss, "_at_once", lambda *_: 6)
    learned, frozen = parts(lm, params)
    if shares:
        del learned["output"]
        output = vocabulary_rows(lm.config, lm.params, params["ids"])
        frozen["drafter"] = {"ids": params["ids"], "output": output} if has_ids else {}
    batch = sources[1].take(np.arange(2))
    loss = EagleLoss(lm.programs.decoder, shape, STEPS)
    found = jax.jit(jax.grad(lambda learned: loss(learned, frozen, batch).loss))(learned)
    wanted = jax.jit(jax.grad(lambda learned: plain_loss(loss.decoder, shape, learned, frozen, batch)))(learned)
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4 * np.abs(other).max())
        assert np.any(other)


@pytest.mark.exhaustive
def test_a_step_is_the_same_in_microbatches_and_changes_the_drafter_alone(lm, sources, drafter):
    shape, params, _ = drafter
    learned, frozen = parts(lm, params)
    optimizer = optax.sgd(0.1)
    batch = sources[0].take(np.arange(2))
    results = []
    for parts_of in (1, 2):
        step = partial(train_step, EagleLoss(lm.programs.decoder, shape, 2), optimizer, StepSettings(parts_of))
        state = TrainState(jnp.int32(0), learned, optimizer.init(learned))
        state, metrics = jax.jit(step)(state, frozen, split_batch(batch, parts_of))
        results.append((state.params, metrics.loss))
    for one, other in zip(*map(jax.tree.leaves, results)):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-5)
    moved = jax.tree.map(lambda one, other: bool(np.any(one != other)), learned, results[0][0])
    assert all(jax.tree.leaves(moved))
