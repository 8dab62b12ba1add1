"""Streams come back from disk as they were, for their own base alone; what is damaged is named."""

import json
from dataclasses import MISSING, fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint.drafters.streams import StreamsDescription, network_digest, read_streams, write_streams
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint, InvalidOption
from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.models.drafters.streams import StreamsConfig
from jaxinfer.ops.backend import choose_backend
from tests.models.drafters.dense_streams import random_adapters, random_streams
from tests.toys import TINY_LLAMA, float32_backend

CONFIG = replace(TINY_LLAMA, num_layers=3)
STREAMS = StreamsConfig(num_streams=3, num_layers=2, rank=4, exit_rank=5, adapter_rank=3)
OWN = {**random_streams(CONFIG.model_dim), "blocks": random_adapters(CONFIG, 2)}


@pytest.fixture
def folder(tmp_path):
    write_streams(tmp_path / "streams", STREAMS, OWN, CONFIG, base="toy", base_fingerprint="0a1b2c3d")
    return tmp_path / "streams"


def test_what_was_written_is_read(folder):
    streams, own = read_streams(folder, CONFIG, float32_backend())
    assert streams == STREAMS
    jax.tree.map(np.testing.assert_array_equal, own, OWN)
    assert json.loads((folder / "streams.json").read_text())["base"] == "toy"
    narrow = read_streams(folder, CONFIG, choose_backend("bfloat16", "cpu"))[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow)} == {jnp.dtype("bfloat16")}
    with pytest.raises(InvalidOption, match="exists"):
        write_streams(folder, STREAMS, own, CONFIG)
    write_streams(folder, STREAMS, own, CONFIG, beside={"tree.json": "[[0]]"}, overwrite=True)
    assert (folder / "tree.json").read_text() == "[[0]]"
    assert json.loads((folder / "streams.json").read_text())["base"] is None


def test_folders_of_before_there_were_adapters_are_read(tmp_path):
    old = replace(STREAMS, adapter_rank=0)
    write_streams(tmp_path / "old", old, random_streams(CONFIG.model_dim), CONFIG, base="toy")
    path = tmp_path / "old" / "streams.json"
    settings = json.loads(path.read_text())
    del settings["adapter_rank"], settings["base_fingerprint"]
    path.write_text(json.dumps(settings))
    streams, own = read_streams(tmp_path / "old", CONFIG, float32_backend(), lambda: "of any weights")
    assert streams == old
    jax.tree.map(np.testing.assert_array_equal, own, random_streams(CONFIG.model_dim))


def test_streams_are_for_the_weights_that_they_werebase_fingerprint(folder):
    read_streams(folder, CONFIG, float32_backend(), lambda: "0a1b2c3d")
    with pytest.raises(InvalidCheckpoint, match="is for the weights 0a1b2c3d, but this model's are 99999999: load"):
        read_streams(folder, CONFIG, float32_backend(), lambda: "99999999")


def test_a_file_format_does_not_change_what_the_network_is():
    same = {
        "another end of texts": {"eos_token_ids": (5,), "bos_token_id": None, "max_position": 99, "family": "mistral"},
        "float32 numbers": {"norm_eps": float(np.float32(CONFIG.norm_eps))},
    }
    others = {
        "theta": {"layer_pattern": (LayerKind(Rope(500000.0, 8)),)},
        "a window": {"layer_pattern": (LayerKind(Rope(10000.0, 8), window=16),)},
        "activation": {"activation": "gelu"},
        "heads": {"num_kv_heads": 4},
        "tied": {"tied_embeddings": True},
    }
    assert {network_digest(replace(CONFIG, **changes)) for changes in same.values()} == {network_digest(CONFIG)}
    digests = {network_digest(replace(CONFIG, **changes)) for changes in others.values()}
    assert len(digests | {network_digest(CONFIG)}) == len(others) + 1


def test_a_fingerprint_stays_what_it_is():
    """Files hold it: fields that a configuration gains later must not change it."""
    assert network_digest(CONFIG) == "9a34eb2564eb214f"


