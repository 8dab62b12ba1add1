"""Rows split over the devices that have the experts: in either exchange, a token's sum has the bits of one device."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer import MeshConfig
from jaxinfer.models.decoder import create_cache
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.experts import apply_experts, gating_of
from jaxinfer.ops.quantized_sums import added_over, scattered_over
from jaxinfer.parallel.mesh import EXPERT, parse_mesh
from jaxinfer.planning.hlo.collectives import collective_kind
from tests.decoding.covered_models import random_prompts
from tests.ops.test_experts import BIASES, EXPERTS, INPUTS, KERNELS, LIMIT, of_dtype
from tests.parallel.on_devices import test_bits
from tests.parallel.on_devices.meshes import check_logits, make_model, on_mesh, sent

ONE = choose_backend("float32", "cpu")
ROWS, EACH, CHOSEN = 4, 5, 3
RNG = np.random.default_rng(1)
WEIGHTS = RNG.uniform(0.1, 1, (ROWS * EACH, CHOSEN)).astype(np.float32)
# Of three terms the order matters. To experts of all devices, and all to three of them.
CHOICES = np.stack([RNG.permutation(EXPERTS)[:CHOSEN] for _ in range(ROWS * EACH)]).astype(np.int32)
CROWDED = np.tile(np.array([[4, 1, 5]], np.int32), (ROWS * EACH, 1))
HELD, GATHERED, SENT = {"rows_over_experts": False}, {"exchange": "gather"}, {"exchange": "all_to_all"}


def rows(array) -> jax.Array:
    return jnp.asarray(array[: ROWS * EACH].reshape(ROWS, EACH, -1))


@functools.cache
def applied(backend):
    gating = gating_of(jax.nn.silu, LIMIT)

    @jax.jit
    def apply(inputs, chosen, weights, kernels, biases):
        return apply_experts(inputs, chosen, weights, kernels, gating, backend, biases)

    return apply


def run(chosen, mesh: str = "", dtype: str = "float32", **changes) -> np.ndarray:
    backend = replace(choose_backend(dtype, "cpu"), **changes)
    if mesh:
        parsed = parse_mesh(mesh)
        backend = replace(backend, mesh=parsed.build(jax.devices()[: parsed.num_devices]))
    kernels, biases = (of_dtype(each, dtype) for each in (KERNELS, BIASES))
    return np.asarray(applied(backend)(rows(INPUTS), rows(chosen), rows(WEIGHTS), kernels, biases))


def check(mesh: str, without: str, forms, **changes) -> None:
    for chosen in (CHOICES, CROWDED):
        expected = run(chosen, without, **changes)
        for form in forms:
            np.testing.assert_array_equal(run(chosen, mesh, **changes, **form), expected)


def test_either_exchange_returns_the_bits_of_a_mesh_without_the_axis():
    check("expert=2,tensor=2", "tensor=2", (GATHERED, SENT))


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    [
        pytest.param("data=2,expert=2", "float32", marks=pytest.mark.slow),
        *(pytest.param("expert=2", dtype, marks=pytest.mark.exhaustive) for dtype in ("float32", "bfloat16")),
    ],
)
def test_every_form_on_other_meshes_returns_the_bits_of_one_device(mesh, dtype):
    check(mesh, "", (HELD, GATHERED, SENT), dtype=dtype)


@pytest.mark.slow
def test_the_grouped_product_gets_the_rows_that_were_sent():
    """Blocks of the same rows: what one device returns, by the kernel interpreted."""
    check("expert=2", "", (SENT,), kernels="interpret")


def described_exchange(operand, output, begin, sizes, land, received, *, axis_name):
    """Return what `jax.lax.ragged_all_to_all` is described to, of which a CPU has none."""
    devices, here = lax.axis_size(axis_name), lax.axis_index(axis_name)
    given, starts, counts, places = (lax.all_gather(each, axis_name) for each in (operand, begin, sizes, land))
    each = len(begin) // devices
    place_Y = jnp.arange(len(output))
    for sender in range(devices):
        for chunk in range(each):
            index = here * each + chunk
            start, place = starts[sender, index], places[sender, index]
            # As many as the receiver expects.
            is_here = (place_Y >= place) & (place_Y < place + received[sender * each + chunk])
            rows_YD = given[sender].at[start + place_Y - place].get(mode="fill", fill_value=jnp.nan)
            rows_YD = jnp.where((counts[sender, index] == received[sender * each + chunk]), rows_YD, jnp.nan)
            output = jnp.where(is_here[:, None], rows_YD, output)
    return output


def test_a_tpu_is_told_where_rows_begin_and_land_and_how_many_they_are(monkeypatch):
    expected = [run(chosen) for chosen in (CHOICES, CROWDED)]
    monkeypatch.setattr(lax, "ragged_all_to_all", described_exchange)
    for chosen, one in zip((CHOICES, CROWDED), expected):
        found = run(chosen, "expert=2", platform="tpu", cpu_kernels=False, **SENT)
        np.testing.assert_allclose(found, one, atol=2e-6)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(GATHERED, marks=pytest.mark.slow, id="gather"),
        *(pytest.param(form, marks=pytest.mark.exhaustive, id=name) for form, name in ((HELD, "held"), (SENT, "sent"))),
    ],
)
def test_derivatives_are_those_of_one_device(form):
    mesh = MeshConfig(expert=2).build(jax.devices()[:2])

    def gradients(backend):
        def total(inputs, weights, kernels, biases):
            output = apply_experts(
                inputs, rows(CHOICES), weights, kernels, gating_of(jax.nn.silu, LIMIT), backend, biases
            )
            return jnp.sum(jnp.sin(output))

        given = rows(INPUTS), rows(WEIGHTS), *(of_dtype(each, "float32") for each in (KERNELS, BIASES))
        return jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(*given)

    found, expected = gradients(replace(ONE, mesh=mesh, **form)), gradients(ONE)
    assert jax.tree.all(jax.tree.map(lambda one, other: np.allclose(one, other, atol=1e-5), found, expected))


def test_shares_of_sums_in_bytes_are_those_of_all_that_get_the_sums():
    """In bytes, in a CPU's order, and a TPU's of whole numbers, of which any order of adding gives the same."""
    devices, width = 4, 1024
    mesh = MeshConfig(expert=devices).build(jax.devices()[:devices])
    split = PartitionSpec(EXPERT)
    parts = np.asarray(jax.random.normal(jax.random.key(0), (devices, 8, 2, width)) * 100, np.float32)
    for collectives, platform, given in (("int8", "tpu", parts), (None, "cpu", parts), (None, "tpu", np.round(parts))):
        backend = replace(ONE, mesh=mesh, collectives=collectives, platform=platform)
        share = jax.shard_map(
            lambda part, backend=backend: (
                scattered_over(part[0], EXPERT, backend),
                added_over(part[0], EXPERT, backend)[None],
            ),
            mesh=mesh,
            in_specs=split,
            out_specs=(split, split),
            check_vma=False,
        )
        found, whole = jax.jit(share)(given)
        np.testing.assert_array_equal(found, whole[0])


@pytest.fixture(scope="module")
def single():
    """Return a function that makes a model, with the logits of four texts on one device."""

    @functools.cache
    def make(name: str):
        lm, texts = make_model(name), random_prompts()[:4]
        return lm, texts, np.asarray(lm.logits(texts))

    return make


@pytest.mark.parametrize(
    ("mesh", "model", "changes"),
    [
        pytest.param("expert=2", "qwen2_moe", {}, marks=pytest.mark.slow),
        pytest.param("expert=2", "qwen2_moe", SENT, marks=pytest.mark.exhaustive),
        pytest.param("expert=4", "deepseek_v3", SENT, marks=pytest.mark.exhaustive),
        pytest.param("data=2,expert=2", "gpt_oss", {}, marks=pytest.mark.exhaustive),
        # Of four rows six devices split none.
        pytest.param("expert=3", "qwen2_moe", {}, marks=pytest.mark.exhaustive),
    ],
)
def test_logits_are_those_of_one_device_in_every_bit(single, mesh, model, changes):
    lm, texts, expected = single(model)
    check_logits(on_mesh(lm, mesh, **changes), texts, expected)


def test_a_device_holds_its_rows_of_the_cache(single):
    lm, _, _ = single("qwen2_moe")
    split = on_mesh(lm, "expert=2")
    place, backend = split.programs.partitioner, split.programs.decoder.backend
    for batch, own in ((4, 2), (3, 3)):
        created = place.create(lambda batch=batch: create_cache(split.config, batch, 32, backend))
        assert {shard.data.shape[1] for shard in created.parts[0].keys.addressable_shards} == {own}


@pytest.mark.exhaustive
def test_nothing_is_gathered_but_tokens_and_what_their_experts_return(single):
    """Nor is any cache: the compiler adds no exchange of its own but sums of single numbers."""
    lm, texts, _ = single("qwen2_moe")
    expected = [result.tokens for result in lm.generate(texts, max_new_tokens=6)]
    for changes in (GATHERED, SENT):
        split = on_mesh(lm, "expert=2", **changes)
        assert [result.tokens for result in split.generate(texts, max_new_tokens=6)] == expected
        for compiled in split.programs.live.values():
            hlo = compiled.as_text()
            found = {line.name: collective_kind(line.opcode) for line in sent(hlo)}
            others = {name: kind for name, kind in found.items() if kind != "all-reduce"}
            assert set(others.values()) == {"all-gather", "all-to-all"}
            # On a CPU it gathers a router's scores, too, to choose the best.
            assert all(re.search(rf"%{re.escape(name)} = .*(shard_map/all_|/top_k)", hlo) for name in others)


@pytest.mark.parametrize(
    ("mesh", "model", "strategy", "changes"),
    [
        pytest.param("expert=2,tensor=2", "qwen2_moe", "prompt_lookup", {}, marks=pytest.mark.exhaustive),
        pytest.param("expert=2", "qwen2_moe", "medusa+jacobi", SENT, marks=pytest.mark.exhaustive),
        pytest.param("data=2,expert=2", "qwen2_moe", "draft_model", {}, marks=pytest.mark.exhaustive),
        pytest.param("expert=4", "deepseek_v3", "layerskip", SENT, marks=pytest.mark.exhaustive),
        pytest.param("expert=2", "gpt_oss", "lookahead", {}, marks=pytest.mark.exhaustive),
        pytest.param("expert=2,tensor=2", "qwen2_moe", "mtp", SENT, marks=pytest.mark.exhaustive),
    ],
)
def test_bits_are_those_of_each_row_alone(monkeypatch, mesh, model, strategy, changes):
    """Alone a row is on every device, in a batch of four on one of them."""
    test_bits.check(monkeypatch, mesh, model, "float32", [strategy], slice(0, 4), **changes)
