"""Products of each row with a low-rank pair of matrices of its own, chosen by number from a stack.

Two functions: `project_down` takes dot products with the chosen ``down``, in the order of all products
(`dot_tiles`); `add_up` adds the rows of the chosen ``up`` to a base, one after the other. So a row's bits depend
neither on the other rows nor on how many matrices there are, and rows of zeros, which fill matrices of lower rank up,
change nothing. What a row did not choose is not read.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module
from jaxinfer.ops.cpu_kernels.machine_code import call
from jaxinfer.ops.cpu_kernels.product_code import OF_MATRIX, dot_functions
from jaxinfer.ops.cpu_kernels.product_pieces import chosen_matrix
from jaxinfer.ops.cpu_kernels.tiles import Vectors
from jaxinfer.ops.cpu_kernels.weighted_sums import WIDEST, weighted_sum_functions

# The columns of a piece of `add_up`, and the rows whose totals it keeps at a time.
_COLUMNS, _ROWS = 256, 32
_DOWN = ("x", "ids", "rows", "length", "per_item")
_UP = Record("x", "ids", "w", "base", "y", "rows", "rank", "outputs", "per_item")


def project_down(
    rows_BTI: Float[Array, "B T I"], stacks: Sequence[Float[Array, "N _ I"]], ids_B: Int[Array, " B"]
) -> tuple[Float[Array, "B T _"], ...]:
    """Return dot products of each row's tokens with the rows of its matrix of each stack, all in float32.

    ``ids_B`` are from 0 to N - 1; where one is negative nothing is computed, and the result means nothing.
    """
    batch, count, width = rows_BTI.shape
    num = stacks[0].shape[0]
    fits = all(stack.shape[0] == num and stack.shape[2] == width for stack in stacks)
    arrays = (rows_BTI, *stacks)
    if not fits or ids_B.shape != (batch,) or any(0 in each.shape or each.dtype != jnp.float32 for each in arrays):
        shapes = ", ".join(f"{each.dtype}{each.shape}" for each in arrays)
        raise ValueError(f"{shapes} and {ids_B.shape} do not fit")
    results = [jax.ShapeDtypeStruct((batch, count, stack.shape[1]), jnp.float32) for stack in stacks]
    build = functools.partial(down_module, count=len(stacks))
    ids_B = jnp.minimum(ids_B, num - 1).astype(jnp.int32)
    return tuple(call(f"project_down_{len(stacks)}", build, "float32", results, rows_BTI, ids_B, *stacks))


def add_up(
    base_BTO: Float[Array, "B T O"],
    inner_BTR: Float[Array, "B T R"],
    stack_NRO: Float[Array, "N R O"],
    ids_B: Int[Array, " B"],
) -> Float[Array, "B T O"]:
    """Return the base plus ``inner`` times each row's matrix; where an id is negative, the base's own bits."""
    batch, count, outputs = base_BTO.shape
    num, rank, width = stack_NRO.shape
    arrays = (base_BTO, inner_BTR, stack_NRO)
    fits = inner_BTR.shape == (batch, count, rank) and width == outputs and ids_B.shape == (batch,)
    if not fits or any(0 in each.shape or each.dtype != jnp.float32 for each in arrays):
        shapes = ", ".join(f"{each.dtype}{each.shape}" for each in arrays)
        raise ValueError(f"{shapes} and {ids_B.shape} do not fit")
    result = jax.ShapeDtypeStruct(base_BTO.shape, jnp.float32)
    ids_B = jnp.minimum(ids_B, num - 1).astype(jnp.int32)
    return call("add_up", up_module, "float32", result, inner_BTR, ids_B, stack_NRO, base_BTO)


def down_module(vectors: Vectors, count: int) -> str:
    """Return the assembly of ``handler(x [B, T, I], ids [B], w [N, R, I], ...) -> y [B, T, R], ...``."""
    record = Record(*_DOWN, *(f"{each}{matrix}" for matrix in range(count) for each in OF_MATRIX))

    def plan(code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
        x, ids, *matrices = arguments
        items, rows, length = x.shape(code, 3)
        outputs = [y.shape(code, 3)[2] for y in results]
        pointers = {"x": x.numbers, "ids": ids.numbers}
        numbers = {"rows": rows, "length": length, "per_item": str(count)}
        for index, (w, y) in enumerate(zip(matrices, results)):
            _, lines, stride = w.shape(code, 3)
            pointers |= {f"w{index}": w.numbers, f"y{index}": y.numbers}
            values = outputs[index], stride, lines, str(index)
            numbers |= {f"{name}{index}": value for name, value in zip(OF_MATRIX[2:], values)}
        pieces = code.arithmetic("mul", items, count)
        work = code.arithmetic("mul", items, code.arithmetic("mul", code.total(outputs), length))
        return Plan(pointers, numbers, pieces, work)

    functions = [*dot_functions(vectors, "float32"), _down_piece(record, count)]
    return make_module(vectors, functions, record, (2 + count, count), plan)


def _down_piece(record: Record, count: int) -> str:
    """Return ``piece(record, index)``, which computes all products of one item with one matrix."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    x, ids = (record.pointer(code, name) for name in _DOWN[:2])
    rows, length, per_item = (record.number(code, name) for name in _DOWN[2:])
    item = code.arithmetic("sdiv", "%index", per_item)
    among = code.arithmetic("srem", "%index", per_item)
    w, y, outputs, stride, lines, _ = chosen_matrix(code, record, count, among, OF_MATRIX[:2], OF_MATRIX[2:])
    chosen = _chosen(code, ids, item)
    of_w = code.arithmetic("mul", chosen, code.arithmetic("mul", lines, stride))
    places = [
        code.at("float", pointer, code.arithmetic("mul", item, code.arithmetic("mul", rows, size)))
        for pointer, size in ((x, length), (y, outputs))
    ]
    operands = f"ptr {places[0]}, ptr {code.at('float', w, of_w)}, ptr {places[1]}"
    sizes = ", ".join(f"i64 {number}" for number in (rows, outputs, length, length, stride, outputs))
    code.effect(f"call void @dots({operands}, {sizes})")
    code.effect("br label %done")
    code.start("done")
    code.effect("ret void")
    return code.text()


