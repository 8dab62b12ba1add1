"""DFlash drafters come back from disk as they were, for their own base alone; what is damaged is named."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint.drafters.dflash import read_dflash, write_dflash
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint, InvalidOption, UnsupportedModel
from jaxinfer.models.drafters.dflash import abstract_dflash, dflash_for, init_dflash
from jaxinfer.models.stacking import stack_params
from tests.models.drafters.published_dflash import settings_for, write_published
from tests.toys import TINY_LLAMA, float32_backend

CONFIG = replace(TINY_LLAMA, num_layers=4)
BACKEND = float32_backend()
DFLASH = dflash_for(CONFIG, num_layers=2, block_size=5, mask_token=9)


@pytest.fixture
def published(tmp_path):
    return write_published(tmp_path / "published", settings_for())


def changed(folder, **changes):
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    section = {**settings["dflash_config"], **changes.pop("dflash_config", {})}
    path.write_text(json.dumps({**settings, "dflash_config": section, **changes}))
    return folder


@pytest.mark.parametrize("scan_layers", [False, True])
def test_what_was_written_is_read(tmp_path, scan_layers):
    """From unrolled layers, or stacked ones, whatever the other."""
    params = init_dflash(DFLASH, float32_backend(scan_layers), 3)
    write_dflash(tmp_path / "own", DFLASH, params, CONFIG, base="toy", base_fingerprint="0a1b2c3d")
    dflash, found = read_dflash(tmp_path / "own", CONFIG, BACKEND, lambda: "0a1b2c3d")
    assert dflash == DFLASH
    unrolled = stack_params(params["decoder"], abstract_dflash(DFLASH, BACKEND)["decoder"])
    jax.tree.map(np.testing.assert_array_equal, found, {**params, "decoder": unrolled})
    with pytest.raises(InvalidCheckpoint, match="is for the weights 0a1b2c3d, but this model's are 99999999: load"):
        read_dflash(tmp_path / "own", CONFIG, BACKEND, lambda: "99999999")
    with pytest.raises(InvalidOption, match="exists"):
        write_dflash(tmp_path / "own", DFLASH, params, CONFIG)
    write_dflash(tmp_path / "own", DFLASH, params, CONFIG, beside={"tree.json": "[[0]]"}, overwrite=True)
    assert (tmp_path / "own" / "tree.json").read_text() == "[[0]]"


def test_files_are_those_of_the_published_layout(tmp_path, published):
    """Names and shapes of tensors, and the keys that tell them."""
    own = replace(DFLASH, block_size=6, mask_token=7, features=(1, 3), decoder=replace(DFLASH.decoder, ffn_dim=48))
    write_dflash(tmp_path / "own", own, init_dflash(own, BACKEND, 3), CONFIG)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "own", published))
    assert {name: array.shape for name, array in ours.items()} == {name: array.shape for name, array in theirs.items()}
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "own", published))
    left_out = {"auto_map", "bos_token_id", "eos_token_id", "initializer_range", "use_cache"}
    assert set(ours) == set(theirs) - left_out
    assert ours["dflash_config"] == theirs["dflash_config"]


def test_names_with_a_prefix_and_tables_of_the_target_are_read_over(published):
    dflash, before = read_dflash(published, CONFIG, BACKEND)
    path = published / "model.safetensors"
    tensors = {f"model.{name}": array for name, array in load_file(path).items()}
    save_file({**tensors, "model.embed_tokens.weight": np.zeros((2, 2), np.float32)}, path)
    assert dflash == read_dflash(published, CONFIG, BACKEND)[0]
    jax.tree.map(np.testing.assert_array_equal, read_dflash(published, CONFIG, BACKEND)[1], before)


def test_layers_that_are_not_named_are_those_of_the_published_rule(published):
    """Of two layers for a target of four: the outputs of the second, 1, and of the last but two, 1."""
    settings = json.loads((published / "config.json").read_text())
    del settings["dflash_config"]["target_layer_ids"]
    (published / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InvalidCheckpoint, match=r"fc.weight has shape \[32, 64\].* makes it \[32, 32\]"):
        read_dflash(published, CONFIG, BACKEND)


OTHER_BASES = {
    "width": ({"model_dim": 48}, "a model of 32 hidden channels, but this one has 48"),
    "vocabulary": ({"vocab_size": 300}, "a model of 258 tokens, but this one has 300"),
    "depth": ({"num_layers": 5}, "a model of 4 layers, but this one has 5"),
}


@pytest.mark.parametrize("name", OTHER_BASES)
def test_a_drafter_of_another_base_is_refused(published, name):
    changes, pattern = OTHER_BASES[name]
    with pytest.raises(InvalidCheckpoint, match=f"the drafter is for {pattern}") as caught:
        read_dflash(published, replace(CONFIG, **changes), BACKEND)
    assert "\n" not in str(caught.value)


DAMAGES = {
    "no block": ({"block_size": 1}, InvalidCheckpoint, "block_size must be a whole number from 2 to 256, not 1"),
    "no mask": ({"dflash_config": {"mask_token_id": None}}, InvalidCheckpoint, "mask_token_id must be a whole number"),
    "a mask beyond": ({"dflash_config": {"mask_token_id": 258}}, InvalidCheckpoint, "from 0 to 257, not 258"),
    "the last layer": (
        {"dflash_config": {"target_layer_ids": [0, 3]}},
        InvalidCheckpoint,
        r"target_layer_ids must list layers from 0 to 2, not \[0, 3\]",
    ),
    "a layer twice": ({"dflash_config": {"target_layer_ids": [2, 2]}}, InvalidCheckpoint, "lists a layer twice"),
    "more layers than fc reads": (
        {"dflash_config": {"target_layer_ids": [0, 1, 2]}},
        InvalidCheckpoint,
        r"fc.weight has shape \[32, 64\], but its configuration makes it \[32, 96\]",
    ),
    "a relative": ({"dflash_config": {"projector_type": "domino"}}, InvalidCheckpoint, "a relative of DFlash"),
    "a new field": ({"dflash_config": {"heads": 2}}, InvalidCheckpoint, "unknown field heads of dflash_config"),
    "a number as base": ({"dflash_config": {"base": 7}}, InvalidCheckpoint, "base must be text or null, not 7"),
    "other layers": ({"logit_scale": 2.0}, UnsupportedModel, "logit_scale"),
    "fewer layers": ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, InvalidCheckpoint, "no place for"),
    "no DFlash": ({"dflash_config": 3}, InvalidCheckpoint, "has no dflash_config, so it is of no DFlash drafter"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_cannot_be_is_refused_in_one_line(published, name):
    changes, kind, pattern = DAMAGES[name]
    if isinstance(changes.get("dflash_config"), int):
        settings = json.loads((published / "config.json").read_text())
        (published / "config.json").write_text(json.dumps({**settings, **changes}))
    else:
        changed(published, **changes)
    with pytest.raises(kind, match=pattern) as caught:
        read_dflash(published, CONFIG, BACKEND)
    assert "\n" not in str(caught.value)


def test_what_is_missing_is_named(tmp_path, published):
    with pytest.raises(CheckpointNotFound, match="no such folder of a DFlash drafter"):
        read_dflash(tmp_path / "nowhere", CONFIG, BACKEND)
    tensors = load_file(published / "model.safetensors")
    del tensors["hidden_norm.weight"]
    save_file(tensors, published / "model.safetensors")
    with pytest.raises(InvalidCheckpoint, match=r"missing tensor hidden_norm\.weight"):
        read_dflash(published, CONFIG, BACKEND)
    (published / "model.safetensors").unlink()
    with pytest.raises(CheckpointNotFound, match="no weights"):
        read_dflash(published, CONFIG, BACKEND)
