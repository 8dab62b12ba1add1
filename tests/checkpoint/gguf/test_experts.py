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
from jaxinfer.errors import InvalidOption, UnsupportedModel
from jaxinfer.models.families.registry import decoder_config, family_of
from tests.checkpoint.gguf.files import permute
from tests.toys import random_params

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
FACTORS = {"attention_multiplier": 0.25, "residual_multiplier": 0.5}
MIXTRAL = {**SIZES, "model_type": "mixtral", "num_local_experts": 4}
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
}


def write(path: Path, name: str, changes: dict[str, Any] | None = None) -> tuple[Path, Any, Any]:
    """Write a random model; return the path, its configuration and its parameters."""
    architecture, described, own = CASES[name]
    described = {**described, "model_type": name}
    family = family_of(described)
    config = decoder_config(described)
    params = jax.tree.map(np.asarray, random_params(config, seed=2))
    names = family.tensor_names(config)
    tensors = LoadedTensors(params, replace(names, block={**names.block, **names.others[-1]}), None)
    writer = gguf.GGUFWriter(path, architecture)
    keys = {
        "block_count": 2, "context_length": 128, "embedding_length": 32, "feed_forward_length": 24,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0, "vocab_size": 40, "expert_count": 4, "expert_used_count": 2, **own,
        **(changes or {}),
    }  # fmt: skip
    for key, value in keys.items():
        kind = gguf.GGUFValueType.UINT32 if isinstance(value, int) else gguf.GGUFValueType.FLOAT32
        writer.add_key_value(f"{architecture}.{key}", value, kind)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    kind = next(key for key, word in gguf.MODEL_ARCH_NAMES.items() if word == architecture)
    table, known = gguf.get_tensor_name_map(kind, 2), {gguf.TENSOR_NAMES[each] for each in gguf.MODEL_TENSORS[kind]}
    for hf_name in tensors.shapes():
        values = tensors.read(hf_name, np.dtype(np.float32))
        if architecture in ("llama", "granitemoe") and ("q_proj" in hf_name or "k_proj" in hf_name):
            values = permute(values, 4 if "q_proj" in hf_name else 2)
        # The converter makes these of a fused tensor.
        renamed = table.get_name(hf_name.replace("shared_mlp", "mlp.shared_expert"), try_suffixes=(".weight", ".bias"))
        assert renamed is not None, hf_name
        assert renamed.rpartition(".")[0].replace("blk.0", "blk.{bid}").replace("blk.1", "blk.{bid}") in known
        writer.add_tensor(renamed, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, config, params


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_configuration_are_those_of_the_folder(tmp_path, name):
    path, config, params = write(tmp_path / "model.gguf", name)
    lm = jaxinfer.load(path, scan_layers=False)
    assert lm.config == config
    assert jax.tree.all(jax.tree.map(lambda one, other: bool((np.asarray(one) == other).all()), lm.params, params))


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"expert_used_count": 5}, "num_experts_per_tok = 5"), ({"expert_gating_func": 2}, "expert_gating_func = 2")],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, changes, named):
    path, *_ = write(tmp_path / "model.gguf", "mixtral", changes)
    with pytest.raises(UnsupportedModel, match=named):
        decoder_config(open_gguf(path).config)


def test_the_files_own_bits_are_refused(tmp_path):
    path, *_ = write(tmp_path / "model.gguf", "mixtral")
    with pytest.raises(InvalidOption, match="weights 'gguf'"):
        jaxinfer.load(path, weights="gguf")
