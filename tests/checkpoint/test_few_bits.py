"""Checkpoints in few bits: a GGUF file's blocks as they are, others rounded, and what is refused in one line."""

import re
import shutil
import time

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxinfer
from jaxinfer.checkpoint import few_bits
from jaxinfer.checkpoint.few_bits import parse_few_bits
from jaxinfer.checkpoint.gguf.block_parts import split_blocks
from jaxinfer.checkpoint.gguf.blocks import dequantize_rows
from jaxinfer.errors import InvalidCheckpoint, InvalidOption
from jaxinfer.ops.few_bits.formats import FP8, GGUF_FORMATS, INT8, MXFP4, Format, int4, nf4
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray, is_quantized
from jaxinfer.ops.few_bits.round_to_nearest import nearest_values
from tests.checkpoint.gguf.files import gguf_tensors, hf_tensors, random_blocks, write_gguf
from tests.toys import write_tiny_llama

KINDS = gguf.GGMLQuantizationType


def write(path, kind="Q4_1", **options):
    """Write a file whose matrices are stored in blocks of some kind."""
    return write_gguf(path / "m.gguf", gguf_tensors(hf_tensors()), KINDS[kind], **options)


def on_host(leaf):
    return jax.tree.map(np.asarray, leaf).dequantize() if is_quantized(leaf) else np.asarray(leaf)


def leaves(lm):
    return dict(jax.tree_util.tree_flatten_with_path(lm.params, is_leaf=is_quantized)[0])


@pytest.mark.parametrize("kind", ["Q4_1", *(pytest.param(k, marks=pytest.mark.slow) for k in ("Q4_0", "Q5_0", "Q8_0"))])
def test_blocks_stand_for_the_weights_that_are_read_without_them(tmp_path, kind):
    """Bit by bit, of queries and keys too, whose rows the file has in another order."""
    path = write(tmp_path, kind)
    found, plain = leaves(jaxinfer.load(path, weights="gguf")), leaves(jaxinfer.load(path))
    assert found.keys() == plain.keys()
    for name, leaf in found.items():
        assert is_quantized(leaf) == (plain[name].ndim == 2)
        assert on_host(leaf).tobytes() == np.asarray(plain[name]).tobytes()
        assert not is_quantized(leaf) or leaf.form == GGUF_FORMATS[kind]


@pytest.mark.parametrize("kind", GGUF_FORMATS)
def test_parts_of_blocks_have_the_values_of_the_blocks(kind):
    """Bit by bit, of any codes and any finite scales."""
    form = GGUF_FORMATS[kind]
    raw = random_blocks((5, 2 * 256), KINDS[kind])
    raw[:, 40:60] ^= np.arange(100, dtype=np.uint8).reshape(5, 20) if form.supers else 0
    expected = dequantize_rows(raw, KINDS[kind])
    size = gguf.GGML_QUANT_SIZES[KINDS[kind]][1]
    parts = split_blocks(raw.reshape(-1, size), kind)
    found = QuantizedArray.of(form, [part.reshape(5, -1) for part in parts])
    assert {name: (part.shape, part.dtype.name) for name, part in zip(form.part_names, found.matrix)} == form.parts(
        5, 512
    )
    assert found.dequantize().tobytes() == expected.tobytes()


