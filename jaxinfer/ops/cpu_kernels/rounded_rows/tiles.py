"""The innermost loops of products of rows in int8 with weights in 8 bits: bytes times bytes, added in int32."""

from dataclasses import replace

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.rounded_rows.byte_sums import (
    BYTES,
    INTEGERS,
    LANES,
    VECTOR,
    ByteSums,
    added_to_codes,
    whole_bytes,
)
from jaxinfer.ops.cpu_kernels.tiles import Vectors, store_totals
from jaxinfer.ops.few_bits.formats import INT8, RUN

_HALF_BYTES = f"<{RUN} x i8>"
_LINE, _AHEAD = 64, 4096
# Without instructions for bytes; more would be slow to compile.
_ROWS_WITHOUT = 2
_TILE = (
    "ptr %x, ptr %w, ptr %scales, ptr %sums, ptr %row_scales, ptr %y, i64 %length, i64 %pitch, i64 %stride, "
    "i64 %sum_pitch, i64 %width"
)


def widened(vectors: Vectors) -> Vectors:
    """Return a processor's vectors with 16 lanes, of which it may take several for one, and rows that fit them."""
    rows = max(1, vectors.rows * vectors.lanes // LANES)
    return replace(vectors, lanes=LANES, rows=rows if vectors.dots_bytes else min(rows, _ROWS_WITHOUT))


def tile_name(outputs: int, rows: int) -> str:
    """Return the name of a tile."""
    return f"rounded_{outputs}x{rows}"


def rounded_tile(vectors: Vectors, outputs: int, rows: int, has_scales: bool) -> str:
    """Return ``NAME(x, w, scales, sums, row_scales, y, length, pitch, stride, sum_pitch, width)``.

    It multiplies rows of x, ``pitch`` bytes apart, by rows of ``length`` codes of 8 bits, ``stride`` bytes apart, each
    of which has one scale; without ``has_scales`` y are the integers. The sums of x's rows are ``sum_pitch`` apart.
    """
    code = Code(f"internal void @{tile_name(outputs, rows)}({_TILE}) #0")
    starts_x = [code.at("i8", "%x", code.arithmetic("mul", "%pitch", row)) for row in range(rows)]
    starts_w = [code.at("i8", "%w", code.arithmetic("mul", "%stride", output)) for output in range(outputs)]
    old, new, rest, end = (
        [f"%{name}{index}" for index in range(outputs * rows)] for name in ("old", "new", "rest", "end")
    )
    trips = code.arithmetic("sdiv", "%length", VECTOR)
    code.effect("br label %head")
    code.start("head")
    code.value("phi i64 [ 0, %entry ], [ %next, %body ]", "%i")
    for before, after in zip(old, new):
        code.value(f"phi {INTEGERS} [ zeroinitializer, %entry ], [ {after}, %body ]", before)
    code.branch(code.value(f"icmp slt i64 %i, {trips}"), "body", "after")
    code.start("body")
    read = outputs * VECTOR
    ahead = code.at("i8", "%w", code.arithmetic("mul", "%i", read))
    for line in range(_AHEAD, _AHEAD + read, _LINE):
        code.effect(f"call void @llvm.prefetch.p0(ptr {code.at('i8', ahead, line)}, i32 0, i32 3, i32 1)")
    _add_vectors(code, vectors, starts_x, starts_w, "%i", old, new, is_half=False)
    code.value("add i64 %i, 1", "%next")
    code.effect("br label %head")
    code.start("after")
    # Half a vector may be left.
    left = code.arithmetic("and", "%length", VECTOR - 1)
    code.branch(code.value(f"icmp eq i64 {left}, 0"), "done", "rest")
    code.start("rest")
    _add_vectors(code, vectors, starts_x, starts_w, trips, old, rest, is_half=True)
    code.effect("br label %done")
    code.start("done")
    for whole, half, total in zip(old, rest, end):
        code.value(f"phi {INTEGERS} [ {whole}, %after ], [ {half}, %rest ]", total)
    _store(code, vectors, end, outputs, rows, has_scales)
    code.effect("ret void")
    return code.text()


def _add_vectors(
    code: Code,
    vectors: Vectors,
    starts_x: list[str],
    starts_w: list[str],
    index: str,
    old: list[str],
    new: list[str],
    *,
    is_half: bool,
) -> None:
    """Append products of vector ``index`` of each row, added to the sums ``old``."""
    place = code.arithmetic("mul", index, VECTOR)
    rows = [code.load(BYTES, code.at("i8", start, place), 1) for start in starts_x]
    for output, start in enumerate(starts_w):
        codes = code.load(_HALF_BYTES if is_half else BYTES, code.at("i8", start, place), 1)
        if is_half:  # x has zeros for the rest
            picked = ", ".join(f"i32 {at % RUN}" for at in range(VECTOR))
            operands = f"{_HALF_BYTES} {codes}, {_HALF_BYTES} poison, <{VECTOR} x i32> <{picked}>"
            codes = code.value(f"shufflevector {operands}")
        codes, places = whole_bytes(code, vectors, codes), range(output, len(old), len(starts_w))
        sums = ByteSums(code, vectors, 8, [old[at] for at in places])
        for row, numbers in enumerate(rows):
            sums.add(row, codes, numbers)
        for at, total in zip(places, sums.totals(), strict=True):
            code.value(f"add {INTEGERS} {total}, zeroinitializer", new[at])


def _store(code: Code, vectors: Vectors, totals: list[str], outputs: int, rows: int, has_scales: bool) -> None:
    """Append stores of what sums add up to."""
    some = f"<{outputs} x float>"
    scales = code.load(some, "%scales", 4) if has_scales else ""
    row_scales = [code.load("float", code.at("float", "%row_scales", row)) for row in range(rows)]
    sums = [
        code.load("float", code.at("float", "%sums", code.arithmetic("mul", "%sum_pitch", row))) for row in range(rows)
    ]
    added = added_to_codes(vectors, INT8)
    taken = [code.value(f"mul i32 {code.value(f'fptosi float {each} to i32')}, {added}") for each in sums]

    def finished(part: str, row: int) -> str:
        whole = code.value(f"sub <{outputs} x i32> {part}, {_spread(code, outputs, 'i32', taken[row])}")
        if not has_scales:
            return code.value(f"bitcast <{outputs} x i32> {whole} to {some}")
        found = code.value(f"sitofp <{outputs} x i32> {whole} to {some}")
        found = code.value(f"fmul {some} {found}, {scales}")
        return code.value(f"fmul {some} {found}, {_spread(code, outputs, 'float', row_scales[row])}")

    store_totals(code, vectors, totals, outputs, element="i32", change=finished)


def _spread(code: Code, count: int, element: str, number: str) -> str:
    kind = f"<{count} x {element}>"
    single = code.value(f"insertelement {kind} poison, {element} {number}, i32 0")
    return code.value(f"shufflevector {kind} {single}, {kind} poison, <{count} x i32> zeroinitializer")
