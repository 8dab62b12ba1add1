"""llama2.c files give the tensors, the configuration and the parameters of the same model as a Hugging Face folder."""

import json
import os
import tracemalloc
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest

import jaxinfer
from jaxinfer.checkpoint.llama2c.file import open_llama2c
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.errors import InvalidCheckpoint, InvalidTokenizer
from tests.checkpoint.llama2c import files
from tests.shared_data import shared_data

SIZES = files.Sizes()
FLOAT32 = np.dtype(np.float32)
STORIES = "models/stories260K/stories260K.bin"
STORIES_FOLDER = "models/stories260K-hf"


def make(version: int, shared: bool = True) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return a model's tensors, and the same as a file of that version holds them."""
    tensors = files.hf_tensors(SIZES, shared)
    return tensors, files.dequantized(SIZES, tensors) if version == 2 else tensors


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("version", [0, 1, 2])
def test_tensors_are_those_that_were_written(tmp_path, version, shared):
    tensors, expected = make(version, shared)
    found = open_llama2c(files.write_llama2c(tmp_path / "m.bin", version, SIZES, tensors)).tensors
    assert found.shapes() == {name: values.shape for name, values in expected.items()}
    for name, values in expected.items():
        for dtype in (FLOAT32, np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
            read = found.read(name, dtype)
            assert read.dtype == dtype
            assert read.tobytes() == values.astype(dtype).tobytes(), name


def test_rounding_to_int8_is_seen_and_small():
    """So that version 2 is not compared with itself: its values differ, by half a step at the most."""
    tensors, rounded = make(2)
    name = "model.layers.1.self_attn.q_proj.weight"
    difference = np.abs(tensors[name] - rounded[name]).max()
    assert 0 < difference <= 0.5001 * np.abs(tensors[name]).max() / 127


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("version", [0, 1, 2])
def test_parameters_are_those_of_the_same_weights_in_a_folder(tmp_path, version, shared):
    tensors, expected = make(version, shared)
    lm = jaxinfer.load(files.write_llama2c(tmp_path / "m.bin", version, SIZES, tensors), dtype="float32")
    reference = jaxinfer.load(files.write_hf_folder(tmp_path / "hf", SIZES, expected), dtype="float32")
    assert replace(lm.config, eos_token_ids=reference.config.eos_token_ids) == reference.config
    jax.tree.map(np.testing.assert_array_equal, lm.params, reference.params)


def test_the_configuration_is_what_the_file_and_llama2c_fix(tmp_path):
    path = files.write_llama2c(tmp_path / "m.bin", 0, SIZES, files.hf_tensors(SIZES, shared=False))
    checkpoint = open_checkpoint(path)
    assert checkpoint.llama2c_file == path
    keys = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    assert [checkpoint.config[key] for key in keys] == ["llama", 300, 32, 40, 2, 4]
    keys = ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
    assert [checkpoint.config[key] for key in keys] == [2, 64, 1e-5, 10000.0, False]


def test_a_text_ends_where_run_c_ends_it(tmp_path):
    """At </s>, and at the <s> of the next story."""
    lm = jaxinfer.load(files.write_llama2c(tmp_path / "m.bin", 1, SIZES, files.hf_tensors(SIZES)))
    assert set(lm.eos_token_ids) == {1, 2}


@pytest.mark.slow
def test_token_ids_work_without_a_tokenizer_and_text_names_the_missing_file(tmp_path):
    path = files.write_llama2c(tmp_path / "m.bin", 1, SIZES, files.hf_tensors(SIZES))
    lm = jaxinfer.load(path)
    (result,) = lm.generate([[1, 5]], max_new_tokens=3)
    assert 1 <= len(result.tokens) <= 3
    with pytest.raises(InvalidTokenizer, match=r"put tok300\.bin, tokenizer\.bin or tokenizer\.model beside it"):
        lm.generate("hello")


@pytest.mark.parametrize("dim", [128, 640])
def test_widths_that_look_like_a_pickle_are_sizes(tmp_path, dim):
    """128 and 640 begin a version 0 file with the bytes 80 00 and 80 02, which begin pickles too."""
    sizes = files.Sizes(dim=dim, hidden_dim=8, n_layers=1, vocab_size=4, seq_len=4)
    path = files.write_llama2c(tmp_path / "m.bin", 0, sizes, files.hf_tensors(sizes))
    assert path.read_bytes()[0] == 0x80
    assert open_llama2c(path).config["hidden_size"] == dim
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InvalidCheckpoint, match="describes a file of"):
        open_llama2c(path)


