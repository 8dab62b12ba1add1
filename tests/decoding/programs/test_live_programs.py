"""A process has no more programs than its memory maps allow: those used last; one that was dropped returns bit for bit.

Counting maps is Linux's; elsewhere the number of programs alone is bounded.
"""

import ctypes
import gc
import random
import resource
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.decoding import live_programs
from jaxinfer.decoding.live_programs import LIVE, Bound, LivePrograms, system_bound
from jaxinfer.decoding.programs import Programs
from jaxinfer.engine.config import EngineConfig
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_loading import load
from jaxinfer.models.decoder import Decoder
from jaxinfer.results import GenerationResult
from jaxinfer.sampling.params import SamplingParams
from tests.shared_data import shared_data
from tests.toys import TINY_LLAMA, float32_backend

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory maps are counted on Linux alone")
SAMPLING = SamplingParams(temperature=0.9, seed=3, logprobs=True)
# Strategies that need nothing but the model.
STRATEGIES = (
    "autoregressive",
    "prompt_lookup",
    "suffix",
    "token_recycling",
    "lookahead",
    "jacobi",
    "prompt_lookup+suffix+nodes=6",
)


def num_maps() -> int:
    return Path("/proc/self/maps").read_bytes().count(b"\n")


class Owner:
    """Has programs."""


def fill(live: LivePrograms, owner: int, *keys: str) -> None:
    for key in keys:
        live.add(owner, key, key.upper)


def test_the_program_that_was_used_longest_ago_goes_first_whoever_owns_it() -> None:
    live, owners = LivePrograms(Bound(most=4, least=1)), (Owner(), Owner())
    first, second = map(live.enter, owners)
    fill(live, first, "a", "b")
    fill(live, second, "a", "c")
    assert live.use(first, "a") is not None
    fill(live, second, "d")
    assert (list(live.of(first)), list(live.of(second))) == (["a"], ["a", "c", "d"])
    assert live.use(first, "b") is None
    fill(live, second, "e")
    assert (list(live.of(first)), list(live.of(second))) == (["a"], ["c", "d", "e"])


def test_an_owner_takes_its_programs_along() -> None:
    live, gone, stays = LivePrograms(Bound(most=4)), Owner(), Owner()
    numbers = live.enter(gone), live.enter(stays)
    for number in numbers:
        fill(live, number, "a", "b")
    del gone
    gc.collect()
    assert [list(live.of(number)) for number in numbers] == [[], ["a", "b"]]


@pytest.mark.parametrize(("maps", "kept"), [(100, 6), (101, 3), (10**6, 3)])
def test_maps_bound_programs_but_for_the_few_that_were_used_last(
    monkeypatch: pytest.MonkeyPatch, maps: int, kept: int
) -> None:
    monkeypatch.setattr(live_programs, "_num_maps", lambda: maps)
    live, owner = LivePrograms(Bound(most=6, least=3, most_maps=100)), Owner()
    number = live.enter(owner)
    fill(live, number, *"abcdefgh")
    assert list(live.of(number)) == list("abcdefgh"[-kept:])


@ON_LINUX
def test_the_bound_is_a_third_of_what_the_system_allows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
    assert system_bound().most_maps == allowed // 3
    assert LIVE.bound == system_bound()
    monkeypatch.setattr(live_programs, "_MOST_MAPS", tmp_path / "absent")
    assert system_bound().most_maps is None


def say(model: LanguageModel, rows: int, length: int, strategy: str = "autoregressive") -> list[GenerationResult]:
    prompts = [[1, *(2 + (7 * row + 5 * at) % 250 for at in range(length - 1))] for row in range(rows)]
    return model.generate(prompts, max_new_tokens=4, sampling=SAMPLING, strategy=strategy)


def bits(results: list[GenerationResult]) -> list[Any]:
    return [(result.tokens, result.logprobs) for result in results]


