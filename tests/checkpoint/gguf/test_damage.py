"""A damaged GGUF, whole or in parts, is read or refused in one line: no crash, no hang, no giant allocation."""

import struct
import time
import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.checkpoint.gguf.file import open_gguf
from jaxinfer.checkpoint.gguf.header import SUPPORTED_TYPES, read_header
from jaxinfer.errors import InvalidCheckpoint, JaxinferError
from tests.checkpoint.examples import examples
from tests.checkpoint.gguf import files

SECONDS, PEAK_BYTES = 5.0, 8 * 2**20
STRING, ARRAY, UINT8, UINT32 = 8, 9, 0, 4


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return files.write_gguf(path, files.gguf_tensors(files.hf_tensors(bias=True))).read_bytes()


@pytest.fixture(scope="module")
def header_bytes(sound) -> int:
    """Return where the weights of the sound file begin."""
    return min(entry.offset for entry in read_header("m.gguf", sound).tensors.values())


def read_all(path, data: bytes) -> str | None:
    """Open and read a file within the bounds; return the error's text, if it is one of the library's."""
    path.write_bytes(data)
    return open_and_read(path, path)


def open_and_read(path, named) -> str | None:
    """Open and read a model within the bounds; its error's text must hold ``named``."""
    start = time.monotonic()
    tracemalloc.start()
    try:
        checkpoint = open_gguf(path)
        for name in checkpoint.tensors.shapes():
            checkpoint.tensors.read(name, np.dtype(np.float16))
        message = None
    except JaxinferError as error:
        message = str(error)
        assert "\n" not in message
        assert str(named) in message
        assert len(message) < 500
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < PEAK_BYTES
    assert time.monotonic() - start < SECONDS
    return message


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("damage") / "m.gguf"


def test_the_sound_file_is_read_within_the_bounds(sound, scratch):
    assert read_all(scratch, sound) is None


@examples(60, 150)
def test_a_file_cut_anywhere_is_refused(sound, header_bytes, scratch, max_examples):
    @settings(derandomize=True, max_examples=max_examples, deadline=None)
    @given(data=st.data())
    def read(data):
        length = data.draw(st.integers(0, header_bytes) | st.integers(0, len(sound) - 64))
        message = read_all(scratch, sound[:length])
        assert message is not None
        if length >= 4:
            assert "truncated" in message
            assert "download it again" in message

    read()


