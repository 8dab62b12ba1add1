"""The assembly of products with weights in few bits: tiles over all rows and outputs, and the foreign function."""

from functools import partial
from typing import NamedTuple

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.few_bits import grouped_tiles, many_rows
from jaxinfer.ops.cpu_kernels.few_bits.grouped_tiles import Numbers, has_grouped_tiles, numbers_of
from jaxinfer.ops.cpu_kernels.few_bits.many_rows import RowsOfTiles
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
from jaxinfer.ops.cpu_kernels.product_pieces import call_tile, chosen_matrix, chosen_tile, each_tile, even_tiles
from jaxinfer.ops.cpu_kernels.sixteen_outputs import declarations, in_sixteen_lanes, turn_function, whole_outputs
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

    There are ``count`` matrices, each with its own N, and with the arrays of its form (`Format.parts`). x is of
    `row_dtype`, but has numbers of bfloat16; y is float32.
    ``in_stacks`` there is an int32 after x, and every array has one more axis before its others: the matrices are those
    at that place of their stacks.
    """
    names = (*_SHARED, *(f"{name}{matrix}" for matrix in range(count) for name in (*_POINTERS, *_INTEGERS)))
    record = Record(*names)
    parts = len(form.part_names)
    is_grouped = has_grouped_tiles(vectors, form)
    numbers_here = numbers_of(vectors, form) if is_grouped else None
    vectors = in_sixteen_lanes(vectors) if is_grouped else vectors
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
        unit = BLOCK if is_grouped else OUTPUTS
        span = code.arithmetic("mul", code.ceiling(code.ceiling(all_outputs, wanted), unit), unit)
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

    functions = [*_functions(vectors, form, numbers_here), _piece(vectors, form, numbers_here, record, count)]
    return make_module(vectors, functions, record, (1 + in_stacks + parts * count, count), plan)


def matrix_at(code: Code, stack: Buffer, kind: str, place: str, axes: int = 2) -> str:
    """Return the address of one part of a matrix in a stack of them; the part has so many axes."""
    at = place
    for length in stack.shape(code, 1 + axes)[1:]:
        at = code.arithmetic("mul", at, length)
    return code.at(kind, stack.numbers, at)


def row_dtype(vectors: Vectors, form: Format) -> str:
    """Return the dtype of rows that are multiplied by weights of a form."""
    return "bfloat16" if vectors.pairs_bfloat16 or has_grouped_tiles(vectors, form) else "float32"


def _functions(vectors: Vectors, form: Format, numbers: Numbers | None) -> list[str]:
    sums = [sums_function(vectors, LLVM_TYPES[row_dtype(vectors, form)])] if form.is_shifted else []
    sums += [zeros_function(vectors, form.group is not None or numbers is not None)] if form.has_zeros else []
    sums.append(prepare_function(vectors, form))
    if numbers is not None:
        tiles = [grouped_tiles.grouped_tile(vectors, form, numbers, *each) for each in many_rows.row_counts(numbers)]
        widen = many_rows.widen_functions(numbers, partial(grouped_tiles.lines_of_run, form=form))
        return [declarations(), *numbers.functions(), *tiles, *sums, *widen, turn_function()]
    declared = tile_declarations(vectors)
    counts = range(1, vectors.rows + 1)
    tiles = [
        few_bits_tile(vectors, form, outputs, rows, is_widened)
        for outputs in (OUTPUTS, 1)
        for rows in counts
        for is_widened in (False, True)
    ]
    return [declared, *tiles, *sums, widen_function(vectors, form)]


def _piece(vectors: Vectors, form: Format, numbers: Numbers | None, record: Record, count: int) -> str:
    """Return ``piece(record, index)``, which computes ``span`` outputs of one matrix for all rows."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    element = LLVM_TYPES[form.scale_dtype]
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
    sizes = _Sizes(rows, length, groups, runs, padded, row_bytes, outputs)
    part = _InRows(code, vectors, sizes) if numbers is None else _Grouped(code, numbers, form, sizes)

    # Memory for the block's scales and minima, for the sums of the rows' groups, and for the part's own.
    of_block = code.arithmetic("mul", padded, BLOCK)
    of_sums = code.arithmetic("mul", padded, rows) if form.is_shifted else "0"
    line = 64
    size = code.arithmetic("mul", code.total([of_block, of_block, of_sums]), SIZES["float"])
    size = code.arithmetic("add", size, part.num_bytes)
    memory = code.value(f"call ptr @malloc(i64 {code.arithmetic('add', size, line)})")
    past = code.arithmetic("and", code.value(f"ptrtoint ptr {memory} to i64"), line - 1)
    own_scales = code.at("i8", memory, code.arithmetic("sub", line, past))
    own_minima = code.at("float", own_scales, of_block)
    own_sums = code.at("float", own_minima, of_block)

    if form.is_shifted:
        code.effect(
            f"call void @add_groups(ptr {x}, ptr {own_sums}, i64 {rows}, i64 {groups}, i64 {runs}, i64 {padded})"
        )
    part.begin(x, own_sums, code.at("float", own_sums, of_sums))
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
        part.multiply(block_w, own_scales, own_minima, code.at("float", y, block.index), count_here)
    code.effect(f"call void @free(ptr {memory})")
    code.effect("ret void")
    return code.text()


