"""What PEFT changes beside linear layers gives PEFT's logits live, one adapter a row, and merged where it can be."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxinfer
from jaxinfer.errors import UnsupportedModel
from tests.late_imports import late
from tests.models.hugging_face import build_model, logits_of, save_model
from tests.models.variants import VARIANTS

torch = late("torch")
peft = late("peft")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]  # of PEFT, about what these tests are about

PROMPT = np.random.default_rng(0).integers(2, 96, 21).tolist()
TOLERANCE = 1e-4  # of the logits' standard deviation
LOW = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]}
TABLES: dict[str, dict[str, Any]] = {
    "low ranks": {"target_modules": ["embed_tokens", "q_proj", "lm_head"]},
    "a shift": {"target_modules": ["q_proj", "up_proj", "lm_head"], "lora_bias": True, "r": 9},
    "whole": {"modules_to_save": ["embed_tokens", "lm_head", "norm", "input_layernorm"]},
    "rows": {"trainable_token_indices": {"embed_tokens": PROMPT[3:6], "lm_head": [7]}},
    "the embedding": {"target_modules": ["embed_tokens"]},
    "the whole embedding": {"modules_to_save": ["embed_tokens"]},
    "the output matrix": {"target_modules": ["lm_head"]},
}
TIED = (
    "rows of both",
    "tied",
    "tied low ranks",
    "rows",
    "low ranks",
    "the embedding",
    "the whole embedding",
    "the output matrix",
)
OF_TIED = {
    **TABLES,
    "rows of both": {"trainable_token_indices": PROMPT[3:6]},
    "tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tied low ranks": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
}
BIASES = {
    "of all": {"bias": "all"},
    "of the adapted": {"target_modules": ["fc1"], "bias": "lora_only"},
    "norms": {"modules_to_save": ["self_attn_layer_norm", "final_layer_norm"], "lora_bias": True},
}
_OF_LATENTS = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
LATENTS = {
    "all": {"target_modules": _OF_LATENTS, "modules_to_save": ["kv_a_layernorm", "norm"]},
    "magnitudes": {"target_modules": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"], "use_dora": True},
}
FAMILIES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "a table of each kind": ("gqa-dynamic", TABLES),
    "one table": ("gqa-tied-attention_bias-linear", {name: OF_TIED[name] for name in TIED}),
    "biases": ("opt", BIASES),
    "joined biases": ("gpt2-n_inner-untied-scales", {"all": {"target_modules": ["c_attn"], "bias": "all"}}),
    "norms of heads": ("qwen3-head_dim-tied", {"norms": {"modules_to_save": ["q_norm", "k_norm", "norm"]}}),
    "latent attention": ("deepseek_v3-bias", LATENTS),
    "latent attention without compressed queries": ("deepseek_v2-greedy", {"all": LATENTS["all"]}),
    "norms of all heads": ("olmo2", {"norms": {"modules_to_save": ["q_norm", "k_norm", "norm"]}}),
    "a norm of the embedding": (
        "bloom",
        {"norms": {"target_modules": ["dense"], "modules_to_save": ["word_embeddings_layernorm", "ln_f"]}},
    ),
    "norms plus one": ("gemma2", {"the embedding": {"target_modules": ["embed_tokens"], "modules_to_save": ["norm"]}}),
}


def adapted(base: Any, folder: Path, seed: int, settings: dict[str, Any]) -> np.ndarray:
    """Save a random adapter of a copy of a model, and return the logits that PEFT gives with it."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(task_type="CAUSAL_LM", **LOW | settings)).eval()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        strength = 0.3 if "lora_" in name else 1.0
        # In place: what is tied stays so.
        parameter.data.copy_(strength * torch.randn_like(parameter) + ("norm" in name and "weight" in name))
    model.save_pretrained(folder)
    return logits_of(model, PROMPT)


def check(tmp_path: Path, variant_name: str, several: dict[str, dict[str, Any]], **options: Any) -> None:
    variant = VARIANTS[variant_name]
    base = build_model(variant)
    lm = jaxinfer.load(save_model(base, tmp_path / "base", variant), dtype="float32", **options)
    plain_TV = np.asarray(lm.logits([PROMPT])[0])
    expected = {}
    for seed, (name, settings) in enumerate(several.items()):
        expected[name] = adapted(base, tmp_path / name, seed, settings)
        lm.load_adapter(name, tmp_path / name)
    names = [None, *expected]
    together_BTV = np.asarray(lm.logits([PROMPT] * len(names), adapter=names))
    np.testing.assert_array_equal(together_BTV[0], plain_TV)
    for row, (name, logits_TV) in enumerate(expected.items(), 1):
        limit = TOLERANCE * logits_TV.std()
        assert np.abs(together_BTV[row] - logits_TV).max() < limit, name
        assert np.abs(plain_TV - logits_TV).max() > 300 * limit, name
        if not options:
            np.testing.assert_array_equal(np.asarray(lm.logits([PROMPT], adapter=name))[0], together_BTV[row])
        if name == "a shift" or (lm.config.tied_embeddings and name in TIED[3:]):
            with pytest.raises(UnsupportedModel, match=r"one tensor of this model|no bias in this model"):
                lm.merge_adapter(name)
            continue
        merged = lm.merge_adapter(name)
        assert np.abs(np.asarray(merged.logits([PROMPT]))[0] - logits_TV).max() < limit, name


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_peft(tmp_path, name):
    check(tmp_path, *FAMILIES[name])
