"""The configurations of the published OLMo 2 and OLMo 3 models are read."""

import pytest

from jaxinfer.errors import InvalidOption, UnsupportedModel
from jaxinfer.models.config import Rope, RopeScaling
from jaxinfer.models.families.registry import decoder_config
from jaxinfer.models.padding import pad_config

OLMO_2_7B = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "float32", "transformers_version": "4.47.0",
    "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
OLMO_2_32B = {
    **OLMO_2_7B, "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "num_hidden_layers": 64,
    "num_key_value_heads": 8,
}  # fmt: skip
OLMO_3_7B = {
    **OLMO_2_7B, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "max_position_embeddings": 65536,
    "vocab_size": 100278, "sliding_window": 4096, "transformers_version": "4.57.0",
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
}  # fmt: skip


@pytest.mark.parametrize("config", [OLMO_2_7B, OLMO_2_32B, OLMO_3_7B])
def test_published_configurations_are_read(config):
    decoder = decoder_config(config)
    assert (decoder.family, decoder.head_dim) == (config["model_type"], 128)
    assert (decoder.num_kv_heads, decoder.ffn_dim) == (config["num_key_value_heads"], config["intermediate_size"])
    assert (decoder.block, decoder.qk_norm, decoder.norm, decoder.norm_eps) == ("output_norm", "all_heads", "rms", 1e-6)
    assert (decoder.tied_embeddings, decoder.qkv_bias, decoder.eos_token_ids) == (False, False, (100257,))


def test_olmo_3_stretches_the_layers_that_see_the_whole_text():
    decoder = decoder_config(OLMO_3_7B)
    local, whole = decoder.kinds
    assert (local.window, local.rope) == (4096, Rope(5e5, 128))
    assert whole.window is None
    assert whole.rope == Rope(5e5, 128, RopeScaling("yarn", 8.0, 8192, attention_factor=1.2079441541679836))
    assert len(decoder.layer_pattern) == 4
    absent = {key: value for key, value in OLMO_3_7B.items() if key != "layer_types"}
    assert decoder_config(absent) == decoder


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"clip_qkv": 0}, "clip_qkv = 0"), ({"hidden_act": "gelu"}, "hidden_act = 'gelu'")],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(changes, named):
    with pytest.raises(UnsupportedModel, match=named):
        decoder_config({**OLMO_2_7B, **changes})


def test_heads_that_are_normed_as_one_are_never_padded():
    """Zeros among them would change the mean."""
    decoder = decoder_config(OLMO_2_32B)
    assert pad_config(decoder, 8).num_heads == 40
    with pytest.raises(InvalidOption, match=r"mesh: 40 query and 8 key heads, .* over tensor=16"):
        pad_config(decoder, 16)
