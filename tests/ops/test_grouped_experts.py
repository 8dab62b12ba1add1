"""Experts by a TPU's grouped product: what the definition gives, whatever other tokens there are."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.ops import grouped_experts
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.experts import OwnPairs, apply_experts, gating_of
from jaxinfer.ops.grouped_experts import Load, add_up, grouped_rows, multiplies_grouped
from jaxinfer.ops.layer_view import LayerView
from tests.ops.test_experts import BIASES, CHOICES, EXPERTS, INPUTS, KERNELS, LIMIT, WEIGHTS, WIDTH, defined

COUNT = 40
TPU = choose_backend("float32", "tpu", kernels="interpret")
CROWDED = np.tile(np.array([[4, 1]], np.int32), (COUNT, 1))


@functools.cache
def applied(backend, biased: bool = True):
    gating = gating_of(jax.nn.silu, LIMIT if biased else None)

    @jax.jit
    def apply(inputs, chosen, weights, kernels, biases):
        return apply_experts(inputs, chosen, weights, kernels, gating, backend, biases if biased else None)

    return apply


def run(chosen=CHOICES, count=COUNT, kernels=KERNELS, inputs=INPUTS, backend=TPU, biased=True):
    arrays = (jnp.asarray(each[None, :count]) for each in (inputs, chosen, WEIGHTS))
    return np.asarray(applied(backend, biased)(*arrays, tuple(kernels), BIASES))[0]


def expected(chosen, count=COUNT, biased=True):
    return np.stack([defined(token, chosen, biased) for token in range(count)])


@pytest.mark.slow
def test_every_token_gets_its_experts_however_many_share_them():
    """In blocks of 16 rows, of which an expert has none, one or several."""
    for chosen in (CHOICES, CROWDED):
        np.testing.assert_allclose(run(chosen), expected(chosen), atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("count", [1, 3, 100])
def test_batches_of_any_size_get_theirs(count, biased):
    for backend in (TPU, replace(TPU, kernels="reference")):
        found = run(count=count, biased=biased, backend=backend)
        np.testing.assert_allclose(found, expected(CHOICES, count, biased), atol=2e-6)


def test_a_tokens_bits_do_not_depend_on_where_the_others_go():
    """Nor on what they are: the same token, first in its expert's rows and last."""
    other = np.where(np.arange(len(INPUTS))[:, None] == 20, INPUTS, 1000 * INPUTS)
    crowded = CROWDED.copy()
    crowded[20] = CHOICES[20]
    assert (run(crowded, inputs=other)[20] == run()[20]).all()


@pytest.mark.parametrize(
    ("kernels", "which", "biased"),
    [
        ("reference", None, False),
        *(pytest.param("interpret", *each, marks=pytest.mark.exhaustive) for each in ((0, True), (2, 0), (None, True))),
    ],
)
def test_a_row_has_its_own_pairs_and_no_other_is_read(kernels, which, biased):
    """In some kernels of every expert; pairs that no token's copy has are not-a-number."""
    backend = replace(TPU, kernels=kernels)
    ids, tokens, number, rank = np.array([2, -1, 0, 2, 1], np.int32), 3, 4, 8
    rng, chosen = np.random.default_rng(5), CHOICES[:15].reshape(5, 3, -1)
    had = {(int(expert), at) for row, at in enumerate(ids) for expert in chosen[row].flat}
    had = np.array([[(expert, at) in had for at in range(number)] for expert in range(EXPERTS)])
    pairs = []
    for index, (_, outputs, inputs) in enumerate(kernel.shape for kernel in KERNELS):
        pair = (rng.standard_normal((EXPERTS, number, rank, size)) / 5 for size in (inputs, outputs))
        pair = tuple(
            np.where(had[..., None, None] | (kernels == "reference"), each, np.nan).astype(np.float32) for each in pair
        )
        pairs.append(pair if which in (index, None) else None)

    gating, whole = gating_of(jax.nn.silu, LIMIT if biased else None), BIASES if biased else None
    inputs, weights = (each[:15].reshape(5, tokens, -1) for each in (INPUTS, WEIGHTS))

    @functools.partial(jax.jit, static_argnums=0)
    def run(backend, tokens, kernels, biases, ids, pairs):
        own = None if pairs is None else OwnPairs(ids, pairs)
        return apply_experts(*tokens, kernels, gating, backend, biases, own)

    def apply(backend, ids, pairs):
        def rounded(array):
            return array.astype(backend.param_dtype) if array.dtype.kind == "f" else array

        arrays = jax.tree.map(rounded, ((inputs, chosen, weights), tuple(KERNELS), whole, ids, pairs))
        return np.asarray(run(backend, *arrays))

    found, by_loop = (apply(each, ids, tuple(pairs)) for each in (backend, choose_backend("float32", "cpu")))
    np.testing.assert_allclose(found, by_loop, atol=1e-5)
    if kernels == "interpret":
        plain = apply(backend, ids, None)
        assert np.abs(found - plain)[ids >= 0].max() > 0.1
        np.testing.assert_array_equal(found[1], plain[1])
    else:
        narrow = replace(choose_backend("bfloat16", "tpu"), kernels=kernels)
        own, none = apply(narrow, ids, tuple(pairs)), apply(narrow, ids, None)
        np.testing.assert_array_equal(own[1], none[1])


