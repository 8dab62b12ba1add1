"""Programs that are kept give the same bits as those compiled anew, and are never taken for others."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.decoding import kept_programs
from jaxinfer.decoding.kept_programs import KeptPrograms
from jaxinfer.decoding.programs import full_logits, prefill
from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.decoding.strategies.prompt_lookup import PromptLookup
from jaxinfer.kept.conditions import compiler_conditions
from jaxinfer.kept.folder import KeptFolder
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_loading import load
from jaxinfer.models.decoder import Decoder
from jaxinfer.results import GenerationResult
from jaxinfer.sampling.params import SamplingParams
from tests.toys import TINY_LLAMA, float32_backend

SAMPLING = SamplingParams(temperature=0.9, top_p=0.95, seed=3, logprobs=True)
PROMPT = [1, 40, 41, 42, 40, 41]


def say(model: LanguageModel, max_new_tokens: int = 1) -> GenerationResult:
    (result,) = model.generate([PROMPT], max_new_tokens=max_new_tokens, sampling=SAMPLING)
    return result


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, tiny_llama_folder: Callable[..., Path]) -> tuple[Path, Path, Any]:
    """Return a model, a folder with its programs, and what it says without them."""
    model, kept = tiny_llama_folder(), tmp_path_factory.mktemp("home") / "kept"
    plain = say(load(model), 6)
    first = load(model, kept=kept)
    assert say(first, 6).logprobs == plain.logprobs
    assert (first.programs.times.reads, first.programs.times.compilations) == (0, 2)
    assert first.programs.kept is not None
    assert not first.programs.kept.notes
    return model, kept, plain


@pytest.mark.slow
def test_another_process_says_the_same_without_compiling(said: tuple[Path, Path, Any]) -> None:
    model, kept, plain = said
    script = (
        "import json, sys; from jaxinfer.model_loading import load; from jaxinfer.sampling.params import "
        "SamplingParams; model = load(sys.argv[1], kept=sys.argv[2]); (result,) = model.generate([json.loads("
        "sys.argv[3])], max_new_tokens=6, sampling=SamplingParams(temperature=0.9, top_p=0.95, seed=3, logprobs=True));"
        "print(json.dumps([result.tokens, result.logprobs, vars(model.programs.times), model.programs.kept.notes, "
        "[name for name in ('jax.experimental.pallas', 'huggingface_hub') if name in sys.modules]]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(model), str(kept), json.dumps(PROMPT)],
        env={**os.environ, "JAX_PLATFORMS": jax.config.jax_platforms or ""},  # pyright: ignore[reportAttributeAccessIssue]
        capture_output=True,
        text=True,
        check=True,
    )
    tokens, logprobs, times, notes, imported = json.loads(run.stdout)
    assert notes == []
    assert (times["reads"], times["compilations"]) == (2, 0)
    assert (tuple(tokens), tuple(logprobs)) == (plain.tokens, plain.logprobs)
    assert imported == []


@pytest.mark.slow
def test_stale_programs_are_compiled_anew(said: tuple[Path, Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    path, kept, plain = said
    changed = {**compiler_conditions(), "versions": "others"}
    before = sorted(file.name for file in (kept / "programs").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(kept_programs, "compiler_conditions", lambda: changed)
        model = load(path, kept=kept)
        assert say(model).tokens == plain.tokens[:1]
        assert model.programs.times.compilations == 1
        assert model.programs.kept is not None
        assert model.programs.kept.notes == ["not read: compiled under other conditions (versions)"]
    assert sorted(file.name for file in (kept / "programs").iterdir()) == before
    again = load(path, kept=kept)
    assert say(again).logprobs == plain.logprobs[:1]
    assert again.programs.times.compilations == 1


@pytest.mark.slow
def test_source_that_lowers_to_the_same_program_needs_no_compiler(
    said: tuple[Path, Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kept, plain = said
    monkeypatch.setattr(kept_programs, "compiler_conditions", lambda: edited)
    for number, (text, compilations) in enumerate(((None, 0), ("other", 1))):
        edited = {**compiler_conditions(), "source files": f"edit {number}"}
        if text is not None:
            monkeypatch.setattr(kept_programs, "_text", lambda lowered: text)  # noqa: B023
        model = load(path, kept=kept)
        assert say(model).logprobs == plain.logprobs[:1]
        assert model.programs.times.compilations == compilations
        assert model.programs.kept is not None
        assert model.programs.kept.notes == ["not read: compiled under other conditions (source files)"]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text", "older"])
def test_damaged_programs_are_compiled_anew(said: tuple[Path, Path, Any], damage: str) -> None:
    _, kept, _ = said
    names = sorted((kept / "programs").iterdir())
    content = names[0].read_bytes()
    damaged = {
        "cut": content[:-100],
        "flipped": content[:-2000] + bytes([content[-2000] ^ 1]) + content[-1999:],
        "empty": b"",
        "text": b"[]\nnothing",
        "older": b'{"form": "jaxinfer program 1"}\nnothing',
    }[damage]
    names[0].write_bytes(damaged)
    programs = KeptPrograms(KeptFolder(kept / "programs", 1 << 28))
    assert programs.read(names[0].name, ()) is None
    assert len(programs.notes) == 1
    assert "damaged" in programs.notes[0]
    names[0].write_bytes(content)


def test_a_folder_that_others_can_write_is_not_used(said: tuple[Path, Path, Any]) -> None:
    path, kept, plain = said
    folder = kept / "programs"
    folder.chmod(0o770)
    try:
        model = load(path, kept=kept)
        assert say(model).tokens == plain.tokens[:1]
    finally:
        folder.chmod(0o700)
    assert (model.programs.times.reads, model.programs.times.compilations) == (0, 1)
    assert model.programs.kept is not None
    assert model.programs.kept.notes
    assert all("open to other users" in note for note in model.programs.kept.notes)


def names_of(folder: Path, cases: list[tuple[Any, tuple[int, ...], tuple[Any, ...]]]) -> list[str | None]:
    programs = KeptPrograms(KeptFolder(folder, 1 << 20))
    return [programs.name(*case) for case in cases]


def test_all_that_a_program_depends_on_is_in_its_name(tmp_path: Path) -> None:
    decoder = Decoder(TINY_LLAMA, float32_backend())
    logits = partial(full_logits, decoder)
    weights = {"embed": jnp.zeros((4, 3))}
    tokens, lengths = jnp.zeros((1, 16), jnp.int32), jnp.zeros(1, jnp.int32)
    cases: list[Any] = [
        (logits, (), (weights, tokens, lengths)),
        (logits, (1,), (weights, tokens, lengths)),
        (logits, (), ({"embed": weights["embed"].astype(jnp.bfloat16)}, tokens, lengths)),
        (logits, (), ({"embed": weights["embed"].T}, tokens, lengths)),
        (logits, (), ({"other": weights["embed"]}, tokens, lengths)),
        (logits, (), (weights, jnp.zeros((1, 32), jnp.int32), lengths)),
        (logits, (), (weights, jnp.zeros((2, 16), jnp.int32), lengths)),
        (logits, (), (weights, tokens, 1)),
        (partial(prefill, decoder, Autoregressive(), 16), (), (weights, tokens, lengths)),
        (partial(prefill, decoder, PromptLookup(), 16), (), (weights, tokens, lengths)),
    ]
    names = names_of(tmp_path, cases)
    assert None not in names
    assert len(set(names)) == len(cases)
    assert names_of(tmp_path, cases) == names


def test_programs_of_other_code_are_not_kept(tmp_path: Path) -> None:
    programs = KeptPrograms(KeptFolder(tmp_path / "kept", 1 << 20))
    assert programs.name(lambda: None, (), ()) is None
    assert programs.notes == ["not kept: a function that is not a module's own has no spelling"]


def test_settings_of_jax_and_of_the_compiler_are_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiler_conditions()
    assert compiler_conditions() == before
    with jax.default_matmul_precision("bfloat16"):
        assert compiler_conditions()["settings of JAX"] != before["settings of JAX"]
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert compiler_conditions()["environment"] != before["environment"]
