"""Descent on codes and scales never makes products change more, and ends below what GPTQ alone leaves."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.ops.few_bits.formats import INT8, int4
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from jaxinfer.quantization.descent import descend, quantize_with_descent
from jaxinfer.quantization.gptq import quantize_by_gptq

FORMS = {"signed": int4(32, True), "minima": int4(32, False), "bytes": INT8}


def case(seed: int, width: int = 96, outputs: int = 8):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(300, width)) @ rng.normal(size=(width, width)) * np.exp(rng.normal(size=width))
    inputs[:, 5] = 0
    return jnp.asarray(rng.standard_t(3, size=(outputs, width)), jnp.float32), jnp.asarray(inputs.T @ inputs / 300)


def errors(weights, squares, array):
    """Return what descent makes smaller, of each row."""
    squares = np.asarray(squares, np.float64)
    squares = squares + 0.01 * np.mean(np.diag(squares)) * np.eye(len(squares))
    missed = np.asarray(weights, np.float64) - np.asarray(array.dequantize(), np.float64)
    return np.sum(missed @ squares * missed, axis=1)


# The others' programs take as long to compile again.
MOST = ["minima", *(pytest.param(form, marks=pytest.mark.slow) for form in ("signed", "bytes"))]


@pytest.mark.parametrize("form", MOST)
def test_each_row_ends_lower_and_stays_where_no_other_code_is_better(form):
    weights, squares = case(0)
    begun = round_to_nearest(weights, FORMS[form])
    once = last = descend(weights, squares, begun)
    for _ in range(12):
        last = descend(weights, squares, last)
    before, after_once, after = (errors(weights, squares, each) for each in (begun, once, last))
    assert (after_once < before).all()
    assert (after <= after_once * (1 + 1e-5)).all()
    values, steps = np.asarray(last.dequantize()), np.repeat(np.asarray(last.scales), 96 // last.scales.shape[1], 1)
    damped = np.asarray(squares) + 0.01 * np.mean(np.diag(squares)) * np.eye(96)
    wanted = (np.asarray(weights) - values) @ damped / np.diag(damped) / np.abs(steps)
    # Where a code further up or down exists.
    lowest, highest = (np.min(values, axis=1), np.max(values, axis=1))
    inside = (values > lowest[:, None]) & (values < highest[:, None])
    assert np.mean(np.abs(wanted[inside]) < 0.51) > 0.98


@pytest.mark.parametrize("form", MOST)
def test_products_change_less_than_by_gptq_alone(form):
    weights, squares = case(1)
    alone = errors(weights, squares, quantize_by_gptq(weights, squares, FORMS[form])).sum()
    assert errors(weights, squares, quantize_with_descent(weights, squares, FORMS[form])).sum() < 0.95 * alone


@pytest.mark.parametrize("form", MOST)
def test_inputs_that_were_never_seen_leave_numbers(form):
    weights, squares = case(2)
    weights = weights.at[0].set(0)
    for seen in (0 * squares, jnp.zeros_like(squares).at[7, 7].set(1)):
        assert np.isfinite(np.asarray(quantize_with_descent(weights, seen, FORMS[form]).dequantize())).all()
