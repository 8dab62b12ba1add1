"""Rows that are rounded to int8, as they multiply panels: whole rows, or groups of their numbers for drafts.

Four neighbouring numbers of each of 16 outputs make a vector, which is multiplied by the same four of a row. Sums of a
step are integers.
"""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.few_bits.grouped_tiles import Numbers
from jaxinfer.ops.cpu_kernels.product_pieces import call_tile
from jaxinfer.ops.cpu_kernels.rounded_rows.byte_sums import (
    BYTES,
    FLOATS,
    INTEGERS,
    LANES,
    VECTOR,
    ByteSums,
    added_to_codes,
    declarations,
    whole_bytes,
)
from jaxinfer.ops.cpu_kernels.rounded_rows.rounding_code import DECLARED, larger_sizes, round_part, scale_of, sum_of
from jaxinfer.ops.cpu_kernels.sixteen_outputs import OUTPUTS, spread_four
from jaxinfer.ops.cpu_kernels.tiles import LLVM_TYPES, SIZES, Vectors
from jaxinfer.ops.few_bits.formats import RUN, Format

# Where sums are in 16 bits first, those of more rows, and their totals, do not stay in registers.
_ROWS_IN_SHORT = 3


class RoundedInGroups:
    """Rows of a dtype whose numbers are rounded in groups of `RUN`, each with its scale (`panel_code.RowKind`)."""

    element, num_factors, has_row_scale, sum_type, sums_of_row = "i8", 2, False, INTEGERS, 1
    numbers: Numbers | None = None

    def __init__(self, vectors: Vectors, form: Format, row_dtype: str) -> None:
        self._vectors, self._form, self._row_dtype = vectors, form, row_dtype
        self.span: int | None = RUN
        self.offset = added_to_codes(vectors, form)
        self.rows = vectors.rows if vectors.dots_bytes else min(vectors.rows, _ROWS_IN_SHORT)

    def functions(self) -> list[str]:
        """Return declarations, and the functions that `make_ready` calls."""
        return [declarations(self._vectors), DECLARED, self._round_function()]

    def make_ready(self, code: Code, x: str, to: str, factors: str, rows: str, length: str) -> None:
        """Append what writes the bytes of rows, and the scales and sums of their groups."""
        groups = code.arithmetic("mul", rows, code.arithmetic("udiv", length, RUN))
        call_tile(code, "@round", (x, to, factors), (groups,))

    def add_run(self, code: Code, codes: str, places: list[str], sums: list[str]) -> list[str]:
        """Return each row's sums, to which the products of a run's codes with the bytes at its place are added."""
        return _dots(code, self._vectors, self._form, codes, places, sums)

    def finish(self, code: Code, sums: list[str], factors: list[str]) -> list[str]:
        """Return each row's sum in float32."""
        return [code.value(f"sitofp {INTEGERS} {each} to {FLOATS}") for each in sums]

    def _round_function(self) -> str:
        """Return ``round(x, codes, scales, groups)``: bytes of each group, its scale, and its sum times that."""
        code = Code("internal void @round(ptr %x, ptr %codes, ptr %scales, i64 %groups) #0")
        parts = range(0, RUN, LANES)
        with code.repeated("each_group", 0, "%groups") as each:
            first = code.arithmetic("mul", each.index, RUN)
            numbers = [_floats(code, self._row_dtype, "%x", code.arithmetic("add", first, part)) for part in parts]
            sizes, total = "zeroinitializer", "zeroinitializer"
            for part in numbers:
                sizes = larger_sizes(code, part, sizes)
            scale, divisor = scale_of(code, self._vectors, sizes)
            codes = code.at("i8", "%codes", first)
            for at, part in zip(parts, numbers):
                rounded = round_part(code, part, divisor, code.at("i8", codes, at))
                total = code.value(f"add {INTEGERS} {total}, {rounded}")
            own = code.at("float", "%scales", code.arithmetic("mul", each.index, 2))
            code.store_at("float", scale, own, 0)
            code.store_at("float", code.value(f"fmul float {sum_of(code, total)}, {scale}"), own, 1)
        code.effect("ret void")
        return code.text()


