"""A file of Cohere Compass as transformers wrote it is read, and what transformers cannot compute is refused."""

from typing import Any

import pytest

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import LayerKind, Rope, RopeScaling
from jaxinfer.models.families.registry import decoder_config

# hf-tiny-v2/tiny-random-CohereCompassTextForSequenceClassification, but for the class.
TINY: dict[str, Any] = {
    "architectures": ["CohereCompassForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 2, "dtype": "float32", "eos_token_id": 255001, "head_dim": 8, "hidden_act": "silu",
    "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 64, "layer_norm_eps": 1e-05,
    "layer_types": ["full_attention", "full_attention"], "logit_scale": None, "max_position_embeddings": 200,
    "model_type": "cohere_compass_text", "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "pad_token_id": 0, "pooling": None,
    "rope_parameters": {
        "full_attention": {"mrope_section": [1, 1, 2], "rope_theta": 10000, "rope_type": "default"},
        "rope_theta": 10000.0, "rope_type": "default",
    },
    "sliding_window": 4096, "tie_word_embeddings": False, "transformers_version": "5.16.0.dev0", "use_cache": True,
    "vocab_size": 255035,
}  # fmt: skip
FULL = {"rope_type": "default", "rope_theta": 1e4}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}


def ropes(**kinds: Any) -> dict[str, Any]:
    return {"rope_parameters": kinds}


def test_the_file_is_read():
    decoder = decoder_config(TINY)
    assert (decoder.norm, decoder.block, decoder.logit_scale) == ("scaled_layer", "parallel", None)
    assert (decoder.num_kv_heads, decoder.qkv_bias, decoder.tied_embeddings) == (2, False, False)
    assert decoder.layer_pattern == (LayerKind(Rope(1e4, 8)),)


def test_each_kind_of_layer_has_its_own_positions_or_none():
    yarn = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 50}
    decoder = decoder_config({**TINY, **MIXED, **ropes(full_attention=None, sliding_attention=yarn)})
    assert decoder.layer_pattern == (LayerKind(Rope(5e4, 8, RopeScaling("yarn", 4.0, 50)), 4096), LayerKind(None))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_parameters": None}, "rope_parameters.full_attention is missing"),
        ({"rope_parameters": FULL}, "rope_parameters.full_attention is missing"),
        (ropes(full_attention={}), "rope_parameters.full_attention is missing or empty"),
        ({**MIXED, **ropes(full_attention=FULL)}, "rope_parameters.sliding_attention is missing"),
        (ropes(full_attention={"rope_type": "default"}), "rope_theta is missing"),
        (ropes(full_attention={**FULL, "partial_rotary_factor": 0.5}), "partial_rotary_factor = 0.5"),
        ({"rope_scaling": {"full_attention": FULL}}, "rope_scaling"),
        ({"rope_theta": 1e4}, "rope_theta = 10000.0"),
        (ropes(full_attention={**FULL, "mrope_base": 2.0}), "mrope_base = 2.0"),
        ({**MIXED, "sliding_window": None}, "sliding_window = None"),
        ({"logit_scale": 0}, "logit_scale = 0"),
    ],
)
def test_what_transformers_does_not_compute_is_refused_by_name(changes, named):
    with pytest.raises(UnsupportedModel) as error:
        decoder_config({**TINY, **changes})
    assert named in str(error.value)
