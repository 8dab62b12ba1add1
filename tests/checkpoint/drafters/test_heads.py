"""Heads are read as they were written, from checkpoints of the Medusa project and from the library's own."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.checkpoint.drafters.heads import read_heads, write_heads
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint, JaxinferError
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.drafters.heads import is_conditioned, plain_logits
from jaxinfer.models.model import Model
from tests.toys import TINY_LLAMA, float32_backend

WIDTH, VOCAB = TINY_LLAMA.model_dim, TINY_LLAMA.vocab_size
BACKEND = float32_backend()


def medusa_tensors(num_heads: int = 3, num_layers: int = 2, prefix: str = "") -> dict[str, np.ndarray]:
    rng, tensors = np.random.default_rng(0), {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = rng.standard_normal((WIDTH, WIDTH)) * 0.2
            tensors[f"{prefix}{head}.{layer}.linear.bias"] = rng.standard_normal(WIDTH)
        tensors[f"{prefix}{head}.{num_layers}.weight"] = rng.standard_normal((VOCAB, WIDTH)) * 0.2
    return {name: array.astype(np.float32) for name, array in tensors.items()}


def write_medusa(folder: Path, tensors: dict[str, np.ndarray], num_heads: int = 3, num_layers: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    settings = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers, "base_model_name_or_path": "a/base"}
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads."])
def test_a_medusa_checkpoint_gives_the_logits_that_it_gives_in_torch(tmp_path, prefix):
    torch = pytest.importorskip("torch")
    tensors = medusa_tensors(prefix=prefix)
    hidden_BD = np.random.default_rng(1).standard_normal((4, WIDTH)).astype(np.float32)
    expected = []
    for head in range(3):
        state = torch.from_numpy(hidden_BD)
        for layer in range(2):
            linear = torch.nn.Linear(WIDTH, WIDTH)
            names = ("weight", "bias")
            linear.load_state_dict({n: torch.from_numpy(tensors[f"{prefix}{head}.{layer}.linear.{n}"]) for n in names})
            state = state + torch.nn.functional.silu(linear(state))
        output = torch.nn.Linear(WIDTH, VOCAB, bias=False)
        output.load_state_dict({"weight": torch.from_numpy(tensors[f"{prefix}{head}.2.weight"])})
        expected.append(output(state).detach().numpy())
    head_params = read_heads(write_medusa(tmp_path / "heads", tensors), TINY_LLAMA, BACKEND)
    model = Model(Decoder(TINY_LLAMA, BACKEND), {})
    np.testing.assert_allclose(
        plain_logits(model, head_params, jnp.asarray(hidden_BD)), np.stack(expected, axis=1), atol=1e-4
    )


def test_heads_that_the_configuration_does_not_count_are_read_and_those_not_asked_for_are_not(tmp_path):
    folder = write_medusa(tmp_path / "heads", medusa_tensors(), num_heads=1)
    assert len(read_heads(folder, TINY_LLAMA, BACKEND)["heads"]) == 3
    assert len(read_heads(folder, TINY_LLAMA, BACKEND, most=2)["heads"]) == 2


def own_heads(conditioned: bool, with_out: bool, share: bool, with_ids: bool):
    rng, inner = np.random.default_rng(2), 24
    heads = []
    for index in range(2):
        features, inputs = inner if with_out else WIDTH, WIDTH * (index + 2 if conditioned else 1)
        block = {"kernel": rng.standard_normal((features, inputs)), "bias": rng.standard_normal(features)}
        if with_out:
            block["out"] = rng.standard_normal((WIDTH, features))
        own = {} if share else {"output": {"kernel": rng.standard_normal((11 if with_ids else VOCAB, WIDTH))}}
        heads.append({"blocks": (block,), **own})
    head_params = jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), {"heads": tuple(heads)})
    return {**head_params, "ids": jnp.arange(3, 25, 2, dtype=jnp.int32)} if with_ids else head_params


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(("conditioned", "with_out"), [(False, False), (False, True), (True, False), (True, True)])
def test_heads_are_read_as_they_were_written(tmp_path, conditioned, with_out, share, with_ids):
    head_params = own_heads(conditioned, with_out, share, with_ids)
    description = write_heads(tmp_path / "heads", head_params, VOCAB, base="a/base")
    assert (description.conditioned, description.share_lm_head, description.model_dim) == (conditioned, share, WIDTH)
    again = read_heads(tmp_path / "heads", TINY_LLAMA, BACKEND)
    assert jax.tree.structure(again) == jax.tree.structure(head_params)
    jax.tree.map(np.testing.assert_array_equal, again, head_params)
    assert is_conditioned(again) == conditioned


def check_refused(kind: type[JaxinferError], pattern: str, folder: Path, config=TINY_LLAMA) -> None:
    with pytest.raises(kind, match=pattern) as caught:
        read_heads(folder, config, BACKEND)
    assert "\n" not in str(caught.value)


def test_files_that_are_missing_or_pickled_are_refused(tmp_path):
    folder = tmp_path / "heads"
    check_refused(CheckpointNotFound, "heads: no such folder of heads", folder)
    folder.mkdir()
    check_refused(CheckpointNotFound, r"medusa_lm_head.safetensors: no such file", folder)
    (folder / "medusa_lm_head.pt").write_bytes(b"pickle")
    check_refused(InvalidCheckpoint, "medusa_lm_head.pt: pickled weights can run any code", folder)
    save_file(medusa_tensors(), folder / "medusa_lm_head.safetensors")
    check_refused(CheckpointNotFound, "config.json: no such file", folder)


def test_heads_of_another_shape_than_the_model_are_refused(tmp_path):
    folder = write_medusa(tmp_path / "medusa", medusa_tensors())
    wider = replace(TINY_LLAMA, model_dim=64)
    check_refused(
        InvalidCheckpoint, r"0.0.linear.weight has shape \[32, 32\], but the model needs \[64, 64\]", folder, wider
    )
    more = replace(TINY_LLAMA, vocab_size=300)
    check_refused(InvalidCheckpoint, r"0.2.weight has shape \[258, 32\], but the model needs \[300, 32\]", folder, more)
    write_heads(tmp_path / "own", own_heads(False, False, True, True), VOCAB, base="a/base")
    check_refused(
        InvalidCheckpoint, "heads of a/base read 32 hidden channels, but the model has 64", tmp_path / "own", wider
    )
    check_refused(InvalidCheckpoint, "know 258 tokens, but the model's vocabulary has 300", tmp_path / "own", more)


def test_tensors_that_do_not_add_up_are_refused(tmp_path):
    folder = tmp_path / "heads"
    write_medusa(folder, medusa_tensors(num_heads=2), num_heads=3)
    check_refused(InvalidCheckpoint, "3 heads of 2 layers need tensor 2.0.linear.weight, which is missing", folder)
    write_medusa(folder, medusa_tensors(), num_layers=1)
    check_refused(InvalidCheckpoint, "3 heads of 1 layers need tensor 0.1.weight, which is missing", folder)
    write_medusa(folder, {**medusa_tensors(), "1.3.weight": np.zeros((VOCAB, WIDTH), np.float32)})
    check_refused(InvalidCheckpoint, "3 heads of 2 layers leave no place for tensor 1.3.weight", folder)
    write_medusa(folder, medusa_tensors(), num_layers=-1)
    check_refused(InvalidCheckpoint, "medusa_num_layers must be a whole number from 0 to 1024, not -1", folder)


DAMAGE = {
    "an unknown field": ({"colour": 1}, "unknown field colour"),
    "no number": ({"num_heads": "2"}, "num_heads must be a whole number from 1 to 1024, not '2'"),
    "no flag": ({"conditioned": 1}, "conditioned must be true or false, not 1"),
    "ids past the vocabulary": ({"draft_ids": [VOCAB]}, "draft_ids must list ids below vocab_size 258"),
    "ids twice": ({"draft_ids": [4, 4]}, "draft_ids lists 1 ids more than once"),
    "no ids": ({"draft_ids": []}, "draft_ids must list ids"),
    "another kind of heads": ({"conditioned": False}, r"shape \[32, 64\], but the model needs \[32, 32\]"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_description_is_refused(tmp_path, name):
    changes, pattern = DAMAGE[name]
    write_heads(tmp_path / "heads", own_heads(True, False, True, False), VOCAB)
    path = tmp_path / "heads" / "heads.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    check_refused(InvalidCheckpoint, pattern, tmp_path / "heads")


def test_what_was_read_does_not_change_with_its_file(tmp_path):
    head_params = own_heads(False, False, True, False)
    write_heads(tmp_path / "heads", head_params, VOCAB)
    again = read_heads(tmp_path / "heads", TINY_LLAMA, BACKEND)
    path = tmp_path / "heads" / "heads.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size - 4 * WIDTH)
        file.write(bytes(4 * WIDTH))
    jax.tree.map(np.testing.assert_array_equal, again, head_params)
    changed = jax.tree.leaves(read_heads(tmp_path / "heads", TINY_LLAMA, BACKEND))
    assert any((one != other).any() for one, other in zip(changed, jax.tree.leaves(head_params)))


def test_heads_in_eight_bits_are_read_as_what_they_stand_for(tmp_path):
    """Each row within half a step of its scale; vectors as they were."""
    heads = read_heads(write_medusa(tmp_path / "heads", medusa_tensors()), TINY_LLAMA, BACKEND)
    write_heads(tmp_path / "small", heads, VOCAB, in_int8=True)
    write_heads(tmp_path / "plain", heads, VOCAB)
    found = read_heads(tmp_path / "small", TINY_LLAMA, BACKEND)
    sizes = [(tmp_path / name / "heads.safetensors").stat().st_size for name in ("small", "plain")]
    assert sizes[0] < 0.4 * sizes[1]
    for was, now in zip(jax.tree.leaves(heads), jax.tree.leaves(found), strict=True):
        steps = np.abs(was).max(axis=-1, keepdims=True) / 127 if was.ndim > 1 else 0
        assert now.dtype == was.dtype
        assert np.all(np.abs(was - now) <= 0.501 * steps)


@pytest.mark.parametrize("key", ["num_heads", "num_layers"])
@pytest.mark.parametrize("value", [1025, 2**24])
def test_a_number_of_heads_that_no_file_holds_is_refused_before_anything_is_made_of_it(tmp_path, key, value):
    """With an output that is shared and no layers, no tensor would be missing."""
    block = {"kernel": np.ones((WIDTH, WIDTH), np.float32), "bias": np.ones(WIDTH, np.float32)}
    write_heads(tmp_path / "heads", {"heads": ({"blocks": (block,)},)}, VOCAB)
    description = tmp_path / "heads" / "heads.json"
    settings = json.loads(description.read_text())
    description.write_text(json.dumps({**settings, "num_layers": 0, key: value}))
    with pytest.raises(InvalidCheckpoint, match=f"{key} must be a whole number from [01] to 1024"):
        read_heads(tmp_path / "heads", TINY_LLAMA, BACKEND)


def test_a_tensor_whose_head_has_many_digits_has_no_place(tmp_path):
    tensors = medusa_tensors()
    tensors["9" * 5000 + ".0.linear.bias"] = np.zeros(WIDTH, np.float32)
    with pytest.raises(InvalidCheckpoint, match="leave no place for tensor 999"):
        read_heads(write_medusa(tmp_path / "heads", tensors), TINY_LLAMA, BACKEND)