@examples(100, 200)
def test_flipped_header_bits_are_read_or_refused(sound, header_bytes, scratch, max_examples):
    @settings(derandomize=True, max_examples=max_examples, deadline=None)
    @given(data=st.data())
    def read(data):
        damaged = bytearray(sound)
        for _ in range(data.draw(st.integers(1, 3))):
            damaged[data.draw(st.integers(0, header_bytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
        read_all(scratch, bytes(damaged))

    read()


@examples(40, 100)
def test_overwritten_lengths_are_read_or_refused(sound, header_bytes, scratch, max_examples):
    @settings(derandomize=True, max_examples=max_examples, deadline=None)
    @given(data=st.data())
    def read(data):
        damaged = bytearray(sound)
        at = data.draw(st.integers(4, header_bytes - 8))
        length = data.draw(st.sampled_from([0, 2**31, 2**32 + 1, 2**62, 2**63, 2**64 - 1]))
        damaged[at : at + 8] = struct.pack("<Q", length)
        read_all(scratch, bytes(damaged))

    read()


@settings(derandomize=True, max_examples=60, deadline=None)
@given(junk=st.binary(max_size=300))
def test_junk_after_the_magic_is_refused(scratch, junk):
    assert read_all(scratch, b"GGUF" + struct.pack("<I", 3) + junk) is not None


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> bytes:
    """Return a file whose matrices are stored in all types in turn."""
    kinds = [gguf.GGMLQuantizationType[name] for name in SUPPORTED_TYPES]
    blocks = {}
    for layer in range(files.LAYERS):
        for index, part in enumerate(("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "ffn_down", "attn_output")):
            kind = kinds[(7 * layer + index) % len(kinds)]
            rows = (files.KV_HEADS if part == "attn_k" else files.HEADS) * files.HEAD_DIM
            blocks[f"blk.{layer}.{part}.weight"] = (files.random_blocks((rows, 256), kind), kind)
    for name, kind in zip(("token_embd", "output"), kinds[len(blocks) :], strict=True):
        blocks[f"{name}.weight"] = (files.random_blocks((files.VOCAB, 256), kind), kind)
    keys = {"llama.embedding_length": 256, "llama.attention.key_length": files.HEAD_DIM}
    keys["llama.attention.value_length"] = files.HEAD_DIM
    path = tmp_path_factory.mktemp("mixed") / "m.gguf"
    return files.write_gguf(path, {}, keys=keys, blocks=blocks).read_bytes()


def test_the_file_of_all_types_is_read_within_the_bounds(mixed, scratch):
    assert {entry.kind.name for entry in read_header("m.gguf", mixed).tensors.values()} == set(SUPPORTED_TYPES)
    assert read_all(scratch, mixed) is None


@examples(50, 150)
def test_a_damaged_file_of_all_types_is_read_or_refused(mixed, scratch, max_examples):
    """The table of tensors, with their types and shapes, lies before the weights and so is hit often."""

    @settings(derandomize=True, max_examples=max_examples, deadline=None)
    @given(data=st.data())
    def read(data):
        damaged = bytearray(mixed)
        start = damaged.index(b"blk.0.attn_q.weight")
        end = min(entry.offset for entry in read_header("m.gguf", mixed).tensors.values())
        for _ in range(data.draw(st.integers(1, 3))):
            damaged[data.draw(st.integers(start, end - 1))] ^= 1 << data.draw(st.integers(0, 7))
        for _ in range(data.draw(st.integers(0, 20))):
            damaged[data.draw(st.integers(end, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        read_all(scratch, bytes(damaged))

    read()


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Return the three parts of a sound model."""
    folder = tmp_path_factory.mktemp("parts")
    return files.write_parts(folder, files.gguf_tensors(files.hf_tensors(bias=True)), 12)


@examples(40, 120)
def test_a_split_file_with_a_damaged_part_is_read_or_refused(parts, max_examples):
    @settings(derandomize=True, max_examples=max_examples, deadline=None)
    @given(data=st.data())
    def read(data):
        index = data.draw(st.integers(0, 2))
        sound = parts[index].read_bytes()
        end = min(entry.offset for entry in read_header("m.gguf", sound).tensors.values())
        damaged = bytearray(sound[: data.draw(st.just(len(sound)) | st.integers(0, len(sound)))])
        for _ in range(data.draw(st.integers(0, 3))):
            at = data.draw(st.integers(0, end - 1))
            if at < len(damaged):
                damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        named = data.draw(st.sampled_from(parts))
        parts[index].write_bytes(damaged)
        try:
            message = open_and_read(named, named.parent)
        finally:
            parts[index].write_bytes(sound)
        if len(damaged) < end:
            assert message is not None

    read()


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(pairs: list[bytes], tensors: list[bytes] = (), weights: int = 256) -> bytes:
    """Build a file from raw metadata pairs and rows of the tensor table."""
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return start + bytes(-len(start) % 32 + weights)


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def nested(depth: int) -> bytes:
    return b"".join(struct.pack("<IQ", ARRAY, 1) for _ in range(depth)) + struct.pack("<IQB", UINT8, 1, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (header([pair(b"a", UINT8, b"\0")] * 2), "'a' occurs twice"),
        (header([pair(b"\xff", UINT8, b"\0")]), "not UTF-8"),
        (header([pair(b"a\nb", 99, b"\0")]), r"'a\\nb' has the unknown value type 99"),
        (header([pair(b"a", ARRAY, nested(40))]), "nests arrays"),
        (header([pair(b"a", ARRAY, struct.pack("<IQ", STRING, 2**61))]), "truncated"),
        (header([pair(b"a", ARRAY, struct.pack("<IQ", UINT8, 2**23))], weights=2**24), "claims 8388608 elements"),
        (header([pair(b"a", STRING, struct.pack("<Q", 2**40))]), "truncated"),
        (header([pair(b"general.alignment", UINT32, struct.pack("<I", 24))]), "alignment is 24"),
        (header([pair(b"general.alignment", UINT32, struct.pack("<I", 0))]), "alignment is 0"),
        (header([], [tensor(b"t", offset=32), tensor(b"t")]), "'t' occurs twice"),
        (header([], [tensor(b"t"), tensor(b"u")]), "'t' and 'u' overlap"),
        (header([], [tensor(b"t", (1,) * 5)]), "5 dimensions"),
        (header([], [tensor(b"t", ())]), "0 dimensions"),
        (header([], [tensor(b"t", (0, 8))]), r"shape \(8, 0\)"),
        (header([], [tensor(b"t", (40, 2), kind=8)]), r"shape \(2, 40\), impossible for Q8_0"),
        (header([], [tensor(b"t", offset=4)]), "not a multiple of the alignment"),
        (header([], [tensor(b"t", (2**40, 2**40))]), "truncated"),
        (header([], [tensor(b"t", offset=2**40)]), "truncated"),
        (header([], [tensor(b"t")]), r"general\.architecture is missing"),
    ],
)
def test_each_kind_of_damage_is_named(scratch, data, message):
    scratch.write_bytes(data)
    with pytest.raises(InvalidCheckpoint, match=message) as error:
        open_gguf(scratch)
    assert "\n" not in str(error.value)
