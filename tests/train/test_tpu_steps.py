"""Train steps of Llama-2-7B, compiled by the TPU compiler for sixteen v5e chips: they fit."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.models.decoder import Decoder, abstract_params
from jaxinfer.ops.backend import choose_backend
from jaxinfer.parallel.mesh import DATA, MeshConfig
from jaxinfer.parallel.rules import parameter_shardings
from jaxinfer.planning.known_models import planned_config
from jaxinfer.planning.topology import chip_of, topology_mesh, without_persistent_cache
from train.heads.joint import raise_rate
from train.heads.joint_loss import JointBatch, JointLoss
from train.heads.loss import HeadLoss, Windows
from train.heads.shapes import HeadShape, init_heads
from train.loop.placement import describe_learned
from train.loop.step import Schedule, StepSettings, TrainState, compile_step
from train.model.lora import init_lora

pytestmark = pytest.mark.tpu_compile

TOPOLOGY, MESH = "v5e:4x4", MeshConfig(data=4, tensor=4)
CONFIG = planned_config("llama-2-7b")
NUM_HEADS = 4
KEY = jax.random.key(0)


def describe(shape, dtype, mesh, *axes):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def compile_it(loss, learned, frozen, batch, mesh, optimizer, microbatches):
    """Return the memory analysis of a step, in which the state is donated."""
    state = jax.eval_shape(lambda one: TrainState(jnp.int32(0), one, optimizer.init(one)), learned)
    step = compile_step(loss, optimizer, StepSettings(microbatches, "bfloat16"))
    with without_persistent_cache(), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = step.trace(describe_learned(state, mesh), frozen, batch).lower(lowering_platforms=("tpu",))
        return lowered.compile().memory_analysis()


@pytest.fixture(scope="module")
def base():
    mesh = topology_mesh(TOPOLOGY, MESH)
    backend = choose_backend("bfloat16", platform="tpu")
    shapes, shardings = abstract_params(CONFIG, backend), parameter_shardings(CONFIG, backend, mesh)
    params = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes, shardings
    )
    return mesh, backend, params


def abstract_heads(params):
    """Heads with output matrices of their own, as the paper has them: 591 million parameters."""
    heads = jax.eval_shape(lambda one: init_heads(HeadShape(NUM_HEADS, shared=False), CONFIG, one, KEY), params)
    assert sum(leaf.size for leaf in jax.tree.leaves(heads)) > 590e6
    return heads


def test_a_step_of_medusa_1_fits(base):
    mesh, backend, params = base
    rows, length = 64, 128 + NUM_HEADS + 1
    states = describe((1, rows, length, CONFIG.model_dim), jnp.float16, mesh, None, DATA)
    ids = describe((1, rows, length), jnp.int32, mesh, None, DATA)
    optimizer, loss = Schedule(1000).build_optimizer(), HeadLoss(Decoder(CONFIG, backend))
    batch = Windows(states, ids, ids, ids, ids)
    check(compile_it(loss, abstract_heads(params), {"params": params}, batch, mesh, optimizer, 1))


@pytest.mark.slow
def test_a_step_of_medusa_2_fits(base):
    """Adapters of rank 32 on all linear layers, rows of 2,048 tokens, blocks computed anew on the way back."""
    mesh, backend, params = base
    decoder = Decoder(CONFIG, replace(backend, remat_layers=True))
    rows, parts = 4, 4
    ids = describe((parts, rows, 2048), jnp.int32, mesh, None, DATA)
    batch = JointBatch(
        ids,
        describe(ids.shape, jnp.bool_, mesh, None, DATA),
        *(ids, ids, ids),
        describe((parts, rows), jnp.float32, mesh, None, DATA),
    )
    learned = {"heads": abstract_heads(params), "lora": jax.eval_shape(partial(init_lora, rank=32, key=KEY), params)}
    optimizer = optax.chain(Schedule(1000).build_optimizer(), raise_rate(learned, 4.0))
    loss = JointLoss(HeadLoss(decoder), "self-distillation", 0.5)
    check(compile_it(loss, learned, {"params": params}, batch, mesh, optimizer, parts))


def check(analysis):
    """The state is updated in place, and all of it fits beside what the step makes meanwhile."""
    state = analysis.alias_size_in_bytes
    total = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + analysis.output_size_in_bytes - state
    print(f"arguments {analysis.argument_size_in_bytes / 2**30:.2f} GiB, total {total / 2**30:.2f} GiB")
    assert state > 0.9 * analysis.output_size_in_bytes
    assert total < chip_of(TOPOLOGY).device_hbm_bytes
