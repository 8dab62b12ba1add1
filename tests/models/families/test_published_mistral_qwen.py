"""The published configurations of Mistral, Qwen2, Qwen2.5 and Qwen3 are read, windows and all."""

from typing import Any

import pytest

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import DecoderConfig, LayerKind, Rope, RopeScaling
from jaxinfer.models.families.registry import decoder_config
from tests.toys import rope_of

MISTRAL_7B_V01 = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
MISTRAL_7B_V03 = {
    **MISTRAL_7B_V01, "attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None,
    "transformers_version": "4.42.0.dev0", "vocab_size": 32768,
}  # fmt: skip
MISTRAL_NEMO = {
    **MISTRAL_7B_V03, "head_dim": 128, "hidden_size": 5120, "max_position_embeddings": 128000,
    "num_hidden_layers": 40, "vocab_size": 131072,
}  # fmt: skip
QWEN2_7B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.37.2", "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
QWEN25_7B_INSTRUCT = {
    **QWEN2_7B, "eos_token_id": 151645, "max_position_embeddings": 32768, "transformers_version": "4.43.1",
}  # fmt: skip
QWEN25_05B = {
    **QWEN2_7B, "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
    "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
    "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
    "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
    "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_8B = {
    **QWEN3_06B, "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 36, "num_attention_heads": 32,
    "num_hidden_layers": 36, "tie_word_embeddings": False,
}  # fmt: skip
PUBLISHED = {
    "Mistral-7B-v0.1": MISTRAL_7B_V01, "Mistral-7B-v0.3": MISTRAL_7B_V03, "Mistral-Nemo": MISTRAL_NEMO,
    "Qwen2-7B": QWEN2_7B, "Qwen2.5-7B-Instruct": QWEN25_7B_INSTRUCT, "Qwen2.5-0.5B": QWEN25_05B,
    "Qwen3-0.6B": QWEN3_06B, "Qwen3-8B": QWEN3_8B,
}  # fmt: skip
QWENS = {
    "qwen2": {**QWEN25_05B, "num_hidden_layers": 6, "sliding_window": 512},
    "qwen3": {**QWEN3_06B, "num_hidden_layers": 6, "sliding_window": 512},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name):
    config = PUBLISHED[name]
    decoder = decoder_config(config)
    assert decoder.family == config["model_type"]
    assert (decoder.model_dim, decoder.num_kv_heads) == (config["hidden_size"], config["num_key_value_heads"])
    assert decoder.head_dim == (64 if name == "Qwen2.5-0.5B" else 128)
    assert rope_of(decoder) == Rope(float(config["rope_theta"]), decoder.head_dim)
    assert [kind.window for kind in decoder.layer_pattern] == [4096 if name == "Mistral-7B-v0.1" else None]
    assert (decoder.qkv_bias, decoder.output_bias) == ("Qwen2" in name, False)
    assert decoder.qk_norm == ("head" if "Qwen3" in name else None)
    assert decoder.tied_embeddings == config["tie_word_embeddings"]
    assert decoder.eos_token_ids == (config["eos_token_id"],)


def windows(config: DecoderConfig) -> list[int | None]:
    return [kind.window for kind in config.layers]


def read(model_type: str, **changes: Any) -> DecoderConfig:
    return decoder_config({**QWENS[model_type], **changes})


@pytest.mark.parametrize("model_type", QWENS)
def test_the_layers_after_the_first_ones_slide(model_type):
    """``max_window_layers`` counts the layers that see the whole text, whatever its name says."""
    assert windows(read(model_type)) == [None] * 6
    assert windows(read(model_type, use_sliding_window=True, max_window_layers=4)) == [None] * 4 + [512] * 2
    assert windows(read(model_type, use_sliding_window=True, max_window_layers=0)) == [512] * 6
    assert len(read(model_type, use_sliding_window=True, max_window_layers=0).layer_pattern) == 1
    assert windows(read(model_type, use_sliding_window=True, max_window_layers=28)) == [None] * 6
    assert windows(read(model_type, use_sliding_window=True, max_window_layers=0, sliding_window=None)) == [None] * 6


@pytest.mark.parametrize("model_type", QWENS)
def test_a_list_of_layers_goes_before_their_count(model_type):
    listed = ["sliding_attention", "full_attention", "full_attention"] * 2
    found = read(model_type, use_sliding_window=True, max_window_layers=0, layer_types=listed)
    rope = rope_of(found)
    assert found.layer_pattern == (LayerKind(rope, 512), LayerKind(rope), LayerKind(rope))
    assert read(model_type, layer_types=None) == read(model_type, layer_types=["full_attention"] * 6)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["full_attention"] * 5}, "layer_types = .* a list of 6 words"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types .* known words are full_attention"),
        ({"layer_types": [["full_attention"]] * 6}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 6}, "layer_types .* needs use_sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window = 0"),
        ({"sliding_window": "4096"}, "sliding_window = '4096'"),
        ({"max_window_layers": -1}, "max_window_layers = -1"),
        ({"max_window_layers": 2.0}, "max_window_layers = 2.0"),
        ({"use_sliding_window": 1}, "use_sliding_window = 1"),
        ({"use_mrope": True}, "use_mrope = True"),
        ({"num_experts": 8}, "num_experts = 8"),
    ],
)
@pytest.mark.parametrize("model_type", QWENS)
def test_windows_that_make_no_sense_are_refused_by_name(model_type, changes, named):
    with pytest.raises(UnsupportedModel, match=named) as error:
        read(model_type, **changes)
    assert "\n" not in str(error.value)


def test_keys_of_one_family_are_not_taken_for_those_of_another():
    for config, key in (
        (MISTRAL_7B_V01, "attention_bias"),
        (QWEN2_7B, "attention_bias"),
        (MISTRAL_7B_V01, "layer_types"),
    ):
        with pytest.raises(UnsupportedModel, match=f"{key} = True"):
            decoder_config({**config, key: True})


def test_absent_keys_take_the_defaults_of_transformers():
    mistral = decoder_config({"model_type": "mistral"})
    assert (mistral.num_kv_heads, mistral.head_dim, mistral.layer_pattern[0].window) == (8, 128, 4096)
    assert decoder_config({"model_type": "mistral", "num_key_value_heads": None}).num_kv_heads == 32
    qwen3 = decoder_config({"model_type": "qwen3", "hidden_size": 2048})
    assert (qwen3.head_dim, qwen3.vocab_size, qwen3.eos_token_ids) == (128, 151936, ())
    assert decoder_config({"model_type": "qwen2"}).layer_pattern[0].window is None


def test_a_yarn_recipe_lets_texts_reach_past_the_trained_length():
    """As the model cards of Qwen2.5 write it into ``config.json``, beside the length that it was trained on."""
    recipe = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    stretched = decoder_config({**QWEN25_7B_INSTRUCT, "rope_scaling": recipe})
    assert rope_of(stretched).scaling == RopeScaling("yarn", 4.0, 32768)
    assert (stretched.max_position, stretched.longest_text) == (32768, 131072)
    assert decoder_config(QWEN25_7B_INSTRUCT).longest_text == 32768
    already = decoder_config({**QWEN25_7B_INSTRUCT, "max_position_embeddings": 131072, "rope_scaling": recipe})
    assert already.longest_text == 131072
