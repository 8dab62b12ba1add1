"""The assembly of products with weights in panels: tiles of 16 outputs, the work of a piece, the foreign function.

A panel's codes and scales are read as they lie (`jaxinfer.ops.few_bits.panels`): a lane of each vector belongs to one
output, and adds that output's products. Every piece of the work makes rows ready for itself, which takes less time than
to wait for each other. A sum's order is step by step: the minimum times the sum of the row's step, then the products of
the step times the scale. A step is a group of weights, which may be a whole row, or of a row's numbers (`RowKind`).
"""

from functools import partial
from typing import Protocol, runtime_checkable

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.few_bits import many_rows
from jaxinfer.ops.cpu_kernels.few_bits.grouped_tiles import Numbers, widened_run
from jaxinfer.ops.cpu_kernels.few_bits.many_rows import RowsOfTiles
from jaxinfer.ops.cpu_kernels.few_bits.product_code import matrix_at
from jaxinfer.ops.cpu_kernels.few_bits.tiles import float_scales
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module
from jaxinfer.ops.cpu_kernels.product_pieces import call_tile, chosen_matrix, chosen_tile, each_tile, even_tiles
from jaxinfer.ops.cpu_kernels.sixteen_outputs import (
    FLOATS,
    LANES,
    LINE,
    OUTPUTS,
    added_runs,
    declarations,
    fetch,
    lines_of_panel,
    store_some,
    times,
)
from jaxinfer.ops.cpu_kernels.tiles import LLVM_TYPES, SIZES, Vectors
from jaxinfer.ops.few_bits.formats import RUN, Format

# Every piece makes all rows ready, so there are few of them.
_PIECES_PER_THREAD = 2
# How many bytes of codes are fetched before they are read.
_AHEAD = 2048
_SHARED = ("x", "rows", "length", "span")
_SCALES = ("scales", "minima", "scale_units", "minima_units")
_POINTERS, _INTEGERS = ("codes", *_SCALES, "y"), ("groups", "outputs", "first_piece")
_TILE = (
    "ptr %x, ptr %factors, ptr %codes, ptr %scales, ptr %minima, ptr %scale_units, ptr %minima_units, ptr %y, "
    "i64 %steps, i64 %length, i64 %width, i64 %count"
)


@runtime_checkable
class RowKind(Protocol):
    """What rows are multiplied as: how they are made ready, and multiplied by codes.

    ``numbers`` are what codes become, where that is written once for many rows.
    A step of ``span`` numbers of a row (None: of all), which are of type ``element``, has ``num_factors`` float32: its
    sum, and before it what scales its products. With ``has_row_scale`` a row has one more after those of its steps,
    which scales all of it. From each code ``offset`` is to be subtracted. The products of a row are added to
    ``sums_of_row`` vectors of ``sum_type``. A tile has up to ``rows`` rows.
    """

    element: str
    numbers: Numbers | None
    span: int | None
    num_factors: int
    has_row_scale: bool
    offset: int
    sum_type: str
    sums_of_row: int
    rows: int

    def functions(self) -> list[str]:
        """Return declarations, and the functions that `make_ready` calls."""
        ...

    def make_ready(self, code: Code, x: str, to: str, factors: str, rows: str, length: str) -> None:
        """Append what writes rows of ``length`` numbers, and the factors of their steps."""
        ...

    def add_run(self, code: Code, codes: str, places: list[str], sums: list[str]) -> list[str]:
        """Return each row's sums, to which the products of a run's codes with the numbers at its place are added."""
        ...

    def finish(self, code: Code, sums: list[str], factors: list[str]) -> list[str]:
        """Return a sum of each row in float32, of those of a step; ``factors`` are where each row has the step's."""
        ...