def test_opening_reads_no_weights_and_reading_needs_little_beside_its_result(tmp_path):
    sizes = files.Sizes(dim=64, hidden_dim=8, n_layers=1, vocab_size=1 << 18)
    small = files.Sizes(dim=64, hidden_dim=8, n_layers=1, vocab_size=16)
    written = files.encode_llama2c(2, small, files.hf_tensors(small))
    path = tmp_path / "m.bin"
    with path.open("wb") as file:
        file.write(written[:8] + sizes.pack() + written[36:])
        # The rest, nearly all of it the embedding, is a hole of zeros.
        file.truncate(len(written) + (sizes.vocab_size - small.vocab_size) * (64 + 4 * 64 // files.GROUP_SIZE))
    tracemalloc.start()
    try:
        tensors = open_llama2c(path).tensors
        assert tracemalloc.get_traced_memory()[1] < 2**20
        embedding = tensors.read("model.embed_tokens.weight", np.dtype(ml_dtypes.bfloat16))
        assert embedding.nbytes == 2**25
        assert tracemalloc.get_traced_memory()[1] < embedding.nbytes + 2**24
    finally:
        tracemalloc.stop()


def test_a_scale_that_is_none_is_refused(tmp_path):
    """As where all scales stand at the file's end: the first exporter of version 2 wrote files of the same length."""
    tensors = files.hf_tensors(SIZES)
    written = bytearray(files.encode_llama2c(2, SIZES, tensors))
    norms = 4 * SIZES.dim * (2 * SIZES.n_layers + 1)
    at = 256 + norms + SIZES.vocab_size * SIZES.dim  # the embedding's first scale
    for value in (-1.0, float("nan")):
        written[at : at + 4] = np.float32(value).tobytes()
        path = tmp_path / "m.bin"
        path.write_bytes(written)
        with pytest.raises(InvalidCheckpoint, match=r"m\.bin: tensor model\.embed_tokens\.weight has invalid scales"):
            open_llama2c(path).tensors.read("model.embed_tokens.weight", FLOAT32)


def test_stories260k_has_the_tensors_of_its_folder():
    found = open_checkpoint(shared_data(STORIES)).tensors
    expected = open_checkpoint(shared_data(STORIES_FOLDER)).tensors
    assert found.shapes() == expected.shapes()
    for name in expected.shapes():
        assert found.read(name, FLOAT32).tobytes() == expected.read(name, FLOAT32).tobytes(), name


@pytest.mark.slow
def test_stories260k_tells_its_golden_story():
    golden = json.loads((shared_data(STORIES_FOLDER) / "golden_numpy.json").read_text())
    lm = jaxinfer.load(shared_data(STORIES), dtype="float32")
    (from_ids,) = lm.generate([golden["prompt_ids"]], max_new_tokens=200)
    assert len(golden["greedy_ids"]) == 200
    assert list(from_ids.tokens) == golden["greedy_ids"]
    # The golden text shows byte tokens by their names.
    assert from_ids.text.strip() == golden["text"].replace("<0x0A>", "\n").strip()


@pytest.mark.slow
def test_stories260k_tells_the_same_story_from_every_version(tmp_path):
    """Version 2 too: with greedy choice and these groups, int8 leaves the beginning of the story as it is."""
    sizes = files.Sizes(64, 172, 5, 8, 4, 512, 512)
    source = open_checkpoint(shared_data(STORIES_FOLDER)).tensors
    tensors = {name: source.read(name, FLOAT32) for name in source.shapes()}
    assert files.encode_llama2c(0, sizes, tensors)[:28] == shared_data(STORIES).read_bytes()[:28]
    told = []
    for version in (1, 2):
        path = files.write_llama2c(tmp_path / f"v{version}.bin", version, sizes, tensors, group_size=64)
        (result,) = jaxinfer.load(path, dtype="float32").generate([[1, 403, 407]], max_new_tokens=24)
        told.append(result.tokens)
    assert told[0] == told[1]


def test_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "m.bin")
    with pytest.raises(InvalidCheckpoint, match="not a regular file"):
        open_checkpoint(tmp_path / "m.bin")
