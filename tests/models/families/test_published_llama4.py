"""The published configurations of Llama 4 are read, images and all, and what contradicts itself is refused."""

import re
from typing import Any

import numpy as np
import pytest

from jaxinfer.checkpoint.loaded import LoadedTensors
from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import Experts, LayerKind, Rope, RopeScaling, Sharpening
from jaxinfer.models.families.registry import decoder_config, family_of
from tests.toys import random_params

_TEXT = {
    "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0, "bos_token_id": 200000,
    "eos_token_id": [200001, 200007, 200008], "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "model_type": "llama4_text", "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48,
    "num_key_value_heads": 8, "output_router_logits": False, "pad_token_id": 200018, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 202048,
}  # fmt: skip
_SCALING = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
_IMAGES = {
    "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
    "image_token_index": 200092, "model_type": "llama4", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0.dev0", "vision_config": {"hidden_size": 1408},
}  # fmt: skip
SCOUT: dict[str, Any] = {
    **_TEXT, "attn_scale": 0.1, "attn_temperature_tuning": 4, "floor_scale": 8192, "interleave_moe_layer_step": 1,
    "max_position_embeddings": 262144, "moe_layers": list(range(48)), "no_rope_layers": [1, 1, 1, 0] * 12,
    "num_local_experts": 16, "rope_scaling": _SCALING, "use_qk_norm": True,
}  # fmt: skip
MAVERICK: dict[str, Any] = {
    **_TEXT, "interleave_moe_layer_step": 2, "max_position_embeddings": 1048576, "num_local_experts": 128,
    "rope_scaling": None, "use_qk_norm": False,
}  # fmt: skip
TINY: dict[str, Any] = {
    **SCOUT, "hidden_size": 16, "head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32,
    "intermediate_size": 12, "intermediate_size_mlp": 20, "num_hidden_layers": 1, "num_local_experts": 3,
    "moe_layers": [0], "no_rope_layers": [],
}  # fmt: skip


@pytest.mark.parametrize(("text", "scaling", "count"), [(SCOUT, True, 16), (MAVERICK, False, 128)])
def test_published_configurations_are_read(text, scaling, count):
    config = {**_IMAGES, "text_config": text}
    decoder = decoder_config(config)
    rope = Rope(5e5, 128, RopeScaling("llama3", 8.0, 8192) if scaling else None)
    chunked, growing = LayerKind(rope, 8192, chunked=True), LayerKind(None, sharpening=Sharpening(0.1, 8192))
    assert decoder.layer_pattern == (chunked, chunked, chunked, growing)
    assert decoder.experts is not None
    pattern = decoder.experts.layer_pattern
    assert decoder.experts == Experts(
        count, 1, 8192, 8192, scoring="chosen_sigmoid", scales_inputs=True, layer_pattern=pattern
    )
    assert decoder.sparse_layers == ((True,) * 48 if scaling else (False, True) * 24)
    assert (decoder.ffn_dim, decoder.qk_norm) == (16384, "rotated_heads" if scaling else None)
    assert (decoder.family, decoder.bos_token_id, decoder.eos_token_ids) == ("llama4", 200000, (200001, 200007, 200008))


def test_tensors_of_images_are_left_out_by_name():
    config = {**_IMAGES, "text_config": TINY}
    names = family_of(config).tensor_names(decoder_config(config))
    assert names.top["embed.embedding"] == "language_model.model.embed_tokens.weight"
    left_out = ("vision_model.class_embedding", "multi_modal_projector.linear_1.weight")
    assert all(any(re.fullmatch(pattern, name) for pattern in names.ignored) for name in left_out)
    assert not any(re.fullmatch(pattern, "vision_tower.weight") for pattern in names.ignored)


def test_experts_stand_side_by_side_in_the_columns_of_a_tensor():
    decoder = decoder_config(TINY)
    params = random_params(decoder)
    (block,) = params["blocks"].values() if "layer_0" in params["blocks"] else (params["blocks"],)
    experts = {name: np.asarray(stack).reshape(3, *stack.shape[-2:]) for name, stack in block["mlp"]["experts"].items()}
    tensors = LoadedTensors(params, family_of(TINY).tensor_names(decoder), None)
    joined = tensors.read("model.layers.0.feed_forward.experts.gate_up_proj", np.dtype(np.float32))
    expected = np.concatenate([experts["gate"], experts["up"]], axis=1).swapaxes(1, 2)
    np.testing.assert_array_equal(joined, expected)
    down = tensors.read("model.layers.0.feed_forward.experts.down_proj", np.dtype(np.float32))
    np.testing.assert_array_equal(down, experts["down"].swapaxes(1, 2))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["chunked_attention"] * 48, "attention_chunk_size": None}, "attention_chunk_size = None"),
        ({"layer_types": ["sliding_attention"] * 48}, "known words are full_attention, chunked_attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "it would undo the attention factor"),
        ({"moe_layers": [48]}, "a list of numbers from 0 to 47"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok = 17"),
        ({"attention_chunk_size": 0}, "attention_chunk_size = 0"),
        ({"no_such_chunk": 1}, "no_such_chunk"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(changes, named):
    with pytest.raises(UnsupportedModel) as error:
        decoder_config({**SCOUT, **changes})
    assert named in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(UnsupportedModel, match="text_config is missing"):
        decoder_config(_IMAGES)