def panel_module(vectors: Vectors, form: Format, kind: RowKind, count: int, in_stacks: bool = False) -> str:
    """Return the assembly of ``handler(x [M, K], codes [P, R, B], scales [P, G, 16], ...) -> y [M, N], ...``.

    There are ``count`` matrices, each with its own N and the arrays of a `PanelArray`. x is what ``kind`` makes ready,
    y float32. ``in_stacks`` there is an int32 after x, and every array has one more axis before its others: the
    matrices are those at that place of their stacks.
    """
    kinds = [LLVM_TYPES[dtype] for _, dtype in form.parts(1, form.unit).values()]
    names = (*_SHARED, *(f"{name}{matrix}" for matrix in range(count) for name in (*_POINTERS, *_INTEGERS)))
    record, parts = Record(*names), len(form.part_names)

    def plan(code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
        x, *matrices = arguments
        rows, length = x.shape(code, 2)
        place = None
        if in_stacks:
            index, *matrices = matrices
            place = index.layer(code, matrices[0].shape(code, 1)[0])
        outputs = [y.shape(code, 2)[1] for y in results]
        all_outputs = code.total(outputs)
        wanted = code.arithmetic("mul", threads, _PIECES_PER_THREAD)
        panels = code.ceiling(code.ceiling(all_outputs, OUTPUTS), wanted)
        span = code.arithmetic("mul", panels, OUTPUTS)
        pieces = [code.ceiling(each, span) for each in outputs]
        pointers, numbers = {"x": x.numbers}, {"rows": rows, "length": length, "span": span}
        for index, y in enumerate(results):
            own = dict(zip(form.part_names, matrices[parts * index : parts * (index + 1)], strict=True))
            places = {
                name: each.numbers if place is None else matrix_at(code, each, kind, place, axes=3)
                for (name, each), kind in zip(own.items(), kinds, strict=True)
            }
            places["y"] = y.numbers
            if form.has_zeros:
                places["minima"] = places["zeros"]
            # What a form does not have is never read.
            pointers |= {f"{name}{index}": places.get(name, places["codes"]) for name in _POINTERS}
            integers = own["scales"].shape(code, 3 + in_stacks)[-2], outputs[index], code.total(pieces[:index])
            numbers |= {f"{name}{index}": number for name, number in zip(_INTEGERS, integers)}
        return Plan(pointers, numbers, code.total(pieces), code.arithmetic("mul", all_outputs, length))

    counts = [(rows, False) for rows in range(1, kind.rows + 1)]
    widen = []
    if kind.numbers is not None:
        counts = many_rows.row_counts(kind.numbers)
        widen = many_rows.widen_functions(kind.numbers, partial(_lines_of_run, form=form))
    tiles = [_tile(vectors, form, kind, *each) for each in counts]
    functions = [declarations(), *kind.functions(), *widen, *tiles, _piece(record, form, kind, count)]
    return make_module(vectors, functions, record, (1 + in_stacks + parts * count, count), plan)


def _lines_of_run(code: Code, run: int | str, form: Format) -> list[str]:
    run_bytes = OUTPUTS * form.row_bytes(RUN)
    here = code.at("i8", "%w", times(code, run, run_bytes))
    fetch(code, code.at("i8", here, _AHEAD), run_bytes)
    return lines_of_panel(code, here, form)


def _tile_name(rows: int, is_widened: bool = False) -> str:
    return f"panel_{rows}{'_widened' if is_widened else ''}"


def _tile(vectors: Vectors, form: Format, kind: RowKind, rows: int, is_widened: bool) -> str:
    """Return ``NAME(x, factors, codes, scales, ..., y, steps, length, width, count)``: the products with one panel.

    Codes may be numbers that ``widen`` wrote. Rows of x have ``length`` numbers and the factors of ``steps``; ``count``
    of the 16 outputs are written to each row of y, which are ``width`` apart.
    """
    code = Code(f"internal void @{_tile_name(rows, is_widened)}({_TILE}) #0")
    starts = [code.at(kind.element, "%x", code.arithmetic("mul", "%length", row)) for row in range(rows)]
    of_steps = code.arithmetic("mul", "%steps", kind.num_factors)
    pitch = code.arithmetic("add", of_steps, int(kind.has_row_scale))
    factors = [code.at("float", "%factors", code.arithmetic("mul", pitch, row)) for row in range(rows)]
    run_bytes = OUTPUTS * form.row_bytes(RUN)
    runs = kind.span // RUN if kind.span is not None else code.arithmetic("udiv", "%length", RUN)
    with code.repeated("each_step", 0, "%steps", 1, *[(FLOATS, "zeroinitializer")] * rows) as each:
        first, of_step = times(code, each.index, runs), code.arithmetic("mul", each.index, kind.num_factors)
        codes = code.at("i8", "%codes", times(code, first, run_bytes))
        places = [code.at(kind.element, start, times(code, first, RUN)) for start in starts]

        def add(run: int | str, sums: list[str]) -> list[str]:
            x = [code.at(kind.element, place, times(code, run, RUN)) for place in places]
            if is_widened:
                assert kind.numbers is not None
                widened = widened_run(code, kind.numbers, "%codes", code.arithmetic("add", first, run))
                return kind.numbers.added(code, widened, x, sums)
            here = code.at("i8", codes, times(code, run, run_bytes))
            fetch(code, code.at("i8", here, _AHEAD), run_bytes)
            return kind.add_run(code, here, x, sums)

        own = [code.at("float", row_factors, of_step) for row_factors in factors]
        sums = added_runs(code, runs, [(kind.sum_type, "zeroinitializer")] * (rows * kind.sums_of_row), add)
        found = kind.finish(code, sums, own)
        scales, minima = _scales(code, vectors, form, kind, each.index)
        for row, (place, products) in enumerate(zip(own, found, strict=True)):
            before, scale = each.all_held[row], scales
            if kind.span is None and not minima:
                each.all_left[row] = code.value(f"fmul {FLOATS} {products}, {scale}")
                continue
            if minima:
                row_sum = vectors.spread(code, code.load_at("float", place, kind.num_factors - 1))
                before = vectors.multiply_add(code, minima, row_sum, before)
            if kind.num_factors > 1:
                scale = code.value(f"fmul {FLOATS} {scales}, {vectors.spread(code, code.load('float', place))}")
            each.all_left[row] = vectors.multiply_add(code, products, scale, before)
    totals = each.all_held
    if kind.has_row_scale:
        row_scales = [vectors.spread(code, code.load_at("float", each, of_steps)) for each in factors]
        totals = [code.value(f"fmul {FLOATS} {total}, {scale}") for total, scale in zip(totals, row_scales)]
    store_some(code, vectors, totals)
    code.effect("ret void")
    return code.text()


def _scales(code: Code, vectors: Vectors, form: Format, kind: RowKind, step: str) -> tuple[str, str]:
    """Return the scales of the panel's outputs in a step, and what is added times a row's sum, if anything is."""
    steps = 1 if form.group is None or kind.span is None else form.group // kind.span
    group = "0" if form.group is None else step if steps == 1 else code.arithmetic("udiv", step, steps)
    line, element = code.arithmetic("mul", group, LANES), LLVM_TYPES[form.scale_dtype]

    def lined(name: str) -> str:
        numbers = code.load(f"<{LANES} x {element}>", code.at(element, f"%{name}", line), SIZES[element])
        if form.supers is None:
            return float_scales(code, form, numbers, LANES)
        at = code.arithmetic("mul", code.arithmetic("udiv", group, form.supers), LANES)
        units = code.load(f"<{LANES} x half>", code.at("half", f"%{name.rstrip('s')}_units", at), SIZES["half"])
        return float_scales(code, form, numbers, LANES, code.value(f"fpext <{LANES} x half> {units} to {FLOATS}"))

    scales, minima = lined("scales"), lined("minima") if form.has_minima else ""
    if form.has_zeros:
        zeros = code.load(f"<{LANES} x i8>", code.at("i8", "%minima", line), 1)
        zeros = code.value(f"sitofp <{LANES} x i8> {zeros} to {FLOATS}")
        minima = code.value(f"fneg {FLOATS} {code.value(f'fmul {FLOATS} {zeros}, {scales}')}")
    if kind.offset:
        least = vectors.constant(float(-kind.offset))
        minima = vectors.multiply_add(code, scales, least, minima or "zeroinitializer")
    return scales, minima


def _piece(record: Record, form: Format, kind: RowKind, count: int) -> str:
    """Return ``piece(record, index)``, which computes ``span`` outputs of one matrix for all rows."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    x = record.pointer(code, "x")
    rows, length, span = (record.number(code, each) for each in _SHARED[1:])
    *pointers, y, groups, outputs, first_piece = chosen_matrix(code, record, count, "%index", _POINTERS, _INTEGERS)
    first = code.arithmetic("mul", code.arithmetic("sub", "%index", first_piece), span)
    past = code.smaller(code.arithmetic("add", first, span), outputs)
    steps = code.arithmetic("udiv", length, kind.span or length)
    pitch = code.arithmetic("add", code.arithmetic("mul", steps, kind.num_factors), int(kind.has_row_scale))
    of_factors = code.arithmetic("mul", code.arithmetic("mul", rows, pitch), SIZES["float"])
    of_rows = code.arithmetic("mul", code.arithmetic("mul", rows, length), SIZES[kind.element])
    runs = code.arithmetic("udiv", length, RUN)
    many = None if kind.numbers is None else RowsOfTiles(code, kind.numbers, rows)
    of_codes = "0" if many is None else many.num_bytes(runs)
    memory = code.value(f"call ptr @malloc(i64 {code.total([of_codes, of_rows, of_factors, str(LINE)])})")
    past_line = code.arithmetic("and", code.value(f"ptrtoint ptr {memory} to i64"), LINE - 1)
    widened = code.at("i8", memory, code.arithmetic("sub", LINE, past_line))
    ready = code.at("i8", widened, of_codes)
    factors = code.at("i8", ready, of_rows)
    kind.make_ready(code, x, ready, factors, rows, length)
    row_bytes = code.arithmetic("mul", runs, form.row_bytes(RUN))
    units = code.arithmetic("udiv", groups, form.supers or 1)
    element = LLVM_TYPES[form.scale_dtype]
    elements = "i8", element, "i8" if form.has_zeros else element, "half", "half"
    of_output = row_bytes, groups, groups, units, units
    with code.repeated("each_panel", first, past, OUTPUTS) as panel:
        matrix = [
            code.at(each, pointer, code.arithmetic("mul", panel.index, size))
            for each, pointer, size in zip(elements, pointers, of_output, strict=True)
        ]
        some = code.smaller(code.arithmetic("sub", past, panel.index), OUTPUTS)
        if many is not None:
            matrix[0] = many.codes(matrix[0], widened, runs, "0")
        with each_tile(code, even_tiles(code, rows, kind.rows) if many is None else many.tiles) as (_, row, rows_here):
            if many is None:
                tile = chosen_tile(code, rows_here, kind.rows, lambda number: f"@{_tile_name(number)}")
            else:
                tile = many.tile(rows_here, _tile_name)
            tile_x = code.at(kind.element, ready, code.arithmetic("mul", row, length))
            tile_factors = code.at("float", factors, code.arithmetic("mul", row, pitch))
            tile_y = code.at("float", y, code.arithmetic("add", code.arithmetic("mul", row, outputs), panel.index))
            call_tile(code, tile, (tile_x, tile_factors, *matrix, tile_y), (steps, length, outputs, some))
    code.effect(f"call void @free(ptr {memory})")
    code.effect("ret void")
    return code.text()
