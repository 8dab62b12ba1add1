"""Programs of a pipeline, compiled for TPUs that are not here: what a stage holds, reads and hands on."""

import pytest

from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.compile import CompiledProgram, compile_programs
from jaxinfer.planning.deployment import Deployment
from jaxinfer.planning.footprint import count_footprint, decode_floor, estimate_step, pipeline_schedule
from jaxinfer.planning.hlo.walk import total
from tests.planning.models import LLAMA_2_7B

pytestmark = pytest.mark.tpu_compile

BATCH, SLOTS, WIDTH = 8, 2048, 4096
DEPLOYMENT = Deployment(LLAMA_2_7B, "v5e:2x4", MeshConfig(pipeline=2, tensor=4), batch=BATCH, max_len=SLOTS - 2)


@pytest.fixture(scope="module")
def decode() -> CompiledProgram:
    mesh = DEPLOYMENT.mesh
    found = compile_programs(LLAMA_2_7B, "v5e:2x4", batch=BATCH, max_len=SLOTS, mesh=mesh, prompt_tokens=None)
    return found["decode"]


@pytest.mark.slow
def test_a_stage_holds_its_layers_and_writes_its_cache_in_place(decode):
    assert decode.cache_bytes == 2 * (32 // 2) * BATCH * SLOTS * (WIDTH // 4) * 2
    # The embedding and the output matrix are on every stage.
    weights = (6_738_415_616 - 2 * 32000 * WIDTH) // 8 + 2 * 32000 * WIDTH // 4
    assert decode.argument_bytes == pytest.approx(2 * weights + decode.cache_bytes, rel=0.02)
    assert decode.alias_bytes >= decode.cache_bytes
    assert decode.temporary_bytes < 0.02 * decode.cache_bytes


@pytest.mark.slow
def test_stages_hand_on_hidden_states_and_gather_neither_weights_nor_cache(decode):
    sent = [found for found in decode.collectives() if not found.branches]
    assert {found.collective for found in sent} == {"all-reduce", "collective-permute"}
    assert all(found.bytes <= BATCH * WIDTH * 2 for found in sent)
    counted = total(decode.instructions()).collectives
    assert counted["collective-permute"] == (2, 2 * BATCH * WIDTH * 2)
    assert counted["all-reduce"][0] == pytest.approx(2 * 32, abs=5)


@pytest.mark.slow
def test_a_step_reads_weights_and_cache_once_in_each_of_its_ticks(decode):
    floor = decode_floor(count_footprint(DEPLOYMENT))
    assert 1.9 < total(decode.instructions()).hbm_bytes / floor < 2.2
    assert pipeline_schedule(DEPLOYMENT, 1).bubble == 1 / 2


@pytest.mark.slow
def test_what_a_step_is_estimated_at_is_what_the_compiler_makes_of_it(decode):
    estimate = estimate_step(DEPLOYMENT, count_footprint(DEPLOYMENT))
    counted = total(decode.instructions())
    assert 1 <= counted.hbm_bytes / estimate.hbm_bytes < 1.1
    # The compiled products meet zeros where eight heads share a product.
    assert 1 <= counted.flops / estimate.flops < 2.2
    assert estimate.sent_bytes == pytest.approx(counted.sent_bytes, rel=0.02)
    assert counted.collectives["collective-permute"] == estimate.collectives["collective-permute"]


def test_long_prompts_go_through_in_microbatches():
    assert pipeline_schedule(DEPLOYMENT, 512).bubble == 1 / 9
