"""A converted folder whose parts do not belong together, or that is damaged anywhere, is refused in one line."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import jaxinfer
from jaxinfer.checkpoint.convert import convert
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.checkpoint.orbax import marker as orbax_marker
from jaxinfer.errors import InvalidCheckpoint, UnsupportedModel
from tests.checkpoint.orbax.test_folder import bits, damage_bytes


@pytest.fixture(scope="module")
def source(tiny_llama_folder):
    return tiny_llama_folder()


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    return convert(source, tmp_path_factory.mktemp("converted") / "model")


@pytest.fixture
def copy(converted, tmp_path):
    return shutil.copytree(converted, tmp_path / "copy")


def edit_json(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


EDITS = {
    "an edited configuration": lambda f: edit_json(f / "config.json", lambda c: c.update(rope_theta=5e5)),
    "a configuration of another model": lambda f: (f / "config.json").write_text('{"model_type": "llama"}'),
    "no configuration": lambda f: (f / "config.json").unlink(),
    "an edited table": lambda f: edit_json(f / "jaxinfer.json", lambda c: c["tensors"].popitem()),
}


@pytest.mark.parametrize("edit", EDITS)
def test_parts_that_do_not_belong_together_are_refused(copy, edit):
    EDITS[edit](copy)
    with pytest.raises(InvalidCheckpoint, match=r"config\.json and jaxinfer\.json do not belong together"):
        open_checkpoint(copy)


def test_a_configuration_that_is_only_laid_out_anew_is_accepted(copy):
    content = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(content.items())), indent=4))
    assert dict(open_checkpoint(copy).config) == content


def test_weights_of_another_model_are_refused(copy, tiny_llama_folder, tmp_path):
    shutil.rmtree(copy / "weights")
    shutil.copytree(convert(tiny_llama_folder(ffn_dim=96), tmp_path / "wide") / "weights", copy / "weights")
    with pytest.raises(InvalidCheckpoint, match="weights of another model"):
        open_checkpoint(copy)


def test_weights_of_another_model_of_the_same_shape_are_refused(copy, tiny_llama_folder, tmp_path):
    shutil.rmtree(copy / "weights")
    shutil.copytree(convert(tiny_llama_folder(seed=7), tmp_path / "other") / "weights", copy / "weights")
    with pytest.raises(InvalidCheckpoint, match="its checksum does not match"):
        jaxinfer.load(copy)


def test_a_checkpoint_that_orbax_wrote_for_others_is_refused(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "plain", {"params": {"w": jnp.ones(3)}})
    with pytest.raises(InvalidCheckpoint, match=r"plain: an Orbax folder of another model or tool, without jaxinfer"):
        open_checkpoint(tmp_path / "plain")


def test_the_weights_alone_are_refused_with_the_folder_to_give(copy):
    with pytest.raises(InvalidCheckpoint, match=rf"without jaxinfer\.json; give {copy}$"):
        open_checkpoint(copy / "weights")
    (copy / "jaxinfer.json").unlink()
    with pytest.raises(InvalidCheckpoint, match="jaxinfer convert wrote"):
        open_checkpoint(copy)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "broken JSON"),
        ("[]", "not an object"),
        ("{}", "not written by jaxinfer convert"),
        ('{"format": "jaxinfer-orbax", "version": 4}', "version 4 of the format"),
        ('{"format": "jaxinfer-orbax", "version": 2}', "damaged"),
        ('{"format": "jaxinfer-orbax", "version": 1}', "damaged"),
        ('{"format": "jaxinfer-orbax", "version": 1, "source": "x", "digest": "x", "tensors": {"w": {}}}', "damaged"),
    ],
)
def test_a_broken_marker_is_refused(copy, content, named):
    (copy / "jaxinfer.json").write_text(content)
    with pytest.raises(InvalidCheckpoint, match=named) as error:
        open_checkpoint(copy)
    assert "\n" not in str(error.value)


LIES = {
    "an empty box": {"box": [0, 32]},
    "a box of another rank": {"box": [258]},
    "a fraction": {"shape": [258.5, 32]},
    "a negative size": {"shape": [-1, 32], "box": [-1, 32]},
    "no checksums": {"checksums": []},
    "a word for a checksum": {"checksums": ["x"]},
    "an unknown dtype": {"dtype": "int4"},
    "an unknown field": {"zeal": 1},
    "a huge shape": {"shape": [1 << 40, 32], "box": [1 << 40, 32]},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_marker_that_lies_with_a_right_digest_is_refused(copy, lie):
    config = json.loads((copy / "config.json").read_text())

    def change(content):
        content["tensors"]["model.embed_tokens.weight"] |= LIES[lie]
        content["digest"] = orbax_marker._digest(config, content["tensors"], {})

    edit_json(copy / "jaxinfer.json", change)
    with pytest.raises(InvalidCheckpoint, match=r"damaged|weights of another model"):
        open_checkpoint(copy)


def read_all(folder: Path) -> dict[str, np.ndarray]:
    tensors = open_checkpoint(folder).tensors
    return {name: tensors.read(name, np.dtype(np.float32)) for name in tensors.shapes()}


@pytest.mark.slow
@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_to_any_file_is_refused_or_harmless(converted, tmp_path_factory, source, data):
    """Delete, cut, or change a byte of any file: either the bits that are read are right or one line says no."""
    folder = shutil.copytree(converted, tmp_path_factory.mktemp("damaged") / "copy")
    path = data.draw(st.sampled_from(sorted(path for path in folder.rglob("*") if path.is_file())))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, max(0, len(content) - 1)))
    match data.draw(st.sampled_from(["delete", "cut", "change"])):
        case "delete":
            path.unlink()
        case "cut":
            path.write_bytes(content[:at])
        case "change" if content:
            content[at] ^= data.draw(st.integers(1, 255))
            path.write_bytes(content)
    found, refusal = None, ""
    try:
        found = read_all(folder)
    except InvalidCheckpoint as error:
        refusal = str(error)
    assert "\n" not in refusal
    if found is not None:
        for name, array in load_file(source / "model.safetensors").items():
            np.testing.assert_array_equal(bits(found[name]), bits(array))
    shutil.rmtree(folder.parent)


def test_a_flipped_bit_of_a_weight_is_found(copy, source):
    name = "model.layers.1.mlp.down_proj.weight"
    damage_bytes(copy, load_file(source / "model.safetensors")[name].tobytes())
    with pytest.raises(InvalidCheckpoint, match=rf"{name} is damaged: its checksum does not match; convert the model"):
        jaxinfer.load(copy)


@pytest.mark.parametrize("lost", ["manifest.ocdbt", "d", "ocdbt.process_0", "."])
def test_lost_parts_of_the_weights_are_refused(copy, lost):
    path = copy / "weights" / lost
    path.unlink() if path.is_file() else shutil.rmtree(path)
    with pytest.raises(InvalidCheckpoint, match=r"tensor .* (cannot be read|is damaged)"):
        read_all(copy)


@pytest.mark.parametrize("broken", ["missing", "family"])
def test_a_model_that_would_not_load_is_not_converted(source, tmp_path, broken):
    folder = shutil.copytree(source, tmp_path / "broken")
    if broken == "family":
        edit_json(folder / "config.json", lambda config: config.update(model_type="mamba"))
    else:
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, folder / "model.safetensors")
    with pytest.raises((InvalidCheckpoint, UnsupportedModel), match=r"model\.norm\.weight|mamba"):
        convert(folder, tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]
