"""The innermost loops of products of rows in int8 with weights in 4 or 8 bits: bytes times bytes, added in int32.

Instructions multiply unsigned bytes by signed ones. Codes of four bits are unsigned; those of 8 bits become so by 128,
which is taken off again as 128 times the sum of the row: integers are exact. Lane i of 16 adds numbers 4 i to 4 i + 3
of each 64, on every processor; one without such instructions adds the same.
"""

from dataclasses import replace

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.tiles import Vectors, store_totals
from jaxinfer.ops.few_bits.formats import RUN, Format

# The numbers of a row that a vector holds, and its lanes.
VECTOR, LANES = 64, 16
BYTES, INTEGERS, FLOATS = f"<{VECTOR} x i8>", f"<{LANES} x i32>", f"<{LANES} x float>"
_HALF_BYTES = f"<{RUN} x i8>"
_DOT = "@llvm.x86.avx512.vpdpbusd.512"
_LINE, _AHEAD = 64, 4096
# Without instructions for bytes; more would be slow to compile.
_ROWS_WITHOUT = 2
_TILE = (
    "ptr %x, ptr %w, ptr %scales, ptr %minima, ptr %sums, ptr %row_scales, ptr %y, i64 %length, i64 %pitch, "
    "i64 %stride, i64 %padded, i64 %sum_pitch, i64 %width"
)


