"""What a plan counts of latent attention, and its step compiled for a TPU."""

import pytest

from jaxinfer.models.config import shallower
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.compile import compile_programs
from jaxinfer.planning.deployment import Deployment
from jaxinfer.planning.footprint import count_footprint, decode_floor
from jaxinfer.planning.hlo.walk import total
from jaxinfer.planning.known_models import planned_config
from tests.planning.buffers import copies_of_the_cache

DEEPSEEK_V3 = planned_config("deepseek-v3")
# A row of 576 numbers fills tiles of 128 lanes.
ROW = 640 * 2


@pytest.mark.slow
def test_a_step_reads_one_row_a_token_and_layer():
    mesh = MeshConfig(expert=4, tensor=8)
    deployment = Deployment(DEEPSEEK_V3, "v5p:4x4x2", mesh, batch=32, max_len=4096, prompt_tokens=512)
    found = count_footprint(deployment)
    # Every device of the axis that splits heads has all of the rows that the experts' devices split.
    slots = found.cache_bytes / (61 * 8 * ROW)
    assert 4096 <= slots <= 4096 + 32
    assert decode_floor(found, 32) > found.cache_bytes


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
def test_a_step_of_32_rows_of_deepseek_v3_leaves_half_of_each_device_free():
    """Bytes past the floor are the cache's, which counts as keys and as values."""
    options = {"batch": 32, "max_len": 4096, "mesh": MeshConfig(expert=4, tensor=8)}
    program = compile_programs(DEEPSEEK_V3, "v5p:4x4x2", prompt_tokens=None, **options)["decode"]
    found = count_footprint(Deployment(DEEPSEEK_V3, "v5p:4x4x2", prompt_tokens=512, **options))
    assert program.total_bytes < 48 * 2**30
    floor = decode_floor(found, 32)
    counted = total(program.instructions())
    assert floor < counted.hbm_bytes < 1.15 * floor + found.cache_bytes
    # All copies of tokens of each of 58 layers would be sent in one more exchange.
    assert "ragged-all-to-all" not in counted.collectives


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
def test_a_compiled_step_copies_no_cache():
    """The first three layers are dense; in the fourth, 64 copies of tokens may each be alone in a block of 16 rows."""
    config = shallower(DEEPSEEK_V3, 4)
    mesh = MeshConfig(tensor=8)
    program = compile_programs(config, "v5p:2x2x2", batch=8, max_len=2048, mesh=mesh, prompt_tokens=None)["decode"]
    cache = 4 * 8 * 2048 * ROW
    rows = 64 * 16 * 7168 * (2 + 4)  # what goes to experts in bfloat16, and comes back in float32
    assert program.temporary_bytes < cache / 4 + rows
    assert copies_of_the_cache(program) == []
    assert "tpu_custom_call" in program.hlo