OTHER_BASES = {
    "width": ({"model_dim": 48}, "a model of 32 hidden channels, but this one has 48"),
    "vocabulary": ({"vocab_size": 300}, "a model of 258 tokens, but this one has 300"),
    "depth": ({"num_layers": 4}, "a model of 3 layers, but this one has 4"),
    "network": ({"ffn_dim": 96}, "the network [0-9a-f]{16}, but this model is [0-9a-f]{16}: load the model"),
}


@pytest.mark.parametrize("name", OTHER_BASES)
def test_streams_of_another_base_are_refused(folder, name):
    changes, pattern = OTHER_BASES[name]
    with pytest.raises(InvalidCheckpoint, match=f"the streams of toy were trained on .*{pattern}") as caught:
        read_streams(folder, replace(CONFIG, **changes), float32_backend())
    assert "\n" not in str(caught.value)


DESCRIPTIONS = {
    "gamma 0": ({"num_streams": 0}, "num_streams must be a whole number of 1 or more, not 0"),
    "all layers": ({"num_layers": 3}, "num_layers=3 is not inside the model's 3 layers"),
    "a rank in words": ({"rank": "four"}, "rank must be a whole number of 1 or more, not 'four'"),
    "true": ({"exit_rank": True}, "exit_rank must be a whole number of 1 or more, not True"),
    "adapters of a negative rank": ({"adapter_rank": -1}, "adapter_rank must be a whole number of 0 or more, not -1"),
    "adapters that are not there": (
        {"adapter_rank": 0},
        "no place for tensor blocks.attention.key.adapter.down",
    ),
    "a number as fingerprint": ({"base_fingerprint": 7}, "base_fingerprint must be text or null, not 7"),
    "no digest": ({"base_digest": None}, "base_digest must be text, not None"),
    "a number as base": ({"base": 7}, "base must be text or null, not 7"),
    "a new field": ({"lora": 8}, "unknown field lora; the fields are num_streams, num_layers"),
    "another number of streams": ({"num_streams": 4}, r"identifiers has shape \[3, 32\], but streams.json makes it"),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_description_that_cannot_be_is_refused(folder, name):
    changes, pattern = DESCRIPTIONS[name]
    settings = json.loads((folder / "streams.json").read_text())
    (folder / "streams.json").write_text(json.dumps({**settings, **changes}))
    with pytest.raises(InvalidCheckpoint, match=pattern) as caught:
        read_streams(folder, CONFIG, float32_backend())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", [field.name for field in fields(StreamsDescription) if field.default is MISSING])
def test_a_description_without_a_field_is_refused(folder, field):
    settings = json.loads((folder / "streams.json").read_text())
    del settings[field]
    (folder / "streams.json").write_text(json.dumps(settings))
    with pytest.raises(InvalidCheckpoint, match=field):
        read_streams(folder, CONFIG, float32_backend())


def test_weights_that_cannot_be_are_refused(folder):
    path = folder / "streams.safetensors"
    whole = load_file(path)
    nan = whole["init.up"].copy()
    nan[0, 0] = np.nan
    damages = {
        "tensor init.up is missing": {name: array for name, array in whole.items() if name != "init.up"},
        "leaves no place for tensor lora": {**whole, "lora": whole["init.up"]},
        "init.up holds numbers that are not finite": {**whole, "init.up": nan},
    }
    for pattern, tensors in damages.items():
        save_file(tensors, path)
        with pytest.raises(InvalidCheckpoint, match=pattern):
            read_streams(folder, CONFIG, float32_backend())
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(InvalidCheckpoint, match="not a valid safetensors file"):
        read_streams(folder, CONFIG, float32_backend())


@pytest.mark.parametrize("name", ["streams.json", "streams.safetensors"])
def test_what_is_missing_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(CheckpointNotFound, match=f"{name}: no such file of streams, which has"):
        read_streams(folder, CONFIG, float32_backend())
    with pytest.raises(CheckpointNotFound, match="no such folder of streams"):
        read_streams(folder / "there", CONFIG, float32_backend())