def test_types_without_products_of_their_own_are_widened_and_named(tmp_path, monkeypatch):
    tensors = gguf_tensors(hf_tensors())
    table = tensors.pop("token_embd.weight")
    blocks = {"token_embd.weight": (gguf.quants.quantize(table, KINDS.Q5_1), KINDS.Q5_1)}
    path = write_gguf(tmp_path / "m.gguf", tensors, KINDS.Q8_0, blocks=blocks)
    said = []
    monkeypatch.setattr(few_bits, "GGUF_FORMATS", {"Q8_0": GGUF_FORMATS["Q8_0"]})
    lm = jaxinfer.load(path, weights="gguf", notice=said.append)
    assert said == [f"{path}: matrices are widened to float32: blocks of Q5_1, which have no products of their own"]
    assert not is_quantized(lm.params["embed"]["embedding"])
    assert is_quantized(lm.params["blocks"]["layer_0"]["mlp"]["up"]["kernel"])


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [False, True])
def test_kernels_are_rounded_and_tables_keep_eight_bits(tmp_path, scan_layers):
    folder = write_tiny_llama(tmp_path)
    lm = jaxinfer.load(folder, weights="int4:group=32", scan_layers=scan_layers)
    forms = {name: leaf.form for name, leaf in leaves(lm).items() if is_quantized(leaf)}
    assert set(forms.values()) == {INT8, int4(32, False)}
    assert {name[0].key for name, form in forms.items() if form == INT8} <= {"embed", "head"}
    plain = jaxinfer.load(folder, scan_layers=scan_layers)
    for name, expected in leaves(plain).items():
        leaf = leaves(lm)[name]
        most = 0.2 * np.abs(np.asarray(expected)).max() if is_quantized(leaf) else 0
        assert np.abs(on_host(leaf) - np.asarray(expected)).max() <= most
    assert lm.fingerprint != plain.fingerprint


def test_eight_bits_in_groups_are_nearer_than_those_of_rows():
    matrix = np.random.default_rng(0).standard_t(3, (16, 256)).astype(np.float32)
    forms = [parse_few_bits(name).form for name in ("int8", "int8:group=128", "int8:group=64", "int8:group=32")]
    assert forms == [INT8, Format(8, 128), Format(8, 64), Format(8, 32)]
    # Tables are in the groups of kernels in bytes, and beside others in bytes of rows.
    assert [form.of_tables for form in forms] == forms
    assert {parse_few_bits(name).form.of_tables for name in ("int4", "nf4:group=32", "fp8:group=64")} == {INT8}
    errors = [np.square(np.asarray(nearest_values(jnp.asarray(matrix), form)) - matrix).sum() for form in forms]
    assert errors[3] < 0.9 * errors[2] < 0.8 * errors[1] < 0.7 * errors[0]


@pytest.mark.slow
def test_a_model_in_eight_bits_in_groups_decodes_alike_by_any_strategy(tmp_path):
    folder = write_tiny_llama(tmp_path, model_dim=128, ffn_dim=256, head_dim=32, num_layers=1)
    lm = jaxinfer.load(folder, weights="int8:group=64")
    assert {leaf.form for leaf in leaves(lm).values() if is_quantized(leaf)} == {Format(8, 64)}
    again = jaxinfer.load(lm.save(tmp_path / "saved"))
    assert again.fingerprint == lm.fingerprint
    assert {leaf.form for leaf in leaves(again).values() if is_quantized(leaf)} == {Format(8, 64)}
    found, drafted = (
        lm.generate([[5, 9, 5, 9]], max_new_tokens=12, strategy=name)[0].tokens
        for name in ("autoregressive", "prompt_lookup")
    )
    assert drafted == found


def test_a_file_in_its_own_bits_is_the_model_that_it_is_without(tmp_path):
    path = write(tmp_path, "Q8_0")
    assert jaxinfer.load(path, weights="gguf").fingerprint == jaxinfer.load(path).fingerprint


def test_kept_weights_are_in_few_bits_too(tmp_path):
    path = write(tmp_path)
    first = jaxinfer.load(path, weights="gguf", kept=tmp_path / "kept")
    for _ in range(1000):  # a thread writes them
        if list(tmp_path.glob("kept/weights/*.parameters")):
            break
        time.sleep(0.01)
    second = jaxinfer.load(path, weights="gguf", kept=tmp_path / "kept")
    plain = jaxinfer.load(path, kept=tmp_path / "kept")
    assert any("mapped" in note for note in second.load_times.notes)
    assert not any("mapped" in note for note in plain.load_times.notes)
    assert jax.tree.structure(second.params) == jax.tree.structure(first.params)
    for left, right in zip(jax.tree.leaves(first.params), jax.tree.leaves(second.params)):
        assert left.dtype == right.dtype
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


