"""Llama 2 7B over eight v5e chips: its programs, and the plan that is made of them."""

import time
from collections import Counter

import jax
import pytest

from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.compile import CompiledProgram, compile_programs
from jaxinfer.planning.footprint import count_footprint, estimate_prefill, estimate_step
from jaxinfer.planning.report import PlanReport, make_plan
from tests.planning.buffers import copies_of_the_cache, largest_buffers
from tests.planning.models import EIGHT, LLAMA_2_7B, LLAMA_3_8B

pytestmark = pytest.mark.tpu_compile

SLOTS = EIGHT.num_slots
Programs = dict[str, CompiledProgram]
# A peak counts what is fetched ahead into vector memory, here the whole of a device's output matrix. Without that it
# is of main memory and of what the program computes.
NO_PREFETCH = {"xla_vf_vmem_max_outstanding_prefetches": "0"}
slow = pytest.mark.slow
by_heads = pytest.mark.parametrize(
    "programs",
    [pytest.param("eight_chips", marks=slow), pytest.param("grouped_heads", marks=pytest.mark.exhaustive)],
)


@pytest.fixture(scope="module")
def planned() -> tuple[PlanReport, Programs]:
    """Plan, and keep the programs that the plan compiles: plain decoding and prefill come first."""
    kept: list[Programs] = []

    def compile_and_keep(*arguments, **options) -> Programs:
        kept.append(compile_programs(*arguments, **options))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxinfer.planning.deployment.compile_programs", compile_and_keep)
        return make_plan(EIGHT), kept[0]


@pytest.fixture(scope="module")
def seven_billion(planned) -> PlanReport:
    return planned[0]


@pytest.fixture(scope="module")
def eight_chips(planned) -> Programs:
    assert set(planned[1]) == {"prefill", "decode"}
    return planned[1]


@pytest.fixture(scope="module")
def grouped_heads() -> Programs:
    return compile_programs(LLAMA_3_8B, "v6e:2x4", batch=8, max_len=SLOTS, mesh=MeshConfig(tensor=8), prompt_tokens=16)


@slow
def test_llama_2_7b_fits_eight_v5e_chips_and_its_steps_wait_for_memory_that_is_read_once(seven_billion):
    assert seven_billion.fits
    assert seven_billion.cache_bytes == 2 * 32 * 8 * 2048 * 4096 * 2 // 8
    assert seven_billion.weights_bytes == pytest.approx(6_738_415_616 * 2 / 8, rel=0.01)
    held = seven_billion.weights_bytes + seven_billion.cache_bytes
    assert held < seven_billion.hbm_total_bytes < 1.1 * held
    for name in ("decode", "verify"):
        step = seven_billion.programs[name]
        assert (step.source, step.bound) == ("compiler", "HBM")
        assert 1 <= step.hbm_bytes / step.floor_bytes < 1.1
        # Of sums over eight devices each sends seven eighths, twice.
        sums = step.collectives["all-reduce"]
        assert sums["count"] == pytest.approx(2 * 32 + 1, abs=5)
        assert step.sent_bytes == pytest.approx(2 * sums["bytes"] * 7 / 8, rel=0.01)
        # The farthest of two by four chips are four links apart, which a sum crosses twice, 1 us each.
        assert step.latency_seconds == pytest.approx(sums["count"] * 2 * 4 * 1e-6)
        assert step.roofline_seconds == pytest.approx(step.hbm_seconds + step.latency_seconds)
    least = 2.73e9 / 819e9 + 65 * 8e-6
    assert seven_billion.programs["decode"].tokens_per_second == pytest.approx(8 / least, rel=0.02)


@slow
def test_verifying_two_nodes_costs_a_plain_step_and_a_little(seven_billion):
    speculation = seven_billion.speculation
    assert speculation is not None
    assert (speculation.nodes, speculation.depth) == (2, 1)
    assert 0.99 < speculation.cost < 1.05
    assert speculation.acceptance == pytest.approx(max(0, speculation.cost - 1), abs=1e-5)


