"""Train steps, compiled by the TPU compiler: those of Llama-2-7B fit into sixteen v5e chips."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.models.decoder import Decoder, abstract_params
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.few_bits.formats import int4
from jaxinfer.parallel.mesh import DATA, MeshConfig
from jaxinfer.parallel.rules import parameter_shardings
from jaxinfer.planning.known_models import planned_config
from jaxinfer.planning.topology import chip_of, topology_mesh, without_persistent_cache
from train.distill.divergences import forward_kl
from train.distill.loss import DistillBatch, DistillLoss
from train.distill.own_teacher import ChangedLoss
from train.heads.joint import raise_rate
from train.heads.joint_loss import JointBatch, JointLoss
from train.heads.loss import HeadLoss, Windows
from train.heads.shapes import HeadShape, init_heads
from train.loop.placement import describe_learned
from train.loop.step import Schedule, StepSettings, TrainState, compile_step
from train.model.lora import init_lora
from train.qat.rounding import rounded
from train.texts.batches import Batch

pytestmark = pytest.mark.tpu_compile

TOPOLOGY, MESH = "v5e:4x4", MeshConfig(data=4, tensor=4)
CONFIG = planned_config("llama-2-7b")
SMALL = replace(CONFIG, vocab_size=1024, num_layers=2, model_dim=512, ffn_dim=1024, num_heads=4, num_kv_heads=4)
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
    return describe_base(CONFIG, TOPOLOGY, MESH)


def describe_base(config, topology, mesh):
    mesh, backend = topology_mesh(topology, mesh), choose_backend("bfloat16", platform="tpu")
    shapes, shardings = abstract_params(config, backend), parameter_shardings(config, backend, mesh)
    params = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes, shardings
    )
    return mesh, backend, params


def abstract_heads(params):
    """Heads with output matrices of their own, as the paper has them: 591 million parameters."""
    heads = jax.eval_shape(lambda one: init_heads(HeadShape(NUM_HEADS, shared=False), CONFIG, one, KEY), params)
    assert sum(leaf.size for leaf in jax.tree.leaves(heads)) > 590e6
    return heads


def compile_medusa_1(config, base, heads, num_heads, rows):
    mesh, backend, params = base
    length = 128 + num_heads + 1
    states = describe((1, rows, length, config.model_dim), jnp.float16, mesh, None, DATA)
    ids = describe((1, rows, length), jnp.int32, mesh, None, DATA)
    optimizer, loss = Schedule(1000).build_optimizer(), HeadLoss(Decoder(config, backend))
    return compile_it(loss, heads, {"params": params}, Windows(states, ids, ids, ids, ids), mesh, optimizer, 1)


@pytest.mark.slow
def test_a_small_step_of_medusa_1_is_compiled_for_a_tpu_and_updates_its_state_in_place():
    """Over the two tensor-parallel chips, the output matrix of the head and its moments are split."""
    base = describe_base(SMALL, "v5e:2x2", MeshConfig(data=2, tensor=2))
    shape = HeadShape(1, shared=False)
    heads = jax.eval_shape(lambda one: init_heads(shape, SMALL, one, KEY), base[2])
    analysis = compile_medusa_1(SMALL, base, heads, 1, rows=8)
    check(analysis)
    whole = 3 * 4 * sum(leaf.size for leaf in jax.tree.leaves(heads))
    assert 0 < analysis.alias_size_in_bytes < 0.9 * whole


@pytest.mark.exhaustive
def test_a_step_of_training_for_few_bits_updates_its_state_in_place():
    """Kernels are rounded where they are split: a chip's groups are its own."""
    config, mesh = replace(SMALL, model_dim=1024, num_heads=8, num_kv_heads=8), MeshConfig(data=2, tensor=2)
    mesh, backend, params = describe_base(config, "v5e:2x2", mesh)
    trained = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding), params)
    ids = describe((1, 4, 256), jnp.int32, mesh, None, DATA)
    texts = Batch(ids, describe(ids.shape, jnp.bool_, mesh, None, DATA), ids)
    batch = DistillBatch(texts, describe((1, 4), jnp.bool_, mesh, None, DATA))
    decoder = Decoder(config, backend)
    loss = ChangedLoss(DistillLoss(decoder, decoder, forward_kl), partial(rounded, form=int4(64, False)))
    check(compile_it(loss, trained, params, batch, mesh, Schedule(1000).build_optimizer(), 1))


@pytest.mark.exhaustive
def test_a_step_of_medusa_1_fits(base):
    check(compile_medusa_1(CONFIG, base, abstract_heads(base[2]), NUM_HEADS, rows=64))


@pytest.mark.exhaustive
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
