"""The index of each row's largest number on a CPU, in one pass that threads share.

XLA's CPU backend gives reductions of long rows to a pool of sleeping threads; waking them takes longer than the
reduction.
"""

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module
from jaxinfer.ops.cpu_kernels.machine_code import call, host_vectors
from jaxinfer.ops.cpu_kernels.tiles import Vectors

# A thread reads these numbers twice, while they are in the processor's first-level cache.
CHUNK = 4096
_NOWHERE = 2**31 - 1
_NAMES = "y", "largest", "places", "rows", "length", "chunks"
# Without classes, and with them.
_RECORD, _RECORD_OF_CLASSES = Record(*_NAMES, "x"), Record(*_NAMES, "x", "classes", "added", "groups", "kinds")


def finds_best(rows: int, numbers: int) -> bool:
    """Whether `best_places` supports this many rows of this many float32."""
    vectors = host_vectors()
    return vectors is not None and rows > 0 and numbers >= vectors.lanes


def best_places(scores_RV: Float[Array, "R V"]) -> Int[Array, " R"]:
    """Return the index of each row's largest float32, the first of equals; NaN is less than any other number.

    Check `finds_best` first. If a compiler splits arrays over devices, each device gets the whole array.
    """
    rows, numbers = scores_RV.shape
    if scores_RV.dtype != jnp.float32 or not finds_best(rows, numbers):
        raise ValueError(f"the best of {scores_RV.dtype}{scores_RV.shape} is not looked for")
    results = _results(rows, numbers)
    return call("best_places", best_module, "float32", results, jax.lax.stop_gradient(scores_RV))[0]


def best_places_of_classes(
    scores_RV: Float[Array, "R V"], classes_BV: Int[Array, "B V"], added_RK: Float[Array, "R K"]
) -> Int[Array, " R"]:
    """Return `best_places` of the scores plus a number for each place's class, of which row r has ``added_RK[r]``.

    Classes are int16 from 0 to below K; those of a line are for R / B rows, one after another. Adding minus infinity
    leaves a class out.
    """
    rows, numbers = scores_RV.shape
    groups, kinds = classes_BV.shape[0], added_RK.shape[1]
    given = (scores_RV.dtype, added_RK.dtype, classes_BV.dtype) == (jnp.float32, jnp.float32, jnp.int16)
    if not given or not finds_best(rows, numbers) or (rows % groups, classes_BV.shape[1]) != (0, numbers) or not kinds:
        shapes = ", ".join(f"{each.dtype}{each.shape}" for each in (scores_RV, classes_BV, added_RK))
        raise ValueError(f"the best of {shapes} is not looked for")
    arrays = map(jax.lax.stop_gradient, (scores_RV, classes_BV, added_RK))
    return call("best_of_classes", best_of_classes_module, "float32", _results(rows, numbers), *arrays)[0]


def _results(rows: int, numbers: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Describe the places, and each chunk's largest number and its index."""
    chunks = -(-numbers // CHUNK)
    return (
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows, chunks), jnp.float32),
        jax.ShapeDtypeStruct((rows, chunks), jnp.int32),
    )


def best_module(vectors: Vectors) -> str:
    """Return the assembly of ``handler(x [R, V]) -> y [R], largest [R, C], places [R, C]``, with C chunks per row."""
    return _module(vectors, _RECORD, ("x",))


def best_of_classes_module(vectors: Vectors) -> str:
    """Return that of ``handler(x [R, V], classes [B, V], added [R, K])``, with the same results."""
    return _module(vectors, _RECORD_OF_CLASSES, ("x", "classes", "added"))


