"""GGUF files of models with experts hold the parameters that the Hugging Face folder does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.checkpoint.gguf.file import open_gguf
from jaxinfer.checkpoint.loaded import LoadedTensors
from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.families.registry import decoder_config, family_of
from jaxinfer.ops.few_bits.formats import GGUF_FORMATS
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from tests.checkpoint.gguf.files import permute
from tests.toys import random_params

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS = {**SIZES, "intermediate_size": 32, "num_local_experts": 4, "head_dim": 8, "sliding_window": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LATENT = {
    **SIZES, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10, "n_routed_experts": 4, "moe_intermediate_size": 16, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "n_group": 2, "topk_group": 1,
}  # fmt: skip
# A row of the cache, and the widths of heads apart.
LATENT_KEYS = {
    "attention.head_count_kv": 1, "attention.kv_lora_rank": 16, "attention.key_length": 24,
    "attention.value_length": 16, "attention.key_length_mla": 20, "attention.value_length_mla": 10,
    "rope.dimension_count": 8, "expert_feed_forward_length": 16, "expert_shared_count": 2,
    "leading_dense_block_count": 1, "expert_weights_scale": 1.5, "expert_group_count": 2, "expert_group_used_count": 1,
}  # fmt: skip
FACTORS = {"attention_multiplier": 0.25, "residual_multiplier": 0.5}
VALUE_TYPES = {
    int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING,
    bool: gguf.GGUFValueType.BOOL,
}  # fmt: skip
MIXTRAL = {**SIZES, "model_type": "mixtral", "num_local_experts": 4, "rope_theta": 10000.0}
# llama.cpp's name of the architecture, the folder's configuration, and the file's keys beside the common ones.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("llama", MIXTRAL, {}),
    "qwen2_moe": (
        "qwen2moe",
        {**SIZES, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 40},
        {"expert_feed_forward_length": 16, "expert_shared_feed_forward_length": 40},
    ),
    "qwen3_moe": (
        "qwen3moe",
        {**SIZES, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 12, "norm_topk_prob": True},
        {"expert_feed_forward_length": 16, "attention.key_length": 12, "attention.value_length": 12},
    ),
    "olmoe": ("olmoe", {**SIZES, "num_experts": 4}, {}),
    "granitemoe": (
        "granitemoe",
        {**SIZES, **FACTORS, "num_local_experts": 4},
        {"attention.scale": 0.25, "residual_scale": 0.5},
    ),
    "granitemoeshared": (
        "granitemoe",
        {**SIZES, **FACTORS, "num_local_experts": 4, "shared_intermediate_size": 40},
        {"attention.scale": 0.25, "residual_scale": 0.5, "expert_shared_feed_forward_length": 40},
    ),
    "gpt_oss": (
        "gpt-oss",
        {**GPT_OSS, "rope_theta": 10000.0, "rope_scaling": {**YARN, "truncate": False}},
        {
            "feed_forward_length": 32, "expert_feed_forward_length": 32, "attention.sliding_window": 16,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
        },
    ),
    "deepseek_v2": (
        "deepseek2",
        {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
        {**LATENT_KEYS, "expert_gating_func": 1},
    ),
    "deepseek_v3": (
        "deepseek2",
        {
            **LATENT, "q_lora_rank": 20, "topk_method": "noaux_tc", "norm_topk_prob": True, "rope_theta": 10000.0,
            "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        {
            **LATENT_KEYS, "attention.q_lora_rank": 20, "expert_gating_func": 2, "expert_weights_norm": True,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_log_multiplier": 0.0707,
        },
    ),
}  # fmt: skip
# Where the names of GGUF files stand among those of a family.
IN_GGUF = {"deepseek_v2": 0, "deepseek_v3": 0, "deepseek_v2 as one": 1}


def write(
    path: Path, name: str, changes: dict[str, Any] | None = None, kind: str | None = None
) -> tuple[Path, Any, Any]:
    """Write a random model, experts in blocks of a kind; return the path, its configuration and its parameters."""
    model_type, _, _ = name.partition(" ")
    architecture, described, own = CASES[model_type]
    described = {**described, "model_type": model_type}
    family = family_of(described)
    config = decoder_config(described)
    params = jax.tree.map(np.asarray, random_params(config, seed=2))
    names = family.tensor_names(config)
    in_gguf = names.others[IN_GGUF.get(name, -1)]
    tensors = LoadedTensors(params, replace(names, block={**names.block, **in_gguf}), None)
    writer = gguf.GGUFWriter(path, architecture)
    keys = {
        "block_count": 2, "context_length": 128, "embedding_length": 32, "feed_forward_length": 24,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0, "vocab_size": 40, "expert_count": 4, "expert_used_count": 2, **own,
        **(changes or {}),
    }  # fmt: skip
    for key, value in keys.items():
        if value is not None:
            writer.add_key_value(f"{architecture}.{key}", value, VALUE_TYPES[type(value)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    number = next(key for key, word in gguf.MODEL_ARCH_NAMES.items() if word == architecture)
    table, known = gguf.get_tensor_name_map(number, 2), {gguf.TENSOR_NAMES[each] for each in gguf.MODEL_TENSORS[number]}
    for hf_name in tensors.shapes():
        values = tensors.read(hf_name, np.dtype(np.float32))
        if architecture in ("llama", "granitemoe") and ("q_proj" in hf_name or "k_proj" in hf_name):
            values = permute(values, 4 if "q_proj" in hf_name else 2)
        # The converter makes these of a fused tensor.
        renamed = table.get_name(hf_name.replace("shared_mlp", "mlp.shared_expert"), try_suffixes=(".weight", ".bias"))
        assert renamed is not None, hf_name
        assert renamed.rpartition(".")[0].replace("blk.0", "blk.{bid}").replace("blk.1", "blk.{bid}") in known
        if kind is not None and "_exps.weight" in renamed and values.shape[-1] % 32 == 0:
            stored = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(renamed, gguf.quants.quantize(values, stored), raw_dtype=stored)
        else:
            writer.add_tensor(renamed, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, config, params


WIDE = ("deepseek_v2", "deepseek_v2 as one")


@pytest.mark.parametrize(
    "name",
    [*(name for name in CASES if name not in WIDE), *(pytest.param(name, marks=pytest.mark.slow) for name in WIDE)],
)
def test_parameters_and_configuration_are_those_of_the_folder(tmp_path, name):
    path, config, params = write(tmp_path / "model.gguf", name)
    lm = jaxinfer.load(path, scan_layers=False)
    assert lm.config == config
    assert jax.tree.all(jax.tree.map(lambda one, other: bool((np.asarray(one) == other).all()), lm.params, params))


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("mixtral", {"expert_used_count": 5}, "num_experts_per_tok = 5"),
        ("mixtral", {"expert_gating_func": 2}, "expert_gating_func = 2"),
        ("gpt_oss", {"expert_gating_func": 1}, "expert_gating_func = 1"),
        ("deepseek_v3", {"expert_gating_func": 4}, "expert_gating_func = 4"),
        ("deepseek_v3", {"attention.key_length": 20}, "attention.key_length = 20"),
        ("deepseek_v2", {"attention.head_count_kv": 2}, "attention.head_count_kv = 2"),
        ("deepseek_v2", {"rope.dimension_count": 20}, "attention.key_length_mla = 20"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, name, changes, named):
    path, *_ = write(tmp_path / "model.gguf", name, changes)
    with pytest.raises(UnsupportedModel, match=named):
        decoder_config(open_gguf(path).config)


def test_older_files_have_the_widths_of_all_heads(tmp_path):
    """And a tensor from which keys and values are made."""
    older = {"attention.key_length": 20, "attention.value_length": 10, "attention.head_count_kv": 4}
    older |= dict.fromkeys(("attention.key_length_mla", "attention.value_length_mla"))
    path, config, _ = write(tmp_path / "model.gguf", "deepseek_v2 as one", older)
    assert decoder_config(open_gguf(path).config) == config


def check_blocks(lm: jaxinfer.LanguageModel, plain: jaxinfer.LanguageModel, params: Any, kind: str) -> None:
    """Experts are in the file's blocks, and stand for its numbers, which are near those that were rounded."""
    stacks, wide = (each.params["blocks"]["layer_1"]["mlp"]["experts"] for each in (lm, plain))
    for part, stack in stacks.items():
        assert stack.form == GGUF_FORMATS[kind]
        assert (np.asarray(stack.dequantize()) == np.asarray(wide[part])).all()
        theirs = params["blocks"]["layer_1"]["mlp"]["experts"][part]
        assert 0 < np.abs(np.asarray(wide[part]) - theirs).max() < 0.3 * np.abs(theirs).max()


