"""The assembly that reads rows in bytes (`jaxinfer.ops.rows_in_bytes`): what bytes stand for, and scales of slots."""

from functools import partial

from jaxinfer.ops.cpu_kernels.assembly import Code, repeated_constant
from jaxinfer.ops.cpu_kernels.tiles import Vectors

# What `widened` leaves out of floats of 8 bits.
BYTE_SCALE = 256.0


def widened(code: Code, dtype: str, count: int, numbers: str) -> str:
    """Append the float32 that a vector of bytes stands for; of ``uint8``, a 256th of it.

    Those are floats with an exponent of four bits. With a fifth one they are float16 256 times as small, also where
    they have no leading one.
    """
    wide = f"<{count} x float>"
    if dtype == "int8":
        return code.value(f"sitofp <{count} x i8> {numbers} to {wide}")
    words = f"<{count} x i16>"

    constant = partial(repeated_constant, "i16", count=count)
    long = code.value(f"zext <{count} x i8> {numbers} to {words}")
    sign = code.value(f"and {words} {code.value(f'shl {words} {long}, {constant(8)}')}, {constant(-0x8000)}")
    size = code.value(f"and {words} {code.value(f'shl {words} {long}, {constant(7)}')}, {constant(0x3F80)}")
    halves = code.value(f"bitcast {words} {code.value(f'or {words} {sign}, {size}')} to <{count} x half>")
    return code.value(f"fpext <{count} x half> {halves} to {wide}")


def scale_functions(vectors: Vectors, dtype: str, most: int) -> list[str]:
    """Return ``read_scales`` and ``scale_scores``; a call of either is of ``most`` slots or, of the latter, any number.

    ``read_scales(bytes, scales, slots, stride, heads)`` writes float32 of slots ``stride`` apart, for numbers as
    `widened` gives them; ``scale_scores(scores, bytes, rows, slots, pitch, stride, heads)`` multiplies scores of rows
    ``pitch`` apart by them. ``bytes`` are the upper ones; the lower ones are ``heads`` further.
    """
    return [_read_scales(dtype), _scale_scores(vectors, most)]


def _read_scales(dtype: str) -> str:
    parameters = "ptr %bytes, ptr %scales, i64 %slots, i64 %stride, i64 %heads"
    code = Code(f"internal void @read_scales({parameters}) #0")
    with code.repeated("each_slot", 0, "%slots") as slot:
        upper = code.at("i8", "%bytes", code.arithmetic("mul", slot.index, "%stride"))
        words = [
            code.value(f"zext i8 {code.load('i8', place)} to i32") for place in (upper, code.at("i8", upper, "%heads"))
        ]
        shifted = [code.value(f"shl i32 {word}, {shift}") for word, shift in zip(words, (24, 16))]
        scale = code.value(f"bitcast i32 {code.value(f'or i32 {shifted[0]}, {shifted[1]}')} to float")
        if dtype != "int8":
            scale = code.value(f"fmul float {scale}, {BYTE_SCALE}")
        code.store_at("float", scale, "%scales", slot.index)
    code.effect("ret void")
    return code.text()


def _scale_scores(vectors: Vectors, most: int) -> str:
    lanes, wide = vectors.lanes, vectors.wide
    parameters = "ptr %scores, ptr %bytes, i64 %rows, i64 %slots, i64 %pitch, i64 %stride, i64 %heads"
    code = Code(f"internal void @scale_scores({parameters}) #0")
    scales = code.value(f"alloca [{most} x float], align 64")
    with code.repeated("each_part", 0, "%slots", most) as part:
        count = code.smaller(code.arithmetic("sub", "%slots", part.index), most)
        place = code.at("i8", "%bytes", code.arithmetic("mul", part.index, "%stride"))
        code.effect(f"call void @read_scales(ptr {place}, ptr {scales}, i64 {count}, i64 %stride, i64 %heads)")
        whole = code.arithmetic("and", count, -lanes)
        with code.repeated("each_row", 0, "%rows") as row:
            line = code.at("float", "%scores", code.arithmetic("mul", row.index, "%pitch"))
            line = code.at("float", line, part.index)
            with code.repeated("each_vector", 0, whole, lanes) as several:
                place, factors = (code.at("float", start, several.index) for start in (line, scales))
                product = code.value(f"fmul {wide} {code.load(wide, place, 4)}, {code.load(wide, factors, 4)}")
                code.effect(f"store {wide} {product}, ptr {place}, align 4")
            with code.repeated("each_other", whole, count) as one:
                numbers = (code.load_at("float", start, one.index) for start in (line, scales))
                code.store_at("float", code.value(f"fmul float {', '.join(numbers)}"), line, one.index)
    code.effect("ret void")
    return code.text()
