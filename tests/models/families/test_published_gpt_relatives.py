"""The published Falcon, StarCoder, GPT-J, CodeGen, GPT-Neo, Minitron, Apertus and EXAONE 3.5 files are read."""

from typing import Any

import numpy as np
import pytest

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.models.families.family import Part
from jaxinfer.models.families.registry import decoder_config, family_of

_GPT: dict[str, Any] = {
    "activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "n_inner": None, "resid_pdrop": 0.0, "scale_attn_weights": True,
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "use_cache": True,
}  # fmt: skip
FALCON_7B = {
    "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"}, "bias": False,
    "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "hidden_size": 4544, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "falcon", "multi_query": True, "new_decoder_architecture": False,
    "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 65024,
}  # fmt: skip
FALCON_40B = {
    **FALCON_7B, "hidden_size": 8192, "new_decoder_architecture": True, "num_attention_heads": 128,
    "num_hidden_layers": 60, "num_kv_heads": 8,
}  # fmt: skip
FALCON_11B = {
    **FALCON_40B, "activation": "gelu", "ff_factor": 4, "ffn_hidden_size": 16384, "hidden_size": 4096,
    "max_position_embeddings": 8192, "num_attention_heads": 32, "num_ln_in_parallel_attn": 1, "rope_scaling": None,
    "rope_theta": 500042.0,
}  # fmt: skip
STARCODER = {
    **_GPT, "activation_function": "gelu", "architectures": ["GPTBigCodeForCausalLM"], "bos_token_id": 0,
    "attention_softmax_in_fp32": True, "eos_token_id": 0, "inference_runner": 0, "max_batch_size": None,
    "max_sequence_length": None, "model_type": "gpt_bigcode", "multi_query": True, "n_embd": 6144, "n_head": 48,
    "n_inner": 24576, "n_layer": 40, "n_positions": 8192, "pad_key_length": True, "pre_allocate_kv_cache": False,
    "scale_attention_softmax_in_fp32": True, "validate_runner_input": True, "vocab_size": 49152,
}  # fmt: skip
GPT_J_6B = {
    **_GPT, "architectures": ["GPTJForCausalLM"], "bos_token_id": 50256, "eos_token_id": 50256,
    "gradient_checkpointing": False, "model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28,
    "n_positions": 2048, "rotary": True, "rotary_dim": 64, "tie_word_embeddings": False,
    "tokenizer_class": "GPT2Tokenizer", "vocab_size": 50400,
}  # fmt: skip
CODEGEN_350M = {
    **_GPT, "architectures": ["CodeGenForCausalLM"], "bos_token_id": 1, "eos_token_id": 50256, "model_type": "codegen",
    "n_ctx": 2048, "n_embd": 1024, "n_head": 16, "n_layer": 20, "n_positions": 2048, "rotary_dim": 32,
    "tokenizer_class": "GPT2Tokenizer", "vocab_size": 51200,
}  # fmt: skip
GPT_NEO_13B = {
    "activation_function": "gelu_new", "architectures": ["GPTNeoForCausalLM"], "attention_dropout": 0,
    "attention_layers": ["global", "local"] * 12, "attention_types": [[["global", "local"], 12]],
    "bos_token_id": 50256, "embed_dropout": 0, "eos_token_id": 50256, "gradient_checkpointing": False,
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": None, "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 2048, "model_type": "gpt_neo", "num_heads": 16, "num_layers": 24, "resid_dropout": 0,
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "use_cache": True, "vocab_size": 50257, "window_size": 256,
}  # fmt: skip
MINITRON_4B = {
    "architectures": ["NemotronForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2,
    "eos_token_id": 3, "head_dim": 128, "hidden_act": "relu2", "hidden_dropout": 0.0, "hidden_size": 3072,
    "initializer_range": 0.0134, "intermediate_size": 9216, "max_position_embeddings": 4096, "mlp_bias": False,
    "model_type": "nemotron", "norm_eps": 1e-05, "num_attention_heads": 24, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "rope_theta": 10000, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
APERTUS_8B = {
    "architectures": ["ApertusForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "xielu", "hidden_dropout": 0.0, "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 21504, "max_position_embeddings": 65536, "mlp_bias": False, "model_type": "apertus",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pad_token_id": 3,
    "post_norm": False, "qk_norm": True, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3", "type": "llama3",
    },
    "rope_theta": 12000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 131072,
}  # fmt: skip
EXAONE_35_24B = {
    "activation_function": "silu", "architectures": ["ExaoneForCausalLM"], "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_exaone.ExaoneConfig"}, "bos_token_id": 1, "embed_dropout": 0.0,
    "eos_token_id": 361, "head_dim": 80, "hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 7168,
    "layer_norm_epsilon": 1e-05, "max_position_embeddings": 32768, "model_type": "exaone", "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_layers": 30, "pad_token_id": 0,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 102400,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Falcon-7B": (FALCON_7B, {"num_kv_heads": 1, "head_dim": 64, "block": "parallel", "ffn_dim": 18176}),
    "Falcon-40B": (FALCON_40B, {"num_kv_heads": 8, "block": "parallel_norms", "tied_embeddings": True}),
    "Falcon-2-11B": (FALCON_11B, {"num_kv_heads": 8, "block": "parallel", "max_position": 8192}),
    "StarCoder": (STARCODER, {"num_kv_heads": 1, "head_dim": 128, "learned_positions": 0, "activation": "gelu"}),
    "GPT-J-6B": (GPT_J_6B, {"ffn_dim": 16384, "block": "parallel", "head_bias": True, "qkv_bias": False}),
    "CodeGen-350M": (CODEGEN_350M, {"num_layers": 20, "head_dim": 64, "layer_pattern": (LayerKind(Rope(1e4, 32)),)}),
    "GPT-Neo-1.3B": (GPT_NEO_13B, {"layer_pattern": (LayerKind(None), LayerKind(None, 256)), "attention_scale": 1.0}),
    "Minitron-4B": (MINITRON_4B, {"norm": "layer_plus_one", "activation": "relu_squared", "gated_mlp": False}),
    "Apertus-8B": (APERTUS_8B, {"activation": "xielu", "qk_norm": "head", "gated_mlp": False, "ffn_dim": 21504}),
    "EXAONE-3.5-2.4B": (EXAONE_35_24B, {"num_layers": 30, "head_dim": 80, "norm_eps": 1e-5, "tied_embeddings": True}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name):
    config, words = PUBLISHED[name]
    decoder = decoder_config(config)
    assert decoder.family == config["model_type"]
    assert {word: getattr(decoder, word) for word in words} == words


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (FALCON_7B, {"alibi": True}, "alibi = True"),
        (FALCON_7B, {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2"),
        (FALCON_40B, {"parallel_attn": False}, "parallel_attn = False"),
        (CODEGEN_350M, {"n_head": 2}, "n_head = 2"),
        (GPT_J_6B, {"rotary_dim": 63}, "rotary_dim = 63"),
        (GPT_J_6B, {"rotary_dim": 512}, "rotary_dim = 512"),
        (GPT_NEO_13B, {"attention_types": [[["global", "local"], 11]]}, "attention_layers = "),
        (GPT_NEO_13B, {"attention_types": [[["global", "diagonal"], 12]]}, "attention_layers = "),
        (GPT_NEO_13B, {"attention_types": 3}, "attention_layers = 3"),
        (STARCODER, {"num_key_value_heads": 4}, "num_key_value_heads = 4"),
        (APERTUS_8B, {"qk_norm": False}, "qk_norm = False"),
        (APERTUS_8B, {"hidden_act": "silu"}, "hidden_act = 'silu'"),
        ({"model_type": "mpt"}, {"attn_config": {"softmax_scale": 0.0}}, "softmax_scale = 0.0"),
        ({"model_type": "mpt"}, {"attn_config": {"softmax_scale": -1.0}}, "softmax_scale = -1.0"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(config, changes, named):
    with pytest.raises(UnsupportedModel) as error:
        decoder_config({**config, **changes})
    assert named in str(error.value)


def test_apertus_stretches_positions_where_its_file_does_not_say_how():
    stretched = decoder_config({**APERTUS_8B, "rope_scaling": None})
    assert stretched == decoder_config(APERTUS_8B)


def test_rows_of_groups_of_heads_are_found_and_their_neighbouring_lanes_taken_apart():
    """CodeGen's tensor has, four times, a quarter of the queries, of the values and of the keys."""
    config = decoder_config({**CODEGEN_350M, "n_embd": 64, "n_head": 8, "rotary_dim": 4})
    names = family_of(CODEGEN_350M).tensor_names(config)
    key = names.block["attention.key.kernel"]
    assert isinstance(key, Part)
    rows = key.rows(64).reshape(4, 2, 8)
    # Of each shard of 48 rows, keys are the last 16, two heads of 8 of which 4 turn.
    head = np.asarray([0, 2, 1, 3, 4, 5, 6, 7])
    np.testing.assert_array_equal(rows[3], [3 * 48 + 32 + head, 3 * 48 + 40 + head])


def test_falcons_groups_have_their_queries_before_a_key_and_a_value():
    config = decoder_config({**FALCON_40B, "hidden_size": 64, "num_attention_heads": 8, "num_kv_heads": 2})
    block = family_of(FALCON_40B).tensor_names(config).block
    parts = [block[f"attention.{name}.kernel"] for name in ("query", "key", "value")]
    assert all(isinstance(part, Part) and part.total == 96 for part in parts)
    query, key, value = (part.rows(count) for part, count in zip(parts, (64, 16, 16)) if isinstance(part, Part))
    np.testing.assert_array_equal(query, [*range(32), *range(48, 80)])
    np.testing.assert_array_equal(key, [*range(32, 40), *range(80, 88)])
    np.testing.assert_array_equal(value, [*range(40, 48), *range(88, 96)])
