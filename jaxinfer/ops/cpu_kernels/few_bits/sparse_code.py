"""The assembly of products with sparse weights: tiles over all rows and outputs, and the foreign function."""

from functools import partial

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.few_bits.product_code import BLOCK, MANY_TILES, PIECES_PER_THREAD, matrix_at
from jaxinfer.ops.cpu_kernels.few_bits.sparse_tiles import (
    place_bytes,
    run_bytes,
    sparse_tile,
    spread_function,
    tile_declarations,
    tile_name,
)
from jaxinfer.ops.cpu_kernels.few_bits.tiles import LINE, row_kind
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module
from jaxinfer.ops.cpu_kernels.product_pieces import chosen_matrix, chosen_tile, each_tile, even_tiles
from jaxinfer.ops.cpu_kernels.tiles import OUTPUTS, SIZES, Vectors
from jaxinfer.ops.few_bits.formats import Format

_SHARED = ("x", "rows", "length", "count", "span")
_POINTERS = ("codes", "places", "y")
_INTEGERS = ("outputs", "first_piece")


def sparse_module(vectors: Vectors, form: Format, count: int = 1, in_stacks: bool = False) -> str:
    """Return the assembly of ``handler(x [M, K], codes [N, S], places [N, P], ...) -> y [M, N], ...``.

    It is `few_bits_module` for a sparse form.
    """
    names = (*_SHARED, *(f"{name}{matrix}" for matrix in range(count) for name in (*_POINTERS, *_INTEGERS)))
    record = Record(*names)
    kinds = "bfloat", "i16" if form.block > 1 else "i8"

    def plan(code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
        x, *matrices = arguments
        rows, length = x.shape(code, 2)
        place = None
        if in_stacks:
            index, *matrices = matrices
            place = index.layer(code, matrices[0].shape(code, 1)[0])
        outputs = [y.shape(code, 2)[1] for y in results]
        all_outputs = code.total(outputs)
        wanted = code.arithmetic("mul", threads, PIECES_PER_THREAD)
        span = code.arithmetic("mul", code.ceiling(code.ceiling(all_outputs, wanted), OUTPUTS), OUTPUTS)
        pieces = [code.ceiling(each, span) for each in outputs]
        stored = matrices[0].shape(code, 2 + in_stacks)[-1]
        runs = code.arithmetic("sdiv", code.arithmetic("mul", stored, SIZES["bfloat"]), run_bytes(form))
        pointers = {"x": x.numbers}
        numbers = {"rows": rows, "length": length, "count": runs, "span": span}
        for index, y in enumerate(results):
            own = matrices[2 * index : 2 * index + 2]
            found = [
                each.numbers if place is None else matrix_at(code, each, kind, place) for each, kind in zip(own, kinds)
            ]
            pointers |= {f"{name}{index}": value for name, value in zip(_POINTERS, [*found, y.numbers])}
            numbers |= {f"outputs{index}": outputs[index], f"first_piece{index}": code.total(pieces[:index])}
        return Plan(pointers, numbers, code.total(pieces), code.arithmetic("mul", all_outputs, stored))

    functions = [*_functions(vectors, form), _piece(vectors, form, record, count)]
    return make_module(vectors, functions, record, (1 + in_stacks + 2 * count, count), plan)


def _widens(form: Format) -> bool:
    """Whether many rows multiply a copy with zeros: two in four take an instruction to be spread, blocks none."""
    return form.block == 1


def _functions(vectors: Vectors, form: Format) -> list[str]:
    tiles = [
        sparse_tile(vectors, form, outputs, rows, is_widened)
        for outputs in (OUTPUTS, 1)
        for rows in range(1, vectors.rows + 1)
        for is_widened in ((False, True) if _widens(form) else (False,))
    ]
    return [tile_declarations(form), *tiles, *([spread_function(form)] if _widens(form) else [])]


def _piece(vectors: Vectors, form: Format, record: Record, count: int) -> str:
    """Return ``piece(record, index)``, which computes ``span`` outputs of one matrix for all rows."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    kind, most = row_kind(vectors), vectors.rows
    x = record.pointer(code, "x")
    rows, length, runs, span = (record.number(code, each) for each in _SHARED[1:])
    w, places, y, outputs, first_piece = chosen_matrix(code, record, count, "%index", _POINTERS, _INTEGERS)
    first = code.arithmetic("mul", code.arithmetic("sub", "%index", first_piece), span)
    here = code.smaller(span, code.arithmetic("sub", outputs, first))
    row_bytes, apart = (code.arithmetic("mul", runs, size(form)) for size in (run_bytes, place_bytes))
    w = code.at("i8", w, code.arithmetic("mul", first, row_bytes))
    places = code.at("i8", places, code.arithmetic("mul", first, apart))
    y = code.at("float", y, first)
    tiles = even_tiles(code, rows, most)
    is_many = code.value(f"icmp sge i64 {tiles.count}, {MANY_TILES}") if _widens(form) else "false"
    memory = spread = ""
    if _widens(form):
        of_codes = code.arithmetic("mul", length, BLOCK * SIZES["bfloat"])
        size = code.value(f"select i1 {is_many}, i64 {of_codes}, i64 0")
        memory = code.value(f"call ptr @malloc(i64 {code.arithmetic('add', size, LINE)})")
        past = code.arithmetic("and", code.value(f"ptrtoint ptr {memory} to i64"), LINE - 1)
        spread = code.at("i8", memory, code.arithmetic("sub", LINE, past))
    with code.repeated("each_block", 0, here, BLOCK) as block:
        count_here = code.smaller(code.arithmetic("sub", here, block.index), BLOCK)
        block_w = code.at("i8", w, code.arithmetic("mul", block.index, row_bytes))
        block_places = code.at("i8", places, code.arithmetic("mul", block.index, apart))
        tile_w, stride = block_w, row_bytes
        if _widens(form):
            code.branch(is_many, "widened", "as_they_lie")
            code.start("widened")
            all_runs = code.arithmetic("mul", count_here, runs)
            code.effect(f"call void @spread(ptr {block_w}, ptr {block_places}, ptr {spread}, i64 {all_runs})")
            code.effect("br label %as_they_lie")
            code.start("as_they_lie")
            wide_bytes = code.arithmetic("mul", length, SIZES["bfloat"])
            tile_w = code.value(f"select i1 {is_many}, ptr {spread}, ptr {block_w}")
            stride = code.value(f"select i1 {is_many}, i64 {wide_bytes}, i64 {row_bytes}")
        whole = code.arithmetic("and", count_here, -OUTPUTS)
        with each_tile(code, tiles) as (_, row, some):
            row_x = code.at(kind, x, code.arithmetic("mul", row, length))
            row_y = code.at("float", y, code.arithmetic("add", code.arithmetic("mul", row, outputs), block.index))
            for name, width, start, end in (("wide", OUTPUTS, 0, whole), ("one", 1, whole, count_here)):
                tile = chosen_tile(code, some, most, partial(_address, code, form, is_many, width))
                with code.repeated(f"each_{name}", start, end, width) as each:
                    pointers = (
                        row_x,
                        code.at("i8", tile_w, code.arithmetic("mul", each.index, stride)),
                        code.at("i8", block_places, code.arithmetic("mul", each.index, apart)),
                        code.at("float", row_y, each.index),
                    )
                    integers = runs, length, stride, apart, outputs
                    operands = [*(f"ptr {each}" for each in pointers), *(f"i64 {each}" for each in integers)]
                    code.effect(f"call void {tile}({', '.join(operands)})")
    if _widens(form):
        code.effect(f"call void @free(ptr {memory})")
    code.effect("ret void")
    return code.text()


def _address(code: Code, form: Format, is_many: str, outputs: int, rows: int) -> str:
    """Return the address of the tile of so many outputs and rows, for runs with zeros or for what is stored."""
    if not _widens(form):
        return f"@{tile_name(outputs, rows, False)}"
    widened, direct = (tile_name(outputs, rows, is_widened) for is_widened in (True, False))
    return code.value(f"select i1 {is_many}, ptr @{widened}, ptr @{direct}")
