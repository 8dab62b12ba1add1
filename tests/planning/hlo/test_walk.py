"""Where the instructions of a compiled program stand, and what they move and compute."""

import dataclasses
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.planning.compile import compile_programs
from jaxinfer.planning.hlo.walk import total, walk
from jaxinfer.planning.topology import tensor_mesh, without_persistent_cache
from tests.planning.models import LLAMA_2_7B

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


def test_a_loop_that_data_ends_runs_as_often_as_told_inside_another_such():
    def drafting(x):
        def draft(y):
            return jax.lax.fori_loop(0, 3, lambda _, z: jnp.sin(z), y)

        return jax.lax.while_loop(jnp.any, lambda y: jax.lax.while_loop(jnp.all, draft, jnp.cos(y)), x)

    hlo = jax.jit(drafting).lower(jnp.ones((4,))).compile().as_text()
    for trips in (1, 5):
        runs = {item.opcode: item.runs for item in walk(hlo, trips) if item.opcode in ("sine", "cosine")}
        assert runs == {"sine": 3 * trips, "cosine": 1}


MOVING = (Path(__file__).parent / "moving_hlo.txt").read_text()


def test_each_instruction_moves_what_was_counted_by_hand():
    found = {item.name: item for item in walk(MOVING) if not item.fused}
    layer, rows = 1024 * 1024 * 2, 64 * 1024 * 2
    moved = {
        name: (item.read_bytes, item.written_bytes)
        for name, item in found.items()
        if item.read_bytes or item.written_bytes
    }
    assert moved == {
        "here": (4, 0),
        "next": (4, 4),
        "before": (2 * 4, 1),
        "multiplied": (layer + rows, 0),  # one layer of all, and the result stays in the chip
        "new": (8 * 1024 * 2 + 4, 8 * 1024 * 2),
        "fetched": (rows, 0),
        "inside": (2048 * 1024 * 2, 0),
        "twice": (0, rows),
        "kernel": (1000, 0),  # what it says itself, not all layers
        "padded": (512, 512),  # five numbers take a tile of 128
    }
    assert {name: found[name].runs for name in ("multiplied", "new", "before")} == {
        "multiplied": 15,
        "new": 1,
        "before": 15,
    }
    flops = {item.name: item.flops for item in walk(MOVING) if item.flops}
    assert flops == {"out": 2 * 64 * 1024 * 1024, "kernel": 77}


def test_totals_count_each_instruction_as_often_as_it_runs_and_branches_only_on_request():
    assert total(walk(MOVING)).flops == 15 * 2 * 64 * 1024 * 1024 + 77
    assert total(walk(TEXT)).collectives == {"all-reduce": (1, 8 * 4096 * 2)}
    assert total(walk(TEXT), branches=True).collectives["all-gather"] == (1, 8 * 16 * 4)


def test_collectives_inside_a_loop_are_counted_and_sent_as_often_as_it_runs():
    loop = """condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"7"}}"""
    text = TEXT.replace("HloModule example", "HloModule example, num_partitions=4")
    found = total(walk(text.replace("condition=%condition, body=%body", loop)))
    size = 8 * 4096 * 2
    assert found.collectives == {"all-reduce": (7, 7 * size)}
    assert found.sent_bytes == 7 * 2 * size * 3 // 4
    assert found.groups == {("all-reduce", 4): 7}


def test_batched_products_written_as_dilated_convolutions_count_no_holes():
    text = """HloModule batched

ENTRY %main (a: bf16[4,8,1024], b: bf16[4,1024,512]) -> f32[4,8,512] {
  %a = bf16[4,8,1024]{2,1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[4,1024,512]{2,1,0:T(8,128)(2,1)} parameter(1)
  %dot = f32[4,8,512]{2,1,0:T(8,128)} dot(%a, %b), lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}
  ROOT %c = f32[4,8,512]{2,1,0} convolution(%a, %b), window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf
}
"""
    assert {item.name: item.flops for item in walk(text) if item.flops} == dict.fromkeys(
        ("dot", "c"), 2 * 4 * 8 * 1024 * 512
    )


@pytest.mark.tpu_compile
def test_a_scanned_stack_is_read_once_and_a_donated_cache_written_by_its_new_rows():
    layers, width, slots = 16, 2048, 8192
    mesh = tensor_mesh("v5e:1x1", 1)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def step(weights_LDD, cache_LSD, x_BD, length):
        def layer(carry, scanned):
            x_BD, cache_LSD = carry
            index, weights_DD = scanned
            x_BD = jnp.tanh(x_BD @ weights_DD)
            return (x_BD, cache_LSD.at[index, length].set(x_BD[0])), None

        return jax.lax.scan(layer, (x_BD, cache_LSD), (jnp.arange(layers), weights_LDD))[0]

    shapes = [
        ((layers, width, width), jnp.bfloat16),
        ((layers, slots, width), jnp.bfloat16),
        ((8, width), jnp.bfloat16),
    ]
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=everywhere) for shape in (*shapes, ((), jnp.int32))]
    with without_persistent_cache():
        compiled = jax.jit(step, donate_argnums=1).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
    counted = total(walk(compiled.as_text()))
    weights = layers * width * width * 2
    assert counted.read_bytes == pytest.approx(weights, rel=0.01)
    # A row of the cache is less than a tile, of which the write may take the rest along.
    assert layers * width * 2 <= counted.written_bytes + 8 * width * 2 < 32 * layers * width * 2
    assert counted.flops == 2 * 8 * width * width * layers
    assert "all-reduce" not in counted.collectives


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
def test_a_step_of_decode_reads_its_weights_and_its_cache_once():
    config = dataclasses.replace(LLAMA_2_7B, num_layers=4, model_dim=1024, ffn_dim=2048, num_heads=8, num_kv_heads=8)
    decode = compile_programs(config, "v5e:1x1", batch=4, max_len=1024, prompt_tokens=None)["decode"]
    weights = (4 * (4 * 1024 * 1024 + 3 * 1024 * 2048) + config.vocab_size * 1024) * 2
    assert decode.cache_bytes == 2 * 4 * 4 * 1024 * 1024 * 2
    counted = total(decode.instructions())
    assert counted.read_bytes == pytest.approx(weights + decode.cache_bytes, rel=0.02)
    assert counted.written_bytes < 0.01 * counted.read_bytes
    # The products of four rows; attention over the cache comes on top, at most as if each head saw all heads' keys.
    products = 2 * 4 * weights // 2
    assert products < counted.flops <= products + 2 * 2 * 8 * decode.cache_bytes // 2
