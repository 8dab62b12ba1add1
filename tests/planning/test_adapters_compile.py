"""A TPU's step with loaded adapters reads those that its rows may have, each once, in place, beside the weights."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.models.adapters import LOADED, kernel_shapes
from jaxinfer.models.layers import BLOCKS
from jaxinfer.planning import compile as planning
from jaxinfer.planning.placement import placed_params
from tests.planning.buffers import largest_buffers
from tests.planning.models import LLAMA_2_7B

pytestmark = pytest.mark.tpu_compile

NUMBER, RANK = 32, 16
SMALL = replace(LLAMA_2_7B, num_layers=4, model_dim=1024, ffn_dim=2816, num_heads=8, num_kv_heads=8, vocab_size=4096)


def moved_bytes(program):
    """Count what a step always reads and writes: only sampling takes other branches."""
    return sum(
        (each.read_bytes + each.written_bytes) * each.runs for each in program.instructions() if not each.branches
    )


def check(monkeypatch, config, batch):
    def placed(config, backend, mesh, form=None):
        whole, stacks = NamedSharding(mesh, PartitionSpec()), {}
        for name, (outputs, inputs) in kernel_shapes(config).items():
            part, _, linear = name.partition(".")
            stacks.setdefault(part, {})[linear] = {
                each: jax.ShapeDtypeStruct((config.num_layers, NUMBER, RANK, size), jnp.bfloat16, sharding=whole)
                for each, size in (("down", inputs), ("up", outputs))
            }
        return {**placed_params(config, backend, mesh, form), LOADED: {BLOCKS: stacks}}

    asked = {"batch": batch, "max_len": 256, "prompt_tokens": None}
    base = planning.compile_programs(config, "v5e:1x1", **asked)["decode"]
    monkeypatch.setattr(planning, "placed_params", placed)
    found = planning.compile_programs(config, "v5e:1x1", **asked)["decode"]
    adapters = found.argument_bytes - base.argument_bytes
    hit = adapters * min(batch, NUMBER) // NUMBER
    sizes = [sum(shape) for shape in kernel_shapes(config).values()]
    assert adapters == pytest.approx(2 * config.num_layers * NUMBER * RANK * sum(sizes), rel=0.01)
    moved = moved_bytes(found)
    assert moved_bytes(base) + 0.9 * hit < moved < 1.05 * (moved_bytes(base) + hit), largest_buffers(found.hlo)
    assert found.beyond_arguments_bytes < base.beyond_arguments_bytes + 0.1 * adapters


@pytest.mark.slow
def test_a_step_of_a_small_model(monkeypatch):
    check(monkeypatch, SMALL, 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch", [1, 32])
def test_a_step_of_llama_2_7b(monkeypatch, batch):
    check(monkeypatch, replace(LLAMA_2_7B, num_layers=16), batch)
