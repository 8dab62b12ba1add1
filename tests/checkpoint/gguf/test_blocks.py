"""Every type of GGUF block dequantises to the bits that the gguf package gives, through a file of its own."""

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.checkpoint.gguf.blocks import dequantize_rows
from jaxinfer.checkpoint.gguf.file import open_gguf
from jaxinfer.checkpoint.gguf.header import SUPPORTED_TYPES
from jaxinfer.errors import UnsupportedModel
from tests.checkpoint.gguf import files

WIDTH = 512  # two super-blocks a row
PLAIN, QUERY = "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"
NAMES = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
NAMES |= {"TQ1_0", "TQ2_0", "MXFP4"}
OTHERS = sorted(kind.name for kind in gguf.GGMLQuantizationType if kind.name not in NAMES)


def write(path, kind, seed=0):
    """Write an embedding and an interleaved query as random blocks; return the file and both by Hugging Face names."""
    embedding = files.random_blocks((files.VOCAB, WIDTH), kind, seed)
    query = files.random_blocks((files.HEADS * files.HEAD_DIM, WIDTH), kind, seed + 1)
    stored = {"token_embd.weight": (embedding, kind), "blk.1.attn_q.weight": (files.permute(query, files.HEADS), kind)}
    keys = {"llama.embedding_length": WIDTH, "llama.attention.key_length": files.HEAD_DIM}
    keys["llama.attention.value_length"] = files.HEAD_DIM
    return files.write_gguf(path, {}, keys=keys, blocks=stored), {PLAIN: embedding, QUERY: query}


def test_the_types_of_the_format_are_covered():
    assert set(SUPPORTED_TYPES) == NAMES


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("name", SUPPORTED_TYPES)
def test_a_tensor_of_every_type_has_the_bits_of_the_gguf_package(tmp_path, name, dtype):
    kind = gguf.GGMLQuantizationType[name]
    path, made = write(tmp_path / "m.gguf", kind)
    tensors = open_gguf(path).tensors
    for key, raw in made.items():
        expected = gguf.quants.dequantize(raw, kind)
        assert np.all(np.isfinite(expected))
        assert np.std(expected) > 0.1
        read = tensors.read(key, np.dtype(dtype))
        assert read.shape == expected.shape == tensors.shapes()[key]
        with np.errstate(over="ignore"):  # Q6_K multiplies a scale by up to 127 * 32
            assert read.tobytes() == expected.astype(dtype).tobytes(), key


@pytest.mark.parametrize("name", [name for name in SUPPORTED_TYPES if name not in ("F32", "F16", "BF16")])
def test_any_bytes_at_all_have_the_bits_of_the_gguf_package(name):
    """Scales that are infinite, undefined, subnormal or zero occur here: 4,096 random float16 a type."""
    kind = gguf.GGMLQuantizationType[name]
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(2).integers(0, 256, (64, 64 * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        read, expected = dequantize_rows(rows, kind), gguf.quants.dequantize(rows, kind)
    assert read.shape == (64, 64 * weights)
    assert not np.all(np.isfinite(expected))
    np.testing.assert_array_equal(read, expected)
    finite = np.isfinite(expected)
    assert read[finite].tobytes() == expected[finite].tobytes()


@pytest.mark.parametrize("name", OTHERS)
def test_another_type_is_refused_by_its_name(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = {"token_embd.weight": (np.zeros((2, max(1, 256 // weights) * size), np.uint8), kind)}
    with pytest.raises(UnsupportedModel, match=rf"'token_embd.weight' is stored as {name}, .*MXFP4 tensors") as error:
        open_gguf(files.write_gguf(tmp_path / "m.gguf", {}, blocks=blocks))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("number", "label"), [(31, "Q4_0_4_4"), (4, "Q4_2"), (77, "type number 77")])
def test_a_type_that_left_the_format_or_is_not_in_it_yet_is_named(tmp_path, number, label):
    path, _ = write(tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q2_K)
    data = path.read_bytes()
    name = b"token_embd.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert data[at : at + 4] == bytes([gguf.GGMLQuantizationType.Q2_K, 0, 0, 0])
    path.write_bytes(data[:at] + bytes([number]) + data[at + 1 :])
    with pytest.raises(UnsupportedModel, match=f"is stored as {label},"):
        open_gguf(path)


@pytest.mark.parametrize("name", ["Q5_0", "Q2_K", "Q6_K"])
def test_rows_that_are_no_whole_blocks_are_refused(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    path, _ = write(tmp_path / "m.gguf", kind)
    data = bytearray(path.read_bytes())
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4
    data[at : at + 8] = (WIDTH - 8).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"shape \(40, {WIDTH - 8}\), impossible for {name}"):
        open_gguf(path)
