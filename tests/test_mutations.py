"""Whatever a file says, reading it ends soon, in little memory, with success or one short line of the library's.

Every reader gets files that were changed at random, the same in every run: ten of each kind in the ordinary run, and
10,000 with ``-m exhaustive``. `tests.mutations` makes them.
"""

import base64
import json
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jaxtyping import config as typing_config
from safetensors.numpy import save_file

import jaxinfer
from jaxinfer.checkpoint.convert import convert
from jaxinfer.checkpoint.drafters.heads import read_heads, write_heads
from jaxinfer.checkpoint.drafters.streams import read_streams, write_streams
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.checkpoint.source import QuantizedSource
from jaxinfer.errors import JaxinferError
from jaxinfer.models.drafters.streams import StreamsConfig, init_streams
from jaxinfer.tokenizers import ChatTemplate, load_tokenizer
from tests.checkpoint.gguf import files as gguf_files
from tests.checkpoint.llama2c import files as llama2c_files
from tests.checkpoint.published.cases import CASES
from tests.mutations import mutate_bytes, mutate_file, mutate_json_text, splice_text
from tests.tokenizers.test_chat_template import HOSTILE, MESSAGES, TEMPLATES
from tests.tokenizers.vocabularies import SPECIAL, open_folder, train_byte_level, train_sentence_piece
from tests.toys import TINY_LLAMA, float32_backend

ORDINARY, WIDE = 10, 10_000
# A template may use three seconds, and all else is read in a fraction of one.
SECONDS, GROWN_BYTES = 6, 400 << 20
LONGEST = 300
BACKEND = float32_backend()
CONFIG = replace(TINY_LLAMA, num_layers=2)


class Reader:
    """Has a sound file or folder; reads it after each change, and makes it sound again."""

    def __init__(self, sound: Path, read: Callable[[Path], object], change: Callable[[Path, random.Random], object]):
        self.sound, self.read, self.change = sound, read, change

    def try_one(self, scratch: Path, rng: random.Random) -> str | None:
        """Change and read a copy; return the error's text, if it is one of the library's."""
        copied = scratch / self.sound.name
        if self.sound.is_dir():
            shutil.copytree(self.sound, copied)
        else:
            shutil.copy(self.sound, copied)
        try:
            self.change(copied, rng)
            self.read(copied)
        except JaxinferError as error:
            return str(error)
        finally:
            shutil.rmtree(copied) if copied.is_dir() else copied.unlink(missing_ok=True)
        return None


