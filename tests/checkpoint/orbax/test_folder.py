"""A converted folder holds the bits and the settings of what it came from."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file, save_file

import jaxinfer
from jaxinfer.checkpoint.convert import convert
from jaxinfer.checkpoint.gguf.file import GGUFTensors
from jaxinfer.checkpoint.gguf.header import TensorEntry
from jaxinfer.checkpoint.gguf.names import StoredTensor
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.checkpoint.orbax import layout as orbax_layout
from jaxinfer.checkpoint.orbax import writer as orbax_writer
from jaxinfer.checkpoint.orbax.folder import OrbaxTensors
from jaxinfer.checkpoint.orbax.layout import choose_box
from jaxinfer.errors import InvalidCheckpoint
from tests.checkpoint.gguf import files as gguf_files
from tests.checkpoint.llama2c import files as llama2c_files

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def bits(array) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def assert_same_tensors(one, other, dtype) -> None:
    assert one.tensors.shapes() == other.tensors.shapes()
    for name in one.tensors.shapes():
        np.testing.assert_array_equal(bits(one.tensors.read(name, dtype)), bits(other.tensors.read(name, dtype)))


@pytest.fixture
def in_small_boxes(monkeypatch):
    """Cut a tiny model's embedding into several boxes."""
    for module in (orbax_layout, orbax_writer):
        monkeypatch.setattr(module, "BOX_BYTES", 8192)


@pytest.fixture(scope="module")
def source(tiny_llama_folder):
    return tiny_llama_folder()


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    return convert(source, tmp_path_factory.mktemp("converted") / "model")


@pytest.fixture
def stored_as(source, tmp_path):
    """Return a function that writes the model in another dtype, with bits in it that rounding would lose."""

    def write(dtype: str) -> Path:
        folder = shutil.copytree(source, tmp_path / f"source-{dtype}")
        tensors = {name: array.astype(DTYPES[dtype]) for name, array in load_file(folder / "model.safetensors").items()}
        first = tensors["model.layers.0.mlp.up_proj.weight"]
        first[0, :3] = [np.inf, -0.0, np.nan]
        bits(first[1, :1])[0] ^= 1
        save_file(tensors, folder / "model.safetensors")
        return folder

    return write


@pytest.mark.slow
@pytest.mark.parametrize("stored", DTYPES)
def test_parameters_are_those_of_the_source_bit_for_bit(stored_as, tmp_path, stored, in_small_boxes):
    folder = stored_as(stored)
    made = convert(folder, tmp_path / "made")
    assert {tensor["dtype"] for tensor in json.loads((made / "jaxinfer.json").read_text())["tensors"].values()} == {
        stored
    }
    for dtype in {"float32", stored}:
        expected, found = (jaxinfer.load(path, dtype=dtype) for path in (folder, made))
        assert expected.config == found.config
        assert jax.tree.structure(expected.params) == jax.tree.structure(found.params)
        assert jax.tree.all(
            jax.tree.map(
                lambda a, b: a.dtype == b.dtype and bool((bits(a) == bits(b)).all()), expected.params, found.params
            )
        )


def test_one_dtype_for_all_is_that_of_the_source_loaded_in_it(source, tmp_path):
    made = convert(source, tmp_path / "made", dtype="bfloat16")
    assert_same_tensors(open_checkpoint(source), open_checkpoint(made), np.dtype(ml_dtypes.bfloat16))


def test_the_tokenizer_and_its_settings_come_along(source, converted):
    expected, found = jaxinfer.load(source), jaxinfer.load(converted)
    text = "The quick fox — naïve?"
    assert found.tokenizer.encode(text) == expected.tokenizer.encode(text)
    messages = [{"role": "user", "content": "Hi"}]
    assert found.encode_chat(messages) == expected.encode_chat(messages)
    assert found.eos_token_ids == expected.eos_token_ids


@pytest.mark.parametrize(
    ("kind", "stored"), [("F32", {"float32"}), ("F16", {"float16", "float32"}), ("Q8_0", {"float32"})]
)
def test_a_gguf_keeps_its_bits_its_configuration_and_its_vocabulary(tmp_path, kind, stored):
    tensors = gguf_files.gguf_tensors(gguf_files.hf_tensors())
    path = gguf_files.write_gguf(tmp_path / "model.gguf", tensors, gguf.GGMLQuantizationType[kind])
    notices: list[str] = []
    expected, found = open_checkpoint(path), open_checkpoint(convert(path, tmp_path / "made", notice=notices.append))
    assert_same_tensors(expected, found, np.dtype(np.float32))
    assert {found.tensors.stored_dtype(name).name for name in found.tensors.shapes()} == stored
    assert dict(found.config) == dict(expected.config)
    kept = {key for key in expected.gguf_metadata if key.startswith("tokenizer.")} | {"general.architecture"}
    assert found.gguf_metadata == {key: expected.gguf_metadata[key] for key in kept}
    assert found.folder is None
    assert len(notices) == (kind == "Q8_0")
    assert all("15 quantised tensors become float32; --dtype" in notice for notice in notices)


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_a_norm_that_a_gguf_shifts_is_not_rounded(kind):
    """What llama.cpp added to a norm's weights is taken off in float32; 16 bits would not hold the difference."""
    values = np.array([0.001, 1.5], np.float16 if kind == "F16" else np.float32)
    entry = TensorEntry(gguf.GGMLQuantizationType[kind], (2,), 0, values.nbytes, values.tobytes())
    assert GGUFTensors({"w": StoredTensor(entry)}).stored_dtype("w") == values.dtype
    assert GGUFTensors({"w": StoredTensor(entry, shift=1.0)}).stored_dtype("w") == np.float32


