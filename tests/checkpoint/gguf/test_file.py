"""GGUF tensors: the values, names and row order that Hugging Face's folder of the same model has."""

import tracemalloc

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.checkpoint.gguf.file import open_gguf
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint, UnsupportedModel
from tests.checkpoint.gguf import files

SUPPORTED = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
F32 = np.dtype(np.float32)


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def round_trip(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return what the gguf package makes of values stored as ``kind``."""
    return gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_type_reads_bit_equal_to_the_gguf_package_in_hugging_face_order(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    made = files.hf_tensors(tied=False, bias=True)
    checkpoint = open_gguf(files.write_gguf(tmp_path / "m.gguf", files.gguf_tensors(made), kind))
    assert checkpoint.tensors.shapes() == {key: values.shape for key, values in made.items()}
    for key, values in made.items():
        # Blocks run along a row, so reordering rows and quantizing commute.
        expected = round_trip(values, kind) if values.ndim > 1 else values
        assert bits(checkpoint.tensors.read(key, F32)) == bits(expected), key


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["F32", "BF16", "Q4_1"])
def test_reading_in_another_dtype_is_the_float32_value_converted(tmp_path, name, dtype):
    kind = gguf.GGMLQuantizationType[name]
    made = files.hf_tensors()
    checkpoint = open_gguf(files.write_gguf(tmp_path / "m.gguf", files.gguf_tensors(made), kind))
    for key in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"):
        read = checkpoint.tensors.read(key, np.dtype(dtype))
        assert read.dtype == dtype
        assert bits(read) == bits(round_trip(made[key], kind).astype(dtype))


def test_slabs_keep_the_row_order_and_bound_the_temporaries(tmp_path):
    rng = np.random.default_rng(1)
    head_dim, heads, width = 512, 16, 1024
    made = {"model.layers.0.self_attn.q_proj.weight": rng.standard_normal((heads * head_dim, width), np.float32)}
    keys = {
        "llama.attention.head_count": heads,
        "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.rope.dimension_count": head_dim,
    }
    stored = {"blk.0.attn_q.weight": files.permute(*made.values(), heads)}
    kind = gguf.GGMLQuantizationType.Q8_0
    checkpoint = open_gguf(files.write_gguf(tmp_path / "m.gguf", stored, kind, keys))
    tracemalloc.start()
    try:
        (name,) = made
        read = checkpoint.tensors.read(name, np.dtype(ml_dtypes.bfloat16))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert bits(read) == bits(round_trip(made[name], kind).astype(ml_dtypes.bfloat16))
    # The tensor is 32 MiB in float32, so one whole float32 copy would not pass.
    assert peak - read.nbytes < 20 * 2**20


def test_infinite_and_undefined_weights_are_read_as_they_are(tmp_path):
    made = files.hf_tensors()
    made["model.embed_tokens.weight"][0, :3] = [np.inf, -np.inf, np.nan]
    path = files.write_gguf(tmp_path / "m.gguf", files.gguf_tensors(made))
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
        read = open_gguf(path).tensors.read("model.embed_tokens.weight", np.dtype(dtype)).astype(np.float32)
        np.testing.assert_array_equal(read[0, :3], np.array([np.inf, -np.inf, np.nan], np.float32))


def test_metadata_is_given_whole_and_in_python_types(tmp_path):
    keys = {"general.note": "é中🙂", "general.flag": True, "general.ratio": 0.5, "general.nested": [[1, 2], [3, 4]]}
    checkpoint = open_gguf(files.write_gguf(tmp_path / "m.gguf", files.gguf_tensors(files.hf_tensors()), keys=keys))
    metadata = dict(checkpoint.gguf_metadata or {})
    assert {key: metadata[key] for key in keys} == keys
    assert metadata["tokenizer.ggml.tokens"] == files.KEYS["tokenizer.ggml.tokens"]
    assert metadata["general.architecture"] == "llama"


def test_version_2_is_read_and_others_are_refused(tmp_path):
    path = files.write_gguf(tmp_path / "m.gguf", files.gguf_tensors(files.hf_tensors()))
    data = bytearray(path.read_bytes())
    data[4:8] = (2).to_bytes(4, "little")
    path.write_bytes(data)
    assert open_gguf(path).config["num_hidden_layers"] == files.LAYERS
    for version, message in ((1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")):
        data[4:8] = version.to_bytes(4, "little")
        path.write_bytes(data)
        with pytest.raises(InvalidCheckpoint, match=message):
            open_gguf(path)


def test_a_foreign_architecture_tensor_or_type_is_refused_by_name(tmp_path):
    tensors = files.gguf_tensors(files.hf_tensors())
    for name, said in (("mamba", "is not supported: .*state-space"), ("nobody", "known: afmoe, .*starcoder2")):
        with pytest.raises(UnsupportedModel, match=f"'{name}' .*{said}"):
            open_gguf(files.write_gguf(tmp_path / "a.gguf", tensors, architecture=name))
    with pytest.raises(UnsupportedModel, match=r"'blk.0.ssm_a.weight'"):
        open_gguf(
            files.write_gguf(tmp_path / "b.gguf", tensors | {"blk.0.ssm_a.weight": tensors["output_norm.weight"]})
        )
    blocks = {"token_embd.weight": (np.zeros((2, 144), np.uint8), gguf.GGMLQuantizationType.IQ4_NL)}
    with pytest.raises(UnsupportedModel, match=r"'token_embd.weight' is stored as IQ4_NL, .*Q4_1"):
        open_gguf(files.write_gguf(tmp_path / "c.gguf", {}, blocks=blocks))


def test_what_is_no_model_is_refused(tmp_path):
    tensors = files.gguf_tensors(files.hf_tensors())
    path = files.write_gguf(tmp_path / "m.gguf", tensors, keys={"general.type": "adapter"})
    with pytest.raises(UnsupportedModel, match="whole model"):
        open_gguf(path)


def test_query_rows_that_are_not_whole_heads_are_refused(tmp_path):
    tensors = files.gguf_tensors(files.hf_tensors())
    tensors["blk.1.attn_q.weight"] = tensors["blk.1.attn_q.weight"][:-8]
    with pytest.raises(InvalidCheckpoint, match=r"'blk.1.attn_q.weight' has shape \[24, 32\], not 4 heads of 8"):
        open_gguf(files.write_gguf(tmp_path / "m.gguf", tensors))


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(CheckpointNotFound, match=r"absent\.gguf: no such file"):
        open_gguf(tmp_path / "absent.gguf")
    with pytest.raises(InvalidCheckpoint, match="cannot be read"):
        open_gguf(tmp_path)
