"""Parameters that are kept are those that were converted, bit for bit, for as long as nothing has changed."""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoint import kept_params
from jaxinfer.checkpoint.kept_params import KeptParams
from jaxinfer.checkpoint.loaded import LoadedTensors
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.kept.folder import KeptFolder
from jaxinfer.models.families.llama import LLAMA
from jaxinfer.models.few_bits import in_few_bits, laid_out
from jaxinfer.notation import Params
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.few_bits.formats import int4
from tests.toys import TINY_LLAMA, float32_backend, random_params

LAYOUT = (TINY_LLAMA, float32_backend())


@cache
def random_llama() -> Params:
    return random_params(TINY_LLAMA)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    (tmp_path / "model.gguf").write_bytes(b"quantized")
    tensors = LoadedTensors(random_llama(), LLAMA.tensor_names(TINY_LLAMA), None)
    return Checkpoint("model", {}, tensors, converted_files=(tmp_path / "model.gguf",))


class Loading:
    """Loads as a process does, and tells whether it had to convert."""

    def __init__(
        self, folder: Path, checkpoint: Checkpoint, layout: Any = LAYOUT, params: Params | None = None
    ) -> None:
        self.converted = False
        kept = KeptParams(KeptFolder(folder / "weights", 1 << 24))

        def convert() -> Params:
            self.converted = True
            return random_llama() if params is None else params

        self.params = kept.load(checkpoint, layout, convert)
        kept.wait()
        self.notes = kept.notes


def assert_same(one: Params, other: Params) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_process_maps_what_the_first_converted(tmp_path: Path, checkpoint: Checkpoint, dtype: str) -> None:
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), random_llama())
    params["odd"] = {"bias": jnp.arange(7, dtype=dtype), "number": jnp.asarray(3, dtype)}
    first, second = (Loading(tmp_path, checkpoint, params=params) for _ in range(2))
    assert (first.converted, second.converted) == (True, False)
    assert (first.notes, second.notes) == ([], ["0 MB mapped"])
    assert_same(second.params, params)


def test_weights_in_few_bits_are_kept_as_they_lie(tmp_path: Path, checkpoint: Checkpoint) -> None:
    config = replace(TINY_LLAMA, model_dim=64, ffn_dim=96)
    params = laid_out(in_few_bits(random_params(config), int4(32, False), "weights"), float32_backend())
    first, second = (Loading(tmp_path, checkpoint, params=params) for _ in range(2))
    assert (first.converted, second.converted) == (True, False)
    assert_same(second.params, params)


def test_another_dtype_or_layout_is_another_file(tmp_path: Path, checkpoint: Checkpoint) -> None:
    layouts = [
        LAYOUT,
        (TINY_LLAMA, choose_backend("bfloat16", "cpu")),
        (TINY_LLAMA, float32_backend(scan_layers=True)),
        (TINY_LLAMA, replace(float32_backend(), cpu_kernels=False)),
        (replace(TINY_LLAMA, tied_embeddings=True), float32_backend()),
    ]
    assert all(Loading(tmp_path, checkpoint, layout).converted for layout in layouts)
    assert not any(Loading(tmp_path, checkpoint, layout).converted for layout in layouts)
    assert len(list((tmp_path / "weights").iterdir())) == len(layouts)


def test_a_checkpoint_that_changed_is_converted_anew(tmp_path: Path, checkpoint: Checkpoint) -> None:
    Loading(tmp_path, checkpoint)
    (file,) = checkpoint.converted_files
    file.write_bytes(b"otherwise")
    changed = Loading(tmp_path, checkpoint)
    assert changed.converted
    assert changed.notes == ["not read: made under other conditions (checkpoint)"]
    os.utime(file, ns=(1, 1))
    assert Loading(tmp_path, checkpoint).converted
    assert not Loading(tmp_path, checkpoint).converted
    assert len(list((tmp_path / "weights").iterdir())) == 1


def test_other_code_converts_anew(tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    Loading(tmp_path, checkpoint)
    conditions = {**kept_params.conditions(), "source files": "others"}
    monkeypatch.setattr(kept_params, "conditions", lambda: conditions)
    changed = Loading(tmp_path, checkpoint)
    assert changed.converted
    assert changed.notes == ["not read: made under other conditions (source files)"]


@pytest.mark.parametrize("damage", ["cut", "empty", "head", "number"])
def test_damaged_parameters_are_converted_anew(tmp_path: Path, checkpoint: Checkpoint, damage: str) -> None:
    Loading(tmp_path, checkpoint)
    (file,) = (tmp_path / "weights").iterdir()
    content = file.read_bytes()
    damaged = {
        "cut": content[:-4096],
        "empty": b"",
        "head": content[:200] + bytes([content[200] ^ 1]) + content[201:],
        "number": content[:64] + b"x" + content[65:],
    }[damage]
    file.write_bytes(damaged)
    again = Loading(tmp_path, checkpoint)
    assert again.converted
    assert len(again.notes) == 1
    assert not Loading(tmp_path, checkpoint).converted


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path, checkpoint: Checkpoint) -> None:
    Loading(tmp_path, checkpoint)
    (tmp_path / "weights").chmod(0o722)
    open_to_all = Loading(tmp_path, checkpoint)
    assert open_to_all.converted
    assert len(open_to_all.notes) == 2
    assert all("open to other users" in note for note in open_to_all.notes)


def test_a_checkpoint_that_needs_no_conversion_is_left_where_it_is(tmp_path: Path, checkpoint: Checkpoint) -> None:
    plain = replace(checkpoint, converted_files=())
    assert Loading(tmp_path, plain).converted
    assert Loading(tmp_path, plain).converted
    assert not (tmp_path / "weights").exists()
