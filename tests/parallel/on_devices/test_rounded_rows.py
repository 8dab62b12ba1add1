"""Rows in bytes on meshes: each device rounds its part of a row as one device rounds the whole."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.ops.few_bits.formats import INT8, Format, int4
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from jaxinfer.ops.matmul import product
from jaxinfer.parallel.mesh import parse_mesh
from tests.decoding.rows import request, run
from tests.parallel.on_devices.meshes import on_mesh
from tests.toys import TINY_LLAMA, float32_backend, random_params

CONFIG = replace(TINY_LLAMA, num_heads=8, num_kv_heads=4, head_dim=32, model_dim=64, ffn_dim=128)
TEXTS = [[5, 6, 7, 8, 11], [9, 3, 2], [4] * 8, [7, 1]]
MESHES = [
    pytest.param("tensor=2,pipeline=2", marks=pytest.mark.slow),
    *(pytest.param(mesh, marks=pytest.mark.exhaustive) for mesh in ("tensor=2", "tensor=4", "data=2,tensor=2")),
]


def rounded(form: Format, **changes) -> LanguageModel:
    params = jax.tree.map(lambda leaf: round_to_nearest(leaf, form) if leaf.ndim == 2 else leaf, random_params(CONFIG))
    params["embed"] = jax.tree.map(lambda leaf: round_to_nearest(leaf, INT8), random_params(CONFIG)["embed"])
    return LanguageModel(CONFIG, params, replace(float32_backend(), activations="int8", **changes))


@pytest.fixture(scope="module")
def one() -> LanguageModel:
    return rounded(INT8)


def logits(lm: LanguageModel) -> list[np.ndarray]:
    found = np.asarray(lm.logits(TEXTS))
    return [found[at, : len(text)] for at, text in enumerate(TEXTS)]


@pytest.mark.parametrize("mesh", MESHES)
def test_logits_are_those_of_one_device_in_every_bit(one, mesh):
    """Where `tensor` splits sums too: devices add integers, and all scale them alike."""
    lm = on_mesh(one, mesh)
    for found, expected in zip(logits(lm), logits(one), strict=True):
        assert found.tobytes() == expected.tobytes()
    if mesh == "tensor=2":
        codes = lm.params["blocks"]["layer_0"]["mlp"]["down"]["kernel"].codes
        assert codes.addressable_shards[0].data.shape == (64, 64)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("form", "changes"), [(INT8, {"collectives": "int8"}), (INT8, {"cpu_kernels": False}), (int4(32, False), {})]
)
def test_elsewhere_logits_are_nearly_those_of_one_device(form, changes):
    """With groups, without kernels, and where devices send bytes, sums are floats."""
    whole = rounded(form, **changes)
    # Without kernels of the CPU's own, or where parts are rounded, the next rows may round to other bytes.
    for found, expected in zip(logits(on_mesh(whole, "tensor=2")), logits(whole), strict=True):
        assert np.abs(found - expected).max() <= 0.03 * expected.std()


@pytest.mark.exhaustive
def test_texts_on_a_mesh_are_those_of_one_device(one):
    lm = on_mesh(one, "data=2,tensor=2")
    requests = [request(text, 12) for text in ([5, 6, 5, 6, 5], [9], [3] * 20, [7, 8])]
    alone = [run(one, [each])[0] for each in requests]
    for found, expected in zip(run(lm, requests, lm.resolve("prompt_lookup")), alone, strict=True):
        assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)


def test_a_part_of_a_row_is_rounded_by_the_largest_number_of_all_of_it():
    """By XLA as well: one large number, on one of the devices."""
    rng = np.random.default_rng(0)
    kernel = round_to_nearest(jnp.asarray(rng.standard_normal((6, 64), np.float32)), INT8)
    x = rng.standard_normal((2, 1, 64), np.float32)
    x[0, 0, 3] = 40
    devices = parse_mesh("tensor=2").build(jax.devices()[:2])
    for has_kernels in (True, False):
        backend = replace(float32_backend(), activations="int8", cpu_kernels=has_kernels)
        whole = jax.jit(lambda x, b=backend: product(x, kernel, b))(x)
        split = replace(backend, mesh=devices)
        parts = jax.jit(lambda x, b=split: product(x, kernel, b, split=(None, "tensor")))(x)
        assert np.asarray(parts).tobytes() == np.asarray(whole).tobytes()
