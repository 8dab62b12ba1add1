"""Long prompts and their caches over the axis sequence, compiled for TPUs that are not here."""

import dataclasses
import re
from collections import Counter

import pytest

from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.compile import CompiledProgram, compile_programs
from tests.planning.models import LLAMA_3_8B

pytestmark = pytest.mark.tpu_compile

LONG = 1 << 17
SLOTS = LONG + 256
PART = LONG // 16 * 256 * 2  # bytes of the keys of one of sixteen parts of the prompt, two heads of them
KINDS = ("collective-permute-start", "custom-call", "collective-permute-done")
SMALL = dataclasses.replace(LLAMA_3_8B, num_layers=2, model_dim=512, ffn_dim=1024, num_heads=8, num_kv_heads=4)


@pytest.fixture(scope="module")
def long_prompt() -> dict[str, CompiledProgram]:
    config = dataclasses.replace(LLAMA_3_8B, max_position=SLOTS)
    mesh = MeshConfig(sequence=8, tensor=4)
    return compile_programs(config, "v5e:4x8", batch=1, max_len=SLOTS, mesh=mesh, prompt_tokens=LONG)


def sent(program: CompiledProgram, loops: int) -> Counter[str | None]:
    """Count what a program sends in each turn of so many loops, whatever it draws."""
    return Counter(found.collective for found in program.collectives() if found.loops == loops and not found.branches)


@pytest.mark.exhaustive
def test_a_prompt_of_128k_tokens_fits_where_a_device_has_a_part_of_everything(long_prompt):
    prefill = long_prompt["prefill"]
    assert prefill.peak_bytes < prefill.total_bytes < 6 * 2**30
    assert prefill.cache_bytes == 2 * 32 * (SLOTS // 8) * 256 * 2
    assert prefill.alias_bytes >= prefill.cache_bytes
    assert prefill.temporary_bytes < 2**30


@pytest.mark.exhaustive
def test_keys_and_values_travel_while_kernels_attend(long_prompt):
    """In the loop over turns, inside that over layers, all four arrays are on their way during both kernels."""
    prefill = long_prompt["prefill"]
    turns = [found for found in prefill.instructions() if found.loops == 2 and not found.branches and not found.fused]
    started = [found for found in turns if found.opcode == "collective-permute-start"]
    assert [found.bytes for found in started] == [PART] * 4
    assert {found.runs for found in started} == {32 * 7}
    body = next(text for text in prefill.hlo.split("\n\n") if f"%{started[0].name} = " in text)
    at = {kind: [place.start() for place in re.finditer(rf"[ )]{kind}\(", body)] for kind in KINDS}
    assert {kind: len(places) for kind, places in at.items()} == {KINDS[0]: 4, KINDS[1]: 2, KINDS[2]: 4}
    assert max(at[KINDS[0]]) < min(at[KINDS[1]]) <= max(at[KINDS[1]]) < min(at[KINDS[2]])


@pytest.mark.exhaustive
def test_a_layer_of_prefill_scatters_two_sums_and_gathers_twice(long_prompt):
    layer = sent(long_prompt["prefill"], 1)
    assert layer["reduce-scatter"] == layer["all-gather"] == 2
    assert layer["all-reduce"] == layer["all-to-all"] == 0


@pytest.mark.exhaustive
def test_a_layer_of_decode_joins_what_devices_attend_to_and_moves_weights_and_cache_once(long_prompt):
    decode = long_prompt["decode"]
    inside = [found for found in decode.instructions() if found.loops == 2 and not found.branches]
    summed = sorted(found.bytes for found in inside if found.collective)
    # The greatest scores, the weighted values with their weights, and the two sums over heads and features.
    assert {found.collective for found in inside if found.collective} == {"all-reduce"}
    assert summed == [8 * 4, 8 * 128 * 4, 4096 * 2, 4096 * 2]
    moved = sum(found.read_bytes + found.written_bytes for found in inside)
    weights = 2 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) // 4
    assert moved < 1.1 * (weights + decode.cache_bytes // 32)
    assert decode.beyond_arguments_bytes < 0.1 * decode.cache_bytes


@pytest.mark.parametrize(
    ("splits", "kinds"),
    [
        pytest.param(True, {"reduce-scatter": 2, "all-gather": 2}, marks=pytest.mark.exhaustive),
        pytest.param(False, {"all-reduce": 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_activations_are_split_between_regions_where_that_is_asked_for(splits, kinds):
    programs = compile_programs(
        SMALL,
        "v5e:2x2",
        batch=2,
        max_len=1024,
        mesh=MeshConfig(tensor=4),
        prompt_tokens=512,
        split_activations=splits,
    )
    layer = sent(programs["prefill"], 1)
    assert {kind: count for kind, count in layer.items() if kind != "collective-permute"} == kinds
