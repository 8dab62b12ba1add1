"""The assembly of products of rows in int8 with weights in few bits: tiles over all rows, and the foreign function."""

from typing import NamedTuple

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.few_bits.tiles import GROUP_LANES, prepare_function
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module
from jaxinfer.ops.cpu_kernels.product_pieces import call_tile, chosen_matrix, chosen_tile, each_tile, even_tiles
from jaxinfer.ops.cpu_kernels.rounded_rows import byte_sums, grouped_tiles
from jaxinfer.ops.cpu_kernels.rounded_rows.tiles import rounded_tile, tile_name, widened
from jaxinfer.ops.cpu_kernels.sixteen_outputs import OUTPUTS as SIXTEEN
from jaxinfer.ops.cpu_kernels.sixteen_outputs import declarations, turn_function, whole_outputs
from jaxinfer.ops.cpu_kernels.tiles import LLVM_TYPES, OUTPUTS, SIZES, Vectors
from jaxinfer.ops.few_bits.formats import Format

_PIECES_PER_THREAD = 4
# The outputs of a block, whose codes stay in a cache for all tiles of rows.
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
        unit = OUTPUTS if form.group is None else SIXTEEN
        span = code.arithmetic("mul", code.ceiling(code.ceiling(all_outputs, wanted), unit), unit)
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

    if form.group is None:
        tiles = [
            rounded_tile(wide, outputs, rows, has_scales)
            for outputs in (OUTPUTS, 1)
            for rows in range(1, wide.rows + 1)
        ]
    else:
        every = range(1, grouped_tiles.rows_of_tiles(wide) + 1)
        tiles = [grouped_tiles.grouped_tile(wide, form, rows) for rows in every]
        tiles += [prepare_function(wide, form), turn_function(), declarations()]
    functions = [byte_sums.declarations(wide), *tiles, _piece(wide, form, record, count)]
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
    part = _Part(
        x, w, scales, minima, sums, row_scales, y, rows, pitch, sum_pitch, length, groups, here, outputs, row_bytes
    )
    if form.group is None:
        _multiply_in_rows(code, vectors, part)
    else:
        _multiply_in_groups(code, vectors, form, part)
    code.effect("ret void")
    return code.text()


class _Part(NamedTuple):
    """The addresses and integers of a piece: its outputs are ``here`` of a matrix, whose rows of y have ``outputs``."""

    x: str
    w: str
    scales: str
    minima: str
    sums: str
    row_scales: str
    y: str
    rows: str
    pitch: str
    sum_pitch: str
    length: str
    groups: str
    here: str
    outputs: str
    row_bytes: str

    def row(self, code: Code, row: str, output: str) -> tuple[str, str, str, str]:
        """Return where a row's codes, sums and scale are, and where its results from an output on go."""
        return (
            code.at("i8", self.x, code.arithmetic("mul", row, self.pitch)),
            code.at("float", self.sums, code.arithmetic("mul", row, self.sum_pitch)),
            code.at("float", self.row_scales, row),
            code.at("float", self.y, code.arithmetic("add", code.arithmetic("mul", row, self.outputs), output)),
        )


def _multiply_in_rows(code: Code, vectors: Vectors, part: _Part) -> None:
    """Append the products of codes that have one scale a row: blocks of outputs, each for all tiles of rows."""
    tiles = even_tiles(code, part.rows, vectors.rows)
    with code.repeated("each_block", 0, part.here, _BLOCK) as block:
        past = code.smaller(code.arithmetic("add", block.index, _BLOCK), part.here)
        whole = code.arithmetic(
            "add", block.index, code.arithmetic("and", code.arithmetic("sub", past, block.index), -OUTPUTS)
        )
        with each_tile(code, tiles) as (_, row, some):
            for name, width, start, end in (("wide", OUTPUTS, block.index, whole), ("one", 1, whole, past)):
                tile = chosen_tile(code, some, vectors.rows, lambda rows: f"@{tile_name(width, rows)}")  # noqa: B023
                with code.repeated(f"each_{name}", start, end, width) as each:
                    x, sums, row_scales, y = part.row(code, row, each.index)
                    w = code.at("i8", part.w, code.arithmetic("mul", each.index, part.row_bytes))
                    pointers = x, w, code.at("float", part.scales, each.index), sums, row_scales, y
                    integers = part.length, part.pitch, part.row_bytes, part.sum_pitch, part.outputs
                    call_tile(code, tile, pointers, integers)


def _multiply_in_groups(code: Code, vectors: Vectors, form: Format, part: _Part) -> None:
    """Append the products of codes in groups: 16 outputs, whose scales are turned, for all tiles of rows.

    Where fewer outputs are left, their codes are copied in front of any others, so that nothing past them is read.
    """
    element, count, groups, row_bytes = LLVM_TYPES[form.scale_dtype], SIXTEEN, part.groups, part.row_bytes
    most = grouped_tiles.rows_of_tiles(vectors)
    padded = code.arithmetic("mul", code.ceiling(groups, GROUP_LANES), GROUP_LANES)
    numbers = code.arithmetic("mul", padded, count)
    size = code.arithmetic("mul", numbers, 3 * SIZES["float"])
    all_codes = code.arithmetic("mul", row_bytes, count)
    lines = code.value(f"call ptr @malloc(i64 {code.arithmetic('add', size, all_codes)})")
    turned = [code.at("float", lines, code.arithmetic("mul", numbers, which)) for which in (1, 2)]
    copies = code.at("i8", lines, size)
    ahead = code.arithmetic("mul", groups, count * SIZES[element])
    tiles = even_tiles(code, part.rows, most)
    with code.repeated("each_block", 0, part.here, count) as block:
        some = code.smaller(code.arithmetic("sub", part.here, block.index), count)
        for given, to in list(zip((part.scales, part.minima), turned))[: 1 + form.has_minima]:
            place = code.at(element, given, code.arithmetic("mul", block.index, groups))
            # No form here has units of scales.
            call_tile(code, "@prepare", (place, place, lines), (some, groups, padded, ahead))
            call_tile(code, "@turn", (lines, to), (padded,))
        w = code.at("i8", part.w, code.arithmetic("mul", block.index, row_bytes))
        codes = whole_outputs(code, w, copies, some, row_bytes)
        with each_tile(code, tiles) as (_, row, rows_here):
            tile = chosen_tile(code, rows_here, most, lambda rows: f"@{grouped_tiles.tile_name(rows)}")
            x, sums, row_scales, y = part.row(code, row, block.index)
            pointers = x, codes, *turned, sums, row_scales, y
            integers = groups, part.pitch, row_bytes, part.sum_pitch, part.outputs, some
            call_tile(code, tile, pointers, integers)
    code.effect(f"call void @free(ptr {lines})")