class RoundedRows:
    """Rows of a dtype, each rounded with one scale, of which a step is a group of weights (`panel_code.RowKind`).

    The sums are those of `rounded_rows`, which multiplies the same weights by rows.
    """

    element, num_factors, has_row_scale, offset, sum_type, sums_of_row = "i8", 1, True, 0, INTEGERS, 1
    numbers: Numbers | None = None

    def __init__(self, vectors: Vectors, form: Format, row_dtype: str) -> None:
        self._vectors, self._form, self._row_dtype, self.span = vectors, form, row_dtype, form.group
        self.rows = vectors.rows

    def functions(self) -> list[str]:
        """Return declarations, and the functions that `make_ready` calls."""
        return [declarations(self._vectors), DECLARED, self._round_function()]

    def make_ready(self, code: Code, x: str, to: str, factors: str, rows: str, length: str) -> None:
        """Append what writes the bytes of rows, the sums of their groups, and each row's scale after them."""
        call_tile(code, "@round", (x, to, factors), (rows, length))

    def add_run(self, code: Code, codes: str, places: list[str], sums: list[str]) -> list[str]:
        """Return each row's sums, to which the products of a run's codes with the bytes at its place are added."""
        return _dots(code, self._vectors, self._form, codes, places, sums)

    def finish(self, code: Code, sums: list[str], factors: list[str]) -> list[str]:
        """Return each row's sum of a step in float32, without what made codes unsigned."""
        shift = added_to_codes(self._vectors, self._form)
        if shift:
            # Of a whole row, the sum that is taken off may be exact as an integer only.
            own = [code.value(f"fptosi float {code.load('float', each)} to i32") for each in factors]
            own = [self._spread(code, code.value(f"mul i32 {each}, {shift}")) for each in own]
            sums = [code.value(f"sub {INTEGERS} {each}, {taken}") for each, taken in zip(sums, own, strict=True)]
        return [code.value(f"sitofp {INTEGERS} {each} to {FLOATS}") for each in sums]

    @staticmethod
    def _spread(code: Code, number: str) -> str:
        single = code.value(f"insertelement {INTEGERS} poison, i32 {number}, i32 0")
        return code.value(f"shufflevector {INTEGERS} {single}, {INTEGERS} poison, <{LANES} x i32> zeroinitializer")

    def _round_function(self) -> str:
        """Return ``round(x, codes, sums, rows, length)``: bytes of each row, the sums of its groups, and its scale."""
        code = Code("internal void @round(ptr %x, ptr %codes, ptr %sums, i64 %rows, i64 %length) #0")
        span = self.span or "%length"
        groups = code.arithmetic("udiv", "%length", span)
        pitch = code.arithmetic("add", groups, 1)
        with code.repeated("each_row", 0, "%rows") as each_row:
            start = code.arithmetic("mul", each_row.index, "%length")
            row_sums = code.at("float", "%sums", code.arithmetic("mul", each_row.index, pitch))
            with code.repeated("each_size", 0, "%length", LANES, (INTEGERS, "zeroinitializer")) as each:
                numbers = _floats(code, self._row_dtype, "%x", code.arithmetic("add", start, each.index))
                each.left = larger_sizes(code, numbers, each.held)
            scale, divisor = scale_of(code, self._vectors, each.held)
            with code.repeated("each_group", 0, groups) as each_group:
                first = code.arithmetic("add", start, code.arithmetic("mul", each_group.index, span))
                with code.repeated("each_part", 0, span, LANES, (INTEGERS, "zeroinitializer")) as each:
                    at = code.arithmetic("add", first, each.index)
                    part = round_part(
                        code, _floats(code, self._row_dtype, "%x", at), divisor, code.at("i8", "%codes", at)
                    )
                    each.left = code.value(f"add {INTEGERS} {each.held}, {part}")
                code.store_at("float", sum_of(code, each.held), row_sums, each_group.index)
            code.store_at("float", scale, row_sums, groups)
        code.effect("ret void")
        return code.text()


def _dots(code: Code, vectors: Vectors, form: Format, codes: str, places: list[str], to: list[str]) -> list[str]:
    """Return each row's sums, to which the products of a run's codes with the bytes at its place are added."""
    sums = ByteSums(code, vectors, form.bits, to)
    for line in range(OUTPUTS * form.row_bytes(RUN) // VECTOR):
        loaded = code.load(BYTES, code.at("i8", codes, VECTOR * line), 1)
        for at, numbers in _codes(code, vectors, form, loaded, line):
            for row, place in enumerate(places):
                four = code.value(f"bitcast {INTEGERS} {spread_four(code, code.at('i8', place, at))} to {BYTES}")
                sums.add(row, numbers, four)
    return sums.totals()


def _codes(code: Code, vectors: Vectors, form: Format, line: str, index: int) -> list[tuple[int, str]]:
    """Return a line's codes as they are multiplied, each vector with the place in a run of the numbers that it has."""
    if form.bits == 8:
        return [(4 * index, whole_bytes(code, vectors, line))]
    fifteen, four = (f"<{', '.join([f'i8 {number}'] * VECTOR)}>" for number in (15, 4))
    low, high = code.value(f"and {BYTES} {line}, {fifteen}"), code.value(f"lshr {BYTES} {line}, {four}")
    return [(4 * index, low), (RUN // 2 + 4 * index, high)]


def _floats(code: Code, dtype: str, x: str, first: str) -> str:
    """Return a vector of numbers of a dtype, in float32."""
    element = LLVM_TYPES[dtype]
    kind = f"<{LANES} x {element}>"
    numbers = code.load(kind, code.at(element, x, first), SIZES[element])
    return numbers if element == "float" else code.value(f"fpext {kind} {numbers} to {FLOATS}")
