"""What devices that split a sequence find joins to attention of the whole; they are a batch here, of one device."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxinfer.notation import SEQUENCE
from jaxinfer.ops.attention import Partial, attend_partially
from jaxinfer.ops.masks import Chunk
from jaxinfer.ops.ring_attention import _Ring, _Rule, ring_order
from jaxinfer.ops.split_slots import join_over
from tests.toys import float32_backend

FLOAT32 = float32_backend()
DEVICES = 4
SCALE = 0.7


SINKS_N = np.linspace(-2, 3, 4, dtype=np.float32)


def whole_attention(query_BTNH, keys_BSKH, values_BSKH, mask_BTS):
    """Attention beside a sink of each head."""
    own = np.arange(query_BTNH.shape[2]) * keys_BSKH.shape[2] // query_BTNH.shape[2]
    scores = np.einsum("btnh,bsnh->btns", query_BTNH, keys_BSKH[:, :, own], dtype=np.float64) * SCALE
    weights = np.where(mask_BTS[:, :, None], np.exp(scores), 0)
    totals = weights.sum(axis=-1, keepdims=True) + np.exp(SINKS_N)[:, None]
    return np.einsum("btns,bsnh->btnh", weights / totals, values_BSKH[:, :, own])


def drawn(tokens, slots):
    rng = np.random.default_rng(tokens)
    return [rng.standard_normal((2, *shape, 8), np.float32) for shape in ((tokens, 4), (slots, 2), (slots, 2))]


def of_devices(array, axis=1):
    """Split an axis over devices, of which each has a row of the new first axis."""
    return np.stack(np.split(array, DEVICES, axis=axis))


def test_parts_of_the_slots_join_to_attention_to_all():
    """Also where a device has nothing that a query sees."""
    query, keys, values = drawn(3, 24)
    mask = np.random.default_rng(0).random((2, 3, 24)) < 0.5
    mask[0, 0, 6:] = mask[1, 2, :18] = False
    mask[0, 0, 0] = mask[1, 2, 20] = True

    def attend(keys, values, mask):
        flat = (held.reshape(*held.shape[:2], -1) for held in (keys, values))
        partial = attend_partially(jnp.asarray(query), *flat, mask, SCALE, FLOAT32)
        return join_over(SEQUENCE, partial, jnp.asarray(SINKS_N)), partial

    parts = of_devices(keys), of_devices(values), of_devices(mask, axis=2)
    means, partials = jax.jit(jax.vmap(attend, axis_name=SEQUENCE))(*parts)
    expected = whole_attention(query, keys, values, mask)
    np.testing.assert_allclose(means, np.broadcast_to(expected, means.shape), atol=1e-5)
    one_by_one = (Partial(*(each[device] for each in partials)) for device in range(DEVICES))
    joined = functools.reduce(Partial.joined_with, one_by_one)
    np.testing.assert_allclose(joined.with_sinks(SINKS_N).mean_BTNH(), expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, 7, pytest.param(Chunk(7), marks=pytest.mark.slow)])
def test_a_prompt_around_a_ring_is_attended_to_and_written_in_its_order(window):
    tokens, slots = 24, 7
    query, keys, values = drawn(tokens, tokens)
    order = ring_order(tokens, replace(FLOAT32, mesh=AbstractMesh((DEVICES,), (SEQUENCE,))))
    assert sorted(order) == list(range(tokens))
    flat = [held.reshape(2, tokens, -1) for held in (keys, values)]
    rule = _Rule(SCALE, None, window, 2, FLOAT32, by_kernel=False)
    ring = _Ring(DEVICES)

    def attend(query, keys, values):
        mixed, held = ring.attend(query, (keys, values), slots, rule, jnp.asarray(SINKS_N))
        return ring.put_in_order(mixed), held

    mine = [of_devices(each[:, order]) for each in (query, *flat)]
    mixed, held = jax.jit(jax.vmap(attend, axis_name=SEQUENCE))(*mine)
    behind, first_of_chunk = np.arange(tokens)[:, None] - np.arange(tokens), np.arange(tokens)[:, None] // 7 * 7
    is_near = behind < (window or tokens) if not isinstance(window, Chunk) else np.arange(tokens) >= first_of_chunk
    mask = np.broadcast_to((behind >= 0) & is_near, (2, tokens, tokens))
    expected = whole_attention(query, keys, values, mask)
    np.testing.assert_allclose(np.concatenate(mixed, axis=1), expected, atol=1e-5)
    for found, written in zip(held, flat):
        np.testing.assert_array_equal(np.concatenate(found, axis=1)[:, :tokens], written)
