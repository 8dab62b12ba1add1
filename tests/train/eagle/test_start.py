"""A new EAGLE-3 drafter begins as the target's last layer, where that has the drafter's form."""

from dataclasses import replace

import jax
import numpy as np

import jaxinfer
from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.models.drafters.eagle import draft_logits, init_eagle, shape_for
from jaxinfer.models.model import Model
from tests.toys import encode_bytes, fable
from train.eagle import start as module
from train.eagle.rows import RowSource
from train.eagle.start import is_alike, start
from train.eagle.unroll import read_features, unroll
from train.texts.packing import Example


def rows_of_two_texts():
    texts = [encode_bytes(fable(1, seed))[:20] for seed in range(4)]
    examples = [Example(tuple(text), tuple(at >= 6 for at in range(len(text)))) for text in texts]
    return RowSource(examples, None, np.arange(4), 44, 0).take(np.arange(2))


def test_without_its_random_part_it_computes_what_the_last_layer_does(tiny_llama_folder, monkeypatch):
    """From the hidden states before it to the target's own logits; the embedding of the next token is not heard."""
    monkeypatch.setattr(module, "_RANDOM_SHARE", 0.0)
    lm, batch = jaxinfer.load(tiny_llama_folder()), rows_of_two_texts()
    shape, model = shape_for(lm.config), Model(lm.programs.decoder, lm.params)
    shape = replace(shape, layers=(0, lm.config.num_layers - 1))
    fixed, learned = start(lm, shape, None, True, jax.random.key(0), batch)
    features = read_features(shape, model, batch)
    (hidden_BTD,) = unroll(shape, model, learned, features.read_BTF, batch, 1)
    found, wanted = draft_logits(shape, model, {**learned, **fixed}, hidden_BTD), model.logits(features.final_BTD)
    is_text_BT = batch.segments_BT > 0
    np.testing.assert_allclose(np.asarray(found)[is_text_BT], np.asarray(wanted)[is_text_BT], rtol=2e-3, atol=2e-3)


def test_of_a_layer_of_another_form_it_takes_nothing(tiny_llama_folder):
    lm = jaxinfer.load(tiny_llama_folder())
    shape = shape_for(lm.config)
    assert is_alike(lm.config, shape.config)
    (own,) = lm.config.kinds
    for other in (
        {"qk_norm": "head"},
        {"norm": "rms_plus_one"},
        {"block": "sandwich"},
        {"activation": "gelu"},
        {"final_norm": False},
        {"layer_pattern": (own, LayerKind(None))},
        {"layer_pattern": (LayerKind(Rope(own.rope.theta, own.rope.dim // 2)),)},
    ):
        assert not is_alike(replace(lm.config, **other), shape.config)
    assert is_alike(replace(lm.config, layer_pattern=(replace(own, window=16),)), shape.config)
    lm.config = replace(lm.config, qk_norm="head")
    _, learned = start(lm, shape, None, True, jax.random.key(3), None)
    drawn = init_eagle(shape, None, jax.random.key(3))
    assert jax.tree.all(jax.tree.map(np.array_equal, learned, drawn))
