"""The assembly of products of rows in int8 with weights in few bits: tiles over all rows, and the foreign function."""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.few_bits.tiles import GROUP_LANES, prepare_function
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module
from jaxinfer.ops.cpu_kernels.product_pieces import chosen_matrix, chosen_tile, each_tile, even_tiles
from jaxinfer.ops.cpu_kernels.rounded_rows.tiles import dot_declarations, rounded_tile, tile_name, widened
from jaxinfer.ops.cpu_kernels.tiles import LLVM_TYPES, OUTPUTS, SIZES, Vectors
from jaxinfer.ops.few_bits.formats import Format

_PIECES_PER_THREAD = 4
# The outputs of a block, whose codes stay in a cache for all tiles of rows and whose scales are written once.
_BLOCK = 16

_SHARED = ("x", "sums", "row_scales", "rows", "pitch", "sum_pitch", "length", "groups", "span")
_POINTERS, _INTEGERS = ("codes", "scales", "minima", "y"), ("outputs", "first_piece")


def rounded_module(vectors: Vectors, form: Format, count: int = 1, has_scales: bool = True) -> str:
    """Return the assembly of ``handler(x [M, P], sums [M, S], row_scales [M, 1], codes [N, B], ...) -> y [M, N], ...``.

    There are ``count`` matrices, each with its own N, and with the arrays of its form (`Format.parts`). x is int8, with
    zeros past the length of a row; sums are those of x's groups, with zeros past them, or of its rows. y is float32;
    without ``has_scales``, which forms of one scale a row may do without, the products of integers in int32.
    """
    wide = widened(vectors)
    names = (*_SHARED, *(f"{name}{matrix}" for matrix in range(count) for name in (*_POINTERS, *_INTEGERS)))
    record, parts = Record(*names), len(form.part_names)

    def plan(code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
        x, sums, row_scales, *matrices = arguments
        rows, pitch = x.shape(code, 2)
        length = code.arithmetic("sdiv", code.arithmetic("mul", matrices[0].shape(code, 2)[1], 8), form.bits)
        outputs = [y.shape(code, 2)[1] for y in results]
        all_outputs = code.total(outputs)
        wanted = code.arithmetic("mul", threads, _PIECES_PER_THREAD)
        span = code.arithmetic("mul", code.ceiling(code.ceiling(all_outputs, wanted), OUTPUTS), OUTPUTS)
        pieces = [code.ceiling(each, span) for each in outputs]
        pointers = {"x": x.numbers, "sums": sums.numbers, "row_scales": row_scales.numbers}
        groups, sum_pitch = (each.shape(code, 2)[1] for each in (matrices[1], sums))
        numbers = {"rows": rows, "pitch": pitch, "sum_pitch": sum_pitch, "length": length, "groups": groups}
        numbers["span"] = span
        for index, y in enumerate(results):
            own = [each.numbers for each in matrices[parts * index : parts * (index + 1)]]
            places = {**dict(zip(form.part_names, own, strict=True)), "y": y.numbers}
            # What a form does not have is never read.
            pointers |= {f"{name}{index}": places.get(name, own[0]) for name in _POINTERS}
            numbers |= {f"outputs{index}": outputs[index], f"first_piece{index}": code.total(pieces[:index])}
        weights = code.arithmetic("mul", all_outputs, length)
        return Plan(pointers, numbers, code.total(pieces), weights)

    tiles = [
        rounded_tile(wide, form, outputs, rows, has_scales)
        for outputs in (OUTPUTS, 1)
        for rows in range(1, wide.rows + 1)
    ]
    prepare = [] if form.group is None else [prepare_function(wide, form)]
    functions = [dot_declarations(wide), *tiles, *prepare, _piece(wide, form, record, count)]
    return make_module(wide, functions, record, (3 + parts * count, count), plan)


def _piece(vectors: Vectors, form: Format, record: Record, count: int) -> str:
    """Return ``piece(record, index)``, which computes ``span`` outputs of one matrix for all rows."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    element = LLVM_TYPES[form.scale_dtype]
    x, sums, row_scales = (record.pointer(code, each) for each in _SHARED[:3])
    rows, pitch, sum_pitch, length, groups, span = (record.number(code, each) for each in _SHARED[3:])
    w, scales, minima, y, outputs, first_piece = chosen_matrix(code, record, count, "%index", _POINTERS, _INTEGERS)
    first = code.arithmetic("mul", code.arithmetic("sub", "%index", first_piece), span)
    here = code.smaller(span, code.arithmetic("sub", outputs, first))
    row_bytes = code.arithmetic("sdiv", code.arithmetic("mul", length, form.bits), 8)
    w = code.at("i8", w, code.arithmetic("mul", first, row_bytes))
    of_scales = code.arithmetic("mul", first, groups)
    scales, minima = (code.at(element, each, of_scales) for each in (scales, minima))
    y = code.at("float", y, first)
    padded, memory = groups, ""
    own_scales, own_minima = scales, minima
    if form.group is not None:
        padded = code.arithmetic("mul", code.ceiling(groups, GROUP_LANES), GROUP_LANES)
        of_block = code.arithmetic("mul", padded, _BLOCK)
        size = code.arithmetic("mul", of_block, 2 * SIZES["float"])
        memory = own_scales = code.value(f"call ptr @malloc(i64 {size})")
        own_minima = code.at("float", own_scales, of_block)
    tiles = even_tiles(code, rows, vectors.rows)
    with code.repeated("each_block", 0, here, _BLOCK) as block:
        count_here = code.smaller(code.arithmetic("sub", here, block.index), _BLOCK)
        block_w = code.at("i8", w, code.arithmetic("mul", block.index, row_bytes))
        block_scales, block_minima = own_scales, own_minima
        if form.group is None:
            block_scales = code.at("float", scales, block.index)
        else:
            of_scales = code.arithmetic("mul", block.index, groups)
            ahead = code.arithmetic("mul", groups, _BLOCK * SIZES[element])
            both = ((scales, own_scales), (minima, own_minima))[: 1 + form.has_minima]
            for given, own in both:
                place, integers = code.at(element, given, of_scales), ", i64 ".join((count_here, groups, padded, ahead))
                # No form here has units of scales.
                code.effect(f"call void @prepare(ptr {place}, ptr {place}, ptr {own}, i64 {integers})")
        whole = code.arithmetic("and", count_here, -OUTPUTS)
        with each_tile(code, tiles) as (_, row, some):
            row_x = code.at("i8", x, code.arithmetic("mul", row, pitch))
            row_sums = code.at("float", sums, code.arithmetic("mul", row, sum_pitch))
            own_row_scales = code.at("float", row_scales, row)
            row_y = code.at("float", y, code.arithmetic("add", code.arithmetic("mul", row, outputs), block.index))
            for name, width, start, end in (("wide", OUTPUTS, 0, whole), ("one", 1, whole, count_here)):
                tile = chosen_tile(code, some, vectors.rows, lambda rows: f"@{tile_name(width, rows)}")  # noqa: B023
                with code.repeated(f"each_{name}", start, end, width) as each:
                    of_scales = code.arithmetic("mul", each.index, padded)
                    pointers = (
                        row_x,
                        code.at("i8", block_w, code.arithmetic("mul", each.index, row_bytes)),
                        code.at("float", block_scales, of_scales),
                        code.at("float", block_minima, of_scales),
                        row_sums,
                        own_row_scales,
                        code.at("float", row_y, each.index),
                    )
                    integers = length, pitch, row_bytes, padded, sum_pitch, outputs
                    operands = [*(f"ptr {each}" for each in pointers), *(f"i64 {each}" for each in integers)]
                    code.effect(f"call void {tile}({', '.join(operands)})")
    if memory:
        code.effect(f"call void @free(ptr {memory})")
    code.effect("ret void")
    return code.text()