class _Sizes(NamedTuple):
    """The integers of a piece: of its rows, of a row's groups and runs, and of a row of codes and of y."""

    rows: str
    length: str
    groups: str
    runs: str
    padded: str
    row_bytes: str
    outputs: str


class _InRows:
    """Appends how tiles of a few outputs, each added up along its row, go over a piece.

    Of many rows, a block is widened first. ``num_bytes`` is the memory that this takes.
    """

    def __init__(self, code: Code, vectors: Vectors, sizes: _Sizes) -> None:
        self._code, self._vectors, self._sizes, self._kind = code, vectors, sizes, row_kind(vectors)
        self._tiles = even_tiles(code, sizes.rows, vectors.rows)
        self._is_many = code.value(f"icmp sge i64 {self._tiles.count}, {MANY_TILES}")
        of_codes = code.arithmetic("mul", sizes.length, BLOCK * SIZES[self._kind])
        self.num_bytes = code.value(f"select i1 {self._is_many}, i64 {of_codes}, i64 0")

    def begin(self, x: str, sums: str, memory: str) -> None:
        self._x, self._sums, self._codes = x, sums, memory

    def multiply(self, w: str, scales: str, minima: str, y: str, count: str) -> None:
        """Append the products with a block of outputs."""
        code, sizes, is_many = self._code, self._sizes, self._is_many
        code.branch(is_many, "widened", "as_they_lie")
        code.start("widened")
        all_runs = code.arithmetic("mul", count, code.arithmetic("sdiv", sizes.length, RUN))
        code.effect(f"call void @widen(ptr {w}, ptr {self._codes}, i64 {all_runs})")
        code.effect("br label %as_they_lie")
        code.start("as_they_lie")
        tile_w = code.value(f"select i1 {is_many}, ptr {self._codes}, ptr {w}")
        widened = code.arithmetic("mul", sizes.length, SIZES[self._kind])
        stride = code.value(f"select i1 {is_many}, i64 {widened}, i64 {sizes.row_bytes}")
        whole = code.arithmetic("and", count, -OUTPUTS)
        with each_tile(code, self._tiles) as (_, row, some):
            row_x = code.at(self._kind, self._x, code.arithmetic("mul", row, sizes.length))
            row_sums = code.at("float", self._sums, code.arithmetic("mul", row, sizes.padded))
            row_y = code.at("float", y, code.arithmetic("mul", row, sizes.outputs))
            for name, width, start, end in (("wide", OUTPUTS, 0, whole), ("one", 1, whole, count)):
                tile = chosen_tile(code, some, self._vectors.rows, partial(_address, code, is_many, width))
                with code.repeated(f"each_{name}", start, end, width) as each:
                    of_scales = code.arithmetic("mul", each.index, sizes.padded)
                    pointers = (
                        row_x,
                        code.at("i8", tile_w, code.arithmetic("mul", each.index, stride)),
                        code.at("float", scales, of_scales),
                        code.at("float", minima, of_scales),
                        row_sums,
                        code.at("float", row_y, each.index),
                    )
                    integers = sizes.groups, sizes.runs, sizes.length, stride, sizes.padded, sizes.outputs
                    call_tile(code, tile, pointers, integers)


