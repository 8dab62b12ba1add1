"""A model in few bits is saved as it lies in memory, part by part, and loads to the same bits."""

import json

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.checkpoint.convert import convert
from jaxinfer.checkpoint.few_bits import parse_few_bits
from jaxinfer.checkpoint.load import load_params
from jaxinfer.checkpoint.loaded import LoadedTensors
from jaxinfer.checkpoint.matrix_readers import choose_reader
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.checkpoint.orbax import marker as orbax_marker
from jaxinfer.checkpoint.source import Checkpoint, QuantizedSource
from jaxinfer.errors import InvalidCheckpoint, InvalidOption
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.families.registry import family_of
from jaxinfer.models.few_bits import drafting_params
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from tests.toys import float32_backend, random_params, write_tiny_llama

UP = "model.layers.1.mlp.up_proj.weight"


def assert_same(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


@pytest.fixture(scope="module")
def source(tiny_llama_folder):
    return tiny_llama_folder()


@pytest.fixture(scope="module")
def saved(source, tmp_path_factory):
    return jaxinfer.load(source, weights="int4:group=32").save(tmp_path_factory.mktemp("saved") / "model")


@pytest.mark.parametrize(
    "weights",
    ["int8", "int4:group=32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nf4:group=32", "fp8"))],
)
def test_what_was_saved_loads_to_the_same_bits(source, tmp_path, weights):
    lm = jaxinfer.load(source, weights=weights)
    found = jaxinfer.load(lm.save(tmp_path / "saved"))
    assert_same(found.params, lm.params)
    assert found.base_fingerprint == lm.base_fingerprint == jaxinfer.load(source).fingerprint
    # Saved once more, and copied: the same folder.
    one, two = found.save(tmp_path / "again"), convert(tmp_path / "saved", tmp_path / "copy")
    for folder in (one, two):
        assert (folder / "jaxinfer.json").read_bytes() == (tmp_path / "saved" / "jaxinfer.json").read_bytes()


def test_plain_numbers_come_of_it_when_a_dtype_is_asked_for(saved, tmp_path):
    wide = jaxinfer.load(convert(saved, tmp_path / "wide", dtype="float32"))
    for found, kernel in zip(
        *(jax.tree.leaves(lm.params, is_leaf=is_quantized) for lm in (wide, jaxinfer.load(saved)))
    ):
        expected = jax.tree.map(np.asarray, kernel).dequantize() if is_quantized(kernel) else np.asarray(kernel)
        np.testing.assert_array_equal(np.asarray(found), expected)


