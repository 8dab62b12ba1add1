"""The innermost loops of products with weights in few bits: a few rows times a few rows of codes, widened in registers.

A group's products are added in float32 first; the sum is multiplied by the group's scale and added to the sums of the
groups before it. Minima come before all groups: each times the sum of its group's numbers of x; zeros times scales are
minima.
"""

import struct
from collections.abc import Sequence
from functools import partial

from jaxinfer.ops.cpu_kernels.assembly import Code, repeated_constant
from jaxinfer.ops.cpu_kernels.lookups import declared_lookup, look_up
from jaxinfer.ops.cpu_kernels.slot_bytes import BYTE_SCALE, widened
from jaxinfer.ops.cpu_kernels.tiles import LLVM_TYPES, SIZES, Vectors, add_up, store_totals
from jaxinfer.ops.few_bits.formats import FP4, LEAST_POWER_BITS, RUN, Format

# Scales, minima and sums of groups are filled up to so many: a multiple of the lanes of every processor.
GROUP_LANES = 16
_HALF = RUN // 2
LINE = 64
# How far ahead tiles fetch codes, in bytes: rows of codes lie one after the other. Without that, a processor waits for
# codes twice as long as it computes with them.
AHEAD = 4096
_TILE = (
    "ptr %x, ptr %w, ptr %scales, ptr %minima, ptr %sums, ptr %y, i64 %groups, i64 %runs, i64 %pitch, i64 %stride, "
    "i64 %padded, i64 %width"
)
_PAIRS_DECLARED = """\
declare <32 x i16> @llvm.x86.avx512.permvar.hi.512(<32 x i16>, <32 x i16>)
declare <64 x i8> @llvm.x86.avx512.pshuf.b.512(<64 x i8>, <64 x i8>)
declare <32 x i16> @llvm.x86.avx512.vpermi2var.hi.512(<32 x i16>, <32 x i16>, <32 x i16>)
declare <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float>, <16 x float>)
"""


def supports(vectors: Vectors, form: Format) -> bool:
    """Whether products with weights of this form have kernels."""
    if form.kept is not None:
        return form.block > 1 or (vectors.pairs_bfloat16 and vectors.expands_words)
    has_halves = "float16" in vectors.dtypes
    if not has_halves and form.scale_dtype in ("float16", "int8"):
        return False
    if form.offset is not None or vectors.pairs_bfloat16:
        return True
    return has_halves if form.bits == 8 else bool(vectors.picks_by) or form.levels == FP4


def row_kind(vectors: Vectors) -> str:
    """Return the LLVM type of numbers of x and of widened codes."""
    return "bfloat" if vectors.pairs_bfloat16 else "float"


def tile_declarations(vectors: Vectors) -> str:
    """Return declarations of what the tiles call, beyond `tiles.declarations`."""
    if vectors.pairs_bfloat16:
        return _PAIRS_DECLARED
    return declared_lookup(vectors.picks_by) if vectors.picks_by else ""


def tile_name(outputs: int, rows: int, is_widened: bool) -> str:
    """Return the name of a tile."""
    return f"few_bits_{outputs}x{rows}{'_widened' if is_widened else ''}"


