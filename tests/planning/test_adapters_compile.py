"""A TPU's step with loaded adapters reads those that its rows may have, each once, in place, beside the weights."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.models.adapters import LOADED, kernel_shapes
from jaxinfer.models.layers import BLOCKS
from jaxinfer.planning import compile as planning
from jaxinfer.planning.known_models import planned_config
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


def check(monkeypatch, config, batch, shapes, hit_share):
    """Check a step's bytes with stacks of these shapes, by path, of which its rows have a share."""

    def placed(config, backend, mesh, form=None):
        whole = NamedSharding(mesh, PartitionSpec())
        stacks = {
            path: jax.ShapeDtypeStruct((config.num_layers, *shape), jnp.bfloat16, sharding=whole)
            for path, shape in shapes.items()
        }
        return {**placed_params(config, backend, mesh, form), LOADED: {BLOCKS: unflatten_dict(stacks, sep=".")}}

    asked = {"batch": batch, "max_len": 256, "prompt_tokens": None}
    base = planning.compile_programs(config, "v5e:1x1", **asked)["decode"]
    monkeypatch.setattr(planning, "placed_params", placed)
    found = planning.compile_programs(config, "v5e:1x1", **asked)["decode"]
    adapters = found.argument_bytes - base.argument_bytes
    assert adapters == pytest.approx(2 * config.num_layers * sum(map(math.prod, shapes.values())), rel=0.01)
    moved, hit = moved_bytes(found), adapters * hit_share
    assert moved_bytes(base) + 0.9 * hit < moved < 1.05 * (moved_bytes(base) + hit), largest_buffers(found.hlo)
    assert found.beyond_arguments_bytes < base.beyond_arguments_bytes + 0.1 * adapters


def check_all(monkeypatch, config, batch):
    shapes = {}
    for name, (outputs, inputs) in kernel_shapes(config).items():
        for each, size in (("down", inputs), ("up", outputs)):
            shapes[f"{name}.{each}"] = (NUMBER, RANK, size)
    check(monkeypatch, config, batch, shapes, min(batch, NUMBER) / NUMBER)


@pytest.mark.slow
def test_a_step_of_a_small_model(monkeypatch):
    check_all(monkeypatch, SMALL, 4)


def check_experts(monkeypatch, config, batch):
    """Each copy of a token may have a pair of its own."""
    experts, model_dim = config.experts, config.model_dim
    shapes = {}
    for name, (outputs, inputs) in {
        "gate": (experts.ffn_dim, model_dim),
        "up": (experts.ffn_dim, model_dim),
        "down": (model_dim, experts.ffn_dim),
    }.items():
        for each, size in (("down", inputs), ("up", outputs)):
            shapes[f"mlp.experts.{name}_{each}"] = (experts.num_experts, NUMBER, RANK, size)
    copies = min(batch * experts.per_token, experts.num_experts * min(batch, NUMBER))
    check(monkeypatch, config, batch, shapes, copies / (experts.num_experts * NUMBER))


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("batch", [4, 32])
def test_a_step_of_experts(monkeypatch, model, batch):
    check_experts(monkeypatch, replace(planned_config(model), num_layers=2, vocab_size=4096), batch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch", [1, 32])
def test_a_step_of_llama_2_7b(monkeypatch, batch):
    check_all(monkeypatch, replace(LLAMA_2_7B, num_layers=16), batch)
