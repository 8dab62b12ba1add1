"""A damaged llama2.c file is read as it is or refused in one line: no crash, no hang, no giant allocation."""

import pickle
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.errors import InvalidCheckpoint, JaxinferError, UnsupportedModel
from tests.checkpoint.llama2c import files

SECONDS, PEAK_BYTES = 5.0, 8 * 2**20
SIZES = files.Sizes()
TENSORS = files.hf_tensors(SIZES)
SOUND = {version: files.encode_llama2c(version, SIZES, TENSORS) for version in (0, 1, 2)}
HEADER_BYTES = {0: 28, 1: 37, 2: 41}
FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
EXTREMES = [0, 1, -1, 3, 2**15, 2**30, 2**31 - 1, -(2**31)]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("damage") / "m.bin"


def read_all(path: Path, data: bytes) -> str | None:
    """Open and read a file within the bounds; return the error's text, if it is one of the library's."""
    path.write_bytes(data)
    start = time.monotonic()
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.tensors.shapes():
            checkpoint.tensors.read(name, np.dtype(np.float16))
        message = None
    except JaxinferError as error:
        message = str(error)
        assert "\n" not in message
        assert str(path) in message
        assert len(message) < 500
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < PEAK_BYTES
    assert time.monotonic() - start < SECONDS
    return message


def with_field(version: int, field: str, value: int) -> bytes:
    """Return a sound file with one integer of its header replaced."""
    damaged = bytearray(SOUND[version])
    struct.pack_into("<i", damaged, (8 if version else 0) + 4 * FIELDS.index(field), value)
    return bytes(damaged)


@pytest.mark.parametrize("version", SOUND)
def test_the_sound_files_are_read_within_the_bounds(scratch, version):
    assert read_all(scratch, SOUND[version]) is None


@pytest.mark.parametrize("version", SOUND)
@pytest.mark.parametrize("change", [-500, -1, 1, 4, 1000])
def test_both_lengths_are_named_where_they_differ(scratch, version, change):
    sound = SOUND[version]
    message = read_all(scratch, sound[:change] if change < 0 else sound + bytes(change))
    assert message is not None
    assert f"describes a file of {len(sound)} bytes, but it has {len(sound) + change}" in message


@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(scratch, data):
    sound = SOUND[data.draw(st.sampled_from([0, 1, 2]))]
    assert read_all(scratch, sound[: data.draw(st.integers(0, 300) | st.integers(0, len(sound) - 1))]) is not None


@settings(derandomize=True, max_examples=150, deadline=None)
@given(data=st.data())
def test_flipped_header_bits_are_read_or_refused(scratch, data):
    version = data.draw(st.sampled_from([0, 1, 2]))
    damaged = bytearray(SOUND[version])
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, HEADER_BYTES[version] - 1))] ^= 1 << data.draw(st.integers(0, 7))
    read_all(scratch, bytes(damaged))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.data())
def test_flipped_weights_are_read_or_refused(scratch, data):
    version = data.draw(st.sampled_from([0, 1, 2]))
    damaged = bytearray(SOUND[version])
    for _ in range(3):
        damaged[data.draw(st.integers(HEADER_BYTES[version], len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    read_all(scratch, bytes(damaged))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(version=st.sampled_from([0, 1, 2]), sizes=st.lists(st.sampled_from(EXTREMES), min_size=7, max_size=7))
def test_sizes_from_nowhere_are_refused(scratch, version, sizes):
    damaged = bytearray(SOUND[version])
    struct.pack_into("<7i", damaged, 8 if version else 0, *sizes)
    assert read_all(scratch, bytes(damaged)) is not None


@settings(derandomize=True, max_examples=40, deadline=None)
@given(junk=st.binary(max_size=300))
def test_junk_is_refused(scratch, junk):
    assert read_all(scratch, junk) is not None


@pytest.mark.parametrize("version", SOUND)
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [0, -7])
def test_a_size_that_is_not_positive_is_named(scratch, version, field, value):
    message = read_all(scratch, with_field(version, field, value))
    assert message is not None
    if version == 0 and (field, value) == ("vocab_size", -7):  # there it means a classifier of its own
        assert "describes a file of" in message
    else:
        assert f"its header makes {field} {value}" in message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (with_field(0, "n_heads", 3), r"splits dim 32 into 3 heads"),
        (with_field(0, "n_heads", 32), r"splits dim 32 into 32 heads"),
        (with_field(1, "n_kv_heads", 3), r"shares 3 key and value heads between 4 heads"),
        (with_field(1, "n_kv_heads", 8), r"shares 8 key and value heads between 4 heads"),
        (with_field(1, "n_layers", 2**31 - 1), r"describes a file of \d{13,} bytes"),
        (with_field(2, "vocab_size", 2**31 - 1), r"describes a file of \d{11,} bytes"),
        (SOUND[1][:36] + b"\2" + SOUND[1][37:], r"shared classifier is 2"),
        (SOUND[2][:37] + struct.pack("<i", 0) + SOUND[2][41:], r"group_size 0 does not divide dim 32"),
        (SOUND[2][:37] + struct.pack("<i", -16) + SOUND[2][41:], r"group_size -16 does not divide dim 32"),
        (SOUND[2][:37] + struct.pack("<i", 64) + SOUND[2][41:], r"group_size 64 does not divide dim 32"),
        (SOUND[1][:200], r"only 200 bytes"),
        (b"", r"only 0 bytes"),
    ],
)
def test_each_lie_of_a_header_is_named(scratch, data, message):
    scratch.write_bytes(data)
    with pytest.raises(InvalidCheckpoint, match=rf"m\.bin: not a llama2\.c checkpoint, or damaged: .*{message}"):
        open_checkpoint(scratch)


@pytest.mark.parametrize("version", [0, 3, -1])
def test_an_unknown_version_is_named(scratch, version):
    scratch.write_bytes(SOUND[1][:4] + struct.pack("<i", version) + SOUND[1][8:])
    with pytest.raises(UnsupportedModel, match=f"version {version} of llama2.c's ak42 files"):
        open_checkpoint(scratch)


def test_more_layers_than_the_decoder_takes_are_refused_before_they_are_listed(scratch):
    sizes = files.Sizes(dim=2, hidden_dim=1, n_layers=1001, n_heads=1, n_kv_heads=1, vocab_size=1, seq_len=1)
    scratch.write_bytes(files.encode_llama2c(1, sizes, files.hf_tensors(sizes)))
    with pytest.raises(UnsupportedModel, match="n_layers 1001 is more than 1000"):
        open_checkpoint(scratch)


def write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02.")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_is_refused_as_one(scratch, protocol):
    scratch.write_bytes(pickle.dumps({"weight": [1.0]}, protocol))
    with pytest.raises(InvalidCheckpoint, match="pickled weights can run any code"):
        open_checkpoint(scratch)


def test_an_archive_of_pytorch_is_refused_as_a_pickle(scratch):
    write_zip(scratch)
    with pytest.raises(InvalidCheckpoint, match="pickled weights can run any code"):
        open_checkpoint(scratch)
