"""Models that round rows to bytes: which weights they need, and what is refused in one line."""

import time

import numpy as np
import pytest

import jaxinfer
from jaxinfer.errors import InvalidOption
from tests.checkpoint.test_few_bits import write

TEXT = [[5, 6, 7, 8]]
SHAPE = {"model_dim": 64, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32, "num_layers": 1}


@pytest.mark.slow
def test_how_a_model_runs_is_not_saved_with_it(tiny_llama_folder, tmp_path):
    """Weights in bytes that are found in a folder run with rows in bytes, where these are asked for."""
    lm = jaxinfer.load(tiny_llama_folder(**SHAPE), weights="int8", activations="int8")
    wide = jaxinfer.load(lm.save(tmp_path / "saved"))
    again = jaxinfer.load(tmp_path / "saved", activations="int8")
    assert wide.backend.activations is None
    assert wide.fingerprint == again.fingerprint == lm.fingerprint
    found, expected, other = (np.asarray(each.logits(TEXT)) for each in (again, lm, wide))
    assert found.tobytes() == expected.tobytes()
    assert 0 < np.abs(found - other).max() < 0.1 * other.std()


def test_kept_weights_are_the_same_however_rows_are_multiplied(tmp_path):
    path = write(tmp_path)
    jaxinfer.load(path, weights="gguf", activations="int8", kept=tmp_path / "kept")
    for _ in range(1000):  # a thread writes them
        if list(tmp_path.glob("kept/weights/*.parameters")):
            break
        time.sleep(0.01)
    lm = jaxinfer.load(path, weights="gguf", kept=tmp_path / "kept")
    assert any("mapped" in note for note in lm.load_times.notes)
    assert lm.backend.activations is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int8", "activations": "int4"}, "unknown activations 'int4'; use int8, or none"),
        (
            {"weights": "mxfp4"},
            "activations 'int8': no products with weights 'mxfp4': load the model with weights int8",
        ),
        # Not every processor multiplies these.
        *[
            ({"weights": name}, f"no products with weights '{name}': load the model|'{name}' have no products on this")
            for name in ("nf4:group=32", "fp8")
        ],
        ({}, r"activations 'int8': blocks\.layer_0.* is in float32: load the model with weights int8 or int4"),
    ],
)
def test_other_weights_are_refused_in_one_line(tiny_llama_folder, options, message):
    with pytest.raises(InvalidOption, match=message) as caught:
        jaxinfer.load(tiny_llama_folder(**SHAPE), **{"activations": "int8", **options})
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_multiplied"), [("Q4_0", True), ("Q8_0", True), ("Q5_1", False)])
def test_blocks_of_a_file_are_multiplied_or_refused(tmp_path, kind, is_multiplied):
    path = write(tmp_path, kind)
    if not is_multiplied:
        with pytest.raises(InvalidOption, match=r"blocks\..* is in 5 bits of another form: load the model"):
            jaxinfer.load(path, weights="gguf", activations="int8")
        return
    found, wide = (
        np.asarray(jaxinfer.load(path, weights="gguf", activations=each).logits(TEXT)) for each in ("int8", None)
    )
    assert 0 < np.abs(found - wide).max() < 0.1 * wide.std()
