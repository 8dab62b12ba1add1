"""gpt-oss's files: experts in MXFP4 stay so, and stand for what transformers makes of them; what is wrong is named."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxinfer
from jaxinfer.checkpoint.convert import convert
from jaxinfer.checkpoint.loaded import LoadedTensors
from jaxinfer.errors import InvalidCheckpoint, InvalidOption, UnsupportedModel
from jaxinfer.models.families.registry import family_of
from jaxinfer.notation import Params
from jaxinfer.ops.few_bits.formats import MXFP4
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from tests.toys import random_params

EXPERTS, DIM, INNER = 3, 64, 32
CONFIG = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 32, "hidden_size": DIM,
    "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 64, "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
    "sliding_window": 16, "bos_token_id": 1, "eos_token_id": 0,
}  # fmt: skip
METHOD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
FAMILY = family_of(CONFIG)
DECODER = FAMILY.translate(CONFIG)
Tensors = dict[str, np.ndarray]


@cache
def params() -> Params:
    return jax.tree.map(lambda leaf: np.asarray(leaf, ml_dtypes.bfloat16), random_params(DECODER, seed=2))


def plain() -> Tensors:
    """Return the tensors that transformers writes of a model in bfloat16."""
    tensors = LoadedTensors(params(), FAMILY.tensor_names(DECODER), None)
    return {name: tensors.read(name, np.dtype(ml_dtypes.bfloat16)) for name in tensors.shapes()}


def in_blocks() -> Tensors:
    """Return the same with random blocks in the place of experts."""
    rng, made = np.random.default_rng(4), {}
    for name, values in plain().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            made[name] = values
            continue
        count, inputs, outputs = values.shape
        made[f"{name}_blocks"] = rng.integers(0, 256, (count, outputs, inputs // 32, 16), np.uint8)
        made[f"{name}_scales"] = rng.integers(118, 128, (count, outputs, inputs // 32), np.uint8)
    return made


def write(folder: Path, tensors: Mapping[str, np.ndarray], method: Mapping[str, Any] | None = METHOD) -> Path:
    folder.mkdir()
    config = CONFIG if method is None else {**CONFIG, "quantization_config": method}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, folder / "model.safetensors")
    return folder


def equal(found: object, expected: object) -> bool:
    return jax.tree.all(jax.tree.map(lambda one, other: bool((np.asarray(one) == other).all()), found, expected))


def widened(lm: jaxinfer.LanguageModel) -> object:
    """Return a model's parameters with experts in bfloat16, in which their numbers are exact."""
    return jax.tree.map(
        lambda leaf: np.asarray(leaf.dequantize()).astype(ml_dtypes.bfloat16) if is_quantized(leaf) else leaf,
        lm.params,
        is_leaf=is_quantized,
    )


