"""A TPU's decoding step reads live blocks where they lie: no layer's weights are copied before, on meshes too."""

from dataclasses import replace

import pytest

from jaxinfer.ops.sparsity import Sparsity
from jaxinfer.parallel.mesh import parse_mesh
from jaxinfer.planning.compile import compile_programs
from jaxinfer.planning.hlo.walk import total
from jaxinfer.planning.known_models import planned_config

CONFIG = replace(planned_config("llama-2-7b", 2), activation="relu", vocab_size=512)


def decode(topology: str, mesh: str):
    given = {"batch": 8, "max_len": 128, "mesh": parse_mesh(mesh), "prompt_tokens": None}
    return compile_programs(CONFIG, topology, **given, sparsity=Sparsity("exact"))["decode"]


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("topology", "mesh"),
    [
        pytest.param("v5e:1x1", "tensor=1", marks=pytest.mark.exhaustive),
        # Of 1,376 hidden units of a device the last block is cut.
        pytest.param("v5e:2x4", "tensor=8", marks=pytest.mark.slow),
        pytest.param("v5e:2x4", "pipeline=2,tensor=4", marks=pytest.mark.exhaustive),
    ],
)
def test_no_weights_are_copied_on_the_way_to_the_kernel(topology, mesh):
    program = decode(topology, mesh)
    kernel_bytes = CONFIG.model_dim * CONFIG.ffn_dim * 2 // parse_mesh(mesh).tensor
    instructions = program.instructions()
    # The kernels of one layer, in the loop over layers, by the estimates of all blocks live.
    kernels = [each for each in instructions if each.name.startswith("sparse_ffn")]
    assert len(kernels) == 2
    assert all(kernel_bytes < each.read_bytes < 1.05 * kernel_bytes for each in kernels)
    # A copy would be written.
    assert total(instructions).written_bytes < 0.2 * kernel_bytes