def few_bits_tile(vectors: Vectors, form: Format, outputs: int, rows: int, is_widened: bool) -> str:
    """Return ``NAME(x, w, scales, minima, sums, y, groups, runs, pitch, stride, padded, width)``.

    It multiplies rows of x, ``pitch`` numbers apart, by rows of w, ``stride`` bytes apart: codes, or numbers that
    `widen` made of them. Rows have ``groups`` groups of ``runs`` runs of 32. Scales, minima, and the sums of x's groups
    are float32 in rows of ``padded`` numbers; only forms with minima read the latter two. Rows of y are ``width``
    apart.
    """
    code = Code(f"internal void @{tile_name(outputs, rows, is_widened)}({_TILE}) #0")
    wide, kind = vectors.wide, row_kind(vectors)
    widen = _Widen(vectors, form, code)
    read = widen.stored if is_widened else widen.run
    run_bytes = RUN * SIZES[kind] if is_widened else form.row_bytes(RUN)
    starts_x = [code.at(kind, "%x", code.arithmetic("mul", "%pitch", row)) for row in range(rows)]
    starts_w, starts_scales, starts_minima, starts_sums = (
        [code.at(element, start, code.arithmetic("mul", pitch, each)) for each in range(count)]
        for start, element, pitch, count in (
            ("%w", "i8", "%stride", outputs),
            ("%scales", "float", "%padded", outputs),
            ("%minima", "float", "%padded", outputs),
            ("%sums", "float", "%padded", rows),
        )
    )
    count = outputs * rows
    begun = ["zeroinitializer"] * count
    if form.is_shifted:
        begun = _add_minima(code, vectors, starts_minima, starts_sums)
    # One loop: over groups; or over the runs of a row that is one group.
    is_grouped, is_halved = form.group is not None, form.group == _HALF
    steps = max(1, form.group // RUN) if form.group is not None else 1
    trips = "%groups" if is_grouped else "%runs"
    trips = code.arithmetic("sdiv", trips, 2) if is_halved else trips
    before = "begin" if form.is_shifted else "entry"
    code.effect("br label %loop")
    code.start("loop")
    code.value(f"phi i64 [ 0, %{before} ], [ %next, %loop ]", "%i")
    for index, each in enumerate(begun):
        code.value(f"phi {wide} [ {each}, %{before} ], [ %sum{index}, %loop ]", f"%old{index}")
    first_run = code.arithmetic("mul", "%i", steps)
    of_x, of_w = code.arithmetic("mul", first_run, RUN), code.arithmetic("mul", first_run, run_bytes)
    places_x = [code.at(kind, start, of_x) for start in starts_x]
    if not is_widened:
        read_bytes = outputs * steps * run_bytes
        ahead = code.at("i8", "%w", code.arithmetic("mul", "%i", read_bytes))
        for line in range(AHEAD, AHEAD + read_bytes, LINE):
            prefetch(code, code.at("i8", ahead, line))
    for output, start in enumerate(starts_w):
        place_w = code.at("i8", start, of_w)
        parts = [part for step in range(steps) for part in read(code.at("i8", place_w, step * run_bytes), step * RUN)]
        scaled = _scales_of(code, vectors, starts_scales[output], is_halved, parts) if is_grouped else [("", parts)]
        for row, place_x in enumerate(places_x):
            index = row * outputs + output
            total = f"%old{index}"
            for scale, several in scaled:
                before_scale, total = total, "zeroinitializer" if is_grouped else total
                is_last = several[-1] is parts[-1]
                for numbers, offset in several:
                    part_x = code.load(vector_of(vectors, kind), code.at(kind, place_x, offset), SIZES[kind])
                    is_named = not is_grouped and offset == parts[-1][1]
                    total = multiply_add(vectors, code, numbers, part_x, total, f"%sum{index}" if is_named else None)
                if is_grouped:
                    total = vectors.multiply_add(code, total, scale, before_scale, f"%sum{index}" if is_last else None)
    code.value("add i64 %i, 1", "%next")
    code.branch(code.value(f"icmp slt i64 %next, {trips}"), "loop", "done")
    code.start("done")
    sums = [f"%sum{index}" for index in range(count)]
    if not is_grouped:
        scales = [vectors.spread(code, code.load("float", start)) for start in starts_scales]
        sums = [code.value(f"fmul {wide} {each}, {scales[at % outputs]}") for at, each in enumerate(sums)]
    store_totals(code, vectors, sums, outputs)
    code.effect("ret void")
    return code.text()


def _scales_of(
    code: Code, vectors: Vectors, scales: str, is_halved: bool, parts: list[tuple[str, int]]
) -> list[tuple[str, list[tuple[str, int]]]]:
    """Return vectors of the scales of group ``%i``, or of both groups of run ``%i``, and the parts that they scale."""
    if not is_halved:
        return [(vectors.spread(code, code.load_at("float", scales, "%i")), parts)]
    first = code.arithmetic("mul", "%i", 2)
    if vectors.pairs_bfloat16:
        # A vector of pairs has the first group in its lower half.
        both = code.load("<2 x float>", code.at("float", scales, first), 4)
        picked = ", ".join(f"i32 {lane // (vectors.lanes // 2)}" for lane in range(vectors.lanes))
        shuffled = f"shufflevector <2 x float> {both}, <2 x float> poison, <{vectors.lanes} x i32> <{picked}>"
        return [(code.value(shuffled), parts)]
    halves = [[part for part in parts if part[1] // _HALF == half] for half in range(2)]
    places = [code.at("float", scales, code.arithmetic("add", first, half)) for half in range(2)]
    return [(vectors.spread(code, code.load("float", place)), half) for place, half in zip(places, halves)]


def widen_function(vectors: Vectors, form: Format) -> str:
    """Return ``widen(w, to, runs)``, which writes runs of codes as numbers that tiles multiply."""
    code = Code("internal void @widen(ptr %w, ptr %to, i64 %runs) #0")
    kind = row_kind(vectors)
    with code.repeated("each_run", 0, "%runs") as each_run:
        place = code.at("i8", "%w", code.arithmetic("mul", each_run.index, form.row_bytes(RUN)))
        prefetch(code, code.at("i8", place, AHEAD))
        to = code.at(kind, "%to", code.arithmetic("mul", each_run.index, RUN))
        for numbers, offset in _Widen(vectors, form, code).run(place, 0):
            code.effect(
                f"store {vector_of(vectors, kind)} {numbers}, ptr {code.at(kind, to, offset)}, align {SIZES[kind]}"
            )
    code.effect("ret void")
    return code.text()


def prepare_function(vectors: Vectors, form: Format) -> str:
    """Return ``prepare(from, units, to, lines, groups, padded, ahead)``: rows of scales in float32, filled with zeros.

    Only forms with units read them. It fetches what lies ``ahead`` bytes further.
    """
    parameters = "ptr %from, ptr %units, ptr %to, i64 %lines, i64 %groups, i64 %padded, i64 %ahead"
    code = Code(f"internal void @prepare({parameters}) #0")
    element = LLVM_TYPES[form.scale_dtype]
    step = form.supers or vectors.lanes
    some, floats = f"<{step} x {element}>", f"<{step} x float>"
    with code.repeated("each_line", 0, "%lines") as each_line:
        line = code.at(element, "%from", code.arithmetic("mul", each_line.index, "%groups"))
        to = code.at("float", "%to", code.arithmetic("mul", each_line.index, "%padded"))
        first_unit = code.arithmetic("mul", each_line.index, code.arithmetic("sdiv", "%groups", step))
        prefetch(code, code.at("i8", line, "%ahead"))
        whole = code.arithmetic("mul", code.arithmetic("sdiv", "%groups", step), step)
        with code.repeated("each_whole", 0, whole, step) as each:
            place = code.at(element, line, each.index)
            prefetch(code, code.at("i8", place, "%ahead"))
            scales = code.load(some, place, SIZES[element])
            units = None
            if form.supers is not None:
                at = code.arithmetic("add", first_unit, code.arithmetic("sdiv", each.index, step))
                unit = code.value(f"fpext half {code.load_at('half', '%units', at)} to float")
                single = code.value(f"insertelement {floats} poison, float {unit}, i32 0")
                spread = f"shufflevector {floats} {single}, {floats} poison, <{step} x i32> zeroinitializer"
                units = code.value(spread)
            scales = float_scales(code, form, scales, step, units)
            code.effect(f"store {floats} {scales}, ptr {code.at('float', to, each.index)}, align 4")
        if form.supers is None:  # units have whole steps of groups
            with code.repeated("each_other", whole, "%groups") as each:
                single = code.load_at(element, line, each.index)
                if element in ("half", "bfloat"):
                    single = code.value(f"fpext {element} {single} to float")
                elif form.scale_dtype == "uint8":
                    vector = code.value(f"insertelement <1 x i8> poison, i8 {single}, i32 0")
                    single = code.value(f"extractelement <1 x float> {_powers(code, vector, 1)}, i32 0")
                code.store_at("float", single, to, each.index)
        with code.repeated("each_zero", "%groups", "%padded") as each:
            code.store_at("float", "0.0", to, each.index)
    code.effect("ret void")
    return code.text()


def float_scales(code: Code, form: Format, scales: str, count: int, units: str | None = None) -> str:
    """Return a vector of ``count`` scales or minima, as a form stores them, in float32; some have units."""
    some, floats = f"<{count} x {LLVM_TYPES[form.scale_dtype]}>", f"<{count} x float>"
    if form.scale_dtype == "uint8":
        return _powers(code, scales, count)
    if form.scale_dtype in ("float16", "bfloat16"):
        return code.value(f"fpext {some} {scales} to {floats}")
    if units is None:
        return scales
    return code.value(f"fmul {floats} {code.value(f'sitofp {some} {scales} to {floats}')}, {units}")


def _powers(code: Code, exponents: str, count: int) -> str:
    """Append the powers of two that bytes stand for: the exponents of float32, of which zero is half of one."""
    some, floats = f"<{count} x i32>", f"<{count} x float>"

    constant = partial(repeated_constant, "i32", count=count)
    wide = code.value(f"zext <{count} x i8> {exponents} to {some}")
    is_least = code.value(f"icmp eq {some} {wide}, zeroinitializer")
    bits = code.value(f"shl {some} {wide}, {constant(23)}")
    bits = code.value(f"select <{count} x i1> {is_least}, {some} {constant(LEAST_POWER_BITS)}, {some} {bits}")
    return code.value(f"bitcast {some} {bits} to {floats}")


def zeros_function(vectors: Vectors, is_scaled: bool) -> str:
    """Return ``prepare_zeros(from, scales, to, lines, groups, padded)``: minima, in float32, of zeros and of scales.

    Scales are those that `prepare_function` wrote. If not ``is_scaled``, whole sums are multiplied by them in the end.
    """
    parameters = "ptr %from, ptr %scales, ptr %to, i64 %lines, i64 %groups, i64 %padded"
    code = Code(f"internal void @prepare_zeros({parameters}) #0")
    step = vectors.lanes
    with code.repeated("each_line", 0, "%lines") as each_line:
        line = code.at("i8", "%from", code.arithmetic("mul", each_line.index, "%groups"))
        of_line = code.arithmetic("mul", each_line.index, "%padded")
        scales, to = code.at("float", "%scales", of_line), code.at("float", "%to", of_line)

        def write(kind: str, zeros: str, at: str) -> None:
            minima = code.value(f"sitofp {zeros} to {kind}")
            if is_scaled:
                factors = code.load(kind, code.at("float", scales, at), 4)
                minima = code.value(f"fmul {kind} {minima}, {factors}")
            minima = code.value(f"fneg {kind} {minima}")
            code.effect(f"store {kind} {minima}, ptr {code.at('float', to, at)}, align 4")

        whole = code.arithmetic("mul", code.arithmetic("sdiv", "%groups", step), step)
        with code.repeated("each_whole", 0, whole, step) as each:
            some = f"<{step} x i8>"
            write(f"<{step} x float>", f"{some} {code.load(some, code.at('i8', line, each.index), 1)}", each.index)
        with code.repeated("each_other", whole, "%groups") as each:
            write("float", f"i8 {code.load_at('i8', line, each.index)}", each.index)
        with code.repeated("each_zero", "%groups", "%padded") as each:
            code.store_at("float", "0.0", to, each.index)
    code.effect("ret void")
    return code.text()


def sums_function(vectors: Vectors, kind: str) -> str:
    """Return ``add_groups(x, to, rows, groups, runs, padded)``: the sums of each group's numbers, as float32.

    x is of LLVM's type ``kind``.
    """
    code = Code("internal void @add_groups(ptr %x, ptr %to, i64 %rows, i64 %groups, i64 %runs, i64 %padded) #0")
    lanes, wide = vectors.lanes, vectors.wide
    numbers = 2 * lanes if vectors.pairs_bfloat16 else lanes
    some, ones = f"<{numbers} x {kind}>", f"<{', '.join(['bfloat 1.0'] * numbers)}>"
    length = code.arithmetic("mul", code.arithmetic("mul", "%groups", "%runs"), RUN)
    group = code.arithmetic("mul", "%runs", RUN)
    with code.repeated("each_row", 0, "%rows") as each_row:
        row_x = code.at(kind, "%x", code.arithmetic("mul", each_row.index, length))
        row_to = code.at("float", "%to", code.arithmetic("mul", each_row.index, "%padded"))
        with code.repeated("each_group", 0, "%groups") as each_group:
            place = code.at(kind, row_x, code.arithmetic("mul", each_group.index, group))
            with code.repeated("each_part", 0, group, numbers, (wide, "zeroinitializer")) as each:
                part = code.load(some, code.at(kind, place, each.index), SIZES[kind])
                if vectors.pairs_bfloat16:
                    each.left = multiply_add(vectors, code, ones, part, each.held)
                else:
                    part = part if kind == "float" else code.value(f"fpext {some} {part} to {wide}")
                    each.left = code.value(f"fadd {wide} {each.held}, {part}")
            total = code.value(f"extractelement {wide} {add_up(code, [each.held], lanes)}, i32 0")
            code.store_at("float", total, row_to, each_group.index)
        with code.repeated("each_zero", "%groups", "%padded") as each:
            code.store_at("float", "0.0", row_to, each.index)
    code.effect("ret void")
    return code.text()


class _Widen:
    """Appends what makes numbers of a run of codes: vectors, and where in the run they begin."""

    def __init__(self, vectors: Vectors, form: Format, code: Code) -> None:
        self._vectors, self._form, self._code = vectors, form, code

    def stored(self, place: str, first: int) -> list[tuple[str, int]]:
        """Read numbers that are widened already."""
        kind = row_kind(self._vectors)
        step = 2 * self._vectors.lanes if self._vectors.pairs_bfloat16 else self._vectors.lanes
        some, code = vector_of(self._vectors, kind), self._code
        starts = range(0, RUN, step)
        return [(code.load(some, code.at(kind, place, at), SIZES[kind]), first + at) for at in starts]

    def run(self, place: str, first: int) -> list[tuple[str, int]]:
        """Widen the run of codes at an address; ``first`` is its place in a row."""
        if self._vectors.pairs_bfloat16:
            if self._form.bits == 8:
                numbers = self._pairs_of_floats(place) if self._form.levels else self._pairs_of_bytes(place)
            else:
                numbers = self._pairs_of_halves(place)
            return [(numbers, first)]
        return self._floats_of_bytes(place, first) if self._form.bits == 8 else self._floats_of_halves(place, first)

    def _pairs_of_halves(self, place: str) -> str:
        """Shift each half of a byte to the end of a word, and look its level up by the last five bits."""
        code, bits = self._code, self._form.bits
        words = f"<{RUN} x i16>"
        packed = code.load(f"<{_HALF} x i8>", place, 1)
        twice = ", ".join(f"i32 {index % _HALF}" for index in range(RUN))
        packed = code.value(f"shufflevector <{_HALF} x i8> {packed}, <{_HALF} x i8> poison, <{RUN} x i32> <{twice}>")
        packed = code.value(f"zext <{RUN} x i8> {packed} to {words}")
        shifts = ", ".join(f"i16 {4 * (index // _HALF)}" for index in range(RUN))
        codes = code.value(f"lshr {words} {packed}, <{shifts}>")
        if bits > 4:
            codes = code.value(f"and {words} {codes}, <{', '.join(['i16 15'] * RUN)}>")
            codes = code.value(f"or {words} {codes}, {self._high_bits(place, 0, RUN, 'i16')}")
        found = [bits_of_level(level) for level in self._form.levels]
        found = found * max(1, RUN // len(found))
        tables = [f"{words} <{', '.join(f'i16 {each}' for each in found[at : at + RUN])}>" for at in (0, RUN)]
        if len(found) == RUN:
            operands = f"@llvm.x86.avx512.permvar.hi.512({tables[0]}, {words} {codes})"
        else:
            operands = f"@llvm.x86.avx512.vpermi2var.hi.512({tables[0]}, {words} {codes}, {tables[1]})"
        return code.value(f"bitcast {words} {code.value(f'call {words} {operands}')} to <{RUN} x bfloat>")

    def _high_bits(self, place: str, first: int, count: int, kind: str) -> str:
        """Return integers with the bits above the lowest four of ``count`` codes, from code ``first`` of a run on."""
        code, bits = self._code, self._form.bits
        size = RUN * (bits - 4) // 8
        stored, some = f"<{size} x i8>", f"<{count} x {kind}>"
        high = code.load(stored, code.at("i8", place, _HALF), 1)
        # Of five bits, a byte has neighbours; of six, every eighth code.
        places = [(at // 8, at % 8) if bits == 5 else (at % 8, 2 * (at // 8)) for at in range(first, first + count)]
        picked = ", ".join(f"i32 {byte}" for byte, _ in places)
        high = code.value(f"shufflevector {stored} {high}, {stored} poison, <{count} x i32> <{picked}>")
        high = code.value(f"zext <{count} x i8> {high} to {some}")
        high = code.value(f"lshr {some} {high}, <{', '.join(f'{kind} {shift}' for _, shift in places)}>")
        high = code.value(f"and {some} {high}, <{', '.join([f'{kind} {(1 << bits - 4) - 1}'] * count)}>")
        return code.value(f"shl {some} {high}, <{', '.join([f'{kind} 4'] * count)}>")

    def _pairs_of_bytes(self, place: str) -> str:
        code, floats = self._code, []
        for half in range(2):
            some = code.load(f"<{_HALF} x i8>", code.at("i8", place, half * _HALF), 1)
            floats.append(code.value(f"sitofp <{_HALF} x i8> {some} to <{_HALF} x float>"))
        operands = ", ".join(f"<16 x float> {each}" for each in reversed(floats))
        return code.value(f"call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512({operands})")

    def _pairs_of_floats(self, place: str) -> str:
        """Move the bits of floats of 4 bits of exponent and 3 of mantissa; look those without exponent up."""
        code, words = self._code, f"<{RUN} x i16>"

        constant = partial(repeated_constant, "i16", count=RUN)
        codes = code.value(f"zext <{RUN} x i8> {code.load(f'<{RUN} x i8>', place, 1)} to {words}")
        sizes = code.value(f"and {words} {codes}, {constant(0x7F)}")
        # The exponent of 1 is 7 in these, and 127 in bfloat16, where it is followed by 7 bits.
        moved = code.value(f"add {words} {code.value(f'shl {words} {sizes}, {constant(4)}')}, {constant(120 << 7)}")
        small = code.value(f"icmp ult {words} {sizes}, {constant(8)}")
        table = [bits_of_level(level) for level in self._form.levels[:8]] * (RUN // 8)
        operands = f"{words} <{', '.join(f'i16 {each}' for each in table)}>, {words} {codes}"
        found = code.value(f"call {words} @llvm.x86.avx512.permvar.hi.512({operands})")
        moved = code.value(f"select <{RUN} x i1> {small}, {words} {found}, {words} {moved}")
        signs = code.value(f"shl {words} {code.value(f'and {words} {codes}, {constant(0x80)}')}, {constant(8)}")
        return code.value(f"bitcast {words} {code.value(f'or {words} {moved}, {signs}')} to <{RUN} x bfloat>")

    def _floats_of_bytes(self, place: str, first: int) -> list[tuple[str, int]]:
        code, lanes, wide, found = self._code, self._vectors.lanes, self._vectors.wide, []
        dtype = "uint8" if self._form.levels else "int8"
        for at in range(0, RUN, lanes):
            some = code.load(f"<{lanes} x i8>", code.at("i8", place, at), 1)
            numbers = widened(code, dtype, lanes, some)
            if self._form.levels:
                numbers = code.value(f"fmul {wide} {numbers}, {self._vectors.constant(BYTE_SCALE)}")
            found.append((numbers, first + at))
        return found

    def _floats_of_halves(self, place: str, first: int) -> list[tuple[str, int]]:
        code, lanes, wide = self._code, self._vectors.lanes, self._vectors.wide
        found, some, whole = [], f"<{lanes} x i8>", f"<{lanes} x i32>"
        for half in range(2):
            for at in range(0, _HALF, lanes):
                packed = code.load(some, code.at("i8", place, at), 1)
                operation, operand = ("lshr", 4) if half else ("and", 15)
                codes = code.value(f"{operation} {some} {packed}, <{', '.join([f'i8 {operand}'] * lanes)}>")
                codes = code.value(f"zext {some} {codes} to {whole}")
                if self._form.bits > 4:
                    codes = code.value(f"or {whole} {codes}, {self._high_bits(place, half * _HALF + at, lanes, 'i32')}")
                found.append((self._levels(codes, whole, wide), first + half * _HALF + at))
        return found

    def _levels(self, codes: str, whole: str, wide: str) -> str:
        code, lanes = self._code, self._vectors.lanes
        if self._form.offset is None and self._vectors.picks_by:
            return look_up(code, self._vectors.picks_by, rounded_levels(self._form.levels), codes, lanes)
        if self._form.offset is None:
            return self._floats_of_fp4(codes)
        offset = ", ".join([f"i32 {self._form.offset}"] * lanes)
        codes = code.value(f"sub {whole} {codes}, <{offset}>")
        return code.value(f"sitofp {whole} {codes} to {wide}")

    def _floats_of_fp4(self, codes: str) -> str:
        """Move a sign, two bits of exponent and one of mantissa to those of float32; 0 and 0.5 have none."""
        code, lanes, whole = self._code, self._vectors.lanes, f"<{self._vectors.lanes} x i32>"

        constant = partial(repeated_constant, "i32", count=lanes)
        sizes = code.value(f"and {whole} {codes}, {constant(7)}")
        moved = code.value(f"shl {whole} {sizes}, {constant(22)}")
        moved = code.value(f"add {whole} {moved}, {constant(126 << 23)}")
        # The exponent of 1 is 127 there. A code of 1 is a half, whose exponent is 126.
        small = code.value(f"mul {whole} {sizes}, {constant(126 << 23)}")
        is_small = code.value(f"icmp ult {whole} {sizes}, {constant(2)}")
        moved = code.value(f"select <{lanes} x i1> {is_small}, {whole} {small}, {whole} {moved}")
        signs = code.value(f"shl {whole} {code.value(f'and {whole} {codes}, {constant(8)}')}, {constant(28)}")
        return code.value(f"bitcast {whole} {code.value(f'or {whole} {moved}, {signs}')} to {self._vectors.wide}")


def bits_of_level(level: float) -> int:
    """Return the bits of the nearest bfloat16."""
    bits = struct.unpack("<I", struct.pack("<f", level))[0]
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


def rounded_levels(levels: Sequence[float]) -> list[float]:
    """Return levels as products multiply them: the nearest bfloat16."""
    return [struct.unpack("<f", struct.pack("<I", bits_of_level(level) << 16))[0] for level in levels]


def prefetch(code: Code, place: str) -> None:
    code.effect(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 3, i32 1)")


def vector_of(vectors: Vectors, kind: str) -> str:
    """The type of a vector of numbers that are multiplied."""
    return "<32 x bfloat>" if kind == "bfloat" else vectors.wide


def multiply_add(vectors: Vectors, code: Code, one: str, other: str, to: str, name: str | None = None) -> str:
    if vectors.pairs_bfloat16:
        operands = f"{vectors.wide} {to}, <32 x bfloat> {one}, <32 x bfloat> {other}"
        return code.value(f"call {vectors.wide} @llvm.x86.avx512bf16.dpbf16ps.512({operands})", name)
    return vectors.multiply_add(code, one, other, to, name)


def _add_minima(code: Code, vectors: Vectors, minima: list[str], sums: list[str]) -> list[str]:
    """Append sums of minima times sums of groups, for each row and output; return them."""
    wide, lanes = vectors.wide, vectors.lanes
    names = [f"%least{index}" for index in range(len(minima) * len(sums))]
    code.effect("br label %each_least")
    code.start("each_least")
    code.value("phi i64 [ 0, %entry ], [ %next_least, %each_least ]", "%l")
    for name in names:
        code.value(f"phi {wide} [ zeroinitializer, %entry ], [ {name}, %each_least ]", f"{name}_old")
    parts = [code.load(wide, code.at("float", start, "%l"), 4) for start in minima]
    for row, start in enumerate(sums):
        sum_x = code.load(wide, code.at("float", start, "%l"), 4)
        for output, part in enumerate(parts):
            name = names[row * len(minima) + output]
            vectors.multiply_add(code, part, sum_x, f"{name}_old", name)
    code.value(f"add i64 %l, {lanes}", "%next_least")
    code.branch(code.value("icmp slt i64 %next_least, %padded"), "each_least", "begin")
    code.start("begin")
    return names