@pytest.mark.slow
def test_blocks_are_multiplied_as_they_lie_and_saved_so(tmp_path):
    """By the names of single matrices: the file's own name tensors in which gate and up take turns."""
    folder, notices = write(tmp_path / "mxfp4", in_blocks()), []
    lm = jaxinfer.load(folder, scan_layers=False, notice=notices.append)
    assert notices == []
    stacks = lm.params["blocks"]["layer_1"]["mlp"]["experts"]
    assert {name: each.form for name, each in stacks.items()} == dict.fromkeys(("gate", "up", "down"), MXFP4)
    assert stacks["up"].by_rows().codes.shape == (EXPERTS, INNER, DIM // 2)
    ids = [[3, 9, 30, 4, 4, 1]]
    plain = jaxinfer.LanguageModel(lm.config, jax.tree.map(np.float32, widened(lm)), lm.backend)
    found, expected = (np.asarray(each.logits(ids)) for each in (lm, plain))
    assert np.abs(found - expected).max() < 0.03 * expected.std()
    lm.save(tmp_path / "saved")
    assert equal(jaxinfer.load(tmp_path / "saved", scan_layers=False).params, lm.params)


def test_blocks_stand_for_what_transformers_makes_of_them_and_are_converted_without_loss(tmp_path):
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = in_blocks()
    made = {name: values for name, values in blocks.items() if not name.endswith(("_blocks", "_scales"))}
    for name in blocks.keys() - made.keys():
        if (module := name.removesuffix("_blocks")) != name:
            parts = (torch.from_numpy(blocks[f"{module}{part}"]) for part in ("_blocks", "_scales"))
            found = mxfp4.convert_moe_packed_tensors(*parts)
            made[module] = found.float().numpy().astype(ml_dtypes.bfloat16)
    assert made.keys() == plain().keys()
    expected = jaxinfer.load(write(tmp_path / "plain", made, None), dtype="bfloat16", scan_layers=False)
    folder = write(tmp_path / "mxfp4", blocks)
    lm = jaxinfer.load(folder, dtype="bfloat16", scan_layers=False)
    assert equal(widened(lm), expected.params)
    assert lm.fingerprint == expected.fingerprint
    convert(folder, tmp_path / "converted")
    assert equal(jaxinfer.load(tmp_path / "converted", dtype="bfloat16", scan_layers=False).params, lm.params)
    convert(folder, tmp_path / "wide", dtype="bfloat16")
    assert equal(jaxinfer.load(tmp_path / "wide", dtype="bfloat16", scan_layers=False).params, expected.params)
    # Weights are not rounded twice.
    with pytest.raises(InvalidOption, match=r"in few bits already \(mxfp4\)"):
        jaxinfer.load(folder, weights="int4")


def test_a_model_in_bfloat16_is_read_and_saved_as_it_came(tmp_path):
    folder = write(tmp_path / "model", plain(), None)
    lm = jaxinfer.load(folder, dtype="bfloat16", scan_layers=False)
    assert equal(lm.params, params())
    scanned = jaxinfer.load(folder, dtype="bfloat16", scan_layers=True)
    scanned.save(tmp_path / "saved")
    again = jaxinfer.load(tmp_path / "saved", dtype="bfloat16", scan_layers=False)
    assert equal(again.params, params())
    assert again.fingerprint == lm.fingerprint
    written = LoadedTensors(scanned.params, FAMILY.tensor_names(DECODER), None)
    original = load_file(folder / "model.safetensors")
    assert written.shapes() == {name: values.shape for name, values in original.items()}
    assert all((written.read(name, values.dtype) == values).all() for name, values in original.items())


NAME = "model.layers.1.mlp.experts.down_proj"
DAMAGE = {
    "no scales": (lambda tensors: tensors.pop(f"{NAME}_scales"), f"missing tensor {NAME}_scales"),
    "other scales": (
        lambda tensors: tensors.update({f"{NAME}_scales": tensors[f"{NAME}_scales"][:, :-1]}),
        f"{NAME}_scales has shape [3, 63, 1], but its configuration makes it [3, 64, 1]",
    ),
    "half of the blocks": (
        lambda tensors: tensors.update({f"{NAME}_blocks": tensors[f"{NAME}_blocks"][..., :8]}),
        f"{NAME}_blocks has shape [3, 64, 1, 8], but must hold blocks of 16 bytes",
    ),
    "floats": (
        lambda tensors: tensors.update({f"{NAME}_scales": tensors[f"{NAME}_scales"].astype(np.float32)}),
        f"{NAME}_scales has type float32, but it must be uint8",
    ),
    "no number": (
        lambda tensors: tensors[f"{NAME}_scales"].reshape(-1).__setitem__(5, 255),
        f"{NAME}_scales has a scale with which weights are no finite numbers",
    ),
    "another layer": (
        lambda tensors: tensors.update({"lm_head_blocks": tensors[f"{NAME}_blocks"]}),
        "lm_head_blocks is none of gate_up_proj, down_proj",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused_by_name(tmp_path, name):
    edit, reason = DAMAGE[name]
    tensors = in_blocks()
    edit(tensors)
    folder = write(tmp_path / "model", tensors)
    with pytest.raises(InvalidCheckpoint) as error:
        jaxinfer.load(folder, dtype="bfloat16")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_keys_that_are_not_known_are_refused(tmp_path):
    folder = write(tmp_path / "model", in_blocks(), {**METHOD, "block_size": 16})
    with pytest.raises(UnsupportedModel, match="block_size"):
        jaxinfer.load(folder)
