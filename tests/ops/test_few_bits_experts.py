"""Experts in few bits: their codes are multiplied where they lie, for the tokens that go to them, in the same bits."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.experts import apply_experts, gating_of
from jaxinfer.ops.few_bits.columns import maybe_by_columns
from jaxinfer.ops.few_bits.formats import FP8, GGUF_FORMATS, INT8, MXFP4, TWO_OF_FOUR, UNSIGNED, Format, int4, nf4
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from jaxinfer.ops.grouped_experts import grouped_rows, multiplies_grouped
from jaxinfer.ops.layer_view import LayerView
from tests.ops.test_few_bits import drawn, name_of

EXPERTS, CHOSEN, WIDTH, INNER = 5, 2, 64, 32
COUNT = 40
RNG = np.random.default_rng(0)
SHAPES = ((INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER))
INPUTS = RNG.standard_normal((COUNT, WIDTH)).astype(np.float32)
WEIGHTS = RNG.uniform(0.1, 1, (COUNT, CHOSEN)).astype(np.float32)
CHOICES = np.stack([RNG.permutation(EXPERTS)[:CHOSEN] for _ in range(COUNT)]).astype(np.int32)
INT4 = int4(32, False)
WIDE = [INT8, nf4(32), FP8, GGUF_FORMATS["Q8_0"], replace(FP8, group=32, scale_type="float32")]
# As DeepSeek-V3 is published, in blocks of 128 x 128.
FP8_BLOCKS = replace(FP8, group=128, scale_type="float32")
BY_KERNELS = choose_backend("float32", "cpu")
BY_XLA = replace(BY_KERNELS, cpu_kernels=False)
GATING = gating_of(jax.nn.silu, None)


@functools.cache
def stacks(form: Format) -> tuple[QuantizedArray, ...]:
    """Return gate, up and down of all experts."""
    rng = np.random.default_rng(1)
    plain = [jnp.asarray(rng.standard_normal((EXPERTS, *shape)) / 6, jnp.float32) for shape in SHAPES]
    if form.supers or form.has_zeros:
        drawn_each = [[drawn(rng, form, *shape) for _ in range(EXPERTS)] for shape in SHAPES]
        return tuple(jax.tree.map(lambda *parts: jnp.stack(parts), *each) for each in drawn_each)
    return tuple(round_to_nearest(each, form) for each in plain)


@functools.cache
def applied(backend):
    return jax.jit(
        lambda inputs, chosen, weights, kernels: apply_experts(inputs, chosen, weights, kernels, GATING, backend)
    )


def run(kernels, backend=BY_KERNELS, count=COUNT, chosen=CHOICES) -> np.ndarray:
    arrays = (jnp.asarray(each[None, :count]) for each in (INPUTS, chosen, WEIGHTS))
    return np.asarray(applied(backend)(*arrays, tuple(kernels)))[0]


def defined(kernels) -> np.ndarray:
    """Return the sums of all tokens' experts in float64."""
    gate, up, down = (np.asarray(kernel.dequantize(), np.float64)[CHOICES] for kernel in kernels)
    inner, factor = (np.einsum("ncfd,nd->ncf", each, INPUTS) for each in (gate, up))
    returned = np.einsum("ncdf,ncf->ncd", down, inner / (1 + np.exp(-inner)) * factor)
    return np.einsum("ncd,nc->nd", returned, WEIGHTS)


FORMS = [MXFP4, *(pytest.param(form, marks=pytest.mark.exhaustive) for form in (INT4, *WIDE))]


@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_every_token_gets_what_the_experts_that_codes_stand_for_return(form):
    """Up to rows that are rounded to bfloat16."""
    expected = defined(stacks(form))
    assert 1e-4 * expected.std() < np.abs(run(stacks(form)) - expected).max() < 0.03 * expected.std()


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(INT4, marks=pytest.mark.slow),
        *(pytest.param(form, marks=pytest.mark.exhaustive) for form in (MXFP4, INT8, FP8)),
    ],
    ids=name_of,
)
def test_xla_widens_one_expert_after_the_other(form):
    expected = defined(stacks(form))
    np.testing.assert_allclose(run(stacks(form), BY_XLA), expected, atol=1e-5 * expected.std())


@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_a_tokens_bits_are_the_same_in_any_company(form):
    """From blocks of one row to blocks of 16."""
    whole = run(stacks(form))
    for count in (1, 3) if form != MXFP4 else (1,):
        assert (run(stacks(form), count=count) == whole[:count]).all(), count


@pytest.mark.slow
@pytest.mark.parametrize("form", [INT4, MXFP4], ids=name_of)
def test_experts_of_one_of_several_layers_have_the_same_bits(form):
    kernels = stacks(form)
    whole = run(kernels)
    layers = [
        LayerView(jax.tree.map(lambda part: jnp.stack([jnp.zeros_like(part), part]), each), jnp.int32(1))
        for each in kernels
    ]
    assert (run(layers) == whole).all()


def test_codes_of_experts_that_no_token_goes_to_are_not_read():
    chosen = np.where(CHOICES == 4, (CHOICES.sum(1, keepdims=True) + 1) % 4, CHOICES).astype(np.int32)
    lost = np.arange(EXPERTS)[:, None, None] == 4
    kernels = stacks(MXFP4)
    poisoned = [replace(kernel, scales=jnp.where(lost, 255, kernel.scales).astype(jnp.uint8)) for kernel in kernels]
    for count in (1, COUNT):
        assert (run(poisoned, count=count, chosen=chosen) == run(kernels, count=count, chosen=chosen)).all()
    assert not np.isfinite(run(poisoned)).all()


