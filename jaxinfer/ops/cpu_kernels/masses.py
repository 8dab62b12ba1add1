"""Sums of exponentials of rows on a CPU, each row's added in one order (`jaxinfer.ops.cpu_kernels.lanes`).

In XLA's CPU backend, the last bits of an exponential and of a sum depend on the shape of the array and on what is
computed around them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float
from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module
from jaxinfer.ops.cpu_kernels.lanes import (
    DECLARATIONS,
    LANES,
    WIDE,
    add_up_lanes,
    constant_lanes,
    load_lanes,
    masked,
    spread_lanes,
    visit_row,
)
from jaxinfer.ops.cpu_kernels.machine_code import call
from jaxinfer.ops.cpu_kernels.tiles import Vectors

_RECORD = Record("scores", "largest", "least", "totals", "logarithms", "length")
_INTEGERS = f"<{LANES} x i32>"

# The exponential of Cephes (Moshier, 1992): log 2 in two parts, of which multiples of the first are exact, and the
# polynomial's coefficients from the highest. Powers below the lowest count as 0; the highest stand for all above.
_LOG_2 = 0.693359375, -2.12194440e-4
_COEFFICIENTS = 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1
_LOWEST, _HIGHEST = -86.0, 88.0
# Adding it rounds a small number to an integer, which is then in the lowest bits.
_ROUNDER = 1.5 * 2.0**23


def total_masses(
    scores_RV: Float[Array, "R V"], largest_R: Float[Array, " R"], least_R: Float[Array, " R"]
) -> tuple[Float[Array, " R"], Float[Array, " R"]]:
    """Return each row's sum of ``exp(score - largest)`` of the scores from ``least`` on, and its logarithm, in float32.

    Check `machine_code.host_vectors` first. If a compiler splits arrays over devices, each device gets the whole array.
    """
    arrays = scores_RV, largest_R, least_R
    if any(each.dtype != jnp.float32 for each in arrays) or largest_R.shape != least_R.shape:
        raise ValueError(f"no masses of {', '.join(f'{each.dtype}{each.shape}' for each in arrays)}")
    results = [jax.ShapeDtypeStruct(largest_R.shape, jnp.float32)] * 2
    return tuple(call("total_masses", masses_module, "float32", results, *map(jax.lax.stop_gradient, arrays)))


def masses_module(vectors: Vectors) -> str:
    """Return the assembly of ``handler(scores [R, V], largest [R], least [R]) -> totals [R], logarithms [R]``."""

    def plan(code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
        rows, length = arguments[0].shape(code, 2)
        names = "scores", "largest", "least", "totals", "logarithms"
        pointers = {name: buffer.numbers for name, buffer in zip(names, [*arguments, *results])}
        return Plan(pointers, {"length": length}, rows, code.arithmetic("mul", rows, length))

    return make_module(vectors, [_piece()], _RECORD, (3, 2), plan)


def _piece() -> str:
    """Return ``piece(record, index)``, which adds up a row."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    length = _RECORD.number(code, "length")
    row = code.at("float", _RECORD.pointer(code, "scores"), code.arithmetic("mul", "%index", length))
    largest, least = (
        spread_lanes(code, code.load_at("float", _RECORD.pointer(code, name), "%index"))
        for name in ("largest", "least")
    )

    def add(index: str, held: str, mask: str | None) -> str:
        scores = load_lanes(code, row, index, mask)
        masses = _exponentials(code, code.value(f"fsub {WIDE} {scores}, {largest}"))
        counts = code.value(f"fcmp oge {WIDE} {scores}, {least}")
        masses = masked(code, masked(code, masses, counts), mask)
        return code.value(f"fadd {WIDE} {held}, {masses}")

    total = add_up_lanes(code, visit_row(code, "each_score", length, add))
    code.store_at("float", total, _RECORD.pointer(code, "totals"), "%index")
    logarithm = code.value(f"call float @logf(float {total})")
    code.store_at("float", logarithm, _RECORD.pointer(code, "logarithms"), "%index")
    code.effect("ret void")
    return DECLARATIONS + "declare float @logf(float)\n" + code.text()


def _exponentials(code: Code, powers: str) -> str:
    """Return e to powers of at most `_HIGHEST`, every operation rounded."""

    def computed(operation: str) -> Callable[[str, str], str]:
        return lambda one, other: code.value(f"{operation} {WIDE} {one}, {other}")

    add, subtract, multiply = (computed(operation) for operation in ("fadd", "fsub", "fmul"))
    highest, rounder = constant_lanes(_HIGHEST), constant_lanes(_ROUNDER)
    is_high, is_low = (
        code.value(f"fcmp {comparison} {WIDE} {powers}, {constant_lanes(limit)}")
        for comparison, limit in (("ogt", _HIGHEST), ("olt", _LOWEST))
    )
    powers = code.value(f"select <{LANES} x i1> {is_high}, {WIDE} {highest}, {WIDE} {powers}")
    # e ** power = 2 ** twos * e ** rest
    shifted = add(multiply(powers, constant_lanes(1.44269504)), rounder)
    twos, rest = subtract(shifted, rounder), powers
    for part in _LOG_2:
        rest = subtract(rest, multiply(twos, constant_lanes(part)))
    sums = constant_lanes(_COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        sums = add(multiply(sums, rest), constant_lanes(coefficient))
    sums = add(add(multiply(sums, multiply(rest, rest)), rest), constant_lanes(1.0))
    # Adding to the exponent's bits multiplies by the power of two.
    bits, exponents = (code.value(f"bitcast {WIDE} {each} to {_INTEGERS}") for each in (sums, shifted))
    shifts = f"<{', '.join(['i32 23'] * LANES)}>"
    bits = code.value(f"add {_INTEGERS} {bits}, {code.value(f'shl {_INTEGERS} {exponents}, {shifts}')}")
    scaled = code.value(f"bitcast {_INTEGERS} {bits} to {WIDE}")
    return code.value(f"select <{LANES} x i1> {is_low}, {WIDE} zeroinitializer, {WIDE} {scaled}")
