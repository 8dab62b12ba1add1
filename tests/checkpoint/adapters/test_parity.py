"""An adapter that PEFT saved gives PEFT's logits, live, one a row, and merged, whatever a family's tensors hold."""

from typing import Any

import numpy as np
import pytest

import jaxinfer
from tests.late_imports import late
from tests.models.hugging_face import build_model, logits_of, save_model
from tests.models.variants import VARIANTS

torch = late("torch")
late("peft")
pytestmark = pytest.mark.parity

PROMPT = np.random.default_rng(0).integers(2, 96, 21).tolist()
TOLERANCE = 1e-4  # of the logits' standard deviation
ALL: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"}
# Of some layers and modules, with ranks and strengths by pattern.
SOME = {
    "llama": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "up_proj", "o_proj"],
        "rank_pattern": {"up_proj": 9},
        "alpha_pattern": {"o_proj": 3},
        "layers_to_transform": [1],
    },
    "dora": {"r": 3, "lora_alpha": 5, "target_modules": r".*\.(k_proj|down_proj)", "use_dora": True},
    "stabilized": {"r": 9, "lora_alpha": 5, "target_modules": ["v_proj", "gate_proj"], "use_rslora": True},
}
# Joined matrices, matrices stored the other way round, biases beside a magnitude, rows in another order.
FAMILIES = {
    "phi3-gqa-tied-longrope-partial": [ALL],
    "gpt2-n_inner-untied-scales": [ALL, {**ALL, "use_dora": True}],
    "gpt_neox": [{**ALL, "use_dora": True}],
    "opt-plain-untied-gelu": [{**ALL, "target_modules": ["q_proj", "out_proj", "fc1", "fc2"], "use_dora": True}],
    "cohere-qk_norm": [ALL],
    "gemma2": [ALL],
    "qwen2-mixed-tied": [ALL],
    "glm4": [ALL],
    "qwen2_moe-shared-one_dense": [{**ALL, "target_modules": ["gate_proj", "down_proj", "shared_expert_gate"]}],
    "granitemoeshared-bias": [{**ALL, "target_modules": ["input_linear", "output_linear"], "use_dora": True}],
    "qwen3_moe-every_second": [
        {**ALL, "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight"]}
    ],
    "gpt_oss": [{**ALL, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}],
    "mixtral-window": [{**ALL, "target_modules": ["w1", "w2", "w3", "gate", "q_proj"]}],
    "deepseek_v3-bias": [{**ALL, "target_modules": ["gate_proj", "up_proj", "down_proj", "kv_b_proj"]}],
    "granitemoe": [{**ALL, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}],
    "hy_v3": [{**ALL, "target_parameters": ["experts.gate_up_proj", "mlp.gate.weight"]}],
    "qwen2_5_vl": [{**ALL, "target_modules": r".*\.(q_proj|qkv|down_proj|proj)"}],
    "gemma3-vision": [ALL],
    "llama4": [{**ALL, "target_modules": ["up_proj", "q_proj"], "target_parameters": ["experts.gate_up_proj"]}],
}


def adapted(base: Any, folder: Any, seed: int, settings: dict[str, Any]) -> np.ndarray:
    """Save a random adapter of a model, and return the logits that PEFT gives with it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data *= 1 + 0.3 * torch.rand_like(parameter)
        elif "lora_" in name:
            parameter.data = 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    logits_TV = logits_of(model, PROMPT)
    model.unload()
    return logits_TV


def check(tmp_path: Any, name: str, several: list[dict[str, Any]]) -> None:
    variant = VARIANTS[name]
    base = build_model(variant)
    lm = jaxinfer.load(save_model(base, tmp_path / "base", variant), dtype="float32")
    plain_TV = np.asarray(lm.logits([PROMPT] * (1 + len(several)))[0])
    expected = []
    for index, settings in enumerate(several):
        expected.append(adapted(base, tmp_path / str(index), index, settings))
        lm.load_adapter(str(index), tmp_path / str(index))
    names = [None, *map(str, range(len(several)))]
    rows_BTV = np.asarray(lm.logits([PROMPT] * len(names), adapter=names))
    np.testing.assert_array_equal(rows_BTV[0], plain_TV)
    for index, logits_TV in enumerate(expected):
        limit = TOLERANCE * logits_TV.std()
        assert np.abs(rows_BTV[1 + index] - logits_TV).max() < limit
        assert np.abs(plain_TV - logits_TV).max() > 1000 * limit
    # The last one's limit.
    merged = lm.merge_adapter(names[-1])
    assert np.abs(np.asarray(merged.logits([PROMPT])[0]) - expected[-1]).max() < limit


@pytest.mark.filterwarnings("ignore")  # of PEFT, about what it guesses
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_peft(tmp_path, name):
    check(tmp_path, name, FAMILIES[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_settings_of_all_kinds_side_by_side_are_those_of_peft(tmp_path):
    check(tmp_path, "gqa-dynamic", [ALL, SOME["llama"], SOME["stabilized"], SOME["dora"]])
