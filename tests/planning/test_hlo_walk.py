"""Where the instructions of a compiled program stand."""

import re
from collections import Counter

import jax
import jax.numpy as jnp

from jaxinfer.planning.hlo_walk import walk

TEXT = """HloModule example

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%body (p: (s32[], bf16[8,4096])) -> (s32[], bf16[8,4096]) {
  %p = (s32[]{:T(128)}, bf16[8,4096]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %start = (bf16[8,4096]{1,0}, bf16[8,4096]{1,0}, u32[]{:S(2)}) all-reduce-start(%p), to_apply=%add
  %done = bf16[8,4096]{1,0:T(8,128)(2,1)} all-reduce-done(%start)
  ROOT %next = (s32[], bf16[8,4096]{1,0}) tuple(%p, %done)
}

%condition (p: (s32[], bf16[8,4096])) -> pred[] {
  ROOT %less = pred[]{:T(512)} compare(%p, %p), direction=LT
}

%rare (q: f32[8,16]) -> f32[8,16] {
  ROOT %gathered = f32[8,16]{1,0} all-gather(%q), dimensions={1}
}

%usual (q: f32[8,16]) -> f32[8,16] {
  ROOT %same = f32[8,16]{1,0} parameter(0)
}

ENTRY %main (x: f32[8,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0:T(8,128)} parameter(0)
  %loop = (s32[]{:T(128)}, /*index=1*/bf16[8,4096]{1,0}) while(%x), condition=%condition, body=%body
  ROOT %chosen = f32[8,16]{1,0} conditional(%x, %x, %x), branch_computations={%usual, %rare}
}
"""


def test_collectives_are_found_in_their_loops_and_branches_and_counted_once():
    found = [(item.collective, item.bytes, item.loops, item.branches) for item in walk(TEXT) if item.collective]
    assert sorted(found) == [("all-gather", 8 * 16 * 4, 0, 1), ("all-reduce", 8 * 4096 * 2, 1, 0)]


def test_every_instruction_of_a_program_is_read():
    expected = Counter(re.findall(r"[)}\]] ([a-z-]+)\(", TEXT.replace("/*index=1*/", "")))
    assert expected["parameter"] == 5
    assert Counter(item.opcode for item in walk(TEXT)) == expected


def test_nested_loops_of_a_real_program_are_counted():
    def nested(x):
        return jax.lax.fori_loop(0, 3, lambda i, y: jax.lax.fori_loop(0, i + 2, lambda _, z: jnp.sin(z), y), x)

    hlo = jax.jit(nested).lower(jnp.ones((4,))).compile().as_text()
    sines = [item for item in walk(hlo) if item.opcode == "sine"]
    assert {(item.loops, item.elements) for item in sines} == {(2, 4)}
