"""What an outsider's ``config.json`` may say: shapes that divide nothing, one of a thing or all, every stretched rope.

Logits and greedy tokens of each are those of transformers, and keys that a file leaves out mean what they mean there.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import jaxinfer
from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.families.registry import FAMILIES, decoder_config
from tests.late_imports import late
from tests.models.hugging_face import build_model, logits_of, save_model
from tests.models.test_parity import PROMPTS, TOLERANCE, check_greedy, largest_difference
from tests.models.variants.variant import SIZES, Variant

torch = late("torch")
transformers = late("transformers")
pytestmark = pytest.mark.parity

_ONE_LAYER = {"num_hidden_layers": 1}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12, "norm_topk_prob": True}
_DEEPSEEK: Mapping[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10, "n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
# No text crosses the length: transformers would then keep keys that were rotated for a shorter one.
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24,
    "short_factor": [1.0 + 0.1 * lane for lane in range(6)], "long_factor": [1.0 + 2.0 * lane for lane in range(6)],
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
# A family, and what is odd about it.
ODD: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "one-of-each": ("llama", {**_ONE_LAYER, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 131}),
    "heads-beyond-width": ("qwen3", {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 14}),
    "own-keys-odd-vocab-tied": ("mistral", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 6,
                                            "vocab_size": 257, "tie_word_embeddings": True, "sliding_window": None}),
    "narrowest-window": ("mistral", {"sliding_window": 2, **_ONE_LAYER}),
    "window-below-prompts": ("starcoder2", {"sliding_window": 4, "num_key_value_heads": 1}),
    "linear": ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}, "head_dim": 12}),
    "dynamic": ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}}),
    "yarn": ("qwen2", {"rope_parameters": _YARN}),
    "longrope": ("llama", {"rope_parameters": _LONGROPE, "head_dim": 12}),
    "llama3": ("mistral", {"rope_parameters": _LLAMA3, "sliding_window": None}),
    "biases-wide-heads": ("qwen3", {"attention_bias": True, "head_dim": 20, "num_key_value_heads": 4}),
    "one-expert": ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "all-experts": ("qwen3_moe", {**_MOE, "num_experts_per_tok": 4}),
    "one-layer-of-experts": ("qwen3_moe", {**_MOE, **_ONE_LAYER, "num_key_value_heads": 1}),
    "no-layer-of-experts": ("qwen3_moe", {**_MOE, "mlp_only_layers": [0, 1]}),
    "all-layers-dense": ("deepseek_v3", {**_DEEPSEEK, "first_k_dense_replace": 2}),
    "all-experts-plain-queries": ("deepseek_v3", _DEEPSEEK),
    "one-layer-with-windows": ("gemma2", {**_ONE_LAYER, "head_dim": 12, "sliding_window": 8}),
    "one-layer-on-and-off": ("gemma3_text", {**_ONE_LAYER, "head_dim": 12, "sliding_window": 8}),
    "odd-vocabulary": ("gpt2", {"vocab_size": 101, "n_embd": 36, "n_layer": 1, "n_head": 3, "n_positions": 160}),
    "thin": ("opt", {"vocab_size": 101, "hidden_size": 20, "num_attention_heads": 5, "ffn_dim": 12}),
    "one-head-of-keys": ("falcon", {"num_attention_heads": 3, "vocab_size": 101}),
}  # fmt: skip
ORDINARY = ("one-of-each",)


def tier(name: str) -> Any:
    return name if name in ORDINARY else pytest.param(name, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("name", list(map(tier, ODD)))
def test_odd_models_are_those_of_transformers(name, tmp_path):
    model_type, odd = ODD[name]
    sizes = {key: value for key, value in SIZES.items() if key not in odd}
    if model_type in ("gpt2", "opt", "falcon"):
        sizes = {key: value for key, value in sizes.items() if "num_key" not in key and "intermediate" not in key}
    variant = Variant({**odd}, model_type=model_type, sizes=sizes)
    model = build_model(variant)
    folder = save_model(model, tmp_path, variant)
    expected = [logits_of(model, ids) for ids in PROMPTS]
    lm = jaxinfer.load(folder, max_len=160, scan_layers=False)
    assert largest_difference(np.asarray(lm.logits(PROMPTS)), expected) < TOLERANCE
    check_greedy(lm, model)


# Of these a file must say more: how many experts, which text model; and two are not in transformers.
_NOT_EMPTY = {
    *("gemma3", "llama4", "granitemoehybrid", "glm4_moe", "deepseek_v2", "dots1", "mimo", "kimi_k2"),
    *(
        "mistral3",
        "llava",
        "llava_next",
        "internvl",
        "aya_vision",
        "cohere2_vision",
        "cohere_compass_text",
        "idefics3",
        "smolvlm",
        "qwen3_vl",
        "qwen3_vl_moe",
    ),
}


@pytest.mark.slow
def test_keys_that_are_left_out_mean_what_transformers_means():
    wrong = []
    for model_type in FAMILIES.keys() - _NOT_EMPTY:
        theirs = transformers.AutoConfig.for_model(model_type).to_dict()
        if decoder_config({**theirs, "architectures": None}) != decoder_config({"model_type": model_type}):
            wrong.append(model_type)
    assert not wrong


def test_an_unknown_rope_is_refused_and_a_stored_type_changes_nothing():
    config = {"model_type": "llama", **SIZES}
    with pytest.raises(UnsupportedModel, match="rope_type = 'spiral'"):
        decoder_config({**config, "rope_scaling": {"rope_type": "spiral", "factor": 2.0}})
    assert decoder_config({**config, "torch_dtype": "float16"}) == decoder_config({**config, "dtype": "bfloat16"})