def test_blocks_of_experts_stay_as_they_lie(tmp_path):
    path, _, params = write(tmp_path / "model.gguf", "gpt_oss", kind="MXFP4")
    check_blocks(jaxinfer.load(path, weights="gguf"), jaxinfer.load(path), params, "MXFP4")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("gpt_oss", "MXFP4", marks=pytest.mark.slow),
        pytest.param("mixtral", "Q8_0", marks=pytest.mark.exhaustive),
    ],
)
def test_blocks_of_experts_are_multiplied_as_they_lie(tmp_path, monkeypatch, name, kind):
    widths = {"intermediate_size": 64}, {"feed_forward_length": 64}
    monkeypatch.setitem(CASES, "mixtral", ("llama", {**MIXTRAL, **widths[0]}, widths[1]))
    path, _, params = write(tmp_path / "model.gguf", name, kind=kind)
    lm, plain = jaxinfer.load(path, weights="gguf"), jaxinfer.load(path)
    check_blocks(lm, plain, params, kind)
    ids = [[3, 9, 30, 4, 4, 1]]
    found, expected = (np.asarray(each.logits(ids)) for each in (lm, plain))
    assert np.abs(found - expected).max() < 0.03 * expected.std()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt_oss", "MXFP4"),
        pytest.param("deepseek_v3", "Q8_0", marks=pytest.mark.slow),
        pytest.param("deepseek_v2", "Q4_0", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_moe", "Q5_1", marks=pytest.mark.exhaustive),
    ],
)
def test_llama_cpps_own_reader_finds_the_same_numbers(tmp_path, name, kind):
    """Of every tensor of experts: its package dequantizes each from the file alone."""
    path, *_ = write(tmp_path / "model.gguf", name, kind=kind)
    lm = jaxinfer.load(path, weights="gguf", scan_layers=False)
    theirs = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors
    }
    stacks, compared = lm.params["blocks"]["layer_1"]["mlp"]["experts"], []
    for part, stack in stacks.items():
        found = np.asarray(stack.dequantize() if is_quantized(stack) else stack)
        np.testing.assert_array_equal(found, theirs[f"blk.1.ffn_{part}_exps.weight"].reshape(found.shape))
        compared += [stack.form] if is_quantized(stack) else []
    assert len(compared) >= 2
    assert set(compared) == {GGUF_FORMATS[kind]}
