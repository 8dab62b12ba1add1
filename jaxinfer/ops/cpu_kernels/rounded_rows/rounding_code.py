"""The assembly that rounds rows to int8: each by its largest number, with the sums that products need."""

from jaxinfer.ops.cpu_kernels.assembly import Code, float_constant
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module
from jaxinfer.ops.cpu_kernels.rounded_rows.byte_sums import FLOATS, INTEGERS, LANES
from jaxinfer.ops.cpu_kernels.rounded_rows.tiles import widened
from jaxinfer.ops.cpu_kernels.tiles import Vectors
from jaxinfer.ops.few_bits.rounded_rows import STEP

# A thread takes rows of about so many numbers at once, and so many take as long as a weight of a product.
_NUMBERS_AT_ONCE, _NUMBERS_PER_WEIGHT = 4096, 4
DECLARED = (
    f"declare {FLOATS} @llvm.rint.v{LANES}f32({FLOATS})\ndeclare i32 @llvm.vector.reduce.umax.v{LANES}i32({INTEGERS})\n"
    f"declare i32 @llvm.vector.reduce.add.v{LANES}i32({INTEGERS})\n"
)
_FIELDS = ("x", "codes", "sums", "scales"), ("rows", "length", "pitch", "groups", "sum_pitch", "rows_at_once")


def rounding_module(vectors: Vectors, group: int | None) -> str:
    """Return the assembly of ``handler(x [M, K]) -> codes [M, P], sums [M, S], scales [M, 1]``.

    x, sums and scales are float32, codes int8. Sums are those of codes in a group, or with None in a row. What is past
    K, or past the last group, is zero.
    """
    record = Record(*_FIELDS[0], *_FIELDS[1])

    def plan(code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
        (x,), (codes, sums, scales) = arguments, results
        rows, length = x.shape(code, 2)
        pitch, sum_pitch = (each.shape(code, 2)[1] for each in (codes, sums))
        at_once = code.larger(code.arithmetic("sdiv", _NUMBERS_AT_ONCE, length), 1)
        groups = "1" if group is None else code.arithmetic("sdiv", length, group)
        pointers = {"x": x.numbers, "codes": codes.numbers, "sums": sums.numbers, "scales": scales.numbers}
        numbers = dict(zip(_FIELDS[1], (rows, length, pitch, groups, sum_pitch, at_once), strict=True))
        weights = code.arithmetic("sdiv", code.arithmetic("mul", rows, length), _NUMBERS_PER_WEIGHT)
        return Plan(pointers, numbers, code.ceiling(rows, at_once), weights)

    wide = widened(vectors)
    return make_module(wide, [DECLARED, _piece(wide, record, group)], record, (1, 3), plan)


def _piece(vectors: Vectors, record: Record, group: int | None) -> str:
    """Return ``piece(record, index)``, which rounds some rows."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    x, codes, sums, scales = (record.pointer(code, name) for name in _FIELDS[0])
    rows, length, pitch, groups, sum_pitch, at_once = (record.number(code, name) for name in _FIELDS[1])
    size = length if group is None else str(group)
    begin = code.arithmetic("mul", "%index", at_once)
    past = code.smaller(code.arithmetic("add", begin, at_once), rows)
    with code.repeated("each_row", begin, past) as each_row:
        row = code.at("float", x, code.arithmetic("mul", each_row.index, length))
        row_codes = code.at("i8", codes, code.arithmetic("mul", each_row.index, pitch))
        row_sums = code.at("float", sums, code.arithmetic("mul", each_row.index, sum_pitch))
        with code.repeated("each_size", 0, length, LANES, (INTEGERS, "zeroinitializer")) as each:
            numbers = code.load(FLOATS, code.at("float", row, each.index), 4)
            each.left = larger_sizes(code, numbers, each.held)
        scale, divisor = scale_of(code, vectors, each.held)
        code.store_at("float", scale, scales, each_row.index)
        with code.repeated("each_group", 0, groups) as each_group:
            first = code.arithmetic("mul", each_group.index, size)
            with code.repeated("each_part", 0, size, LANES, (INTEGERS, "zeroinitializer")) as each:
                at = code.arithmetic("add", first, each.index)
                numbers = code.load(FLOATS, code.at("float", row, at), 4)
                part = round_part(code, numbers, divisor, code.at("i8", row_codes, at))
                each.left = code.value(f"add {INTEGERS} {each.held}, {part}")
            code.store_at("float", sum_of(code, each.held), row_sums, each_group.index)
        with code.repeated("each_zero", length, pitch) as each:
            code.store_at("i8", 0, row_codes, each.index)
        with code.repeated("each_no_group", groups, sum_pitch) as each:
            code.store_at("float", "0.0", row_sums, each.index)
    code.effect("ret void")
    return code.text()


def larger_sizes(code: Code, numbers: str, sizes: str) -> str:
    """Return the larger ones of some sizes and of the sizes of numbers; what is no number is larger than all."""
    # Sizes compare as their bits do.
    bits = code.value(f"bitcast {FLOATS} {numbers} to {INTEGERS}")
    bits = code.value(f"and {INTEGERS} {bits}, <{', '.join([f'i32 {0x7FFFFFFF}'] * LANES)}>")
    larger = code.value(f"icmp ugt {INTEGERS} {bits}, {sizes}")
    return code.value(f"select <{LANES} x i1> {larger}, {INTEGERS} {bits}, {INTEGERS} {sizes}")


def scale_of(code: Code, vectors: Vectors, sizes: str) -> tuple[str, str]:
    """Return the scale of numbers, of which these are the largest sizes, and what to divide them by."""
    most = code.value(f"call i32 @llvm.vector.reduce.umax.v{LANES}i32({INTEGERS} {sizes})")
    most = code.value(f"bitcast i32 {most} to float")
    scale = code.value(f"fmul float {most}, {float_constant(STEP)}")
    is_zero = code.value(f"fcmp oeq float {scale}, 0.0")
    return scale, vectors.spread(code, code.value(f"select i1 {is_zero}, float 1.0, float {scale}"))


def round_part(code: Code, numbers: str, divisor: str, to: str) -> str:
    """Append the store of a vector of numbers as bytes; return them as integers."""
    part = code.value(f"fdiv {FLOATS} {numbers}, {divisor}")
    part = code.value(f"call {FLOATS} @llvm.rint.v{LANES}f32({FLOATS} {part})")
    part = code.value(f"fptosi {FLOATS} {part} to {INTEGERS}")
    some = code.value(f"trunc {INTEGERS} {part} to <{LANES} x i8>")
    code.effect(f"store <{LANES} x i8> {some}, ptr {to}, align 1")
    return part


def sum_of(code: Code, integers: str) -> str:
    """Return the sum of a vector of integers, in float32."""
    total = code.value(f"call i32 @llvm.vector.reduce.add.v{LANES}i32({INTEGERS} {integers})")
    return code.value(f"sitofp i32 {total} to float")
