"""Compiled for a CPU, no step copies a cache: XLA copies what a branch of a condition writes to, however large."""

import math
import re
from collections.abc import Mapping
from typing import Any

import pytest

import jaxinfer

# Strategies that verify the roots alone where nothing was drafted, and one that never does.
STRATEGIES = (
    "prompt_lookup",
    pytest.param("lookahead", marks=pytest.mark.slow),
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("token_recycling", "suffix")),
)
PROMPT, NUM_NEW = [5, 6, 7, 5, 6, 7, 5], 50


def copies_in_loops(program: str, lanes: int, least: int) -> list[str]:
    """Return the copies of four-dimensional arrays with rows of ``lanes``, of ``least`` numbers or more.

    Those that a program makes once, of what it is given, do not count.
    """
    loops = "".join(part for part in re.split(r"\n\n|\n(?=%)", program) if not part.startswith("ENTRY"))
    found = re.findall(r"(%\S+) = \w+\[([\d,]+)\]\S* (?:copy|convert|transpose)\(", loops)
    shapes = [(name, list(map(int, shape.split(",")))) for name, shape in found]
    return [name for name, shape in shapes if (len(shape), shape[-1]) == (4, lanes) and math.prod(shape) >= least]


def copies_of_caches(lm: jaxinfer.LanguageModel, programs: Mapping[Any, Any], kind: str, slots: int) -> list[str]:
    """Return the copies, in loops of programs of a kind, as large as the keys of so many slots."""
    texts = [program.as_text() for name, program in programs.items() if name[0][0] == kind]
    assert texts
    lanes = lm.config.num_kv_heads * lm.config.head_dim
    return [copy for text in texts for copy in copies_in_loops(text, lanes, lm.config.num_layers * slots * lanes)]


def test_copies_are_found():
    loop = "body (p: f32[1,1,2,3]) -> f32[1,1,2,3] {\n  %copy.1 = f32[1,1,2,3]{3,2,1,0} copy(%p)\n}"
    program = f"HloModule a\n\n%{loop}\n\nENTRY %{loop}"
    assert copies_in_loops(program, 3, 6) == ["%copy.1"]
    assert not copies_in_loops(program, 3, 7)
    assert not copies_in_loops(program, 2, 6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_writes_to_the_cache_in_place(tiny_llama_folder, strategy):
    check_steps_in_place(jaxinfer.load(tiny_llama_folder()), strategy)


def test_a_step_writes_short_floats_in_place(tiny_llama_folder):
    """XLA would rewrite a whole cache of bfloat16; float16 it writes where it belongs."""
    check_steps_in_place(jaxinfer.load(tiny_llama_folder(), dtype="bfloat16"), "prompt_lookup")


def check_steps_in_place(lm: jaxinfer.LanguageModel, strategy: str) -> None:
    lm.generate([PROMPT], max_new_tokens=NUM_NEW, strategy=strategy)
    assert not copies_of_caches(lm, lm.programs.live, "decode", len(PROMPT) + NUM_NEW)


@pytest.mark.parametrize(
    "strategy", ["prompt_lookup", pytest.param("draft_model:model=self,weights=int8", marks=pytest.mark.slow)]
)
def test_a_window_of_all_rows_copies_neither_pages_nor_memory(tiny_llama_folder, strategy):
    """Requests come to their own texts in rows that are taken in another order than they wait in."""
    lm = jaxinfer.load(tiny_llama_folder())
    with lm.engine(max_rows=2, page_size=8, pages=40, steps_per_look=2, strategy=strategy) as engine:
        alone = engine.submit(PROMPT, max_new_tokens=NUM_NEW).result(60.0)
        both = [engine.submit(PROMPT, max_new_tokens=count) for count in (9, NUM_NEW)]
        assert [each.result(60.0).tokens for each in both] == [alone.tokens[:9], alone.tokens]
        programs = engine._groups[0].core._device._programs
        assert not copies_of_caches(lm, programs.live, "window", 64)