@pytest.mark.slow
def test_gate_and_up_may_be_in_forms_of_their_own_and_inputs_in_orders():
    """Beside plain kernels, too."""
    rng = np.random.default_rng(2)
    form = Format(4, 32, UNSIGNED, scale_type="float32", has_zeros=True)
    gate, up, down = stacks(form)[0], stacks(INT4)[1], stacks(INT8)[2].dequantize()
    order = np.stack([rng.permutation(WIDTH) for _ in range(EXPERTS)])[:, None].astype(np.int32)
    ordered = replace(gate, form=replace(form, is_ordered=True), order=jnp.asarray(order))
    assert (np.asarray(ordered.dequantize()) != np.asarray(gate.dequantize())).any()
    kernels = ordered, up, down
    plain = ordered.dequantize(), up.dequantize(), down
    expected = run(plain, BY_XLA)
    np.testing.assert_allclose(run(kernels, BY_XLA), expected, atol=1e-5 * expected.std())
    assert np.abs(run(kernels) - expected).max() < 0.03 * expected.std()


def grouped(form: Format) -> tuple[QuantizedArray, ...]:
    """Return gate, up and down of experts as a TPU has them, 128 wide."""
    rng = np.random.default_rng(3)
    plain = [jnp.asarray(rng.standard_normal((EXPERTS, 128, 128)) / 8, jnp.float32) for _ in SHAPES]
    rounded = tuple(round_to_nearest(each, form) for each in plain)
    return tuple(maybe_by_columns(each, 128) for each in rounded)


@pytest.mark.parametrize(
    ("form", "kernels"),
    [
        pytest.param(FP8_BLOCKS, "interpret", marks=pytest.mark.exhaustive),
        *(
            pytest.param(form, kernels, marks=pytest.mark.exhaustive)
            for form in (INT8, int4(64, False), MXFP4, FP8, nf4(64), GGUF_FORMATS["Q8_0"])
            for kernels in ("reference", "interpret")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_the_grouped_product_of_a_tpu_widens_codes(kernels, form):
    """And a token's bits are the same in any company, and in any layer of a stack."""
    backend, stacks = choose_backend("bfloat16", "tpu", kernels=kernels), grouped(form)
    assert multiplies_grouped(stacks, backend)
    inputs = jnp.asarray(np.random.default_rng(4).standard_normal((1, 3, 128)), jnp.bfloat16)
    arrays = inputs, *(jnp.asarray(each[None, :3]) for each in (CHOICES, WEIGHTS))
    found = np.asarray(apply_experts(*arrays, stacks, GATING, backend), np.float32)
    plain = tuple(each.dequantize() for each in stacks)
    expected = np.asarray(apply_experts(*arrays, plain, GATING, BY_XLA), np.float32)
    assert np.abs(found - expected).max() < 0.03 * expected.std()
    views = tuple(
        LayerView(jax.tree.map(lambda part: jnp.stack([jnp.zeros_like(part), part]), each), jnp.int32(1))
        for each in stacks
    )
    assert (np.asarray(apply_experts(*arrays, views, GATING, backend), np.float32) == found).all()
    alone = apply_experts(*(each[:, 1:2] for each in arrays), stacks, GATING, backend)
    assert (np.asarray(alone, np.float32) == found[:, 1:2]).all()


def test_forms_that_no_kernel_widens_and_mixed_ones_go_by_a_loop():
    tpu = choose_backend("bfloat16", "tpu", kernels="interpret")
    for form in (INT8, FP8, MXFP4, int4(64, True), FP8_BLOCKS, nf4(32), GGUF_FORMATS["Q8_0"]):
        gate, up, down = jax.eval_shape(lambda form=form: grouped(form))
        assert multiplies_grouped((gate, up, down), tpu)
        assert multiplies_grouped((gate, up, jax.ShapeDtypeStruct(down.shape, jnp.bfloat16)), tpu)
        assert not multiplies_grouped((gate, jax.ShapeDtypeStruct(up.shape, jnp.bfloat16), down), tpu)
        assert not multiplies_grouped((gate, up, down), replace(tpu, kernels="xla"))
        assert not multiplies_grouped((gate, up, down), replace(tpu, compute_dtype="float32"))
    assert not multiplies_grouped(jax.eval_shape(lambda: grouped(TWO_OF_FOUR)), tpu)
    # Blocks have room for more rows, so that codes are widened once.
    int8, plain = grouped(INT8), [jax.ShapeDtypeStruct((5, 128, 128), jnp.bfloat16)] * 3
    assert [grouped_rows(mean, int8, "bfloat16") for mean in (0.25, 8.0, 9.0, 16.0, 64.0)] == [8, 16, 32, 32, 64]
    assert [grouped_rows(mean, plain, "bfloat16") for mean in (0.25, 8.0, 9.0, 16.0, 64.0)] == [8, 8, 16, 16, 64]


@pytest.mark.slow
def test_derivatives_are_those_of_the_weights_that_codes_stand_for():
    kernels = stacks(INT4)
    plain = tuple(kernel.dequantize() for kernel in kernels)
    arrays = [jnp.asarray(each[None, :4]) for each in (INPUTS, CHOICES, WEIGHTS)]

    def total(inputs, kernels):
        return jnp.sum(jnp.sin(apply_experts(inputs, *arrays[1:], kernels, GATING, BY_KERNELS)))

    found, expected = (jax.jit(jax.grad(total))(arrays[0], each) for each in (kernels, plain))
    np.testing.assert_allclose(found, expected, atol=1e-5)
