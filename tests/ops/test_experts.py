"""Experts: each token gets its own, in the same bits in any company, and no other expert's weights are read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.ops.backend import Backend, choose_backend
from jaxinfer.ops.experts import apply_experts, block_rows, gating_of, lay_out

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
# What experts with biases and limits have besides; many products are beyond the limit.
BIASES = tuple(RNG.standard_normal((EXPERTS, width)).astype(np.float32) for width in (INNER, INNER, WIDTH))
LIMIT = 0.7


def run(
    count: int, chosen: np.ndarray = CHOICES, dtype: str = "float32", kernels=KERNELS, biased=False, **backend
) -> np.ndarray:
    """Return what the first tokens' experts return, as rows of one batch."""
    arrays = (jnp.asarray(each[None, :count]) for each in (INPUTS, chosen, WEIGHTS))
    function = applied(choose_backend(dtype, "cpu", **backend), biased)
    return np.asarray(function(*arrays, *(of_dtype(each, dtype) for each in (kernels, BIASES))))[0]


def of_dtype(kernels, dtype: str):
    return tuple(jnp.asarray(kernel, dtype) for kernel in kernels)


@functools.cache
def applied(backend: Backend, biased: bool):
    gating = gating_of(jax.nn.silu, LIMIT if biased else None)

    @jax.jit
    def apply(inputs, chosen, weights, kernels, biases):
        return apply_experts(inputs, chosen, weights, kernels, gating, backend, biases if biased else None)

    return apply


def defined(token: int, chosen: np.ndarray, biased: bool) -> np.ndarray:
    """Return one token's sum in float64."""
    total = np.zeros(WIDTH)
    for expert, weight in zip(chosen[token], WEIGHTS[token].astype(np.float64)):
        gate, up, down = (kernel[expert].astype(np.float64) for kernel in KERNELS)
        added = [bias[expert] * float(biased) for bias in BIASES]
        inner, factor = gate @ INPUTS[token] + added[0], up @ INPUTS[token] + added[1]
        if biased:
            inner, factor = np.minimum(inner, LIMIT), np.clip(factor, -LIMIT, LIMIT) + 1
        total += weight * (down @ (inner / (1 + np.exp(-inner)) * factor) + added[2])
    return total


@pytest.mark.parametrize(
    "options",
    [{}, {"biased": True}, pytest.param({"scan_layers": True, "biased": True}, marks=pytest.mark.slow)],
    ids=["kernels", "biased", "xla"],
)
def test_every_token_gets_its_experts_however_many_share_them(options):
    crowded = np.tile(np.array([[4, 1]], np.int32), (max(SIZES), 1))
    for chosen in (CHOICES, crowded):
        expected = np.stack([defined(token, chosen, options.get("biased", False)) for token in range(max(SIZES))])
        np.testing.assert_allclose(run(max(SIZES), chosen, **options), expected, atol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "biased"),
    [("float32", True), *(pytest.param("bfloat16", each, marks=pytest.mark.slow) for each in (0, 1))],
)
def test_a_tokens_bits_are_the_same_in_any_company(dtype, biased):
    """From blocks of one row to blocks of 32, of which the last tokens' are not full."""
    assert len({block_rows(count, CHOSEN, EXPERTS, "cpu") for count in SIZES}) >= 3
    whole = run(max(SIZES), dtype=dtype, biased=biased)
    for count in SIZES[:-1]:
        assert (run(count, dtype=dtype, biased=biased) == whole[:count]).all(), count


@pytest.mark.parametrize(("platform", "most"), [("cpu", 64), ("tpu", 256)])
def test_a_block_has_the_rows_of_an_even_share_up_to_what_a_weight_pays_for(platform, most):
    """Of 256 experts, 8 a token: one row in decoding, and as many as a prompt fills."""
    rows = [block_rows(tokens, 8, 256, platform) for tokens in (1, 32, 1024, 1 << 14)]
    assert rows == [1, 1, 32, most]


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

    gating = gating_of(jax.nn.silu, LIMIT)

    def total(inputs, weights, kernels, biases):
        return jnp.sum(jnp.sin(apply_experts(inputs, arrays[1], weights, kernels, gating, backend, biases)))

    def dense(inputs, weights, kernels, biases):
        gate, up, down = (kernel[arrays[1][0]] for kernel in kernels)
        added = [bias[arrays[1][0]] for bias in biases]
        gates, factors = (jnp.einsum("ncfd,nd->ncf", each, inputs[0]) + bias for each, bias in zip((gate, up), added))
        inner = jax.nn.silu(jnp.minimum(gates, LIMIT)) * (jnp.clip(factors, -LIMIT, LIMIT) + 1)
        returned = jnp.einsum("ncdf,ncf->ncd", down, inner) + added[2]
        return jnp.sum(jnp.sin(jnp.einsum("ncd,nc->nd", returned, weights[0])))

    given = (arrays[0], arrays[2], *(of_dtype(each, "float32") for each in (KERNELS, BIASES)))
    found, expected = (jax.jit(jax.grad(each, argnums=(0, 1, 2, 3)))(*given) for each in (total, dense))
    assert jax.tree.all(jax.tree.map(lambda one, other: np.allclose(one, other, atol=1e-5), found, expected))