@ON_LINUX
def test_dropped_programs_are_unmapped_and_come_back_bit_for_bit(tiny_llama_folder: Callable[..., Path]) -> None:
    model, live = load(tiny_llama_folder(num_layers=1)), LivePrograms(Bound(most=1, least=1))
    model.programs = Programs(model.programs.decoder, live=live)
    model.logits([[1, 2], [1, 3], [1, 4]])
    first = np.asarray(model.logits([[1, 40, 41]]))
    (old,) = map(weakref.ref, model.programs.live.values())
    model.logits([[1, 40, 41], [1, 42]])
    assert old() is None
    assert len(model.programs.live) == 1
    for _ in range(2):
        assert np.array_equal(np.asarray(model.logits([[1, 40, 41]])), first)
        assert model.programs.compilations == 4
    # A program goes without a collection of garbage, and its memory with it.
    gc.disable()
    try:
        before = num_maps()
        del model.programs
        # On a busy machine a thread that has run it may let go of it a moment later.
        ends = time.monotonic() + 10
        while before - num_maps() <= 10 and time.monotonic() < ends:
            time.sleep(0.01)
        assert before - num_maps() > 10
    finally:
        gc.enable()


def test_a_program_that_is_dropped_while_it_runs_ends() -> None:
    live = LivePrograms(Bound(most=1, least=1))
    programs = Programs(Decoder(TINY_LLAMA, float32_backend()), live=live)
    vector = jnp.arange(64.0)

    def slow(_: None, vector: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 300_000, lambda _, found: jnp.cos(found), vector)

    running = programs.run("slow", slow, (), None, vector)
    programs.run("quick", lambda _, vector: vector + 1, (), None, vector)
    assert [key[0] for key in programs.live] == ["quick"]
    assert jnp.array_equal(running, jax.jit(slow)(None, vector))


@pytest.mark.exhaustive
def test_an_engine_serves_the_same_with_few_programs(
    tiny_llama_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = load(tiny_llama_folder(num_layers=1), max_len=64), [1, 40, 41, 42]
    monkeypatch.setattr(LIVE, "_bound", Bound(most=2, least=1))
    # One program of each kind, so that none is prepared in the background.
    with model.engine(EngineConfig(max_rows=1, page_size=8, prefill_chunk=16)) as engine:
        texts = [engine.submit(prompt, max_new_tokens=6).result() for _ in range(2)]
        (group,) = engine._groups
        programs = group.core._device._programs
        assert len(programs.live) == 2
        assert programs.compilations == 6
    (plain,) = model.generate([prompt], max_new_tokens=6)
    assert [text.tokens for text in texts] == [plain.tokens] * 2


@ON_LINUX
@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("num_calls", "most_rows", "longest", "most_maps"),
    [(20_000, 2, 100, 20_000), (5000, 8, 400, None)],
    ids=["few", "many"],
)
def test_a_process_that_meets_many_shapes_stays_as_it_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_calls: int,
    most_rows: int,
    longest: int,
    most_maps: int | None,
) -> None:
    """Random strategies, rows and lengths: many more programs than may live; maps and memory as once all are compiled.

    Programs are kept in a folder, from which those that were dropped are read: that makes thousands of calls possible.
    Every hundredth call repeats the first one, which has the same bits.
    """
    model = load(shared_data("models/stories260K-hf"), kept=tmp_path / "kept")
    if most_maps is not None:
        monkeypatch.setattr(LIVE, "_bound", Bound(most_maps=most_maps, least=4))
    allowed, rng = LIVE.bound.most_maps, random.Random(5)
    assert allowed is not None
    first = bits(say(model, 1, 5))
    maps, resident = [], []
    for number in range(num_calls):
        if number % 100 == 99:
            assert bits(say(model, 1, 5)) == first
        say(model, rng.randint(1, most_rows), rng.randint(5, longest), rng.choice(STRATEGIES))
        if number % 10 == 9:
            maps.append(num_maps())
            ctypes.CDLL(None).malloc_trim(0)
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
        if number % 100 == 99:
            times = model.programs.times
            print(
                f"{number + 1} calls: {maps[-1]} maps, {resident[-1] >> 20} MiB, {len(model.programs.live)} programs "
                f"live, {times.compilations} compiled, {times.reads} read",
                file=sys.stderr,
                flush=True,
            )
    assert max(maps) <= allowed + 100  # the small programs that make a call's arrays come after its last look
    half = len(maps) // 2
    assert max(maps[half:]) <= 1.05 * max(maps[:half])
    assert max(resident[half:]) <= 1.1 * max(resident[:half])
