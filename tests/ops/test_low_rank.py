"""A row's product with a low-rank pair of its own is NumPy's, and its bits depend on the row and the pair alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.cpu_kernels import low_rank as kernels
from jaxinfer.ops.low_rank import add_up, project_down
from jaxinfer.ops.low_rank_heads import add_pairs

KERNELS, XLA = choose_backend("float32", "cpu"), choose_backend("float32", "cpu", scan_layers=True)
TPU = replace(XLA, kernels="interpret")
IDS = np.array([2, -1, 0, 2, 1], np.int32)
ROWS, TOKENS, INPUTS, RANK, NUMBER, OUTPUTS = len(IDS), 3, 40, 8, 4, 70


def drawn(rank=RANK):
    rng = np.random.default_rng(0)
    shapes = (ROWS, TOKENS, INPUTS), (NUMBER, RANK, INPUTS), (NUMBER, RANK, OUTPUTS), (ROWS, TOKENS, OUTPUTS)
    inputs, down, up, base = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    fill = ((0, 0), (0, rank - RANK), (0, 0))
    return inputs, np.pad(down, fill), np.pad(up, fill), base


def added(backend, inputs, down, up, base, ids):
    def run(inputs, down, up, base, ids):
        return add_up(base, project_down(inputs, [down], ids, backend)[0], up, ids, backend)

    return np.asarray(jax.jit(run)(inputs, down, up, base, ids))


@pytest.mark.slow
@pytest.mark.parametrize("backend", [KERNELS, XLA, TPU], ids=["kernels", "xla", "tpu"])
def test_each_row_has_its_own_product_and_rows_without_keep_their_bits(backend):
    inputs, down, up, base = drawn()
    found = added(backend, inputs, down, up, base, IDS)
    for row, at in enumerate(IDS):
        own = inputs[row].astype(np.float64) @ down[at].T @ up[at] if at >= 0 else 0
        np.testing.assert_allclose(found[row], base[row] + own, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(found[1], base[1])


@pytest.mark.parametrize(
    "backend",
    [KERNELS, XLA, pytest.param(TPU, marks=pytest.mark.exhaustive)],
    ids=["kernels", "xla", "tpu"],
)
def test_each_head_has_a_half_of_its_rows_pair(backend):
    rng, heads = np.random.default_rng(2), 3
    of_heads, of_all, narrow, wide = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in (
            (heads, NUMBER, RANK, 24),
            (NUMBER, RANK, INPUTS),
            (ROWS, TOKENS, heads, 24),
            (ROWS, TOKENS, heads, INPUTS),
        )
    )

    def run(of_heads, of_all, narrow, wide, ids):
        stacks = of_heads, of_all
        return (
            add_pairs(wide, narrow, *stacks, ids, backend),
            add_pairs(narrow, wide, *stacks[::-1], ids, backend),
        )

    first, last = map(np.asarray, jax.jit(run)(of_heads, of_all, narrow, wide, IDS))
    for row, at in enumerate(IDS):
        for head in range(heads):
            pair = of_heads[head, at].astype(np.float64).T @ of_all[at] if at >= 0 else np.zeros((24, INPUTS))
            close = {"rtol": 1e-5, "atol": 1e-3}
            np.testing.assert_allclose(first[row, :, head], wide[row, :, head] + narrow[row, :, head] @ pair, **close)
            np.testing.assert_allclose(last[row, :, head], narrow[row, :, head] + wide[row, :, head] @ pair.T, **close)
    np.testing.assert_array_equal(first[1], wide[1])
    np.testing.assert_array_equal(last[1], narrow[1])


def test_bits_depend_neither_on_other_rows_nor_on_the_stack():
    inputs, down, up, base = drawn()
    found = added(KERNELS, inputs, down, up, base, IDS)
    for row in range(ROWS):
        for tokens in (1, TOKENS):
            alone = added(KERNELS, inputs[[row], :tokens], down, up, base[[row], :tokens], IDS[[row]])
            np.testing.assert_array_equal(alone[0], found[row, :tokens])
    np.testing.assert_array_equal(added(KERNELS, *drawn(rank=16)[:3], base, IDS), found)
    more = np.concatenate([down, down]), np.concatenate([up, up])
    np.testing.assert_array_equal(added(KERNELS, inputs, *more, base, np.where(IDS < 0, -1, IDS + NUMBER)), found)


def test_several_stacks_are_read_in_one_call():
    inputs, down, _, _ = drawn()
    other = np.ascontiguousarray(down[:, :5][:, ::-1])
    both = kernels.project_down(jnp.asarray(inputs), [jnp.asarray(down), jnp.asarray(other)], jnp.asarray(IDS))
    for found, stack in zip(both, (down, other)):
        (alone,) = kernels.project_down(jnp.asarray(inputs), [jnp.asarray(stack)], jnp.asarray(IDS))
        np.testing.assert_array_equal(np.asarray(found)[IDS >= 0], np.asarray(alone)[IDS >= 0])


def test_many_tokens_and_columns_are_cut_into_pieces():
    rng = np.random.default_rng(1)
    shapes = (1, 70, 33), (2, 16, 33), (2, 16, 300), (1, 70, 300)
    inputs, down, up, base = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    found = added(KERNELS, inputs, down, up, base, np.array([1], np.int32))
    np.testing.assert_allclose(found, base + inputs @ down[1].T @ up[1], rtol=1e-4, atol=1e-3)


def test_what_is_not_float32_is_refused():
    inputs, down, up, base = map(jnp.asarray, drawn())
    with pytest.raises(ValueError, match="do not fit"):
        kernels.project_down(inputs, [down.astype(jnp.bfloat16)], jnp.asarray(IDS))
    with pytest.raises(ValueError, match="do not fit"):
        kernels.add_up(base, jnp.zeros((ROWS, TOKENS, RANK)), up.astype(jnp.bfloat16), jnp.asarray(IDS))
