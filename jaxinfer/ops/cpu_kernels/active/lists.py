"""The assembly that lists active units: numbers of rows, or pairs of bfloat16, that are not zero in some row."""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.tiles import Vectors, masked_load

# The bits of a unit of four bytes without signs: a zero has none of them.
_WITHOUT_SIGNS = {False: 0x7FFFFFFF, True: 0x7FFF7FFF}


def list_function(vectors: Vectors, pairs: bool, classes: int) -> str:
    """Return ``list_active(x, rows, length, pitch, all, lists, room, counts)``.

    A unit is a float32, with ``pairs`` two bfloat16. Unit i of all rows is active if it is not zero in some row, and
    with ``all`` in any case; NaN is not zero. Active units of class ``i % classes`` are written to that class's list,
    in order: int32 from ``lists + class * room`` on, with their count, int64, in ``counts``. Rows have ``length`` units
    and are ``pitch`` apart; a list has room for one more than it may get. ``classes`` divides the lanes or is 1.
    """
    lanes, some = vectors.lanes, f"<{vectors.lanes} x i32>"
    parameters = "ptr %x, i64 %rows, i64 %length, i64 %pitch, i1 %all, ptr %lists, i64 %room, ptr %counts"
    code = Code(f"internal void @list_active({parameters}) #0")
    flags = code.value(f"alloca {some}, align 64")
    for each in range(classes):
        code.store_at("i64", 0, "%counts", each)
    everything = _spread(code, lanes, code.value("sext i1 %all to i32"))
    signless = _spread(code, lanes, str(_WITHOUT_SIGNS[pairs]))
    load, kind = masked_load(lanes, 4)
    with code.repeated("each_vector", 0, "%length", lanes) as vector:
        first = code.at("i32", "%x", vector.index)
        mask = vectors.first(code, lanes, code.arithmetic("sub", "%length", vector.index))
        with code.repeated("each_row", 0, "%rows", 1, (some, everything)) as row:
            place = code.at("i32", first, code.arithmetic("mul", row.index, "%pitch"))
            read = code.value(f"call {kind} {load}(ptr {place}, i32 4, <{lanes} x i1> {mask}, {kind} zeroinitializer)")
            row.left = code.value(f"or {some} {row.held}, {code.value(f'bitcast {kind} {read} to {some}')}")
        kept = code.value(f"and {some} {row.held}, {signless}")
        is_active = code.value(f"and <{lanes} x i1> {code.value(f'icmp ne {some} {kept}, zeroinitializer')}, {mask}")
        code.effect(f"store {some} {code.value(f'zext <{lanes} x i1> {is_active} to {some}')}, ptr {flags}, align 64")
        for lane in range(lanes):
            count = code.load_at("i64", "%counts", lane % classes)
            unit = code.value(f"trunc i64 {code.arithmetic('add', vector.index, lane)} to i32")
            # Written in any case, and counted if it is active: a branch would often be guessed wrong.
            code.store_at(
                "i32", unit, "%lists", code.arithmetic("add", count, code.arithmetic("mul", "%room", lane % classes))
            )
            flag = code.value(f"zext i32 {code.load_at('i32', flags, lane)} to i64")
            code.store_at("i64", code.arithmetic("add", count, flag), "%counts", lane % classes)
    code.effect("ret void")
    return code.text()


def _spread(code: Code, lanes: int, number: str) -> str:
    """Append a vector with one int32 in every lane."""
    single = code.value(f"insertelement <{lanes} x i32> poison, i32 {number}, i32 0")
    return code.value(
        f"shufflevector <{lanes} x i32> {single}, <{lanes} x i32> poison, <{lanes} x i32> zeroinitializer"
    )
