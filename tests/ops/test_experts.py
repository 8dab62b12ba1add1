"""Experts: each token gets its own, in the same bits in any company, and no other expert's weights are read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.ops.backend import Backend, choose_backend
from jaxinfer.ops.experts import apply_experts, block_rows, lay_out

EXPERTS, CHOSEN, WIDTH, INNER = 6, 2, 32, 24
SIZES = (1, 3, 17, 100)
RNG = np.random.default_rng(0)
KERNELS = tuple(
    RNG.standard_normal(shape).astype(np.float32) / 5
    for shape in ((EXPERTS, INNER, WIDTH), (EXPERTS, INNER, WIDTH), (EXPERTS, WIDTH, INNER))
)
INPUTS = RNG.standard_normal((max(SIZES), WIDTH)).astype(np.float32)
WEIGHTS = RNG.uniform(0.1, 1, (max(SIZES), CHOSEN)).astype(np.float32)
CHOICES = np.stack([RNG.permutation(EXPERTS)[:CHOSEN] for _ in range(max(SIZES))]).astype(np.int32)


def run(count: int, chosen: np.ndarray = CHOICES, dtype: str = "float32", kernels=KERNELS, **backend) -> np.ndarray:
    """Return what the first tokens' experts return, as rows of one batch."""
    arrays = (jnp.asarray(each[None, :count]) for each in (INPUTS, chosen, WEIGHTS))
    return np.asarray(applied(choose_backend(dtype, "cpu", **backend))(*arrays, of_dtype(kernels, dtype)))[0]


def of_dtype(kernels, dtype: str):
    return tuple(jnp.asarray(kernel, dtype) for kernel in kernels)


@functools.cache
def applied(backend: Backend):
    return jax.jit(lambda inputs, chosen, weights, kernels: apply_experts(
        inputs, chosen, weights, kernels, jax.nn.silu, backend
    ))  # fmt: skip


def defined(token: int, chosen: np.ndarray = CHOICES) -> np.ndarray:
    """Return one token's sum in float64."""
    total = np.zeros(WIDTH)
    for expert, weight in zip(chosen[token], WEIGHTS[token].astype(np.float64)):
        gate, up, down = (kernel[expert].astype(np.float64) for kernel in KERNELS)
        inner = gate @ INPUTS[token]
        total += weight * (down @ (inner / (1 + np.exp(-inner)) * (up @ INPUTS[token])))
    return total


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"scan_layers": True}, marks=pytest.mark.slow)], ids=["kernels", "xla"]
)
def test_every_token_gets_its_experts_however_many_share_them(options):
    crowded = np.tile(np.array([[4, 1]], np.int32), (max(SIZES), 1))
    for chosen in (CHOICES, crowded):
        expected = np.stack([defined(token, chosen) for token in range(max(SIZES))])
        np.testing.assert_allclose(run(max(SIZES), chosen, **options), expected, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_tokens_bits_are_the_same_in_any_company(dtype):
    """From blocks of one row to blocks of 32, of which the last tokens' are not full."""
    assert len({block_rows(count, CHOSEN, EXPERTS) for count in SIZES}) >= 3
    whole = run(max(SIZES), dtype=dtype)
    for count in SIZES[:-1]:
        assert (run(count, dtype=dtype) == whole[:count]).all(), count


def test_experts_that_no_token_goes_to_are_not_read():
    chosen = np.where(CHOICES == 5, 0, CHOICES)
    chosen = np.where(chosen[:, :1] == chosen[:, 1:], np.array([[3, 4]]), chosen).astype(np.int32)
    poisoned = tuple(np.where(np.arange(EXPERTS)[:, None, None] == 5, np.nan, kernel) for kernel in KERNELS)
    for count in (1, max(SIZES)):
        assert (run(count, chosen, kernels=poisoned) == run(count, chosen)).all()
    assert np.isnan(run(max(SIZES), kernels=poisoned)).any()


laid_out = jax.jit(lay_out, static_argnums=(1, 2))


@pytest.mark.parametrize("rows", [1, 8])
def test_blocks_that_are_run_are_of_experts_that_tokens_go_to_and_hold_every_copy(rows):
    """Also on a device that has the first four of six experts."""
    crowded = np.array([[4, 1], [4, 1], [1, 4]], np.int32)
    for chosen, count in ((CHOICES, EXPERTS), (crowded, EXPERTS), (CHOICES, 4)):
        blocks = laid_out(chosen, count, rows)
        ours, run = chosen < count, int(blocks.count)
        hits = np.bincount(chosen[ours], minlength=count)
        assert run == sum(-(-hits // rows))
        experts, tokens, places = (np.asarray(each) for each in (blocks.experts, blocks.tokens, blocks.places_NC))
        assert sorted(set(experts[:run].tolist())) == np.flatnonzero(hits).tolist()
        token_NC = np.broadcast_to(np.arange(len(chosen))[:, None], chosen.shape)
        assert (tokens[places[ours]] == token_NC[ours]).all()
        assert (experts[places[ours] // rows] == chosen[ours]).all()
        assert (places[~ours] >= len(tokens)).all()
        assert (tokens < len(chosen)).sum() == ours.sum()


def test_derivatives_are_those_of_the_definition():
    arrays = [jnp.asarray(each[None, :5]) for each in (INPUTS, CHOICES, WEIGHTS)]
    backend = choose_backend("float32", "cpu")

    def total(inputs, weights, kernels):
        return jnp.sum(jnp.sin(apply_experts(inputs, arrays[1], weights, kernels, jax.nn.silu, backend)))

    def dense(inputs, weights, kernels):
        gate, up, down = (kernel[arrays[1][0]] for kernel in kernels)
        inner = jax.nn.silu(jnp.einsum("ncfd,nd->ncf", gate, inputs[0])) * jnp.einsum("ncfd,nd->ncf", up, inputs[0])
        return jnp.sum(jnp.sin(jnp.einsum("ncdf,ncf,nc->nd", down, inner, weights[0])))

    given = (arrays[0], arrays[2], of_dtype(KERNELS, "float32"))
    found, expected = (jax.jit(jax.grad(each, argnums=(0, 1, 2)))(*given) for each in (total, dense))
    assert jax.tree.all(jax.tree.map(lambda one, other: np.allclose(one, other, atol=1e-5), found, expected))
