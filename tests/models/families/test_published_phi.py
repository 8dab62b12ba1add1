"""The configurations of the published Phi models are read, in the forms in which they were published."""

from typing import Any

import pytest

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.families.registry import decoder_config
from tests.toys import rope_of

SHORT, LONG = [1.0 + 0.05 * lane for lane in range(48)], [1.0 + 1.3 * lane for lane in range(48)]

PHI_2 = {
    "_name_or_path": "microsoft/phi-2", "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0,
    "bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256, "hidden_act": "gelu_new", "hidden_size": 2560,
    "initializer_range": 0.02, "intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
    "model_type": "phi", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "partial_rotary_factor": 0.4, "qk_layernorm": False, "resid_pdrop": 0.1, "rope_scaling": None,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.37.0",
    "use_cache": True, "vocab_size": 51200,
}  # fmt: skip
PHI_15 = {
    **PHI_2, "_name_or_path": "microsoft/phi-1_5", "bos_token_id": None, "eos_token_id": None, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 24, "num_key_value_heads": None, "partial_rotary_factor": 0.5,
    "resid_pdrop": 0.0,
}  # fmt: skip
PHI_3_MINI_4K = {
    "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
    "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.2", "use_cache": True, "vocab_size": 32064,
}  # fmt: skip
PHI_3_MINI_128K = {
    **PHI_3_MINI_4K, "max_position_embeddings": 131072, "sliding_window": 262144,
    "rope_scaling": {"long_factor": LONG, "short_factor": SHORT, "type": "su"},
}  # fmt: skip
PHI_35_MINI = {**PHI_3_MINI_128K, "rope_scaling": {"long_factor": LONG, "short_factor": SHORT, "type": "longrope"}}
PHI_3_MEDIUM_4K = {
    **PHI_3_MINI_4K, "hidden_size": 5120, "intermediate_size": 17920, "num_attention_heads": 40,
    "num_hidden_layers": 40, "num_key_value_heads": 10,
}  # fmt: skip
PHI_4 = {
    **PHI_3_MEDIUM_4K, "bos_token_id": 100257, "eos_token_id": 100265, "pad_token_id": 100349, "vocab_size": 100352,
    "max_position_embeddings": 16384, "original_max_position_embeddings": 16384, "rope_theta": 250000,
    "sliding_window": None, "transformers_version": "4.47.0",
}  # fmt: skip
PHI_4_MINI = {
    **PHI_35_MINI, "bos_token_id": 199999, "eos_token_id": 199999, "pad_token_id": 199999, "vocab_size": 200064,
    "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "num_attention_heads": 24,
    "num_key_value_heads": 8, "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
    "transformers_version": "4.45.0",
}  # fmt: skip


def read(config: dict[str, Any], **changes: Any) -> Any:
    return decoder_config({**config, **changes})


@pytest.mark.parametrize(
    ("config", "head_dim", "rotary_dim"),
    [(PHI_2, 80, 32), (PHI_15, 64, 32), (PHI_3_MINI_4K, 96, 96), (PHI_3_MINI_128K, 96, 96), (PHI_35_MINI, 96, 96),
     (PHI_3_MEDIUM_4K, 128, 128), (PHI_4, 128, 128), (PHI_4_MINI, 128, 96)],
)  # fmt: skip
def test_published_configurations_are_read(config, head_dim, rotary_dim):
    decoder = read(config)
    assert (decoder.model_dim, decoder.ffn_dim) == (config["hidden_size"], config["intermediate_size"])
    assert decoder.num_kv_heads == (config["num_key_value_heads"] or config["num_attention_heads"])
    assert (decoder.head_dim, rope_of(decoder).dim) == (head_dim, rotary_dim)
    assert rope_of(decoder).theta == config["rope_theta"]
    assert decoder.layer_pattern[0].window == config.get("sliding_window")
    assert decoder.tied_embeddings == config["tie_word_embeddings"]
    assert decoder.eos_token_ids == (() if config["eos_token_id"] is None else (config["eos_token_id"],))
    assert decoder.longest_text == config["max_position_embeddings"]


@pytest.mark.parametrize("config", [PHI_3_MINI_128K, PHI_35_MINI, PHI_4_MINI])
def test_long_models_keep_their_factors_and_both_lengths(config):
    scaling = rope_of(read(config)).scaling
    assert scaling is not None
    assert (scaling.kind, scaling.original_max_position, scaling.factor) == ("longrope", 4096, 32.0)
    assert (scaling.short_factors, scaling.long_factors) == (tuple(SHORT), tuple(LONG))


def test_the_original_length_is_that_of_transformers_where_the_file_has_none():
    config = {key: value for key, value in PHI_35_MINI.items() if key != "original_max_position_embeddings"}
    assert read(config) == read(PHI_35_MINI)


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (PHI_2, {"qk_layernorm": True}, "qk_layernorm = True"),
        (PHI_2, {"partial_rotary_factor": 0.41251}, "partial_rotary_factor"),
        (PHI_2, {"hidden_act": "mish"}, "hidden_act = 'mish'"),
        (PHI_2, {"num_key_value_heads": 5}, "num_key_value_heads = 5"),
        (PHI_2, {"sliding_window": 100}, "sliding_window = 100"),
        (PHI_4, {"num_key_value_heads": 7}, "num_key_value_heads = 7"),
        (PHI_4, {"attention_bias": True}, "attention_bias = True"),
        (PHI_4, {"lm_head_bias": True}, "lm_head_bias = True"),
        (PHI_4, {"full_attn_mod": 2}, "full_attn_mod = 2"),
        (PHI_4, {"sliding_window": 0}, "sliding_window = 0"),
        (PHI_4, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling = 'linear'"),
        (PHI_4, {"rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}}, "short_factor"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(config, changes, named):
    with pytest.raises(UnsupportedModel) as error:
        read(config, **changes)
    assert named in str(error.value)
    assert "\n" not in str(error.value)