def widened(vectors: Vectors) -> Vectors:
    """Return a processor's vectors with 16 lanes, of which it may take several for one, and rows that fit them."""
    rows = max(1, vectors.rows * vectors.lanes // LANES)
    return replace(vectors, lanes=LANES, rows=rows if vectors.dots_bytes else min(rows, _ROWS_WITHOUT))


def dot_declarations(vectors: Vectors) -> str:
    """Return declarations of what the tiles call, beyond `tiles.declarations`."""
    return f"declare {INTEGERS} {_DOT}({INTEGERS}, {BYTES}, {BYTES})\n" if vectors.dots_bytes else ""


def dot(code: Code, vectors: Vectors, unsigned: str, signed: str, to: str) -> str:
    """Append products of unsigned and signed bytes, four of which are added to each integer."""
    if vectors.dots_bytes:
        return code.value(f"call {INTEGERS} {_DOT}({INTEGERS} {to}, {BYTES} {unsigned}, {BYTES} {signed})")
    # A product fits into 16 bits, two of them do not. Numbers are told apart by shifts: lower ones come first.
    short, pairs, fours = f"<{VECTOR} x i16>", f"<{VECTOR // 2} x i32>", f"<{LANES} x i64>"
    one, other = (
        code.value(f"{way} {BYTES} {each} to {short}") for way, each in (("zext", unsigned), ("sext", signed))
    )
    products = code.value(f"bitcast {short} {code.value(f'mul {short} {one}, {other}')} to {pairs}")
    sixteen = f"<{', '.join(['i32 16'] * (VECTOR // 2))}>"
    lower = code.value(f"ashr {pairs} {code.value(f'shl {pairs} {products}, {sixteen}')}, {sixteen}")
    upper = code.value(f"ashr {pairs} {products}, {sixteen}")
    both = code.value(f"bitcast {pairs} {code.value(f'add {pairs} {lower}, {upper}')} to {fours}")
    first = code.value(f"trunc {fours} {both} to {INTEGERS}")
    moved = code.value(f"lshr {fours} {both}, <{', '.join(['i64 32'] * LANES)}>")
    last = code.value(f"trunc {fours} {moved} to {INTEGERS}")
    return code.value(f"add {INTEGERS} {to}, {code.value(f'add {INTEGERS} {first}, {last}')}")


def tile_name(outputs: int, rows: int) -> str:
    """Return the name of a tile."""
    return f"rounded_{outputs}x{rows}"


def rounded_tile(vectors: Vectors, form: Format, outputs: int, rows: int, has_scales: bool) -> str:
    """Return ``NAME(x, w, scales, minima, sums, row_scales, y, length, pitch, stride, padded, sum_pitch, width)``.

    It multiplies rows of x, ``pitch`` bytes apart, by rows of ``length`` codes, ``stride`` bytes apart. Scales and
    minima of groups are float32 in rows of ``padded`` numbers; where a row is one group, there is one scale a row, and
    without ``has_scales`` y are the integers. Sums, of x's groups or rows, are ``sum_pitch`` apart.
    """
    code = Code(f"internal void @{tile_name(outputs, rows)}({_TILE}) #0")
    tile = _Tile(code, vectors, form, outputs, rows)
    before = "entry"
    begun = ["zeroinitializer"] * (outputs * rows)
    if form.has_minima:
        begun, before = tile.add_minima(), "begin"
    kind = FLOATS if form.group is not None else INTEGERS
    unit = max(VECTOR, form.group or VECTOR)
    trips = code.arithmetic("sdiv", "%length", unit)
    code.effect("br label %head")
    code.start("head")
    code.value(f"phi i64 [ 0, %{before} ], [ %next, %body ]", "%i")
    old = [f"%old{index}" for index in range(len(begun))]
    news = [f"%new{index}" for index in range(len(begun))]
    for name, first, new in zip(old, begun, news):
        code.value(f"phi {kind} [ {first}, %{before} ], [ {new}, %body ]", name)
    code.branch(code.value(f"icmp slt i64 %i, {trips}"), "body", "after")
    code.start("body")
    tile.unit("%i", unit // VECTOR, old, news)
    code.value("add i64 %i, 1", "%next")
    code.effect("br label %head")
    code.start("after")
    # Half a vector may be left, where a group is no more than that.
    ends = old
    if unit == VECTOR and form.group != VECTOR:
        left = code.arithmetic("and", "%length", VECTOR - 1)
        code.branch(code.value(f"icmp eq i64 {left}, 0"), "done", "rest")
        code.start("rest")
        rests, ends = ([f"%{name}{index}" for index in range(len(begun))] for name in ("rest", "end"))
        tile.unit(trips, 1, old, rests, is_half=True)
        code.effect("br label %done")
        code.start("done")
        for end, whole, rest in zip(ends, old, rests):
            code.value(f"phi {kind} [ {whole}, %after ], [ {rest}, %rest ]", end)
    tile.store(ends, has_scales)
    code.effect("ret void")
    return code.text()


class _Tile:
    """Appends the parts of a tile: ``outputs`` rows of codes times ``rows`` rows of x."""

    def __init__(self, code: Code, vectors: Vectors, form: Format, outputs: int, rows: int) -> None:
        self._code, self._vectors, self._form, self._outputs = code, vectors, form, outputs
        self._x = [code.at("i8", "%x", code.arithmetic("mul", "%pitch", row)) for row in range(rows)]
        self._w = [code.at("i8", "%w", code.arithmetic("mul", "%stride", output)) for output in range(outputs)]
        self._of_groups = [code.arithmetic("mul", "%padded", output) for output in range(outputs)]

    def add_minima(self) -> list[str]:
        """Append sums of minima times sums of groups, lane i of groups i, i + 16, ...; return them."""
        code, names = self._code, [f"%least{index}" for index in range(self._outputs * len(self._x))]
        sums = [code.at("float", "%sums", code.arithmetic("mul", "%sum_pitch", row)) for row in range(len(self._x))]
        minima = [code.at("float", "%minima", each) for each in self._of_groups]
        code.effect("br label %each_least")
        code.start("each_least")
        code.value("phi i64 [ 0, %entry ], [ %next_least, %each_least ]", "%l")
        for name in names:
            code.value(f"phi {FLOATS} [ zeroinitializer, %entry ], [ {name}, %each_least ]", f"{name}_old")
        parts = [code.load(FLOATS, code.at("float", start, "%l"), 4) for start in minima]
        for row, start in enumerate(sums):
            sum_x = code.load(FLOATS, code.at("float", start, "%l"), 4)
            for output, part in enumerate(parts):
                name = names[row * self._outputs + output]
                self._vectors.multiply_add(code, part, sum_x, f"{name}_old", name)
        code.value(f"add i64 %l, {LANES}", "%next_least")
        code.branch(code.value("icmp slt i64 %next_least, %padded"), "each_least", "begin")
        code.start("begin")
        return names

    def unit(self, index: str, count: int, old: list[str], new: list[str], is_half: bool = False) -> None:
        """Append products of unit ``index`` of rows, ``count`` vectors, added to the sums ``old``."""
        code, form = self._code, self._form
        offset = form.offset or 0
        first = code.arithmetic("mul", index, count)
        vectors = [first if each == 0 else code.arithmetic("add", first, each) for each in range(count)]
        size = VECTOR * form.bits // 8
        if not is_half:
            read = self._outputs * count * size
            ahead = code.at("i8", "%w", code.arithmetic("mul", index, read))
            for line in range(_AHEAD, _AHEAD + read, _LINE):
                code.effect(f"call void @llvm.prefetch.p0(ptr {code.at('i8', ahead, line)}, i32 0, i32 3, i32 1)")
        of_x = [code.arithmetic("mul", each, VECTOR) for each in vectors]
        rows = [[code.load(BYTES, code.at("i8", start, at), 1) for at in of_x] for start in self._x]
        begun = ["zeroinitializer"] * len(rows)
        if form.group is not None and (form.bits == 8 or offset):
            shift = f"<{', '.join([f'i8 {128 if form.bits == 8 else offset}'] * VECTOR)}>"
            taken = [self._dots([shift] * count, row, "zeroinitializer") for row in rows]
            begun = [code.value(f"sub {INTEGERS} zeroinitializer, {each}") for each in taken]
        of_w = [code.arithmetic("mul", each, size) for each in vectors]
        for output, start in enumerate(self._w):
            codes = [self._codes(code.at("i8", start, at), is_half) for at in of_w]
            scale = self._scale(output, index, is_half) if form.group is not None else ""
            for row, numbers in enumerate(rows):
                at = row * self._outputs + output
                if form.group is None:
                    total = self._dots(codes, numbers, old[at])
                    code.value(f"add {INTEGERS} {total}, zeroinitializer", new[at])
                else:
                    total = code.value(f"sitofp {INTEGERS} {self._dots(codes, numbers, begun[row])} to {FLOATS}")
                    self._vectors.multiply_add(code, total, scale, old[at], new[at])

    def store(self, totals: list[str], has_scales: bool) -> None:
        """Append stores of what sums add up to."""
        code, form, outputs = self._code, self._form, self._outputs
        row_scales = [code.load("float", code.at("float", "%row_scales", row)) for row in range(len(self._x))]
        some = f"<{outputs} x float>"

        def scaled(part: str, row: int) -> str:
            return code.value(f"fmul {some} {part}, {_spread(code, outputs, 'float', row_scales[row])}")

        if form.group is not None:
            store_totals(code, self._vectors, totals, outputs, change=scaled)
            return
        scales = code.load(some, "%scales", 4) if has_scales else ""
        sums = [code.load("float", code.at("float", "%sums", code.arithmetic("mul", "%sum_pitch", row)))
                for row in range(len(self._x))]  # fmt: skip
        taken = [code.value(f"mul i32 {code.value(f'fptosi float {each} to i32')}, 128") for each in sums]

        def finished(part: str, row: int) -> str:
            whole = code.value(f"sub <{outputs} x i32> {part}, {_spread(code, outputs, 'i32', taken[row])}")
            if not has_scales:
                return code.value(f"bitcast <{outputs} x i32> {whole} to {some}")
            found = scaled(code.value(f"sitofp <{outputs} x i32> {whole} to {some}"), row)
            return code.value(f"fmul {some} {found}, {scales}")

        store_totals(code, self._vectors, totals, outputs, element="i32", change=finished)

    def _dots(self, codes: list[str], numbers: list[str], total: str) -> str:
        for one, other in zip(codes, numbers, strict=True):
            total = dot(self._code, self._vectors, one, other, total)
        return total

    def _codes(self, place: str, is_half: bool) -> str:
        """Return unsigned codes, as many as a vector of x has; of half a vector, any after them."""
        code = self._code
        if self._form.bits == 8:
            some = code.load(_HALF_BYTES if is_half else BYTES, place, 1)
            some = self._doubled(some) if is_half else some
            return code.value(f"xor {BYTES} {some}, <{', '.join(['i8 -128'] * VECTOR)}>")
        size = RUN // 2 if is_half else RUN
        packed, kind = code.load(f"<{size} x i8>", place, 1), f"<{size} x i8>"
        low = code.value(f"and {kind} {packed}, <{', '.join(['i8 15'] * size)}>")
        high = code.value(f"lshr {kind} {packed}, <{', '.join(['i8 4'] * size)}>")
        # Of each run of 16 bytes the low halves come first.
        order = [at + part * size for run in range(0, size, 16) for part in range(2) for at in range(run, run + 16)]
        picked = ", ".join(f"i32 {each}" for each in order)
        found = code.value(f"shufflevector {kind} {low}, {kind} {high}, <{2 * size} x i32> <{picked}>")
        return self._doubled(found) if is_half else found

    def _doubled(self, half: str) -> str:
        """Return a vector of which half is given; x has zeros for the rest."""
        picked = ", ".join(f"i32 {at % RUN}" for at in range(VECTOR))
        return self._code.value(
            f"shufflevector {_HALF_BYTES} {half}, {_HALF_BYTES} poison, <{VECTOR} x i32> <{picked}>"
        )

    def _scale(self, output: int, index: str, is_half: bool) -> str:
        """Return a vector of the scale of group ``index``, or of both groups of a vector."""
        code = self._code
        start = code.at("float", "%scales", self._of_groups[output])
        if self._form.group != RUN:
            return self._vectors.spread(code, code.load_at("float", start, index))
        first = code.arithmetic("mul", index, 2)
        if is_half:
            return self._vectors.spread(code, code.load_at("float", start, first))
        both = code.load("<2 x float>", code.at("float", start, first), 4)
        picked = ", ".join(f"i32 {lane // (LANES // 2)}" for lane in range(LANES))
        return code.value(f"shufflevector <2 x float> {both}, <2 x float> poison, <{LANES} x i32> <{picked}>")


def _spread(code: Code, count: int, element: str, number: str) -> str:
    kind = f"<{count} x {element}>"
    single = code.value(f"insertelement {kind} poison, {element} {number}, i32 0")
    return code.value(f"shufflevector {kind} {single}, {kind} poison, <{count} x i32> zeroinitializer")
