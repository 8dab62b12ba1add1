"""What drafters are made of a model's weights is made once, for as long as these and the drafters' files stay."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.checkpoint.drafters.heads import write_heads
from jaxinfer.checkpoint.kept_params import WRITER
from jaxinfer.errors import InvalidOption
from jaxinfer.ops.few_bits.panels import PanelArray
from tests.toys import TINY_LLAMA, float32_backend, random_params

# Its rows divide into groups, so that its kernels are rounded to 4 bits.
CONFIG = replace(TINY_LLAMA, model_dim=64, ffn_dim=96)
PARAMS = random_params(CONFIG)


def random_heads(seed: int) -> Any:
    """Two heads that know every third token, and read the model's output matrix."""
    rng = np.random.default_rng(seed)

    def head() -> Any:
        kernel, bias = rng.normal(size=(64, 64)), rng.normal(size=64)
        return {"blocks": ({"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.asarray(bias, jnp.float32)},)}

    return {"heads": (head(), head()), "ids": jnp.arange(0, CONFIG.vocab_size, 3)}


def resolved(spec: str, kept: Path | None, params: Any = PARAMS) -> tuple[Any, list[str]]:
    """Return a strategy's parameters as a new process resolves them, and what it says of what is kept."""
    lm = LanguageModel(CONFIG, params, float32_backend(), kept=kept)
    strategy: Any = lm.resolve(spec)
    for thread in threading.enumerate():
        if thread.name == WRITER:
            thread.join()
    return strategy.parameters, lm.load_times.notes


def assert_same(one: Any, other: Any) -> None:
    # That panels are for drafts is part of the structure.
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def panels(params: Any) -> list[PanelArray]:
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, PanelArray))
    return [leaf for leaf in leaves if isinstance(leaf, PanelArray)]


def changed_a_little() -> Any:
    kernel = PARAMS["blocks"]["layer_1"]["mlp"]["up"]["kernel"]
    block = PARAMS["blocks"]["layer_1"]
    others = {**block, "mlp": {**block["mlp"], "up": {"kernel": kernel.at[0, 0].add(1)}}}
    return {**PARAMS, "blocks": {**PARAMS["blocks"], "layer_1": others}}


@pytest.mark.parametrize(
    ("spec", "num_files"),
    [
        ("cascade:heads={heads}", 2),
        ("draft_model:model=self,weights=int8", 1),
        ("draft_model:model=self,weights=int4:group=32,layers=1", 1),
        ("medusa:heads={heads},tree=dynamic:5", 1),
    ],
)
def test_a_second_process_finds_what_the_first_made(tmp_path: Path, spec: str, num_files: int) -> None:
    write_heads(tmp_path / "heads", random_heads(0), CONFIG.vocab_size)
    spec = spec.format(heads=tmp_path / "heads")
    anew, _ = resolved(spec, None)
    (first, none), (second, found) = (resolved(spec, tmp_path / "kept") for _ in range(2))
    assert none == []
    assert found == ["0 MB mapped"] * num_files
    assert panels(anew)
    assert_same(first, anew)
    assert_same(second, anew)


def test_other_weights_and_other_files_are_not_mistaken_for_those_that_are_kept(tmp_path: Path) -> None:
    folder, kept = tmp_path / "heads", tmp_path / "kept"
    write_heads(folder, random_heads(0), CONFIG.vocab_size)
    spec = f"cascade:heads={folder}"
    resolved(spec, kept)
    params, notes = resolved(spec, kept, changed_a_little())
    assert notes == []
    assert_same(params, resolved(spec, None, changed_a_little())[0])
    write_heads(folder, random_heads(1), CONFIG.vocab_size, overwrite=True)
    params, notes = resolved(spec, kept)
    assert notes == ["0 MB mapped"]  # the model in fewer bits; not its drafters
    assert_same(params, resolved(spec, None)[0])


@pytest.mark.parametrize("name", ["cascade:weights=int4:group=128", "draft_model:model=self,weights=int4:group=128"])
def test_bits_that_do_not_fit_are_refused_where_things_are_kept_too(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidOption, match="do not divide into groups of 128"):
        resolved(name, tmp_path / "kept")
    assert not files(tmp_path / "kept")


def test_nothing_is_kept_twice_that_is_the_models_own(tmp_path: Path) -> None:
    params, _ = resolved("draft_model:model=self,weights=2:4", tmp_path / "kept")
    assert not files(tmp_path / "kept")
    assert params["embed"]["embedding"] is PARAMS["embed"]["embedding"]


@pytest.mark.parametrize("name", ["draft_model:model=self,verify=rejection", "medusa:heads={heads},verify=typical"])
def test_what_the_text_depends_on_is_made_anew(tmp_path: Path, name: str) -> None:
    """A fingerprint reads a part of the weights."""
    write_heads(tmp_path / "heads", random_heads(0), CONFIG.vocab_size)
    name = name.format(heads=tmp_path / "heads")
    for _ in range(2):
        _, notes = resolved(f"{name},tree=chain:2" if "medusa" in name else name, tmp_path / "kept")
        assert notes == []
    assert not files(tmp_path / "kept")


def test_what_a_file_cannot_hold_is_made_anew_and_that_is_said(tmp_path: Path) -> None:
    """Heads without blocks of their own."""
    outputs = [np.random.default_rng(seed).normal(size=(CONFIG.vocab_size, 64)) for seed in range(2)]
    heads = {"heads": tuple({"blocks": (), "output": {"kernel": jnp.asarray(each, jnp.float32)}} for each in outputs)}
    write_heads(tmp_path / "heads", heads, CONFIG.vocab_size)
    for _ in range(2):
        params, notes = resolved(f"medusa:heads={tmp_path / 'heads'},tree=chain:2", tmp_path / "kept")
        assert notes == ["not kept: heads.item 0.blocks is empty"]
        assert params["heads"][0]["blocks"] == ()


def test_what_drafts_takes_no_room_from_the_weights(tmp_path: Path) -> None:
    resolved("draft_model:model=self", tmp_path / "kept")
    assert [path.parent.name for path in files(tmp_path / "kept")] == ["drafting"]


def files(kept: Path) -> list[Path]:
    return list(kept.glob("*/*.parameters"))
