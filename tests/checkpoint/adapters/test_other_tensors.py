"""Embeddings, output matrices, norms and experts that an adapter changes: merged as PEFT computes, or refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import jaxinfer
from jaxinfer.checkpoint.adapters.low_rank import LowRank
from jaxinfer.checkpoint.adapters.other_tensors import check_tied
from jaxinfer.checkpoint.adapters.peft_folder import open_adapter
from jaxinfer.checkpoint.convert import convert
from jaxinfer.errors import JaxinferError
from jaxinfer.models.families.family import TensorNames
from jaxinfer.models.families.llama import LLAMA
from tests.models.variants import VARIANTS
from tests.toy_adapters import edit_adapter, write_adapter
from tests.toys import TINY_LLAMA

HEAD, EMBED, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
SHAPES = {HEAD: (262, 32), EMBED: (262, 32), NORM: (32,), "model.layers.0.mlp.experts.0.up_proj.weight": (8, 32)}
PEFT = "base_model.model."
NAMES = LLAMA.tensor_names(TINY_LLAMA)


@pytest.fixture
def folder(tmp_path):
    return write_adapter(tmp_path / "adapter", TINY_LLAMA, only=("attention.query",))


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def edited(folder, settings: dict[str, Any], tensors: dict[str, np.ndarray], names: TensorNames = NAMES):
    """Add to an adapter of rank 4 and strength 2, and read it to be merged."""

    def edit(written, stored):
        written.update(settings)
        stored.update({PEFT + name: array for name, array in tensors.items()})

    edit_adapter(folder, edit)
    return open_adapter(folder, names, TINY_LLAMA, SHAPES)


def test_tensors_are_replaced_by_name_by_row_and_added_to(folder):
    tensors = {
        HEAD: drawn(*SHAPES[HEAD]),
        NORM: drawn(32),
        "model.embed_tokens.token_adapter.trainable_tokens_delta": drawn(2, 32),
        "model.layers.0.mlp.experts.0.up_proj.lora_A.weight": drawn(4, 32),
        "model.layers.0.mlp.experts.0.up_proj.lora_B.weight": drawn(8, 4),
    }
    settings = {
        "modules_to_save": ["lm_head", "norm"],
        "trainable_token_indices": [7, 3],
        "target_modules": ["q_proj", "up_proj"],
        "exclude_modules": ["mlp.up_proj"],
    }
    changes = edited(folder, settings, tensors).changes
    assert changes.keys() == SHAPES.keys()
    base = {name: drawn(*shape) + 1 for name, shape in SHAPES.items()}
    found = {name: change.applied_to(base[name]) for name, change in changes.items()}
    np.testing.assert_array_equal(found[HEAD], tensors[HEAD])
    np.testing.assert_array_equal(found[NORM], tensors[NORM])
    rows = base[EMBED].copy()
    rows[[7, 3]] = tensors["model.embed_tokens.token_adapter.trainable_tokens_delta"]
    np.testing.assert_array_equal(found[EMBED], rows)
    expert = "model.layers.0.mlp.experts.0.up_proj"
    added = tensors[f"{expert}.lora_B.weight"] @ tensors[f"{expert}.lora_A.weight"]
    np.testing.assert_allclose(found[f"{expert}.weight"], base[f"{expert}.weight"] + 2 * added, rtol=1e-5, atol=1e-5)


def test_an_embedding_has_its_matrices_the_other_way_round(folder):
    down_RV, up_DR = drawn(4, 262), drawn(32, 4)
    pair = {"model.embed_tokens.lora_embedding_A": down_RV, "model.embed_tokens.lora_embedding_B": up_DR}
    changes = edited(folder, {"target_modules": ["q_proj", "embed_tokens"]}, pair).changes
    base = drawn(*SHAPES[EMBED])
    np.testing.assert_allclose(changes[EMBED].applied_to(base), base + 2 * (up_DR @ down_RV).T, rtol=1e-4, atol=1e-4)


def test_a_tied_pair_is_read_and_merged_as_one_change(folder):
    """PEFT names the embedding alone, and stores the output matrix's low ranks too."""
    pair = {"model.embed_tokens.lora_embedding_A": drawn(4, 262), "model.embed_tokens.lora_embedding_B": drawn(32, 4)}
    pair |= {
        "lm_head.lora_A.weight": pair["model.embed_tokens.lora_embedding_B"].T,
        "lm_head.lora_B.weight": pair["model.embed_tokens.lora_embedding_A"].T,
    }
    settings = {"target_modules": ["q_proj", "model.embed_tokens"], "ensure_weight_tying": True}
    tied = LLAMA.tensor_names(replace(TINY_LLAMA, tied_embeddings=True))
    changes = edited(folder, settings, pair, tied).changes
    base, added = drawn(*SHAPES[EMBED]), 2 * (pair["lm_head.lora_B.weight"] @ pair["lm_head.lora_A.weight"])
    merged = check_tied("here", tied, changes)
    assert merged.keys() == {EMBED}
    for change in (merged[EMBED], changes[HEAD]):
        np.testing.assert_allclose(change.applied_to(base), base + added, rtol=1e-4, atol=1e-4)
    other = replace(changes[HEAD], low=LowRank(drawn(4, 32), drawn(262, 4)))
    with pytest.raises(JaxinferError, match="which are one tensor of this model"):
        check_tied("here", tied, {**changes, HEAD: other})


