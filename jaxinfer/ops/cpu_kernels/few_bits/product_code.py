"""The assembly of products with weights in few bits: tiles over all rows and outputs, and the foreign function."""

from functools import partial

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.few_bits.tiles import (
    GROUP_LANES,
    few_bits_tile,
    prepare_function,
    row_kind,
    sums_function,
    tile_declarations,
    tile_name,
    widen_function,
    zeros_function,
)
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module
from jaxinfer.ops.cpu_kernels.product_pieces import chosen_matrix, chosen_tile, each_tile, even_tiles
from jaxinfer.ops.cpu_kernels.tiles import LLVM_TYPES, OUTPUTS, SIZES, Vectors
from jaxinfer.ops.few_bits.formats import RUN, Format

PIECES_PER_THREAD = 4
# The outputs of a block: their scales, and for many rows their widened codes, are written once for all tiles.
BLOCK = 16
# From so many tiles of rows on, widening a block once is faster than in each tile.
MANY_TILES = 3

_SHARED = ("x", "rows", "length", "groups", "span")
_POINTERS = ("codes", "scales", "minima", "scale_units", "minima_units", "y")
_INTEGERS = ("outputs", "first_piece")


def few_bits_module(vectors: Vectors, form: Format, count: int = 1, in_stacks: bool = False) -> str:
    """Return the assembly of ``handler(x [M, K], codes [N, B], scales [N, G], ...) -> y [M, N], ...``.

    There are ``count`` matrices, each with its own N, and with the arrays of its form (`Format.parts`). x is bfloat16,
    or float32 with numbers of bfloat16 where the processor has no products of pairs; y is float32.
    ``in_stacks`` there is an int32 after x, and every array has one more axis before its others: the matrices are those
    at that place of their stacks.
    """
    names = (*_SHARED, *(f"{name}{matrix}" for matrix in range(count) for name in (*_POINTERS, *_INTEGERS)))
    record = Record(*names)
    parts = len(form.part_names)
    kinds = [LLVM_TYPES[dtype] for _, dtype in form.parts(1, form.unit).values()]

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
        pointers = {"x": x.numbers}
        groups = matrices[1].shape(code, 2 + in_stacks)[-1]
        numbers = {"rows": rows, "length": length, "groups": groups, "span": span}
        for index, y in enumerate(results):
            own = [
                each.numbers if place is None else matrix_at(code, each, kind, place)
                for each, kind in zip(matrices[parts * index : parts * (index + 1)], kinds)
            ]
            places = {**dict(zip(form.part_names, own, strict=True)), "y": y.numbers}
            if form.has_zeros:
                places["minima"] = places["zeros"]
            # What a form does not have is never read.
            pointers |= {f"{name}{index}": places.get(name, own[0]) for name in _POINTERS}
            numbers |= {f"outputs{index}": outputs[index], f"first_piece{index}": code.total(pieces[:index])}
        return Plan(pointers, numbers, code.total(pieces), code.arithmetic("mul", all_outputs, length))

    functions = [*_functions(vectors, form), _piece(vectors, form, record, count)]
    return make_module(vectors, functions, record, (1 + in_stacks + parts * count, count), plan)


def matrix_at(code: Code, stack: Buffer, kind: str, place: str) -> str:
    """Return the address of one part of a matrix in a stack ``[X, N, ...]`` of them."""
    _, lines, numbers = stack.shape(code, 3)
    return code.at(kind, stack.numbers, code.arithmetic("mul", place, code.arithmetic("mul", lines, numbers)))


def _functions(vectors: Vectors, form: Format) -> list[str]:
    counts = range(1, vectors.rows + 1)
    tiles = [
        few_bits_tile(vectors, form, outputs, rows, is_widened)
        for outputs in (OUTPUTS, 1)
        for rows in counts
        for is_widened in (False, True)
    ]
    declared = tile_declarations(vectors)
    sums = [sums_function(vectors, form)] if form.is_shifted else []
    sums += [zeros_function(vectors, form)] if form.has_zeros else []
    return [declared, *tiles, *sums, widen_function(vectors, form), prepare_function(vectors, form)]