class _Grouped:
    """Appends how tiles of 16 outputs go over a piece: rows as numbers, and scales in lines of 16."""

    def __init__(self, code: Code, numbers: Numbers, form: Format, sizes: _Sizes) -> None:
        self._code, self._numbers, self._form, self._sizes = code, numbers, form, sizes
        self._scales_bytes = code.arithmetic("mul", sizes.padded, BLOCK * SIZES["float"])
        row = code.arithmetic("mul", sizes.length, SIZES[numbers.element])
        self._rows_bytes = code.arithmetic("mul", sizes.rows, row)
        self._codes_bytes = code.arithmetic("mul", sizes.row_bytes, BLOCK)
        self._all_runs = code.arithmetic("sdiv", sizes.length, RUN)
        self._tiles = RowsOfTiles(code, numbers, sizes.rows)
        own = self._scales_bytes, self._scales_bytes, self._rows_bytes, self._codes_bytes
        self.num_bytes = code.total([*own, self._tiles.num_bytes(self._all_runs)])

    def begin(self, x: str, sums: str, memory: str) -> None:
        code, sizes, self._sums = self._code, self._sizes, sums
        self._scales, self._minima = memory, code.at("i8", memory, self._scales_bytes)
        self._rows = code.at("i8", self._minima, self._scales_bytes)
        self._copies = code.at("i8", self._rows, self._rows_bytes)
        self._widened = code.at("i8", self._copies, self._codes_bytes)
        runs = code.arithmetic("mul", sizes.rows, self._all_runs)
        call_tile(code, "@arrange", (x, self._rows), (runs,))

    def multiply(self, w: str, scales: str, minima: str, y: str, count: str) -> None:
        """Append the products with a block of outputs."""
        code, sizes = self._code, self._sizes
        for lines, to in ((scales, self._scales), (minima, self._minima))[: 1 + self._form.is_shifted]:
            call_tile(code, "@turn", (lines, to), (sizes.padded,))
        codes = whole_outputs(code, w, self._copies, count, sizes.row_bytes)
        codes = self._tiles.codes(codes, self._widened, self._all_runs, sizes.row_bytes)
        with each_tile(code, self._tiles.tiles) as (_, row, some):
            tile = self._tiles.tile(some, grouped_tiles.tile_name)
            pointers = (
                code.at(self._numbers.element, self._rows, code.arithmetic("mul", row, sizes.length)),
                codes,
                self._scales,
                self._minima,
                code.at("float", self._sums, code.arithmetic("mul", row, sizes.padded)),
                code.at("float", y, code.arithmetic("mul", row, sizes.outputs)),
            )
            integers = sizes.groups, sizes.length, sizes.row_bytes, sizes.padded, sizes.outputs, count
            call_tile(code, tile, pointers, integers)


def _address(code: Code, is_many: str, outputs: int, rows: int) -> str:
    """Return the address of the tile of so many outputs and rows, for codes that are widened or lie as they do."""
    widened, direct = (tile_name(outputs, rows, is_widened) for is_widened in (True, False))
    return code.value(f"select i1 {is_many}, ptr @{widened}, ptr @{direct}")
