"""What a plan counts of latent attention, and its step compiled for a TPU."""

import pytest

from jaxinfer.models.config import shallower
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.compile import compile_programs
from jaxinfer.planning.deployment import Deployment
from jaxinfer.planning.footprint import count_footprint, decode_floor
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
    # Every device of an axis that splits heads or experts has all rows.
    slots = found.cache_bytes / (61 * 32 * ROW)
    assert 4096 <= slots <= 4096 + 32
    assert decode_floor(found, 32) > found.cache_bytes


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