def _piece(vectors: Vectors, form: Format, record: Record, count: int) -> str:
    """Return ``piece(record, index)``, which computes ``span`` outputs of one matrix for all rows."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    kind, element = row_kind(vectors), LLVM_TYPES[form.scale_dtype]
    x = record.pointer(code, "x")
    rows, length, groups, span = (record.number(code, each) for each in _SHARED[1:])
    w, scales, minima, scale_units, minima_units, y, outputs, first_piece = chosen_matrix(
        code, record, count, "%index", _POINTERS, _INTEGERS
    )
    first = code.arithmetic("mul", code.arithmetic("sub", "%index", first_piece), span)
    here = code.smaller(span, code.arithmetic("sub", outputs, first))
    row_bytes = code.arithmetic("mul", code.arithmetic("sdiv", length, RUN), form.row_bytes(RUN))
    w = code.at("i8", w, code.arithmetic("mul", first, row_bytes))
    of_scales = code.arithmetic("mul", first, groups)
    scales = code.at(element, scales, of_scales)
    minima = code.at("i8" if form.has_zeros else element, minima, of_scales)
    units = code.arithmetic("sdiv", groups, form.supers or 1)
    of_units = code.arithmetic("mul", first, units)
    scale_units, minima_units = (code.at("half", each, of_units) for each in (scale_units, minima_units))
    y = code.at("float", y, first)

    # Of a group; none where two groups share a run.
    runs = code.arithmetic("sdiv", code.arithmetic("sdiv", length, RUN), groups)
    padded = code.arithmetic("mul", code.ceiling(groups, GROUP_LANES), GROUP_LANES)
    most = vectors.rows
    tiles = even_tiles(code, rows, most)
    is_many = code.value(f"icmp sge i64 {tiles.count}, {MANY_TILES}")

    # Memory for the block's scales and minima, the sums of the rows' groups, and the block's widened codes.
    of_block = code.arithmetic("mul", padded, BLOCK)
    of_sums = code.arithmetic("mul", padded, rows) if form.is_shifted else "0"
    of_codes = code.value(f"select i1 {is_many}, i64 {code.arithmetic('mul', length, BLOCK)}, i64 0")
    line = 64
    size = code.arithmetic("mul", code.total([of_block, of_block, of_sums]), SIZES["float"])
    size = code.arithmetic("add", size, code.arithmetic("mul", of_codes, SIZES[kind]))
    memory = code.value(f"call ptr @malloc(i64 {code.arithmetic('add', size, line)})")
    past = code.arithmetic("and", code.value(f"ptrtoint ptr {memory} to i64"), line - 1)
    own_scales = code.at("i8", memory, code.arithmetic("sub", line, past))
    own_minima = code.at("float", own_scales, of_block)
    own_sums = code.at("float", own_minima, of_block)
    own_codes = code.at("float", own_sums, of_sums)

    if form.is_shifted:
        code.effect(
            f"call void @add_groups(ptr {x}, ptr {own_sums}, i64 {rows}, i64 {groups}, i64 {runs}, i64 {padded})"
        )
    with code.repeated("each_block", 0, here, BLOCK) as block:
        count_here = code.smaller(code.arithmetic("sub", here, block.index), BLOCK)
        block_w = code.at("i8", w, code.arithmetic("mul", block.index, row_bytes))
        of_scales = code.arithmetic("mul", block.index, groups)
        ahead = code.arithmetic("mul", groups, BLOCK * SIZES[element])
        of_units = code.arithmetic("mul", block.index, units)
        both = (scales, scale_units, own_scales), (minima, minima_units, own_minima)
        for given, given_units, own in both[: 1 + form.has_minima]:
            place, own_units = code.at(element, given, of_scales), code.at("half", given_units, of_units)
            integers = ", i64 ".join((count_here, groups, padded, ahead))
            code.effect(f"call void @prepare(ptr {place}, ptr {own_units}, ptr {own}, i64 {integers})")
        if form.has_zeros:
            pointers = f"ptr {code.at('i8', minima, of_scales)}, ptr {own_scales}, ptr {own_minima}"
            integers = ", i64 ".join((count_here, groups, padded))
            code.effect(f"call void @prepare_zeros({pointers}, i64 {integers})")
        code.branch(is_many, "widened", "as_they_lie")
        code.start("widened")
        all_runs = code.arithmetic("mul", count_here, code.arithmetic("sdiv", length, RUN))
        code.effect(f"call void @widen(ptr {block_w}, ptr {own_codes}, i64 {all_runs})")
        code.effect("br label %as_they_lie")
        code.start("as_they_lie")
        tile_w = code.value(f"select i1 {is_many}, ptr {own_codes}, ptr {block_w}")
        stride = code.value(f"select i1 {is_many}, i64 {code.arithmetic('mul', length, SIZES[kind])}, i64 {row_bytes}")
        whole = code.arithmetic("and", count_here, -OUTPUTS)
        with each_tile(code, tiles) as (_, row, some):
            row_x = code.at(kind, x, code.arithmetic("mul", row, length))
            row_sums = code.at("float", own_sums, code.arithmetic("mul", row, padded))
            row_y = code.at("float", y, code.arithmetic("add", code.arithmetic("mul", row, outputs), block.index))
            for name, width, start, end in (("wide", OUTPUTS, 0, whole), ("one", 1, whole, count_here)):
                tile = chosen_tile(code, some, most, partial(_address, code, is_many, width))
                with code.repeated(f"each_{name}", start, end, width) as each:
                    of_scales = code.arithmetic("mul", each.index, padded)
                    pointers = (
                        row_x,
                        code.at("i8", tile_w, code.arithmetic("mul", each.index, stride)),
                        code.at("float", own_scales, of_scales),
                        code.at("float", own_minima, of_scales),
                        row_sums,
                        code.at("float", row_y, each.index),
                    )
                    integers = groups, runs, length, stride, padded, outputs
                    operands = [*(f"ptr {each}" for each in pointers), *(f"i64 {each}" for each in integers)]
                    code.effect(f"call void {tile}({', '.join(operands)})")
    code.effect(f"call void @free(ptr {memory})")
    code.effect("ret void")
    return code.text()


def _address(code: Code, is_many: str, outputs: int, rows: int) -> str:
    """Return the address of the tile of so many outputs and rows, for codes that are widened or lie as they do."""
    widened, direct = (tile_name(outputs, rows, is_widened) for is_widened in (True, False))
    return code.value(f"select i1 {is_many}, ptr @{widened}, ptr @{direct}")