@slow
def test_what_is_counted_agrees_with_what_is_compiled(seven_billion):
    footprint = count_footprint(EIGHT)
    for name, work in (
        ("decode", estimate_step(EIGHT, footprint)),
        ("prefill", estimate_prefill(EIGHT, footprint)),
    ):
        compiled = seven_billion.programs[name]
        assert work.hbm_bytes == compiled.floor_bytes
        assert work.sent_bytes == pytest.approx(compiled.sent_bytes, rel=0.01)
        assert work.hops * EIGHT.chip.ici_hop_seconds == pytest.approx(compiled.latency_seconds, rel=0.1)
        # Products of attention meet zeros where heads share one, and kernels fill tiles of rows: 16 times its own work.
        assert 1 <= compiled.flops / work.flops < 2.2


@by_heads
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_weights_and_cache_split_by_heads_leave_an_eighth_to_each_chip(programs, name, request):
    program = request.getfixturevalue(programs)[name]
    config = LLAMA_2_7B if programs == "eight_chips" else LLAMA_3_8B
    lanes = config.num_kv_heads * config.head_dim
    assert program.cache_bytes == 2 * 32 * 8 * SLOTS * lanes * 2 // 8
    assert program.alias_bytes >= program.cache_bytes
    assert copies_of_the_cache(program) == [], largest_buffers(program.hlo)
    num_weights = 32 * (2 * 4096 * (4096 + lanes) + 3 * 4096 * config.ffn_dim) + 2 * config.vocab_size * 4096
    assert program.argument_bytes - program.cache_bytes == pytest.approx(num_weights * 2 / 8, rel=0.01)


@slow
def test_decode_needs_no_copy_of_a_weight(eight_chips):
    """Both programs read the weights in one order."""
    decode = eight_chips["decode"]
    assert decode.temporary_bytes < 0.02 * decode.cache_bytes, largest_buffers(decode.hlo)
    orders = [
        jax.tree.map(lambda format: format.layout.major_to_minor, program.parameter_formats)
        for program in eight_chips.values()
    ]
    assert orders[0] == orders[1]


@pytest.mark.exhaustive
def test_decode_compiles_in_ten_seconds_and_needs_a_fiftieth_of_its_cache_beyond_its_arguments():
    """Ten seconds of this process, which others that run beside it do not lengthen."""
    began = time.process_time()
    decode = compile_programs(
        LLAMA_2_7B,
        "v5e:2x4",
        batch=8,
        max_len=SLOTS,
        mesh=MeshConfig(tensor=8),
        prompt_tokens=None,
        compiler_options=NO_PREFETCH,
    )["decode"]
    assert time.process_time() - began < 10
    assert decode.beyond_arguments_bytes < 0.02 * decode.cache_bytes, largest_buffers(decode.hlo)


@slow
def test_on_a_mesh_kernels_read_weights_and_cache_once(eight_chips):
    """Each device attends to its own heads; a layer moves at most a tenth more than it must."""
    decode = eight_chips["decode"]
    inside = [found for found in decode.instructions() if found.loops == 2 and not found.branches]
    assert any(found.name.startswith("attend_cache") for found in inside)
    moved = sum(found.read_bytes + found.written_bytes for found in inside)
    weights = 2 * (4 * 4096 * 4096 + 3 * 4096 * LLAMA_2_7B.ffn_dim) // 8
    assert moved < 1.1 * (weights + decode.cache_bytes // 32)


@by_heads
def test_a_layer_of_decode_sums_over_the_chips_twice_and_sends_nothing_else(programs, request):
    decode = request.getfixturevalue(programs)["decode"]
    always = [instruction for instruction in decode.collectives() if not instruction.branches]
    # Inside the loop over steps, then the one over layers.
    assert Counter(found.collective for found in always if found.loops == 2) == {"all-reduce": 2}
    assert {found.bytes for found in always if found.loops == 2} == {8 * 4096 * 2}
    # A step: the tokens' embeddings, then a few numbers a row to draw over the split vocabulary; never the logits.
    a_step = sorted(found.bytes for found in always if found.loops < 2)
    assert a_step[-1] == 8 * 4096 * 2
    assert sum(a_step[:-1]) < 1024


@slow
def test_the_layers_of_decode_read_weights_and_cache_once(eight_chips):
    decode = eight_chips["decode"]
    inside = [found for found in decode.instructions() if found.loops == 2 and not found.branches]
    moved = sum((found.read_bytes + found.written_bytes) * found.runs for found in inside)
    weights = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) * 2 // 8
    assert 1 <= moved / (weights + decode.cache_bytes) < 1.1
