"""A row's own adapter changes routers and each token's own experts as the merged model has them, whatever runs it."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer import LanguageModel
from jaxinfer.checkpoint.adapters.other_tensors import PREFIX
from jaxinfer.checkpoint.adapters.peft_folder import WEIGHTS
from jaxinfer.checkpoint.adapters.settings import CONFIG
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.families.registry import family_of
from jaxinfer.models.stacking import stack_params
from jaxinfer.ops.backend import choose_backend
from tests.toys import random_params

DESCRIBED = {
    "model_type": "mixtral",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
EXPERTS = "model.layers.{}.block_sparse_moe.experts.{}."
PROMPTS = [[3, 9, 14, 27, 30, 2, 11], [5, 5, 21, 8, 33], [3, 9, 14, 27, 30, 2, 11], [19, 1, 1, 38, 6, 12]]
# A dense layer, and one with a shared expert that has a gate.
WITH_SHARED = {
    "model_type": "qwen2_moe",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "max_position_embeddings": 64,
}
DENSE, SHARED = "model.layers.0.mlp.", "model.layers.1.mlp.shared_expert"
# Kernels by the checkpoint's names: all experts' and the router's, or the first matrix of one expert.
ADAPTERS = {"all": ("w1", "w2", "w3", "gate"), "one": ("w2",)}


def save(folder, modules, rank: int, targets):
    """Write an adapter of modules, whose shapes ``[out, in]`` are given."""
    rng, tensors = np.random.default_rng(rank), {}
    for module, (outputs, inputs) in modules.items():
        down, up = rng.standard_normal((rank, inputs)), rng.standard_normal((outputs, rank))
        tensors[f"{PREFIX}{module}.lora_A.weight"] = (down * inputs**-0.5).astype(np.float32)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = (up * rank**-0.5).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets)}
    (folder / CONFIG).write_text(json.dumps(settings))
    return folder


def write(folder, name: str, rank: int):
    """Write an adapter of experts: of all of them, or of the third of the last layer."""
    modules = {}
    sizes = {"w1": (24, 32), "w3": (24, 32), "w2": (32, 24), "gate": (4, 32)}
    for layer in range(2):
        for target in ADAPTERS[name]:
            inside = EXPERTS if target != "gate" else "model.layers.{}.block_sparse_moe."
            for expert in range(4 if target != "gate" else 1):
                if name == "one" and (layer, expert) != (1, 2):
                    continue
                modules[f"{inside.format(layer, expert)}{target}"] = sizes[target]
    return save(folder, modules, rank, ADAPTERS[name])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = family_of(DESCRIBED).translate(DESCRIBED)
    lm = LanguageModel(config, random_params(config, seed=3), choose_backend("float32", "cpu"))
    folder = tmp_path_factory.mktemp("adapters")
    for rank, name in ((3, "all"), (9, "one")):
        lm.load_adapter(name, write(folder / name, name, rank))
    return lm


def logits(lm, rows, names):
    return np.asarray(lm.logits([PROMPTS[row] for row in rows], adapter=[names[row] for row in rows]))


def logits_with(lm, params):
    """Return the logits with other parameters, by a program that all of them share."""
    tokens_BT = np.zeros((len(PROMPTS), 8), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens_BT[row, : len(prompt)] = prompt
    lengths_B = np.array(list(map(len, PROMPTS)), np.int32)
    return np.asarray(lm.programs.logits(params, tokens_BT, lengths_B, np.zeros(len(PROMPTS), np.int32)))


def is_merged(found, names, lm):
    """Check each row against the model with its adapter merged."""
    plain = logits_with(lm, lm.params)
    for name in {*names} - {None}:
        merged = logits_with(lm, lm.loaded_adapters.merged(name)[0])
        for row, own in enumerate(names):
            if own == name:
                there = slice(0, len(PROMPTS[row]))
                np.testing.assert_allclose(found[row, there], merged[row, there], atol=2e-4)
                assert np.abs(plain[row, there] - merged[row, there]).max() > 0.05


NAMES = ("all", None, "one", "all")


@pytest.mark.slow
def test_a_row_is_the_merged_model_and_has_the_bits_that_it_has_alone(model):
    together = logits(model, range(4), NAMES)
    is_merged(together, NAMES, model)
    np.testing.assert_array_equal(together[1, :5], logits_with(model, model.params)[1, :5])
    for row in (0, 2):
        count = len(PROMPTS[row])
        np.testing.assert_array_equal(logits(model, [row], NAMES)[0, :count], together[row, :count])


def test_dense_layers_shared_experts_and_their_gates_are_a_rows_own(tmp_path):
    config = family_of(WITH_SHARED).translate(WITH_SHARED)
    lm = LanguageModel(config, random_params(config, seed=3), choose_backend("float32", "cpu"))
    parts = {
        "dense": {f"{DENSE}{name}_proj": (40, 32) for name in ("gate", "up")} | {f"{DENSE}down_proj": (32, 40)},
        "shared": {f"{SHARED}.{name}_proj": (16, 32) for name in ("gate", "up")} | {f"{SHARED}.down_proj": (32, 16)},
        "gate": {f"{SHARED}_gate": (1, 32)},
    }
    for rank, (name, modules) in enumerate(parts.items(), 3):
        lm.load_adapter(name, save(tmp_path / name, modules, rank, modules))
    names = (*parts, None)
    is_merged(logits(lm, range(4), names), names, lm)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernels", ["xla", "interpret"])
def test_scanned_layers_by_xla_and_by_a_tpus_kernels(model, kernels):
    backend = choose_backend("float32", "cpu", scan_layers=True, kernels=kernels)
    scanned = LanguageModel(model.config, stack_params(model.params, abstract_params(model.config, backend)), backend)
    for name, origin in model.adapters.items():
        scanned.load_adapter(name, origin)
    found = logits(scanned, range(4), NAMES)
    is_merged(found, NAMES, model)


@pytest.mark.exhaustive
def test_texts_are_those_of_the_merged_model(model):
    asked = {"max_new_tokens": 8}
    found = model.generate(PROMPTS, **asked, adapter=list(NAMES))
    for row, name in enumerate(NAMES):
        lm = model if name is None else model.merge_adapter(name)
        (alone,) = lm.generate(PROMPTS[row : row + 1], **asked)
        assert alone.tokens == found[row].tokens