# What PEFT warns of is what these tests are about, and what transformers warns PEFT of.
QUIETLY = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore:.is_gradient_checkpointing")
ROWS = "model.embed_tokens.token_adapter.trainable_tokens_delta"


EMBEDDED = {"model.embed_tokens.lora_embedding_A": drawn(4, 262)}
OF_HEAD = {"lm_head.lora_A.weight": drawn(4, 32), "lm_head.lora_B.weight": drawn(262, 4)}


@pytest.mark.parametrize(
    ("settings", "tensors", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, {HEAD: drawn(300, 32)}, "lm_head.weight has 300 tokens, but the model's"),
        ({"modules_to_save": ["norm"]}, {NORM: drawn(30)}, r"model.norm.weight as \[30\], but the model's is \[32\]"),
        ({"modules_to_save": ["score"]}, {"score.weight": drawn(2, 32)}, "'score.weight', and no tensor of the model"),
        ({}, {NORM: drawn(32)}, "no modules_to_save in adapter_config.json names it"),
        ({"trainable_token_indices": [3]}, {ROWS: drawn(2, 32)}, "no rows for trainable_token_indices"),
        ({"trainable_token_indices": [262]}, {ROWS: drawn(1, 32)}, "no rows for trainable_token_indices"),
        ({}, {"model.embed_tokens.lora_embedding_A": drawn(4, 262)}, "it lacks .*lora_embedding_B"),
        ({"modules_to_save": ["norm"]}, {NORM: drawn(32) * np.nan}, "numbers that are not finite"),
        ({"trainable_token_indices": []}, {ROWS: drawn(0, 32)}, "no rows for trainable_token_indices"),
        ({}, EMBEDDED | {"model.embed_tokens.lora_embedding_B": drawn(4)}, r"matrices of \[4\] and \[4, 262\], but"),
        ({"r": 10**400}, {}, "is not a whole number of 1 or more"),
        ({"lora_alpha": -(10**400)}, {}, "is not a number"),
        ({"lora_bias": True}, OF_HEAD | {"lm_head.lora_B.bias": drawn(9)}, r"\[9\] numbers for the outputs of lm_head"),
        (
            {"use_dora": True},
            OF_HEAD | {"lm_head.lora_magnitude_vector": drawn(9)},
            r"\[9\] numbers for the outputs of",
        ),
        ({"ensure_weight_tying": True}, OF_HEAD, "has matrices for lm_head, which adapter_config.json does not target"),
    ],
)
def test_what_does_not_fit_is_refused_by_one_line(folder, settings, tensors, message):
    if "lora_bias" in settings or "use_dora" in settings:
        # Of the output matrix alone: every module would need one.
        edit_adapter(folder, lambda _, stored: stored.clear())
        settings = {**settings, "target_modules": ["lm_head"]}
    with pytest.raises(JaxinferError, match=message) as caught:
        edited(folder, settings, tensors)
    assert "\n" not in str(caught.value)


LLAMA_SETTINGS: dict[str, dict[str, Any]] = {
    "low ranks": {"target_modules": ["embed_tokens", "q_proj", "lm_head"]},
    "whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    "rows": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5, 9], "lm_head": [7]}},
    "rows of a tied embedding": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 9]},
}


@pytest.mark.exhaustive
@QUIETLY
@pytest.mark.parametrize("name", LLAMA_SETTINGS)
def test_merged_models_have_the_logits_of_peft(name, tmp_path):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from tests.models.hugging_face import build_model, logits_of, save_model

    variant = VARIANTS["gqa-tied-attention_bias-linear" if "tied" in name else "gqa-dynamic"]
    base = build_model(variant)
    save_model(base, tmp_path / "base", variant)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=6, **LLAMA_SETTINGS[name])).eval()
    torch.manual_seed(0)
    for path, parameter in model.named_parameters():
        if "lora_" in path or "trainable_tokens" in path or "modules_to_save" in path:
            parameter.data = 0.5 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "adapter")
    ids = [5, 9, 7, *range(2, 40)]
    expected_TV = logits_of(model, ids)
    lm = jaxinfer.load(convert(tmp_path / "base", tmp_path / "merged", adapter=tmp_path / "adapter"))
    found_TV = np.asarray(lm.logits([ids]))[0]
    assert np.abs(found_TV - expected_TV).max() < 1e-4 * expected_TV.std()


@pytest.mark.exhaustive
@QUIETLY
@pytest.mark.parametrize("name", ["low ranks", "whole"])
def test_a_tied_embedding_is_not_changed_alone(name, tmp_path):
    pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from tests.models.hugging_face import build_model, save_model

    variant = VARIANTS["gqa-tied-attention_bias-linear"]
    base = build_model(variant)
    save_model(base, tmp_path / "base", variant)
    settings = {**LLAMA_SETTINGS[name]}
    if name == "whole":
        settings["modules_to_save"] = ["embed_tokens"]
    peft.get_peft_model(base, peft.LoraConfig(r=4, **settings)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(JaxinferError, match="which are one tensor of this model"):
        convert(tmp_path / "base", tmp_path / "merged", adapter=tmp_path / "adapter")