SPECS = {
    "an unknown name": ("int5", "unknown weights 'int5'; use one of int8, int4, nf4, mxfp4, fp8, 2:4, blocks, gguf"),
    "an option that is none": ("int4:size=3", "unknown option 'size' of weights int4; its options are: group, symm"),
    "a group that is none": ("int4:group=48", "group='48' is none of 32, 64, 128"),
    "an option of int4": ("int8:symmetric=yes", "unknown option 'symmetric' of weights int8; its options are: group, "),
    "a group that int8 has not": ("int8:group=16", "group='16' is none of 32, 64, 128"),
    "groups that do not divide": (
        "int4:group=128",
        r"rows of \d\d weights do not divide into groups of 128; use a small",
    ),
    "blocks of a folder": ("gguf", "is no GGUF file; use int8 or int4"),
}


@pytest.mark.parametrize("name", SPECS)
def test_what_cannot_be_is_refused_in_one_line(tiny_llama_folder, name):
    spec, pattern = SPECS[name]
    with pytest.raises(InvalidOption, match=pattern) as caught:
        jaxinfer.load(tiny_llama_folder(), weights=spec)
    assert str(caught.value).isprintable()


def test_where_few_bits_do_not_run_yet_they_are_refused_by_name(tmp_path):
    with pytest.raises(InvalidOption, match=r"m\.gguf has no Q4_0, .*, MXFP4; use int8 or int4"):
        jaxinfer.load(write(tmp_path, "F32"), weights="gguf")


def test_a_damaged_scale_is_named(tmp_path):
    tensors = gguf_tensors(hf_tensors())
    raw = random_blocks(tensors.pop("blk.0.ffn_up.weight").shape, KINDS.Q4_1)
    raw.reshape(-1)[:2] = 0xFF
    path = write_gguf(tmp_path / "m.gguf", tensors, KINDS.Q4_1, blocks={"blk.0.ffn_up.weight": (raw, KINDS.Q4_1)})
    with pytest.raises(InvalidCheckpoint, match=r"up_proj\.weight has a scale that is no finite number"):
        jaxinfer.load(path, weights="gguf")


def test_specifications_are_read():
    assert parse_few_bits(None) is None
    forms = {
        "fp8": FP8,
        "mxfp4": MXFP4,
        "nf4:group=32": nf4(32),
        "int8": INT8,
        "int4": int4(64, False),
        "int4:group=32,symmetric=yes,only=experts": int4(32, True),
        "gguf": None,
    }
    assert {spec: parse_few_bits(spec).form for spec in forms} == forms


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("value", "weights", "scan_layers", "why"),
    [
        (np.nan, "int8", False, "no finite numbers"),
        (-np.inf, "int8", True, "no finite numbers"),
        (np.nan, "fp8", False, "no finite numbers"),
        (1e6, "int4:group=32", False, "too large for scales in float16: use int8"),
        # The scale is held, and the minimum is not.
        (-1e5, "int4:group=32", True, "too large for scales in float16: use int8"),
    ],
)
def test_weights_that_a_form_cannot_hold_are_named(tiny_llama_folder, tmp_path, value, weights, scan_layers, why):
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama_folder(), folder)
    tensors = load_file(folder / "model.safetensors")
    changed = tensors[DOWN].copy()
    changed[3, 5] = value
    save_file({**tensors, DOWN: changed}, folder / "model.safetensors")
    with pytest.raises(InvalidCheckpoint, match=rf"model: {re.escape(DOWN)} has weights that are {why}"):
        jaxinfer.load(folder, weights=weights, scan_layers=scan_layers)
    if weights != "fp8":
        lm = jaxinfer.load(folder, scan_layers=scan_layers)
        for method in ("gptq", "awq", "smoothquant"):
            with pytest.raises(InvalidOption, match=rf"mlp\.down\.\w+ of the model has weights that are {why}"):
                jaxinfer.quantize(lm, weights, method=method, calibration=[1, 2, 3, 4], text_tokens=2)
