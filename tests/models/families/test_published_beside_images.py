"""Published configurations with a vision model give the text decoder, and its tensors under both spellings."""

from typing import Any

import pytest

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.families.family import Part
from jaxinfer.models.families.registry import decoder_config, family_of
from tests.toys import rope_of

QWEN25_VL_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
    "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu", "hidden_size": 3584,
    "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28,
    "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_act": "silu", "hidden_size": 1280},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 152064,
}  # fmt: skip
MISTRAL_SMALL_31: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
    "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "initializer_range": 0.02, "intermediate_size": 32768, "max_position_embeddings": 131072,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None, "use_cache": True,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16", "vision_config": {"model_type": "pixtral"}, "vision_feature_layer": -1,
}  # fmt: skip
LLAVA_15 = {
    **MISTRAL_SMALL_31, "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
    "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
}  # fmt: skip


def test_qwen_vl_without_images_has_the_positions_of_text():
    decoder = decoder_config(QWEN25_VL_7B)
    assert (decoder.family, decoder.qkv_bias, decoder.num_kv_heads, decoder.eos_token_ids) == (
        "qwen2_5_vl", True, 4, (151645,),
    )  # fmt: skip
    assert (rope_of(decoder).theta, rope_of(decoder).scaling) == (1e6, None)


def test_mistral_small_is_what_its_text_section_says():
    decoder = decoder_config(MISTRAL_SMALL_31)
    assert (decoder.family, decoder.head_dim, decoder.tied_embeddings) == ("mistral3", 128, False)
    assert decoder_config({**MISTRAL_SMALL_31, "tie_word_embeddings": True}).tied_embeddings
    assert decoder_config(LLAVA_15).model_dim == 4096


@pytest.mark.parametrize(
    ("prefix", "head"),
    [("language_model.model.", "language_model.lm_head.weight"), ("model.language_model.", "lm_head.weight")],
)
def test_both_spellings_of_names_are_known(prefix, head):
    names = (
        family_of(MISTRAL_SMALL_31).tensor_names(decoder_config(MISTRAL_SMALL_31)).spelled_in([f"{prefix}norm.weight"])
    )
    assert (names.top["embed.embedding"], names.top["head.kernel"]) == (f"{prefix}embed_tokens.weight", head)


def test_a_notice_names_what_is_left_out_where_it_is_there():
    names = family_of(QWEN25_VL_7B).tensor_names(decoder_config(QWEN25_VL_7B))
    assert "vision model is left out" in str(names.notice_for(["model.norm.weight", "visual.patch_embed.proj.weight"]))
    assert names.notice_for(["model.norm.weight"]) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"text_config": {"model_type": "mamba"}}, "text_config.model_type = 'mamba'"),
        ({"text_config": {}}, "text_config is missing or empty"),
        ({"no_such_key": 1}, "no_such_key = 1"),
        ({"text_config": {"model_type": "mistral", "no_such_key": 1}}, "no_such_key = 1"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes, named):
    with pytest.raises(UnsupportedModel) as error:
        decoder_config({**MISTRAL_SMALL_31, **changes})
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("is_published", "wide", "narrow"), [(True, (6, 32, 48), (6, 24, 32)), (False, (6, 48, 32), (6, 32, 24))]
)
def test_experts_of_qwen3_vl_are_found_by_their_shapes(is_published, wide, narrow):
    """Published files have them transposed, by the names that transformers gives those that it saves."""
    text = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "vocab_size": 40,
    }  # fmt: skip
    config = {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": {}}
    names = family_of(config).tensor_names(decoder_config(config))
    inside = "model.language_model.layers.0.mlp.experts."
    shapes = {f"{inside}gate_up_proj": list(wide), f"{inside}down_proj": list(narrow)}
    found = names.spelled_in(shapes).block["mlp.experts.gate"]
    assert isinstance(found, Part)
    assert (found.transposed, found.shape) == (is_published, wide)