def _module(vectors: Vectors, record: Record, given: tuple[str, ...]) -> str:
    def plan(code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
        rows, length = arguments[0].shape(code, 2)
        _, chunks = results[1].shape(code, 2)
        names = *given, "y", "largest", "places"
        pointers = {name: buffer.numbers for name, buffer in zip(names, [*arguments, *results])}
        numbers = {"rows": rows, "length": length, "chunks": chunks}
        if "classes" in given:
            (groups,), (_, kinds) = arguments[1].shape(code, 1), arguments[2].shape(code, 2)
            numbers |= {"groups": groups, "kinds": kinds}
        pieces, weights = code.arithmetic("mul", rows, chunks), code.arithmetic("mul", rows, length)
        return Plan(pointers, numbers, pieces, weights)

    functions = [_piece(vectors, record, "classes" in given), _end(record)]
    return make_module(vectors, functions, record, (len(given), 3), plan, has_end=True)


def _piece(vectors: Vectors, record: Record, has_classes: bool) -> str:
    """Return ``piece(record, index)``, which finds a chunk's largest number and its first index."""
    lanes, wide, integers = vectors.lanes, vectors.wide, f"<{vectors.lanes} x i32>"
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    length, chunks = (record.number(code, name) for name in ("length", "chunks"))
    row, chunk = code.arithmetic("sdiv", "%index", chunks), code.arithmetic("srem", "%index", chunks)
    line = code.at("float", record.pointer(code, "x"), code.arithmetic("mul", row, length))
    begin = code.arithmetic("mul", chunk, CHUNK)
    past = code.smaller(code.arithmetic("add", begin, CHUNK), length)
    # The last vector ends at the row's end and may overlap the one before.
    last = code.arithmetic("sub", length, lanes)
    if has_classes:
        line = _add_of_classes(code, vectors, record, row, line, (begin, past, last))
    with code.repeated("each_number", begin, past, lanes, (wide, vectors.constant(float("-inf")))) as numbers:
        part = code.load(wide, code.at("float", line, code.smaller(numbers.index, last)), 4)
        is_greater = code.value(f"fcmp ogt {wide} {part}, {numbers.held}")
        numbers.left = code.value(f"select <{lanes} x i1> {is_greater}, {wide} {part}, {wide} {numbers.held}")
    largest = code.value(f"call float @llvm.vector.reduce.fmax.v{lanes}f32({wide} {numbers.held})")
    spread = vectors.spread(code, largest)
    order = f"<{', '.join(f'i32 {lane}' for lane in range(lanes))}>"
    nowhere = f"<{', '.join([f'i32 {_NOWHERE}'] * lanes)}>"
    with code.repeated("each_place", begin, past, lanes, (integers, nowhere)) as places:
        first = code.smaller(places.index, last)
        part = code.load(wide, code.at("float", line, first), 4)
        single = code.value(f"insertelement {integers} poison, i32 {code.value(f'trunc i64 {first} to i32')}, i32 0")
        firsts = code.value(f"shufflevector {integers} {single}, {integers} poison, {integers} zeroinitializer")
        own = code.value(f"add {integers} {firsts}, {order}")
        is_largest = code.value(f"fcmp oeq {wide} {part}, {spread}")
        place = code.value(f"select <{lanes} x i1> {is_largest}, {integers} {own}, {integers} {nowhere}")
        is_before = code.value(f"icmp slt {integers} {place}, {places.held}")
        places.left = code.value(f"select <{lanes} x i1> {is_before}, {integers} {place}, {integers} {places.held}")
    place = code.value(f"call i32 @llvm.vector.reduce.smin.v{lanes}i32({integers} {places.held})")
    code.store_at("float", largest, record.pointer(code, "largest"), "%index")
    code.store_at("i32", place, record.pointer(code, "places"), "%index")
    code.effect("ret void")
    declared = f"declare float @llvm.vector.reduce.fmax.v{lanes}f32({wide})\n"
    kinds = f"<{lanes} x ptr>, i32 immarg, <{lanes} x i1>, {wide}"
    declared += f"declare {wide} @llvm.masked.gather.v{lanes}f32.v{lanes}p0({kinds})\n" if has_classes else ""
    declared += f"declare i32 @llvm.vector.reduce.smin.v{lanes}i32({integers})\n"
    return declared + code.text()


def _add_of_classes(
    code: Code, vectors: Vectors, record: Record, row: str, line: str, chunk: tuple[str, str, str]
) -> str:
    """Append the sums of a chunk's numbers and what is added for their classes; return their line's address.

    ``chunk`` is where it begins and ends, and where the row's last vector begins. The sums are in a buffer of the
    thread's own, of which only the chunk's part is there.
    """
    lanes, wide = vectors.lanes, vectors.wide
    begin, past, last = chunk
    rows, length, groups, kinds = (record.number(code, name) for name in ("rows", "length", "groups", "kinds"))
    group = code.arithmetic("sdiv", row, code.arithmetic("sdiv", rows, groups))
    classes = code.at("i16", record.pointer(code, "classes"), code.arithmetic("mul", group, length))
    added = code.at("float", record.pointer(code, "added"), code.arithmetic("mul", row, kinds))
    # The last vector may begin before the chunk does.
    buffer = code.value(f"alloca [{CHUNK + lanes} x float], align 64")
    sums = code.at("float", buffer, code.arithmetic("sub", lanes, begin))
    every = f"<{', '.join(['i1 true'] * lanes)}>"
    gather = f"@llvm.masked.gather.v{lanes}f32.v{lanes}p0"
    with code.repeated("each_sum", begin, past, lanes) as each:
        first = code.smaller(each.index, last)
        part = code.load(wide, code.at("float", line, first), 4)
        kind = code.load(f"<{lanes} x i16>", code.at("i16", classes, first), 2)
        kind = code.value(f"zext <{lanes} x i16> {kind} to <{lanes} x i32>")
        places = code.value(f"getelementptr float, ptr {added}, <{lanes} x i32> {kind}")
        own = code.value(
            f"call {wide} {gather}(<{lanes} x ptr> {places}, i32 4, <{lanes} x i1> {every}, {wide} poison)"
        )
        total = code.value(f"fadd {wide} {part}, {own}")
        code.effect(f"store {wide} {total}, ptr {code.at('float', sums, first)}, align 4")
    return sums


def _end(record: Record) -> str:
    """Return ``end(record)``, which finds each row's first chunk with the largest number."""
    code = Code("internal void @end(ptr %record)")
    rows, length, chunks = (record.number(code, name) for name in ("rows", "length", "chunks"))
    y, largest, places = (record.pointer(code, name) for name in ("y", "largest", "places"))
    with code.repeated("each_row", 0, rows) as each_row:
        first = code.arithmetic("mul", each_row.index, chunks)
        with code.repeated("each_chunk", 1, chunks, 1, ("i64", first)) as best:
            place = code.arithmetic("add", first, best.index)
            one, other = (code.load_at("float", largest, each) for each in (place, best.held))
            is_greater = code.value(f"fcmp ogt float {one}, {other}")
            best.left = code.value(f"select i1 {is_greater}, i64 {place}, i64 {best.held}")
        place = code.value(f"sext i32 {code.load_at('i32', places, best.held)} to i64")
        # A row of only NaN has no index.
        place = code.smaller(place, code.arithmetic("sub", length, 1))
        code.store_at("i32", code.value(f"trunc i64 {place} to i32"), y, each_row.index)
    code.effect("ret void")
    return code.text()
