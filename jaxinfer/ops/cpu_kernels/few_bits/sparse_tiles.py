"""The innermost loops of products with sparse weights: a few rows times a few rows of the weights that are stored.

A row's sum is that of a product with all weights, `RUN` numbers after the other, without those of blocks that are not
stored; of two in four, those that are not stored are zeros, which one instruction puts between the others.
"""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.few_bits.tiles import AHEAD, LINE, multiply_add, prefetch, row_kind, vector_of
from jaxinfer.ops.cpu_kernels.tiles import SIZES, Vectors, store_totals
from jaxinfer.ops.few_bits.formats import RUN, Format

_TILE = "ptr %x, ptr %w, ptr %places, ptr %y, i64 %count, i64 %pitch, i64 %stride, i64 %apart, i64 %width"
_HALF = RUN // 2
_STORED = SIZES["bfloat"]
_DECLARED = "declare <32 x i16> @llvm.x86.avx512.mask.expand.v32i16(<32 x i16>, <32 x i16>, <32 x i1>)\n"


def tile_declarations(form: Format) -> str:
    """Return declarations of what the tiles call, beyond `tiles.declarations`."""
    return "" if form.block > 1 else _DECLARED


def run_bytes(form: Format) -> int:
    """Return the bytes of what is stored of a run, or of a block."""
    return _STORED * (form.block if form.block > 1 else form.num_kept(RUN))


def place_bytes(form: Format) -> int:
    """Return the bytes that say where that is."""
    return 2 if form.block > 1 else RUN // 8


def tile_name(outputs: int, rows: int, is_widened: bool) -> str:
    """Return the name of a tile."""
    return f"sparse_{outputs}x{rows}{'_widened' if is_widened else ''}"


def sparse_tile(vectors: Vectors, form: Format, outputs: int, rows: int, is_widened: bool) -> str:
    """Return ``NAME(x, w, places, y, count, pitch, stride, apart, width)``.

    It multiplies rows of x, ``pitch`` numbers apart, by rows of w, ``stride`` bytes apart: ``count`` runs or blocks as
    they are stored, or runs that `spread_function` wrote with their zeros. Rows of places are ``apart`` bytes apart,
    those of y ``width`` numbers.
    """
    code = Code(f"internal void @{tile_name(outputs, rows, is_widened)}({_TILE}) #0")
    wide, kind = vectors.wide, row_kind(vectors)
    starts_x = [code.at(kind, "%x", code.arithmetic("mul", "%pitch", row)) for row in range(rows)]
    starts_w = [code.at("i8", "%w", code.arithmetic("mul", "%stride", each)) for each in range(outputs)]
    starts_places = [code.at("i8", "%places", code.arithmetic("mul", "%apart", each)) for each in range(outputs)]
    size, of_place = RUN * SIZES[kind] if is_widened else run_bytes(form), place_bytes(form)
    code.effect("br label %loop")
    code.start("loop")
    code.value("phi i64 [ 0, %entry ], [ %next, %loop ]", "%i")
    for index in range(outputs * rows):
        code.value(f"phi {wide} [ zeroinitializer, %entry ], [ %sum{index}, %loop ]", f"%old{index}")
    of_w, of_x = code.arithmetic("mul", "%i", size), code.arithmetic("mul", "%i", RUN)
    if not is_widened:
        ahead = code.at("i8", "%w", code.arithmetic("mul", "%i", outputs * size))
        for line in range(AHEAD, AHEAD + outputs * size, LINE):
            prefetch(code, code.at("i8", ahead, line))
        ahead = code.at("i8", "%places", code.arithmetic("mul", "%i", outputs * of_place))
        prefetch(code, code.at("i8", ahead, AHEAD * of_place // size))
    for output, start in enumerate(starts_w):
        place = code.at("i8", start, of_w)
        here = of_x
        if is_widened:
            numbers = _stored(vectors, code, place, kind)
        else:
            found = code.at("i8", starts_places[output], code.arithmetic("mul", "%i", of_place))
            if form.block > 1:
                block = code.value(f"zext i16 {code.load('i16', found, 2)} to i64")
                here, numbers = code.arithmetic("mul", block, RUN), _stored(vectors, code, place, "bfloat")
            else:
                numbers = [(_with_zeros(code, place, found), 0)]
        for row, start_x in enumerate(starts_x):
            index = row * outputs + output
            total, place_x = f"%old{index}", code.at(kind, start_x, here)
            for some, offset in numbers:
                part_x = code.load(vector_of(vectors, kind), code.at(kind, place_x, offset), SIZES[kind])
                name = f"%sum{index}" if offset == numbers[-1][1] else None
                total = multiply_add(vectors, code, some, part_x, total, name)
    code.value("add i64 %i, 1", "%next")
    code.branch(code.value("icmp slt i64 %next, %count"), "loop", "done")
    code.start("done")
    store_totals(code, vectors, [f"%sum{index}" for index in range(outputs * rows)], outputs)
    code.effect("ret void")
    return code.text()


def spread_function(form: Format) -> str:
    """Return ``spread(w, places, to, runs)``, which writes runs with their zeros."""
    code = Code("internal void @spread(ptr %w, ptr %places, ptr %to, i64 %runs) #0")
    with code.repeated("each_run", 0, "%runs") as each:
        place = code.at("i8", "%w", code.arithmetic("mul", each.index, run_bytes(form)))
        prefetch(code, code.at("i8", place, AHEAD))
        found = code.at("i8", "%places", code.arithmetic("mul", each.index, place_bytes(form)))
        to = code.at("bfloat", "%to", code.arithmetic("mul", each.index, RUN))
        code.effect(f"store <{RUN} x bfloat> {_with_zeros(code, place, found)}, ptr {to}, align {_STORED}")
    code.effect("ret void")
    return code.text()


def _stored(vectors: Vectors, code: Code, place: str, kind: str) -> list[tuple[str, int]]:
    """Read a run as it lies: vectors as they are multiplied, and where in the run they begin."""
    if vectors.pairs_bfloat16:
        return [(code.load(f"<{RUN} x bfloat>", place, _STORED), 0)]
    found = []
    for at in range(0, RUN, vectors.lanes):
        some = code.load(f"<{vectors.lanes} x {kind}>", code.at(kind, place, at), SIZES[kind])
        wider = f"fpext <{vectors.lanes} x {kind}> {some} to {vectors.wide}"
        found.append((some if kind == "float" else code.value(wider), at))
    return found


def _with_zeros(code: Code, place: str, mask: str) -> str:
    """Read half of a run's numbers, and put them where its bits are set."""
    words, every = f"<{RUN} x i16>", ", ".join(f"i32 {lane}" for lane in range(RUN))
    half = f"<{_HALF} x i16>"
    stored = code.value(
        f"shufflevector {half} {code.load(half, place, _STORED)}, {half} poison, <{RUN} x i32> <{every}>"
    )
    bits = code.value(f"bitcast i32 {code.load('i32', mask, 1)} to <{RUN} x i1>")
    operands = f"{words} {stored}, {words} zeroinitializer, <{RUN} x i1> {bits}"
    spread = code.value(f"call {words} @llvm.x86.avx512.mask.expand.v32i16({operands})")
    return code.value(f"bitcast {words} {spread} to <{RUN} x bfloat>")
