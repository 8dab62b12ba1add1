"""The published configurations of gpt-oss are read, and what contradicts itself is refused."""

from typing import Any

import pytest

from jaxinfer.checkpoint.published.open import read_scheme
from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import Experts, LayerKind, Rope, RopeScaling
from jaxinfer.models.families.registry import decoder_config, family_of
from jaxinfer.models.layers import cycles

_SCALING = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
    "truncate": False,
}  # fmt: skip
_METHOD = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "quantization_config": _METHOD, "rms_norm_eps": 1e-05, "rope_scaling": _SCALING,
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
GPT_OSS_120B: dict[str, Any] = {
    **GPT_OSS_20B, "layer_types": ["sliding_attention", "full_attention"] * 18, "num_hidden_layers": 36,
    "num_local_experts": 128,
}  # fmt: skip
PLAIN = {key: value for key, value in GPT_OSS_20B.items() if key != "quantization_config"}
ROPE = Rope(150000.0, 64, RopeScaling("yarn", 32.0, 4096, truncate=False))


@pytest.mark.parametrize(("config", "layers", "count"), [(GPT_OSS_20B, 24, 32), (GPT_OSS_120B, 36, 128)])
def test_published_configurations_are_read(config, layers, count):
    plain, scheme = read_scheme(config)
    assert scheme is not None
    assert scheme.name == "mxfp4"
    decoder = decoder_config(plain)
    chosen = {"scoring": "chosen_softmax", "bias": True, "limit": 7.0}
    assert decoder.experts == Experts(count, 4, 2880, **chosen)
    assert decoder.layer_pattern == (LayerKind(ROPE, 128), LayerKind(ROPE))
    assert (decoder.num_layers, decoder.num_heads, decoder.num_kv_heads, decoder.head_dim) == (layers, 64, 8, 64)
    assert (decoder.qkv_bias, decoder.output_bias, decoder.attention_sinks) == (True, True, True)
    assert (decoder.activation, decoder.norm_eps, decoder.longest_text) == ("quick_gelu", 1e-5, 131072)
    assert (decoder.bos_token_id, decoder.eos_token_ids) == (None, (200002,))
    assert [tuple(cycle) for cycle in cycles(decoder)] == [(0, layers, 2)]
    assert "attention.sink_logits" in family_of(plain).tensor_names(decoder).block


def test_keys_that_are_absent_are_those_of_the_published_models():
    left_out = ("layer_types", "rope_scaling", "rope_theta", "sliding_window", "swiglu_limit", "attention_bias")
    few = {key: value for key, value in PLAIN.items() if key not in left_out}
    assert decoder_config(few) == decoder_config(PLAIN)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5"),
        ({"swiglu_limit": 0.0}, "swiglu_limit = 0.0"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok = 33"),
        ({"sliding_window": None}, "sliding_window = None"),
        ({"no_such_sink": 1}, "no_such_sink"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(changes, named):
    with pytest.raises(UnsupportedModel) as error:
        decoder_config({**PLAIN, **changes})
    assert named in str(error.value)
    assert "\n" not in str(error.value)
