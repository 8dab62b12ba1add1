"""A Hugging Face folder yields its tensors exactly, or one clear error before any weight is read."""

import json
from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.checkpoint.hf_folder import open_hf_folder
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint, JaxinferError
from tests.checkpoint.weights import tensors, write_folder

STORED = [np.float32, np.float16, ml_dtypes.bfloat16]
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("num_shards", [0, 1, 3])
@pytest.mark.parametrize("stored", STORED)
def test_every_tensor_is_read_in_every_target_type(tmp_path, stored, num_shards):
    made = tensors(dtype=stored, width=3)
    checkpoint = open_hf_folder(write_folder(tmp_path, made, num_shards))
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.folder == tmp_path
    assert checkpoint.tensors.shapes() == {name: array.shape for name, array in made.items()}
    for target in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64):
        for name, array in made.items():
            read = checkpoint.tensors.read(name, np.dtype(target))
            assert read.dtype == target
            np.testing.assert_array_equal(read, array.astype(target))


def test_float32_rounds_to_the_nearest_even_bfloat16(tmp_path):
    halfway = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8)], np.float32)
    checkpoint = open_hf_folder(write_folder(tmp_path, {"x": halfway}))
    rounded = checkpoint.tensors.read("x", np.dtype(ml_dtypes.bfloat16)).astype(np.float32)
    np.testing.assert_array_equal(rounded, [1, 1 + 2**-6, 1 + 2**-7, -1])


def test_reading_without_conversion_is_a_read_only_view(tmp_path):
    checkpoint = open_hf_folder(write_folder(tmp_path, tensors()))
    read = checkpoint.tensors.read("model.embed.weight", np.dtype(np.float32))
    assert not read.flags.writeable
    assert not read.flags.owndata


def test_a_tensor_type_without_a_conversion_is_refused_by_name(tmp_path):
    checkpoint = open_hf_folder(write_folder(tmp_path, {"ids": np.arange(3)}))
    with pytest.raises(InvalidCheckpoint, match="ids has type I64"):
        checkpoint.tensors.read("ids", np.dtype(np.float32))


@pytest.mark.parametrize(
    ("text", "named"),
    [("{", "broken JSON"), ("[1]", "not an object"), ("\udcff", "broken JSON"), ("[" * 100_000, "broken JSON")],
)
def test_a_broken_config_is_named(tmp_path, text, named):
    folder = write_folder(tmp_path, tensors())
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidCheckpoint, match=named) as error:
        open_hf_folder(folder)
    assert "config.json" in str(error.value)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(CheckpointNotFound, match=r"config\.json"):
        open_hf_folder(tmp_path)
    folder = write_folder(tmp_path, tensors())
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(InvalidCheckpoint, match="neither"):
        open_hf_folder(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointNotFound, match="no weights"):
        open_hf_folder(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_pickled_weights_are_refused_with_reason_and_mend(tmp_path, name):
    folder = write_folder(tmp_path, tensors())
    (folder / name).write_bytes(b"\x80\x02.")
    open_hf_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidCheckpoint, match=r"pickled weights can run any code.*safetensors") as error:
        open_hf_folder(folder)
    assert name in str(error.value)


def test_a_missing_shard_is_named(tmp_path):
    folder = write_folder(tmp_path, tensors(), num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InvalidCheckpoint, match=r"model-00002-of-00003\.safetensors: this shard is missing"):
        open_hf_folder(folder)


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        (None, "weight_map"),
        ({"x": 3}, "weight_map"),
        ({"x": "../x.safetensors"}, "plain file name"),
        ({"x": "/etc/passwd"}, "plain file name"),
        ({"x": ""}, "plain file name"),
        ({"x": "x" * 5000}, "this shard is missing"),
    ],
)
def test_a_bad_index_is_refused(tmp_path, weight_map, named):
    folder = write_folder(tmp_path, tensors(), num_shards=2)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidCheckpoint, match=named):
        open_hf_folder(folder)


def test_index_and_shards_must_agree(tmp_path):
    folder = write_folder(tmp_path, tensors(), num_shards=2)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    shard = weight_map["model.embed.weight"]
    (folder / INDEX).write_text(json.dumps({"weight_map": {**weight_map, "absent": shard}}))
    with pytest.raises(InvalidCheckpoint, match="absent is in the index but not in the file"):
        open_hf_folder(folder)
    del weight_map["model.embed.weight"]
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidCheckpoint, match=r"model\.embed\.weight is not in model\.safetensors\.index\.json"):
        open_hf_folder(folder)


def write_raw(folder, header: bytes, data: bytes):
    write_folder(folder, tensors())
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    return folder


def tensor(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": tensor([2], 0, 4)},
        {"a": tensor([2], 0, 16)},
        {"a": tensor([2], 8, 0)},
        {"a": tensor([-2], 0, 8)},
        {"a": tensor([2**40, 2**40], 0, 8)},
        {"a": tensor([2], 0, 8, "F31")},
        {"a": tensor([2], 0, 8), "b": tensor([2], 0, 8)},
        {"a": tensor([1], 0, 4), "b": tensor([1], 8, 12)},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": 7},
        [],
    ],
)
def test_headers_that_contradict_the_data_are_refused(tmp_path, header):
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors") as error:
        open_hf_folder(write_raw(tmp_path, json.dumps(header).encode(), bytes(8)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"abc", bytes(8), (2**63).to_bytes(8, "little"), (10**9).to_bytes(8, "little")]
)
def test_header_lengths_beyond_the_file_are_refused(tmp_path, content):
    folder = write_folder(tmp_path, tensors())
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors"):
        open_hf_folder(folder)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("fuzzed"), tensors())
    return folder, (folder / "model.safetensors").read_bytes()


def open_and_read(folder):
    checkpoint = open_hf_folder(folder)
    for name in checkpoint.tensors.shapes():
        checkpoint.tensors.read(name, np.dtype(np.float32))


@given(st.data())
@settings(derandomize=True, max_examples=60, deadline=None)
def test_truncated_files_are_refused(fuzzed, data):
    folder, whole = fuzzed
    (folder / "model.safetensors").write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(JaxinferError):
        open_and_read(folder)


@given(st.data())
@settings(derandomize=True, max_examples=200, deadline=None)
def test_flipped_header_bits_read_or_fail_as_a_bad_checkpoint(fuzzed, data):
    folder, whole = fuzzed
    changed = bytearray(whole)
    header_bits = 8 * (8 + int.from_bytes(whole[:8], "little"))
    for bit in data.draw(st.lists(st.integers(0, header_bits - 1), min_size=1, max_size=3)):
        changed[bit // 8] ^= 1 << bit % 8
    (folder / "model.safetensors").write_bytes(changed)
    with suppress(JaxinferError):
        open_and_read(folder)
