"""A configuration key is read with its type and range, known to carry nothing, or refused by name."""

from typing import Any

import pytest

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.refused import WHAT
from jaxinfer.models.families.registry import FAMILIES, decoder_config, family_of
from tests.toys import rope_of

SMALL = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}

LLAMA_2_7B = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
LLAMA_31_8B = {
    **LLAMA_2_7B, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "intermediate_size": 14336, "max_position_embeddings": 131072,
    "mlp_bias": False, "num_key_value_heads": 8, "rope_theta": 500000.0, "vocab_size": 128256,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
}  # fmt: skip
LLAMA_32_1B = {**LLAMA_31_8B, "head_dim": 64, "hidden_size": 2048, "tie_word_embeddings": True}
SMOLLM2 = {
    **LLAMA_2_7B, "attention_bias": False, "attention_dropout": 0.0, "hidden_size": 576, "num_attention_heads": 9,
    "num_key_value_heads": 3, "is_llama_config": True, "rope_interleaved": False, "rope_theta": 100000,
    "mlp_bias": False, "pad_token_id": 2, "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
}  # fmt: skip
VICUNA = {**LLAMA_2_7B, "max_sequence_length": 2048, "pad_token_id": 0, "temperature": 0.9, "top_p": 0.6}
OPEN_LLAMA = {key: LLAMA_2_7B[key] for key in LLAMA_2_7B if key not in ("rope_scaling", "pretraining_tp")}
WIDTHS = {"vocab_size": 32000, "num_layers": 32, "model_dim": 4096, "num_heads": 32, "head_dim": 128}


def read(**changes: Any) -> DecoderConfig:
    return decoder_config({**SMALL, **changes})


@pytest.mark.parametrize("config", [LLAMA_2_7B, LLAMA_31_8B, LLAMA_32_1B, SMOLLM2, VICUNA, OPEN_LLAMA])
def test_published_configurations_are_read(config):
    decoder = decoder_config(config)
    assert decoder.model_dim == config["hidden_size"]
    assert decoder.num_kv_heads == config["num_key_value_heads"]
    assert decoder.norm_eps == config["rms_norm_eps"]
    assert rope_of(decoder).theta == config.get("rope_theta", 10000.0)
    assert decoder.max_position == config["max_position_embeddings"]
    assert (rope_of(decoder).scaling is None) == (config.get("rope_scaling") is None)


def test_end_tokens_are_a_tuple_whether_one_or_many():
    assert decoder_config(LLAMA_31_8B).eos_token_ids == (128001, 128008, 128009)
    assert decoder_config(LLAMA_2_7B).eos_token_ids == (2,)
    assert read(eos_token_id=None, bos_token_id=None).eos_token_ids == ()
    assert read(bos_token_id=None).bos_token_id is None


def test_absent_and_null_keys_take_the_defaults_of_transformers():
    decoder = read(head_dim=None, num_key_value_heads=None)
    assert (decoder.head_dim, decoder.num_kv_heads) == (16, 4)
    defaults = decoder_config({"model_type": "llama"})
    assert {name: getattr(defaults, name) for name in WIDTHS} == WIDTHS


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", True), ("vocab_size", 0), ("vocab_size", -5), ("vocab_size", 10.0), ("vocab_size", "10"),
        ("vocab_size", None), ("vocab_size", 2**40), ("rms_norm_eps", 0), ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")), ("rms_norm_eps", 1e39), ("rms_norm_eps", 10**400), ("rms_norm_eps", True),
        ("rms_norm_eps", "1e-5"), ("attention_bias", 1),
        ("attention_bias", "false"), ("tie_word_embeddings", None), ("hidden_act", "gelu"), ("hidden_act", 3),
        ("hidden_act", ["silu"]), ("bos_token_id", -1), ("bos_token_id", 1.0), ("eos_token_id", [1, None]),
        ("eos_token_id", "</s>"), ("rope_scaling", []), ("rope_scaling", "linear"), ("head_dim", 15),
        ("num_key_value_heads", 3),
    ],
)  # fmt: skip
def test_a_value_of_wrong_type_or_range_is_refused_by_name(key, value):
    with pytest.raises(UnsupportedModel, match=key) as error:
        read(**{key: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts", 8), ("num_local_experts", None), ("no_such_key", 1), ("logit_scale", 1.0),
        ("quantization_config", {"bits": 4}), ("sliding_window", 4096), ("rope_interleaved", True),
        ("add_cross_attention", True), ("is_encoder_decoder", True), ("partial_rotary_factor", 0.5),
        ("pruned_heads", {"0": [1]}), ("auto_map", {"AutoModel": "m.M"}), ("add_cross_attention", 0),
    ],
)  # fmt: skip
def test_an_unknown_key_or_an_unimplemented_value_is_refused_by_name(key, value):
    with pytest.raises(UnsupportedModel, match=rf"{key} = .* is not supported"):
        read(**{key: value})


def test_neutral_values_of_unimplemented_keys_are_accepted():
    neutral = {"quantization_config": None, "sliding_window": None, "add_cross_attention": False, "pruned_heads": {}}
    assert read(**neutral) == read()


def test_a_long_value_is_shortened_to_one_line():
    with pytest.raises(UnsupportedModel) as error:
        read(no_such_key="x\n" * 500)
    assert len(str(error.value)) < 300
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", ["frobnicator", None, 7, ["llama"]])
def test_an_unknown_family_is_refused_with_the_known_ones(model_type):
    with pytest.raises(UnsupportedModel, match="known: llama"):
        family_of({"model_type": model_type})


def test_an_unknown_architecture_of_a_known_family_is_refused():
    with pytest.raises(UnsupportedModel, match=r"LlamaForSequenceClassification.*known: LlamaForCausalLM"):
        read(architectures=["LlamaForSequenceClassification"])
    assert family_of({"model_type": "llama", "architectures": None}) is FAMILIES["llama"]


@pytest.mark.parity
def test_what_transformers_5_writes_is_read():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=99)
    for written in (theirs.to_dict(), theirs.to_diff_dict()):
        decoder = decoder_config(written)
        assert (decoder.vocab_size, decoder.head_dim, rope_of(decoder).theta) == (99, 16, 10000.0)
        assert rope_of(decoder).scaling is None


@pytest.mark.parametrize(
    ("model_type", "what"),
    [
        *((name, "a mixture of experts of another kind") for name in ("laguna", "jetmoe")),
        ("mamba", "a model with state-space or recurrent layers"),
        *((name, "a model with linear attention or convolutions") for name in ("qwen3_next", "qwen3_5_moe", "minimax")),
        ("deepseek_v32", "a model whose attention chooses among earlier tokens"),
        ("diffllama", "a decoder of another kind"),
        ("t5", "a model with an encoder and a decoder"),
        ("gemma3n", "a model of images, sound or video beside text"),
    ],
)
def test_models_of_other_kinds_are_refused_by_what_they_are(model_type, what):
    with pytest.raises(UnsupportedModel) as error:
        decoder_config({"model_type": model_type})
    assert str(error.value) == f"config.json: model_type '{model_type}' is {what}, which is not supported"
    assert FAMILIES.keys().isdisjoint(WHAT)


# A newer transformers has more, which fails nobody's ordinary run.
@pytest.mark.exhaustive
@pytest.mark.parity
def test_every_model_that_transformers_lets_write_is_known_by_name():
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    assert auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() <= FAMILIES.keys() | WHAT.keys()