def read_tensors(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for name in checkpoint.tensors.shapes():
        checkpoint.tensors.read(name, np.dtype(np.float16))


def read_published(path: Path) -> None:
    """Read matrices in their own bits and as plain numbers."""
    tensors = open_checkpoint(path).tensors
    for name in tensors.shapes():
        tensors.read(name, np.dtype(np.float16))
        if isinstance(tensors, QuantizedSource) and tensors.forms().get(name):
            tensors.quantized(name)


def write_published(folder: Path, case: str) -> Path:
    """Write a matrix of a published checkpoint, and what says how it is stored."""
    config, pack, _ = CASES[case]
    packed, _ = pack(np.random.default_rng(0), 32, 128)
    folder.mkdir()
    parts = {f"m.q_proj.{part}": each for part, each in packed.items()}
    texts = {name: each for name, each in parts.items() if isinstance(each, str)}
    numbers = {name: np.ascontiguousarray(each) for name, each in parts.items() if name not in texts}
    save_file(numbers, folder / "model.safetensors", metadata=texts or None)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def read_params(path: Path) -> None:
    jaxinfer.load(path)


def read_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(open_folder(folder))
    ids = tokenizer.encode("The quick brown fox, 3.14 <s> 東京 🙂\n")
    tokenizer.decode(ids)
    tokenizer.decode(list(range(100)))
    if tokenizer.chat_template is not None:
        tokenizer.chat_template.render(MESSAGES)


def change_bytes(path: Path, rng: random.Random) -> None:
    path.write_bytes(mutate_bytes(path.read_bytes(), rng, 4000))


def change_named(name: str) -> Callable[[Path, random.Random], None]:
    def change(folder: Path, rng: random.Random) -> None:
        path = folder / name
        mutate = mutate_json_text if path.suffix == ".json" else lambda data, rng: mutate_bytes(data, rng, 4000)
        path.write_bytes(mutate(path.read_bytes(), rng))

    return change


def render(path: Path) -> None:
    ChatTemplate(path.read_text(encoding="utf-8")).render(MESSAGES)


def change_template(path: Path, rng: random.Random) -> None:
    path.write_text(splice_text([*TEMPLATES, *list(HOSTILE.values())[:-1]], rng), encoding="utf-8")


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory, tiny_llama_folder: Callable[..., Path]) -> dict[str, Reader]:
    """Return a reader of each kind of file."""
    home = tmp_path_factory.mktemp("sound")
    model = tiny_llama_folder(num_layers=1)
    gguf = gguf_files.write_gguf(home / "m.gguf", gguf_files.gguf_tensors(gguf_files.hf_tensors(bias=True)))
    llama2c, sizes = home / "m.bin", llama2c_files.Sizes()
    llama2c.write_bytes(llama2c_files.encode_llama2c(1, sizes, llama2c_files.hf_tensors(sizes)))
    byte_level, pieces = home / "byte_level", home / "pieces"
    for folder in (byte_level, pieces):
        folder.mkdir()
    tokenizer = json.loads(train_byte_level().to_str())
    # A trie that maps nothing, before the texts that it would map to.
    charsmap = base64.b64encode(struct.pack("<I", 1024) + bytes(1024) + b"\0").decode()
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Precompiled"}]}
    tokenizer["normalizer"]["normalizers"][1]["precompiled_charsmap"] = charsmap
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], strip]}
    # The vocabulary last, and so the settings are changed more often.
    (byte_level / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = {"bos_token": SPECIAL[1], "eos_token": {"content": SPECIAL[0]}, "add_bos_token": True, "legacy": False}
    settings |= {"chat_template": TEMPLATES[0], "added_tokens_decoder": {"0": {"content": SPECIAL[0], "special": True}}}
    (byte_level / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (pieces / "tokenizer.model").write_bytes(train_sentence_piece())
    template = home / "template.jinja"
    template.write_text(TEMPLATES[0], encoding="utf-8")
    heads, streams = home / "heads", home / "streams"
    key = jax.random.key(0)
    width = CONFIG.model_dim
    head = {
        "blocks": ({"kernel": np.ones((width, width), np.float32), "bias": np.ones(width, np.float32)},),
        "output": {"kernel": np.ones((CONFIG.vocab_size, width), np.float32)},
    }
    write_heads(heads, {"heads": (head, head)}, CONFIG.vocab_size, base="toy", beside={"tree.json": "[[0], [0, 0]]"})
    shape = StreamsConfig(num_streams=2, num_layers=1, rank=2, exit_rank=2)
    write_streams(streams, shape, init_streams(shape, CONFIG, BACKEND, key), CONFIG, base="toy")
    return {
        "gguf": Reader(gguf, read_tensors, change_bytes),
        "llama2c": Reader(llama2c, read_tensors, change_bytes),
        "folder": Reader(model, read_params, mutate_file),
        "orbax": Reader(convert(model, home / "orbax"), read_tensors, mutate_file),
        "tokenizer.json": Reader(byte_level, read_tokenizer, change_named("tokenizer.json")),
        "tokenizer settings": Reader(byte_level, read_tokenizer, change_named("tokenizer_config.json")),
        "sentence piece": Reader(pieces, read_tokenizer, change_named("tokenizer.model")),
        "chat template": Reader(template, render, change_template),
        "heads": Reader(heads, lambda path: read_heads(path, CONFIG, BACKEND), mutate_file),
        "streams": Reader(streams, lambda path: read_streams(path, CONFIG, BACKEND), mutate_file),
        **{case: Reader(write_published(home / case, case), read_published, mutate_file) for case in PUBLISHED},
    }


PUBLISHED = ("gptq_act_order", "compressed_int4_asymmetric", "fp8_blocks", "nf4", "torchao_int4")
KINDS = (
    *PUBLISHED,
    "gguf",
    "llama2c",
    "folder",
    "orbax",
    "tokenizer.json",
    "tokenizer settings",
    "sentence piece",
    "chat template",
    "heads",
    "streams",
)


@pytest.fixture
def unchecked_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as users do: the checks of types, which the tests have elsewhere, would find some faults first."""
    monkeypatch.setattr(typing_config, "jaxtyping_disable", True)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [ORDINARY, pytest.param(WIDE, marks=pytest.mark.exhaustive)])
@pytest.mark.timeout(0)
def test_a_changed_file_is_read_or_refused_in_one_line(
    readers: dict[str, Reader], tmp_path: Path, kind: str, count: int
) -> None:
    reader, refused = readers[kind], 0
    reader.read(reader.sound)
    for number in range(count):
        began, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        try:
            message = reader.try_one(tmp_path, random.Random(f"{kind} {number}"))
        except BaseException as error:
            error.add_note(f"{kind}, change {number}")
            raise
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
        assert time.thread_time() - began < SECONDS, f"change {number} takes long"
        assert grown < GROWN_BYTES, f"change {number} takes much memory"
        if message is not None:
            refused += 1
            assert message.isprintable(), f"change {number}"
            assert 0 < len(message) <= LONGEST, f"change {number}"
    assert refused >= count // 5
