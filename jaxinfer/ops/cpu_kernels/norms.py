"""RMS norm and LayerNorm of rows on a CPU, each row's numbers added in one order (`jaxinfer.ops.cpu_kernels.lanes`).

XLA's CPU backend adds them in an order that depends on the number of rows: one or two rows of 1,536 numbers differ in
their last bits from the same rows among sixteen.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float
from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module
from jaxinfer.ops.cpu_kernels.lanes import (
    DECLARATIONS,
    WIDE,
    add_up_lanes,
    load_lanes,
    masked,
    spread_lanes,
    store_lanes,
    visit_row,
)
from jaxinfer.ops.cpu_kernels.machine_code import call
from jaxinfer.ops.cpu_kernels.tiles import Vectors

# A thread takes rows of about so many numbers at once.
_NUMBERS_AT_ONCE = 4096
# How many numbers take as long as a weight of a product.
_NUMBERS_PER_WEIGHT = 8


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def norm_rows(
    rows_RD: Float[Array, "R D"], scale_D: Float[Array, " D"], bias_D: Float[Array, " D"] | None, epsilon: float
) -> Float[Array, "R D"]:
    """Return the rows' LayerNorm if there is a bias, else their RMS norm, in float32.

    The result of every operation is rounded. Check `machine_code.host_vectors` first. If a compiler splits arrays over
    devices, each device gets the whole array.
    """
    arrays = [rows_RD, scale_D] if bias_D is None else [rows_RD, scale_D, bias_D]
    if any(each.dtype != jnp.float32 or each.shape[-1:] != rows_RD.shape[-1:] for each in arrays):
        raise ValueError(f"no norm of {', '.join(f'{each.dtype}{each.shape}' for each in arrays)}")
    if 0 in rows_RD.shape:
        return rows_RD
    name, build = ("rms_norm", rms_norm_module) if bias_D is None else ("layer_norm", layer_norm_module)
    result = jax.ShapeDtypeStruct(rows_RD.shape, jnp.float32)
    return call(name, build, "float32", result, *arrays, jnp.full((1,), epsilon, jnp.float32))


@norm_rows.defjvp
def _norm_jvp(epsilon: float, primals: Any, tangents: Any) -> Any:
    def reference(rows: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
        if bias is not None:
            rows = rows - jnp.mean(rows, axis=-1, keepdims=True)
        normed = rows * jax.lax.rsqrt(jnp.mean(jnp.square(rows), axis=-1, keepdims=True) + epsilon) * scale
        return normed if bias is None else normed + bias

    return jax.jvp(reference, primals, tangents)


def rms_norm_module(vectors: Vectors) -> str:
    """Return the assembly of ``handler(x [R, D], scale [D], epsilon [1]) -> y [R, D]``."""
    return _module(vectors, ("x", "scale", "epsilon", "y"))


def layer_norm_module(vectors: Vectors) -> str:
    """Return the assembly of ``handler(x [R, D], scale [D], bias [D], epsilon [1]) -> y [R, D]``."""
    return _module(vectors, ("x", "scale", "bias", "epsilon", "y"))


def _module(vectors: Vectors, names: tuple[str, ...]) -> str:
    record = Record(*names, "rows", "length", "rows_at_once")

    def plan(code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
        rows, length = arguments[0].shape(code, 2)
        at_once = code.larger(code.arithmetic("sdiv", _NUMBERS_AT_ONCE, length), 1)
        pointers = {name: buffer.numbers for name, buffer in zip(names, [*arguments, *results])}
        numbers = {"rows": rows, "length": length, "rows_at_once": at_once}
        # Other kernels' weights come from memory, these numbers from a cache.
        weights = code.arithmetic("sdiv", code.arithmetic("mul", rows, length), _NUMBERS_PER_WEIGHT)
        return Plan(pointers, numbers, code.ceiling(rows, at_once), weights)

    return make_module(vectors, [_piece(record, "bias" in names)], record, (len(names) - 1, 1), plan)


def _piece(record: Record, is_layer_norm: bool) -> str:
    """Return ``piece(record, index)``, which norms some rows."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    rows, length, at_once = (record.number(code, name) for name in ("rows", "length", "rows_at_once"))
    x, y, scale = (record.pointer(code, name) for name in ("x", "y", "scale"))
    bias = record.pointer(code, "bias") if is_layer_norm else ""
    epsilon = code.load("float", record.pointer(code, "epsilon"))
    count = code.value(f"sitofp i64 {length} to float")
    begin = code.arithmetic("mul", "%index", at_once)
    past = code.smaller(code.arithmetic("add", begin, at_once), rows)
    with code.repeated("each_row", begin, past) as each_row:
        source, target = (code.at("float", place, code.arithmetic("mul", each_row.index, length)) for place in (x, y))
        mean = ""

        def mean_of(sums: str) -> str:
            return code.value(f"fdiv float {add_up_lanes(code, sums)}, {count}")

        def centred(index: str, mask: str | None) -> str:
            part = load_lanes(code, source, index, mask)
            return masked(code, code.value(f"fsub {WIDE} {part}, {mean}"), mask) if is_layer_norm else part

        def add(index: str, held: str, mask: str | None) -> str:
            return code.value(f"fadd {WIDE} {held}, {load_lanes(code, source, index, mask)}")

        def add_square(index: str, held: str, mask: str | None) -> str:
            part = centred(index, mask)
            return code.value(f"fadd {WIDE} {held}, {code.value(f'fmul {WIDE} {part}, {part}')}")

        if is_layer_norm:
            mean = spread_lanes(code, mean_of(visit_row(code, "each_number", length, add)))
        variance = mean_of(visit_row(code, "each_square", length, add_square))
        root = code.value(f"call float @llvm.sqrt.f32(float {code.value(f'fadd float {variance}, {epsilon}')})")
        inverse = spread_lanes(code, code.value(f"fdiv float 1.0, {root}"))

        def write(index: str, held: str, mask: str | None) -> str:
            part = code.value(f"fmul {WIDE} {centred(index, mask)}, {inverse}")
            part = code.value(f"fmul {WIDE} {part}, {load_lanes(code, scale, index, mask)}")
            if is_layer_norm:
                part = code.value(f"fadd {WIDE} {part}, {load_lanes(code, bias, index, mask)}")
            store_lanes(code, part, target, index, mask)
            return held

        visit_row(code, "each_result", length, write)
    code.effect("ret void")
    return DECLARATIONS + "declare float @llvm.sqrt.f32(float)\n" + code.text()