@pytest.mark.slow
def test_results_that_are_gathered_in_parts_are_the_same(monkeypatch):
    whole = run()
    # Three parts of 14 tokens, of which the last has two more than there are.
    monkeypatch.setattr(grouped_experts, "_MOST_GATHERED", 0)
    monkeypatch.setattr(grouped_experts, "_TOKENS", 14)
    assert (run(backend=replace(TPU, step_rows=2)) == whole).all()


def test_rows_on_other_devices_are_left_out_of_a_sum_in_parts_or_not(monkeypatch):
    """And rows that were never computed, which are not-a-number."""
    rng = np.random.default_rng(1)
    places = np.where(rng.random((COUNT, 3)) < 0.6, 99, rng.integers(0, 20, (COUNT, 3))).astype(np.int32)
    results = np.where(np.arange(24)[:, None] < 20, rng.standard_normal((24, WIDTH)), np.nan).astype(np.float32)
    weights = rng.uniform(0.1, 1, (COUNT, 3)).astype(np.float32)
    rows = np.where((places < 24)[..., None], results[np.minimum(places, 23)], 0)
    found = jax.jit(add_up, static_argnums=3)(results, places, weights, True)
    np.testing.assert_allclose(found, (rows * weights[..., None]).sum(1), atol=1e-6)
    monkeypatch.setattr(grouped_experts, "_MOST_GATHERED", 0)
    monkeypatch.setattr(grouped_experts, "_TOKENS", 14)
    in_parts = jax.jit(lambda *given: add_up(*given, is_split=True))(results, places, weights)
    assert (np.asarray(in_parts) == np.asarray(found)).all()


def test_what_a_device_reads_follows_its_share():
    """Two of eight experts on a device, in blocks of 16 rows."""
    assert Load(8, 8, 2, 64).expected(16) == pytest.approx((8, 128 + 8 * 15 / 2), rel=1e-6)
    assert Load(2, 8, 2, 64).expected(16) == pytest.approx((2, 32 + 15), rel=1e-6)
    assert Load(2, 8, 2, 1).expected(16) == (0.5, 0.5 + 0.5 * 15 / 2)
    assert [Load(own, 8, 2, 1).is_split for own in (2, 8)] == [True, False]


@pytest.mark.slow
def test_the_experts_of_one_of_several_layers_are_read_where_they_lie():
    views = [LayerView(jnp.stack([jnp.full_like(kernel, jnp.nan), kernel]), jnp.int32(1)) for kernel in KERNELS]
    assert (run(kernels=views) == run()).all()


def test_experts_that_no_token_goes_to_are_not_read():
    chosen = np.where(CHOICES == 5, (CHOICES.sum(1, keepdims=True) + 1) % 5, CHOICES).astype(np.int32)
    poisoned = [np.where(np.arange(EXPERTS)[:, None, None] == 5, np.nan, kernel) for kernel in KERNELS]
    assert (run(chosen, kernels=poisoned) == run(chosen)).all()
    assert np.isnan(run(kernels=poisoned)).any()


def test_the_grouped_product_serves_whole_kernels_of_tpus_and_blocks_follow_the_mean():
    assert multiplies_grouped(KERNELS, TPU)
    assert not multiplies_grouped(KERNELS, replace(TPU, kernels="xla"))
    assert not multiplies_grouped(KERNELS, choose_backend("float32", "cpu"))
    assert not multiplies_grouped(KERNELS, choose_backend("bfloat16", "tpu", kernels="interpret"))
    shapes = (8, 14336, 4096), (8, 14336, 4096), (8, 4096, 14336)
    stacks = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    rows = [grouped_rows(mean, stacks, "bfloat16") for mean in (0.25, 16.0, 17.0, 100.0, 4096.0)]
    assert rows == [8, 16, 32, 128, 128]
