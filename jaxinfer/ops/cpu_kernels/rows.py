"""Reads rows of a table of 16-bit floats on a CPU, in place.

XLA's CPU backend first copies the table to another type, in each program that has a loop: 20 ms for the default model's
57 MB.
"""

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module
from jaxinfer.ops.cpu_kernels.machine_code import call
from jaxinfer.ops.cpu_kernels.tiles import Vectors

_RECORD = Record("table", "ids", "rows", "lines", "length")


def take_rows(table_VD: Float[Array, "V D"], ids_N: Int[Array, " N"]) -> Float[Array, "N D"]:
    """Return rows of a table of bfloat16 or float16; an id outside it reads its first or last row.

    Check `machine_code.host_vectors` first. If a compiler splits arrays over devices, each device gets the whole array.
    """
    if table_VD.dtype.itemsize != 2 or 0 in table_VD.shape:
        raise ValueError(f"{table_VD.dtype}{table_VD.shape} is no table of 16-bit floats")
    result = jax.ShapeDtypeStruct((*ids_N.shape, table_VD.shape[1]), table_VD.dtype)
    return call("take_rows", rows_module, "16bit", result, table_VD, ids_N.astype(jnp.int32))


def rows_module(vectors: Vectors) -> str:
    """Return the assembly of ``handler(table [V, D], ids [N]) -> rows [N, D]``, of 16-bit numbers and int32."""

    def plan(code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
        table, ids = arguments
        lines, length = table.shape(code, 2)
        (count,) = ids.shape(code, 1)
        pointers = {"table": table.numbers, "ids": ids.numbers, "rows": results[0].numbers}
        return Plan(pointers, {"lines": lines, "length": length}, count, code.arithmetic("mul", count, length))

    return make_module(vectors, [_piece()], _RECORD, (2, 1), plan)


def _piece() -> str:
    """Return ``piece(record, index)``, which copies a row."""
    code = Code("internal void @piece(ptr %record, i64 %index)")
    table, ids, rows = (_RECORD.pointer(code, name) for name in ("table", "ids", "rows"))
    lines, length = (_RECORD.number(code, name) for name in ("lines", "length"))
    line = code.value(f"sext i32 {code.load_at('i32', ids, '%index')} to i64")
    line = code.larger(code.smaller(line, code.arithmetic("sub", lines, 1)), 0)
    place, row = (
        code.at("i16", numbers, code.arithmetic("mul", index, length))
        for numbers, index in ((table, line), (rows, "%index"))
    )
    size = code.arithmetic("mul", length, 2)
    code.effect(f"call void @llvm.memcpy.p0.p0.i64(ptr {row}, ptr {place}, i64 {size}, i1 false)")
    code.effect("ret void")
    return "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)\n" + code.text()
