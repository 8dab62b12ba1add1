"""Experts in few bits: rounded one after the other from whatever tensors hold them, saved, and loaded as they lie."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxinfer
from jaxinfer.checkpoint.loaded import LoadedTensors
from jaxinfer.errors import InvalidCheckpoint, InvalidOption
from jaxinfer.models.families.registry import family_of
from jaxinfer.models.few_bits import in_few_bits
from jaxinfer.notation import Params
from jaxinfer.ops.few_bits.formats import FP8, MXFP4, int4
from jaxinfer.ops.few_bits.panels import without_panels
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray, is_quantized
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from tests.checkpoint import test_experts
from tests.checkpoint.test_experts import Tensors, joined, single
from tests.toys import random_params

CONFIG = {**test_experts.CONFIG, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1}
FAMILY = family_of(CONFIG)
DECODER = FAMILY.translate({**CONFIG, "mlp_only_layers": []})
TEXT = [[5, 9, 2, 40, 7, 8]]


@cache
def params() -> Params:
    return jax.tree.map(np.asarray, random_params(DECODER, seed=1))


def plain_stacks() -> Params:
    return params()["blocks"]["layer_0"]["mlp"]["experts"]


def tensors_of() -> Tensors:
    tensors = LoadedTensors(params(), FAMILY.tensor_names(DECODER), None)
    return {name: tensors.read(name, np.dtype(np.float32)) for name in tensors.shapes()}


def write(folder: Path, tensors: Tensors, method: dict | None = None) -> Path:
    folder.mkdir()
    config = {**CONFIG, "mlp_only_layers": []}
    (folder / "config.json").write_text(json.dumps(config if method is None else {**config, **method}))
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, folder / "model.safetensors")
    return folder


def joined_one(tensors: Tensors) -> Tensors:
    """Return the tensors of the only layer as transformers 5 holds them."""
    return _of_one_layer(joined, tensors)


def single_one(tensors: Tensors) -> Tensors:
    """Return the tensors of the only layer as GGUF files have them."""
    return _of_one_layer(single, tensors)


def _of_one_layer(form: Callable[[Tensors], Tensors], tensors: Tensors) -> Tensors:
    third = {name.replace("layers.0.", "layers.2."): each for name, each in tensors.items() if ".experts." in name}
    return {name: values for name, values in form({**tensors, **third}).items() if ".layers.2." not in name}


def stacks_of(lm) -> dict[str, QuantizedArray]:
    found = lm.params["blocks"]
    found = found["layer_0"] if "layer_0" in found else jax.tree.map(lambda part: part[0], found)
    assert all(map(is_quantized, found["mlp"]["experts"].values()))
    return found["mlp"]["experts"]


def same(found: object, expected: object) -> bool:
    """Whether two trees have the same arrays, in panels or by rows."""
    found, expected = without_panels(found), without_panels(expected)
    return jax.tree.all(
        jax.tree.map(lambda one, other: np.asarray(one).tobytes() == np.asarray(other).tobytes(), found, expected)
    )


@pytest.mark.parametrize(
    ("weights", "form"),
    [
        ("int4:group=32", dict),
        *(
            pytest.param("mxfp4" if form is joined_one else "int8", form, marks=pytest.mark.slow)
            for form in (joined_one, single_one)
        ),
        *(pytest.param(each, dict, marks=pytest.mark.exhaustive) for each in ("nf4:group=32", "fp8")),
    ],
)
def test_every_expert_is_rounded_as_it_would_be_alone_saved_and_loaded(tmp_path, weights, form: Callable):
    from jaxinfer.checkpoint.few_bits import parse_few_bits

    lm = jaxinfer.load(write(tmp_path / "model", form(tensors_of())), weights=weights)
    wanted = parse_few_bits(weights).form
    for name, stack in stacks_of(lm).items():
        assert stack.form == wanted
        for expert in (0, 3):
            alone = round_to_nearest(jnp.asarray(plain_stacks()[name][expert]), wanted)
            assert same(jax.tree.map(lambda part: part[expert], stack), alone)  # noqa: B023
    assert lm.params["blocks"]["layer_0"]["mlp"]["router"]["weights"].dtype == jnp.float32
    lm.save(tmp_path / "saved")
    again = jaxinfer.load(tmp_path / "saved")
    assert same(again.params, lm.params)
    assert again.fingerprint == lm.fingerprint


@pytest.mark.slow
def test_layers_that_are_scanned_hold_the_same_codes_and_are_saved_alike(tmp_path):
    folder = write(tmp_path / "model", tensors_of())
    apart, stacked = (jaxinfer.load(folder, weights="int4:group=32", scan_layers=each) for each in (False, True))
    assert same(stacks_of(stacked), stacks_of(apart))
    found, expected = (np.asarray(lm.logits(TEXT)) for lm in (stacked, apart))
    assert np.abs(found - expected).max() < 0.05 * expected.std()
    stacked.save(tmp_path / "saved")
    assert same(jaxinfer.load(tmp_path / "saved", scan_layers=False).params, apart.params)
    assert stacked.fingerprint == apart.fingerprint


def in_blocks_of_fp8(rows: int, inputs: int) -> tuple[Tensors, dict]:
    """Return tensors as DeepSeek publishes them: floats of 8 bits, and a scale for each block of a matrix."""
    made: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(3)
    for name, values in tensors_of().items():
        if ".experts." not in name:
            made[name] = values
            continue
        made[name] = values.astype(ml_dtypes.float8_e4m3fn)
        grid = -(-values.shape[0] // rows), -(-values.shape[1] // inputs)
        made[f"{name}_scale_inv"] = rng.uniform(0.5, 2, grid).astype(np.float32)
    method = {"quant_method": "fp8", "weight_block_size": [rows, inputs], "activation_scheme": "dynamic"}
    return made, {"quantization_config": method}


@pytest.mark.slow
def test_blocks_of_floats_that_are_published_stay_as_they_are(tmp_path):
    tensors, method = in_blocks_of_fp8(32, 32)
    notices: list[str] = []
    lm = jaxinfer.load(write(tmp_path / "model", tensors, method), notice=notices.append)
    assert not [each for each in notices if "widened" in each]
    up = stacks_of(lm)["up"]
    assert up.form == replace(FP8, group=32, scale_type="float32")
    assert up.codes.dtype == jnp.int8
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    scales = np.repeat(np.repeat(tensors[f"{name}_scale_inv"], 32, 0), 32, 1)
    expected = tensors[name].astype(np.float32) * scales
    assert (np.asarray(up.dequantize())[2] == expected).all()


def test_experts_alone_may_be_in_few_bits(tmp_path):
    lm = jaxinfer.load(write(tmp_path / "model", tensors_of()), weights="mxfp4:only=experts")
    assert stacks_of(lm)["gate"].form == MXFP4
    found = {id(each) for each in jax.tree.leaves(lm.params, is_leaf=is_quantized) if is_quantized(each)}
    assert found == {id(each) for each in stacks_of(lm).values()}
    assert same(lm.params["blocks"]["layer_0"]["attention"], params()["blocks"]["layer_0"]["attention"])
    rounded = in_few_bits(params(), MXFP4, "named", only_experts=True)
    assert same(rounded, lm.params)


def test_a_stack_that_is_loaded_is_rounded_to_the_same_codes():
    """A matrix at a time, as from a checkpoint; what is no matrix stays."""
    found = in_few_bits(params(), int4(32, False), "named")
    gate = found["blocks"]["layer_0"]["mlp"]["experts"]["gate"]
    alone = round_to_nearest(jnp.asarray(plain_stacks()["gate"][1]), int4(32, False))
    assert same(jax.tree.map(lambda part: part[1], gate), alone)
    assert same(found["blocks"]["layer_0"]["mlp"]["router"], params()["blocks"]["layer_0"]["mlp"]["router"])


def test_what_experts_are_not_asked_for_with_is_refused_in_one_line(tmp_path):
    folder = write(tmp_path / "model", tensors_of())
    with pytest.raises(InvalidOption, match="activations 'int8': experts multiply rows as they are: leave act"):
        jaxinfer.load(folder, weights="int8", activations="int8")
    with pytest.raises(InvalidOption, match=r"down_proj.weight: its rows of 32 weights do not divide into groups of"):
        jaxinfer.load(folder, weights="int4:group=128")
    lm = jaxinfer.load(folder)
    with pytest.raises(InvalidOption, match=r"only=experts': a method chooses codes of all kernels: leave only= out"):
        jaxinfer.quantize(lm, "int8:only=experts")
    lost = dict(tensors_of())
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    lost[name] = np.full_like(lost[name], np.nan)
    for weights in ("int4:group=32", "mxfp4"):
        with pytest.raises(InvalidCheckpoint, match=r"experts.1.down_proj.weight has weights that are no finite"):
            jaxinfer.load(write(tmp_path / weights[:4], lost), weights=weights)


@pytest.mark.exhaustive
def test_a_mixture_drafts_for_itself_in_fewer_bits(tmp_path):
    lm = jaxinfer.load(write(tmp_path / "model", tensors_of()))
    strategy = lm.resolve("draft_model:model=self,weights=mxfp4,num_draft_tokens=3")
    assert strategy.params["blocks"]["layer_0"]["mlp"]["experts"]["down"].form == MXFP4
    plain, drafted = (lm.generate(TEXT, max_new_tokens=16, strategy=each)[0] for each in ("autoregressive", strategy))
    assert drafted.tokens == plain.tokens
    assert drafted.stats.accepted > 0