def up_module(vectors: Vectors) -> str:
    """Return the assembly of ``handler(x [B, T, R], ids [B], w [N, R, O], base [B, T, O]) -> y [B, T, O]``."""

    def plan(code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
        x, ids, w, base = arguments
        items, rows, rank = x.shape(code, 3)
        outputs = w.shape(code, 3)[2]
        buffers = zip(("x", "ids", "w", "base", "y"), (x, ids, w, base, results[0]))
        per_item = code.ceiling(outputs, _COLUMNS)
        numbers = {"rows": rows, "rank": rank, "outputs": outputs, "per_item": per_item}
        work = code.arithmetic("mul", items, code.arithmetic("mul", rank, outputs))
        pointers = {name: buffer.numbers for name, buffer in buffers}
        return Plan(pointers, numbers, code.arithmetic("mul", items, per_item), work)

    functions = [*weighted_sum_functions(vectors), _up_piece(vectors)]
    return make_module(vectors, functions, _UP, (4, 1), plan)


def _up_piece(vectors: Vectors) -> str:
    """Return ``piece(record, index)``, which computes some columns of one item."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    totals = code.value(f"alloca [{_ROWS * vectors.lanes} x float], align 64")
    x, ids, w, base, y = (_UP.pointer(code, name) for name in ("x", "ids", "w", "base", "y"))
    rows, rank, outputs, per_item = (_UP.number(code, name) for name in ("rows", "rank", "outputs", "per_item"))
    item = code.arithmetic("sdiv", "%index", per_item)
    first = code.arithmetic("mul", code.arithmetic("srem", "%index", per_item), _COLUMNS)
    width = code.smaller(code.arithmetic("sub", outputs, first), _COLUMNS)
    of_item = code.arithmetic("mul", item, rows)
    with code.repeated("each_copy", 0, rows) as each:
        row = code.arithmetic("add", of_item, each.index)
        place = code.arithmetic("add", code.arithmetic("mul", row, outputs), first)
        target, source = (code.at("float", pointer, place) for pointer in (y, base))
        size = code.arithmetic("mul", width, 4)
        code.effect(f"call void @llvm.memcpy.p0.p0.i64(ptr {target}, ptr {source}, i64 {size}, i1 false)")
    chosen = _chosen(code, ids, item)
    of_w = code.arithmetic("add", code.arithmetic("mul", chosen, code.arithmetic("mul", rank, outputs)), first)
    # Of the numbers of x that `add_weighted` adds up beside, which nobody reads here.
    code.effect(f"call void @llvm.memset.p0.i64(ptr {totals}, i8 0, i64 {4 * _ROWS * vectors.lanes}, i1 false)")
    with code.repeated("each_rows", 0, rows, _ROWS) as each_rows:
        count = code.smaller(code.arithmetic("sub", rows, each_rows.index), _ROWS)
        row = code.arithmetic("add", of_item, each_rows.index)
        place_x = code.at("float", x, code.arithmetic("mul", row, rank))
        of_y = code.arithmetic("add", code.arithmetic("mul", row, outputs), first)
        step = WIDEST * vectors.lanes
        with code.repeated("each_columns", 0, width, step) as each:
            columns = code.smaller(code.arithmetic("sub", width, each.index), step)
            place_w = code.at("float", w, code.arithmetic("add", of_w, each.index))
            place_y = code.at("float", y, code.arithmetic("add", of_y, each.index))
            operands = f"ptr {place_x}, ptr {place_w}, ptr {place_y}, ptr {totals}"
            sizes = ", ".join(f"i64 {number}" for number in (count, rank, rank, outputs, outputs, columns))
            code.effect(f"call void @add_weighted({operands}, {sizes})")
    code.effect("br label %done")
    code.start("done")
    code.effect("ret void")
    return _MEMORY + code.text()


_MEMORY = "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)\ndeclare void @llvm.memset.p0.i64(ptr, i8, i64, i1)\n"


def _chosen(code: Code, ids: str, item: str) -> str:
    """Append a jump to ``done`` where an item chose nothing, and else go on; return what it chose."""
    chosen = code.value(f"sext i32 {code.load_at('i32', ids, item)} to i64")
    code.branch(code.value(f"icmp slt i64 {chosen}, 0"), "done", "chosen")
    code.start("chosen")
    return chosen
