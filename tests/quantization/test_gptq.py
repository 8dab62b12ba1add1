"""GPTQ against a loop written out in NumPy, and what it is for: products that change less."""

import numpy as np
import pytest

from jaxinfer.ops.few_bits.formats import INT8, Format, int4
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from jaxinfer.quantization.gptq import quantize_by_gptq

FORMS = {"signed": int4(32, True), "minima": int4(32, False), "bytes": INT8}


def group_of(weights, form: Format):
    """Return scale and minimum of some weights of each row, as rounding to the nearest has them."""
    width = weights.shape[1]
    found = round_to_nearest(weights, Format(form.bits, width if form.group else None, form.levels, form.has_minima))
    scales, minima = (None if part is None else np.asarray(part, np.float32) for part in (found.scales, found.minima))
    return scales[:, 0], 0.0 if minima is None else minima[:, 0]


def by_columns(weights, squares, form: Format, by_size: bool):
    """Round column after column and pass each error on to all columns after it at once."""
    weights, squares = weights.astype(np.float64), squares.astype(np.float64)
    width = weights.shape[1]
    group = form.group or width
    dead = np.diag(squares) == 0
    weights[:, dead] = 0
    squares = squares + np.diag(dead + 0.01 * np.mean(np.diag(squares)))
    order = np.argsort(-np.where(dead, 0, np.diag(squares)), kind="stable") if by_size else np.arange(width)
    passed = np.linalg.cholesky(np.linalg.inv(squares[order][:, order])).T
    fitted = {first: group_of(weights[:, first : first + group].astype(np.float32), form)
              for first in range(0, width, group)}  # fmt: skip
    levels = np.array(form.levels or range(-127, 128))
    result = np.zeros_like(weights)
    for at, column in enumerate(order):
        first = column // group * group
        if not by_size and form.group and column == first:
            fitted[first] = group_of(weights[:, first : first + group].astype(np.float32), form)
        scale, minimum = fitted[first]
        values = weights[:, column]
        nearest = np.abs((values - minimum)[:, None] / np.where(scale == 0, 1, scale)[:, None] - levels).argmin(axis=1)
        result[:, column] = scale * levels[nearest] + minimum
        error = (values - result[:, column]) / passed[at, at]
        weights[:, order[at:]] -= error[:, None] * passed[at, at:]
    return result


def case(seed: int, width: int = 160, outputs: int = 8):
    # More than one block, of inputs in their order and by size.
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(400, width)) @ rng.normal(size=(width, width)) * np.exp(rng.normal(size=width))
    inputs[:, 5] = 0
    return rng.normal(size=(outputs, width)).astype(np.float32), inputs.astype(np.float32)


@pytest.mark.parametrize("by_size", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_columns_are_rounded_in_turn_and_the_others_make_up_for_it(form, by_size):
    weights, inputs = case(0)
    squares = inputs.T @ inputs / len(inputs)
    found = np.asarray(quantize_by_gptq(weights, squares, FORMS[form], by_size=by_size).dequantize())
    expected = by_columns(weights, squares, FORMS[form], by_size)
    # Where a value lies between two levels, float32 and float64 may round apart, and all after it differ.
    assert np.mean(np.abs(found - expected) < 1e-3) > 0.97


@pytest.mark.parametrize("form", FORMS)
def test_products_change_less_than_by_rounding_to_the_nearest(form):
    weights, inputs = case(1)
    squares = inputs.T @ inputs / len(inputs)

    def error(quantized) -> float:
        return float(np.mean((inputs @ (np.asarray(quantized.dequantize()) - weights).T) ** 2))

    nearest = error(round_to_nearest(weights, FORMS[form]))
    in_order, by_size = (error(quantize_by_gptq(weights, squares, FORMS[form], by_size=way)) for way in (False, True))
    assert in_order < 0.8 * nearest
    assert by_size < 0.7 * nearest