SIZES = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
# Fused parts and lanes in another order; heads between others' rows; kernels that lie [in, out].
CONFIGS = {
    "glm4": SIZES | {"head_dim": 8, "num_key_value_heads": 2},
    "gpt_neox": SIZES,
    "gpt2": {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


@pytest.mark.parametrize(("model_type", "scan_layers"), [("glm4", False), ("gpt_neox", False), ("gpt2", True)])
def test_kernels_are_found_in_whatever_parts_the_checkpoint_has_them(model_type, scan_layers):
    config = {"model_type": model_type, **CONFIGS[model_type]}
    family = family_of(config)
    decoder = family.translate(config)
    names, backend = family.tensor_names(decoder), float32_backend(scan_layers)
    plain = LoadedTensors(random_params(decoder, scan_layers=scan_layers), names, None)

    def load(tensors, few_bits):
        checkpoint = Checkpoint("here", config, tensors)
        reader = choose_reader(checkpoint, few_bits, backend, is_split=False)
        return load_params(checkpoint, names, abstract_params(decoder, backend), matrices=reader)

    params = load(plain, parse_few_bits("int4:group=32"))
    tensors = LoadedTensors(params, names, None)
    assert isinstance(tensors, QuantizedSource)
    assert_same(load(tensors, None), params)
    for name, stored in tensors.forms().items():
        widened, expected = (each.read(name, np.dtype(np.float32)) for each in (tensors, plain))
        assert widened.shape == expected.shape
        assert stored.is_transposed == (model_type == "gpt2" and expected.ndim == 2 and ".h." in name)
        # The deepest step of 4 bits: half a step of a group whose weights differ by less than 6.
        np.testing.assert_allclose(widened, expected, atol=0.2)


def test_a_changed_scale_is_found(source, tmp_path):
    folder = jaxinfer.load(source, weights="int8").save(tmp_path / "saved")
    marker = json.loads((folder / "jaxinfer.json").read_text())
    marker["tensors"][f"{UP}.scales"]["checksums"][0] ^= 1
    config = json.loads((folder / "config.json").read_text())
    few_bits = {key: marker[key] for key in ("forms", "rounded_from", "folded")}
    marker["digest"] = orbax_marker._digest(config, marker["tensors"], few_bits)
    (folder / "jaxinfer.json").write_text(json.dumps(marker))
    with pytest.raises(InvalidCheckpoint, match=r"tensor .*up_proj\.weight\.scales is damaged: its checksum"):
        jaxinfer.load(folder)


LIES = {
    "other bits": lambda marker: marker["forms"][UP]["form"].update(bits=5),
    "a group that does not divide": lambda marker: marker["forms"][UP]["form"].update(group=7),
    "levels that are words": lambda marker: marker["forms"][UP]["form"].update(levels=["x"] * 16),
    "no levels": lambda marker: marker["forms"][UP]["form"].update(levels=[]),
    "no form": lambda marker: marker["forms"][UP].update(form=None),
    "an unknown field": lambda marker: marker["forms"][UP]["form"].update(zeal=1),
    "another shape": lambda marker: marker["forms"][UP].update(shape=[32, 64, 1]),
    "a part that is missing": lambda marker: marker["tensors"].pop(f"{UP}.minima"),
    "integers that belong to nothing": lambda marker: marker["forms"].pop(UP),
    "no forms": lambda marker: marker.pop("forms"),
    "nothing of factors": lambda marker: marker.pop("folded"),
    "factors that are not there": lambda marker: marker.update(folded=["0.mlp.down"]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_marker_that_lies_about_forms_with_a_right_digest_is_refused(saved, tmp_path, lie):
    for path in ("config.json", "weights"):
        (tmp_path / path).symlink_to(saved / path)
    marker, config = (json.loads((saved / name).read_text()) for name in ("jaxinfer.json", "config.json"))
    LIES[lie](marker)
    few_bits = {key: marker[key] for key in ("forms", "rounded_from", "folded") if key in marker}
    marker["digest"] = orbax_marker._digest(config, marker["tensors"], few_bits)
    (tmp_path / "jaxinfer.json").write_text(json.dumps(marker))
    with pytest.raises(InvalidCheckpoint, match="damaged"):
        open_checkpoint(tmp_path)


def test_forms_that_belong_to_another_folder_are_refused(saved, tmp_path):
    for path in ("config.json", "weights"):
        (tmp_path / path).symlink_to(saved / path)
    marker = json.loads((saved / "jaxinfer.json").read_text())
    marker["forms"][UP]["form"]["levels"][3] += 1
    (tmp_path / "jaxinfer.json").write_text(json.dumps(marker))
    with pytest.raises(InvalidCheckpoint, match="do not belong together"):
        open_checkpoint(tmp_path)


def test_weights_are_not_rounded_twice(saved):
    with pytest.raises(InvalidOption, match=r"'int8': those of .* are in few bits already: leave weights= out, or"):
        jaxinfer.load(saved, weights="int8")


def test_what_has_no_products_is_widened_and_said_to_be(saved):
    said = []
    with jax.enable_x64(True):
        lm = jaxinfer.load(saved, dtype="float64", notice=said.append)
    assert not any(map(is_quantized, jax.tree.leaves(lm.params, is_leaf=is_quantized)))
    assert said == [f"{saved}: matrices are widened to float64: products in float64"]


def test_layers_in_several_forms_run_one_by_one(tmp_path):
    folder, said = write_tiny_llama(tmp_path), []
    lm = jaxinfer.load(folder, weights="int4:group=32", scan_layers=False)
    other = jaxinfer.load(folder, weights="int8", scan_layers=False)
    lm.params["blocks"]["layer_1"] = other.params["blocks"]["layer_1"]
    saved = lm.save(tmp_path / "mixed")
    assert_same(jaxinfer.load(saved, scan_layers=False).params, lm.params)
    scanned = jaxinfer.load(saved, scan_layers=True, notice=said.append)
    assert not is_quantized(scanned.params["blocks"]["mlp"]["up"]["kernel"])
    assert said == [f"{saved}: matrices are widened to float32: layers or parts in several forms"]


def test_a_draft_model_has_the_bits_of_its_folder(source, saved):
    strategy = jaxinfer.load(source).resolve(f"draft_model:model={saved}")
    # They lie as what drafts is multiplied: on a CPU with the instructions for it, in panels.
    assert_same(strategy.params, drafting_params(jaxinfer.load(saved).params, strategy.backend))
