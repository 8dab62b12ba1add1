"""Tokens of a prompt and slots of a cache split over devices: a ring attends to what one device attends to."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxinfer import MeshConfig
from jaxinfer.cache.dense import create_dense_cache
from jaxinfer.cache.interface import Scores
from jaxinfer.ops import ring_attention
from jaxinfer.ops.backend import Backend, choose_backend
from jaxinfer.ops.masks import Chunk, causal_ancestors
from tests.parallel.on_devices.meshes import Single, make_model


@pytest.mark.parametrize(
    ("num_devices", "window", "softcap"),
    [
        (3, 20, 3.0),
        pytest.param(2, 7, None, marks=pytest.mark.exhaustive),
        pytest.param(4, Chunk(20), None, marks=pytest.mark.slow),
        pytest.param(8, None, None, marks=pytest.mark.exhaustive),
    ],
)
def test_a_ring_attends_to_what_one_device_attends_to(num_devices, window, softcap, monkeypatch):
    monkeypatch.setattr(ring_attention, "_QUERY_BLOCK", 4)
    backend = choose_backend("float32", platform="cpu")
    check_ring(split(backend, num_devices), backend, 8 * 2 * num_devices, 8, window, softcap)


@pytest.mark.slow
def test_a_ring_of_kernels_attends_to_what_one_device_attends_to():
    backend = choose_backend("float32", platform="cpu", kernels="interpret")
    check_ring(split(backend, 2), choose_backend("float32", platform="cpu"), 4 * 128, 64, 150, None)


def split(backend: Backend, num_devices: int) -> Backend:
    mesh = MeshConfig(sequence=num_devices).build(jax.devices()[:num_devices])
    return replace(backend, mesh=mesh)


def check_ring(split: Backend, whole: Backend, num_tokens: int, head_dim: int, window, softcap) -> None:
    """Compare output and cache of a layer of grouped heads with sinks; each device has slots past the prompt."""
    rng = np.random.default_rng(3)
    query, keys, values = (
        jnp.asarray(rng.normal(size=(2, num_tokens, heads, head_dim)), jnp.float32) for heads in (4, 2, 2)
    )
    results, scores = [], Scores(head_dim**-0.5, softcap, jnp.linspace(-2.0, 3.0, 4))
    for backend in (whole, split):
        cache = create_dense_cache(2, 2, num_tokens + 40, 2 * head_dim, backend, window)

        def attend(*heads, cache=cache, backend=backend):
            start_B, counts_B = jnp.zeros(2, jnp.int32), jnp.full(2, num_tokens, jnp.int32)
            placement = cache.place(start_B, causal_ancestors(num_tokens)[None], counts_B, num_tokens)
            if backend is split:
                order_T = ring_attention.ring_order(num_tokens, backend)
                placement = placement._replace(seen=placement.seen._replace(order_T=jnp.asarray(order_T)))
                heads = [each[:, order_T] for each in heads]
            mixed, cache = cache.attend(1, placement, *heads, scores, backend)
            if backend is split:
                mixed = ring_attention.in_text_order(mixed.reshape(2, num_tokens, -1), backend).reshape(mixed.shape)
            return mixed, cache

        results.append(jax.jit(attend)(query, keys, values))
    (expected, plain), (found, around) = results
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
    assert around.keys.shape[2] % split.slot_shards == 0
    for ours, theirs in ((around.keys, plain.keys), (around.values, plain.values)):
        np.testing.assert_array_equal(ours[:, :, :num_tokens], theirs[:, :, :num_tokens])


def test_every_device_holds_its_own_slots_and_a_window_has_none():
    """Of 100 slots each of three devices has as many, in whole tiles; one stage has all layers."""
    gemma2 = Single(make_model("gemma2")).on("sequence=3")
    ring, dense = sorted(gemma2.programs.create_cache(2, 100, 4).parts, key=lambda part: part.keys.shape[2])
    assert dense.keys.sharding.spec == PartitionSpec("pipeline", "data", "sequence", "tensor")
    assert dense.keys.shape[2] == 3 * 48
    assert dense.keys.addressable_shards[0].data.shape[2] == 48
    assert ring.keys.addressable_shards[0].data.shape == ring.keys.shape