@pytest.mark.parametrize("version", [0, 2])
def test_a_llama2c_file_keeps_its_bits_and_the_tokenizer_beside_it(tmp_path, version):
    sizes = llama2c_files.Sizes()
    path = llama2c_files.write_llama2c(tmp_path / "m.bin", version, sizes, llama2c_files.hf_tensors(sizes))
    for name in ("tok300.bin", "tokenizer.bin", "unrelated.bin"):
        (tmp_path / name).write_bytes(name.encode())
    notices: list[str] = []
    made = convert(path, tmp_path / "made", notice=notices.append)
    expected, found = open_checkpoint(path), open_checkpoint(made)
    assert_same_tensors(expected, found, np.dtype(np.float32))
    assert dict(found.config) == dict(expected.config)
    assert found.llama2c_file.parent == made
    assert {path.name for path in made.glob("*.bin")} == {"tok300.bin", "tokenizer.bin"}
    assert len(notices) == (version == 2)


def test_a_converted_folder_can_be_converted_again(converted, tmp_path):
    again = convert(converted, tmp_path / "again")
    assert_same_tensors(open_checkpoint(converted), open_checkpoint(again), np.dtype(np.float32))
    assert (again / "tokenizer.json").read_bytes() == (converted / "tokenizer.json").read_bytes()


def test_orbax_itself_reads_the_weights(source, converted):
    expected = load_file(source / "model.safetensors")
    found = ocp.StandardCheckpointer().restore(converted / "weights")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_boxes_are_the_chunks_that_orbax_stores(source, tmp_path, in_small_boxes):
    made = convert(source, tmp_path / "made")
    found = ocp.StandardCheckpointer().metadata(made / "weights").item_metadata.tree
    boxes = {name: choose_box(tuple(array.shape), 4) for name, array in found.items()}
    assert boxes == {name: tuple(array.storage.chunk_shape) for name, array in found.items()}
    assert any(box != tuple(found[name].shape) for name, box in boxes.items())


def test_a_tensor_that_only_cuts_into_crumbs_stays_whole():
    assert choose_box((32003, 4096), 2) == (32003, 4096)
    assert choose_box((32000, 4096), 2) == (4000, 2048)
    assert choose_box((7,), 4) == (7,)


def test_rows_are_read_without_the_boxes_that_do_not_hold_them(source, tmp_path, in_small_boxes):
    """Damage the last box of a matrix on disk: its first rows still read, its last ones do not."""
    name = "model.embed_tokens.weight"
    array = load_file(source / "model.safetensors")[name]
    tensors = open_checkpoint(made := convert(source, tmp_path / "made")).tensors
    for start, stop in ((0, 258), (3, 4), (100, 201), (257, 258), (5, 5)):
        np.testing.assert_array_equal(tensors.read_rows(name, start, stop, np.dtype(np.float32)), array[start:stop])
    damage_bytes(made, array[-5:].tobytes())
    tensors = open_checkpoint(made).tensors
    np.testing.assert_array_equal(tensors.read_rows(name, 0, 200, np.dtype(np.float32)), array[:200])
    with pytest.raises(InvalidCheckpoint, match=r"embed_tokens\.weight is damaged: its checksum"):
        tensors.read_rows(name, 200, 258, np.dtype(np.float32))


def damage_bytes(folder: Path, pattern: bytes) -> None:
    """Flip one bit of the only place in the folder's weights that holds these bytes."""
    holders = [path for path in folder.rglob("*") if path.is_file() and pattern in path.read_bytes()]
    assert len(holders) == 1
    content = bytearray(holders[0].read_bytes())
    content[content.index(pattern) + 1] ^= 4
    holders[0].write_bytes(content)


def test_a_single_number_comes_back_as_one_and_damage_to_it_is_found(tmp_path):
    """As Apertus has it: the parameters of its activations."""

    class Numbers:
        def shapes(self):
            return {"beta": (), "alpha": (3,)}

        def read(self, name, dtype):
            return np.full(self.shapes()[name], 0.5, dtype)

    dtypes = dict.fromkeys(("beta", "alpha"), np.dtype(np.float32))
    stored = orbax_writer.write_tensors(tmp_path / "weights", Numbers(), dtypes, None)
    found = OrbaxTensors(tmp_path, stored, {})
    assert found.shapes() == Numbers().shapes()
    assert found.read("beta", np.dtype(np.float64)) == 0.5
    damaged = OrbaxTensors(tmp_path, {"beta": replace(stored["beta"], checksums=(7,))}, {})
    with pytest.raises(InvalidCheckpoint, match="damaged"):
        damaged.read("beta", np.dtype(np.float32))
