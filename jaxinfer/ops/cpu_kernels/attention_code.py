"""The assembly of attention: chunks of slots, each with its own softmax, joined at the end.

As in FlashDecoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html), threads share the chunks. Chunks always
begin at the same slots, and hidden slots have exactly zero weight, so a row's results depend neither on other rows nor
on the number of threads.
"""

from collections.abc import Callable

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module
from jaxinfer.ops.cpu_kernels.product_code import column_functions, dot_functions
from jaxinfer.ops.cpu_kernels.tiles import Vectors

# A multiple of the lanes of all processors. Each row keeps one score per slot of a chunk.
CHUNK = 128
# How many float32 a processor fetches at once.
_LINE = 16

_RECORD = Record(
    "q", "k", "v", "hidden", "ranges", "y", "scratch", "items", "rows", "numbers", "tokens", "slots", "stride",
    "lines", "groups", "first_batch", "chunks",
)  # fmt: skip


def attention_module(vectors: Vectors) -> str:
    """Return the assembly of ``handler(q, l, k, v, hidden, ranges) -> y, scratch``.

    q [I, X, H], k and v [L, B, S, F], hidden [B, T, P], y [I, X, H] and scratch [I * P / CHUNK, `scratch_numbers`] are
    float32; l and ranges [B, 2] are int32. I = B * C, F >= C * H, P is a multiple of CHUNK and H of the lanes. Row x of
    q[b * C + c] belongs to token x % T. It attends to part c of the slots ranges[b, 0] <= s < ranges[b, 1] of k[l, b]
    and v[l, b], and to fewer than a vector's lanes before them. If hidden[b, x % T, s] is not 0, it replaces the slot's
    score.
    """
    functions = [*dot_functions(vectors, "float32"), *column_functions(vectors)]
    own = [_exponential(vectors), _soften(vectors), _piece(vectors), _end(vectors)]
    return make_module(vectors, [*functions, *own], _RECORD, (6, 2), _plan, has_end=True)


def scratch_numbers(rows: int, numbers: int) -> int:
    """Return the float32 numbers of a chunk's scratch: scores, weighted values, largest scores and sums of weights."""
    return rows * (CHUNK + numbers + 2)


def _plan(code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
    q, layer, k, v, hidden, ranges = arguments
    items, rows, numbers = q.shape(code, 3)
    layers, batches, lines, stride = k.shape(code, 4)
    _, tokens, slots = hidden.shape(code, 3)
    groups = code.arithmetic("sdiv", items, batches)
    chunks = code.arithmetic("sdiv", slots, CHUNK)
    first_batch = code.arithmetic("mul", layer.layer(code, layers), batches)
    with code.repeated("each_range", 0, batches) as seen:
        first, last = _range(code, ranges.numbers, seen.index)
        seen.left = code.arithmetic("add", seen.held, code.arithmetic("sub", last, first))
    lanes = code.arithmetic("mul", code.arithmetic("mul", groups, numbers), 2)
    weights = code.arithmetic("mul", seen.held, lanes)
    pointers = {"q": q, "k": k, "v": v, "hidden": hidden, "ranges": ranges, "y": results[0], "scratch": results[1]}
    integers = {
        "items": items, "rows": rows, "numbers": numbers, "tokens": tokens, "slots": slots, "stride": stride,
        "lines": lines, "groups": groups, "first_batch": first_batch, "chunks": chunks,
    }  # fmt: skip
    places = {name: buffer.numbers for name, buffer in pointers.items()}
    return Plan(places, integers, code.arithmetic("mul", items, chunks), weights)


def _range(code: Code, ranges: str, batch: str) -> tuple[str, str]:
    """Return the first slot to read and the one after the last."""
    word = code.arithmetic("mul", batch, 2)
    first, last = (
        code.value(f"sext i32 {code.load_at('i32', ranges, place)} to i64")
        for place in (word, code.arithmetic("add", word, 1))
    )
    return first, last


def _places(code: Code, scratch: str, index: str, rows: str, numbers: str) -> tuple[str, str, str, str]:
    """Return the addresses of a chunk's scores, weighted values, largest scores and sums of weights."""
    each = code.arithmetic("add", numbers, CHUNK + 2)
    scores = code.at("float", scratch, code.arithmetic("mul", index, code.arithmetic("mul", rows, each)))
    weighted = code.at("float", scores, code.arithmetic("mul", rows, CHUNK))
    largest = code.at("float", weighted, code.arithmetic("mul", rows, numbers))
    return scores, weighted, largest, code.at("float", largest, rows)


def _piece(vectors: Vectors) -> str:
    """Return ``piece(record, index)``, which attends from all rows of an item to the slots of a chunk."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    chunks, groups, rows, numbers, tokens, slots, stride, lines, first_batch = (
        _RECORD.number(code, name)
        for name in (
            "chunks", "groups", "rows", "numbers", "tokens", "slots", "stride", "lines", "first_batch"
        )
    )  # fmt: skip
    item = code.arithmetic("sdiv", "%index", chunks)
    begin = code.arithmetic("mul", code.arithmetic("srem", "%index", chunks), CHUNK)
    batch, group = code.arithmetic("sdiv", item, groups), code.arithmetic("srem", item, groups)
    first, last = _range(code, _RECORD.pointer(code, "ranges"), batch)
    # Each vector of scores holds the same slots wherever the range begins.
    first = code.larger(begin, code.arithmetic("and", first, -vectors.lanes))
    last = code.smaller(code.arithmetic("add", begin, CHUNK), last)
    count = code.arithmetic("sub", last, first)
    code.branch(code.value(f"icmp sgt i64 {count}, 0"), "some", "none")
    code.start("some")
    scores, weighted, largest, totals = _places(code, _RECORD.pointer(code, "scratch"), "%index", rows, numbers)
    of_query = code.arithmetic("mul", item, code.arithmetic("mul", rows, numbers))
    query = code.at("float", _RECORD.pointer(code, "q"), of_query)
    line = code.arithmetic("mul", code.arithmetic("add", first_batch, batch), lines)
    of_slot = code.arithmetic("mul", code.arithmetic("add", line, first), stride)
    of_slot = code.arithmetic("add", of_slot, code.arithmetic("mul", group, numbers))
    keys, values = (code.at("float", _RECORD.pointer(code, name), of_slot) for name in ("k", "v"))
    # Prefetch everything at once; otherwise the processor would wait for each line's few numbers.
    for name, places in (("key", keys), ("value", values)):
        with code.repeated(f"each_{name}", 0, count) as slot:
            line = code.at("float", places, code.arithmetic("mul", slot.index, stride))
            with code.repeated(f"each_line_of_{name}", 0, numbers, _LINE) as part:
                place = code.at("float", line, part.index)
                code.effect(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 2, i32 1)")
    integers = ", ".join(f"i64 {number}" for number in (rows, count, numbers, numbers, stride, CHUNK))
    code.effect(f"call void @dots(ptr {query}, ptr {keys}, ptr {scores}, {integers})")
    of_hidden = code.arithmetic("add", code.arithmetic("mul", batch, code.arithmetic("mul", tokens, slots)), first)
    hidden = code.at("float", _RECORD.pointer(code, "hidden"), of_hidden)
    integers = ", ".join(f"i64 {number}" for number in (rows, tokens, count, slots))
    code.effect(f"call void @soften(ptr {scores}, ptr {hidden}, ptr {largest}, ptr {totals}, {integers})")
    integers = ", ".join(f"i64 {number}" for number in (rows, numbers, count, CHUNK, stride, numbers))
    code.effect(f"call void @columns(ptr {scores}, ptr {values}, ptr {weighted}, {integers})")
    code.effect("br label %none")
    code.start("none")
    code.effect("ret void")
    return code.text()


def _soften(vectors: Vectors) -> str:
    """Return ``soften(scores, hidden, largest, totals, rows, tokens, count, slots)``.

    It reads each row's first ``count`` scores (rows are ``CHUNK`` apart) and replaces the hidden ones. Then it replaces
    each by ``exp(score - largest)``, and stores the largest score and the sum.
    """
    lanes, wide = vectors.lanes, vectors.wide
    parameters = "ptr %scores, ptr %hidden, ptr %largest, ptr %totals, i64 %rows, i64 %tokens, i64 %count, i64 %slots"
    code = Code(f"internal void @soften({parameters}) #0")
    order = f"<{', '.join(f'i64 {lane}' for lane in range(lanes))}>"
    lowest = vectors.constant(float("-inf"))
    with code.repeated("each_row", 0, "%rows") as each_row:
        row = each_row.index
        own = code.at("float", "%scores", code.arithmetic("mul", row, CHUNK))
        hidden = code.at("float", "%hidden", code.arithmetic("mul", code.arithmetic("srem", row, "%tokens"), "%slots"))
        with code.repeated("each_score", 0, "%count", lanes, (wide, lowest)) as scores:
            place = code.at("float", own, scores.index)
            hidden = code.load(wide, code.at("float", hidden, scores.index), 4)
            # Selected, not added: a hidden slot's score may be any value and must not count.
            is_seen = code.value(f"fcmp oeq {wide} {hidden}, zeroinitializer")
            seen = f"<{lanes} x i1> {is_seen}, {wide} {code.load(wide, place, 4)}, {wide} {hidden}"
            shown = code.value(f"select {seen}")
            # Past the last slot, memory holds old values.
            left = code.arithmetic("sub", "%count", scores.index)
            single = code.value(f"insertelement <{lanes} x i64> poison, i64 {left}, i32 0")
            every = f"<{lanes} x i32> zeroinitializer"
            lefts = code.value(f"shufflevector <{lanes} x i64> {single}, <{lanes} x i64> poison, {every}")
            is_slot = code.value(f"icmp slt <{lanes} x i64> {order}, {lefts}")
            score = code.value(f"select <{lanes} x i1> {is_slot}, {wide} {shown}, {wide} {lowest}")
            code.effect(f"store {wide} {score}, ptr {place}, align 4")
            scores.left = _greater(code, vectors, scores.held, score)
        highest = _everywhere(code, vectors, scores.held, _greater)
        with code.repeated("each_weight", 0, "%count", lanes, (wide, "zeroinitializer")) as weights:
            place = code.at("float", own, weights.index)
            below = code.value(f"fsub {wide} {code.load(wide, place, 4)}, {highest}")
            weight = code.value(f"call {wide} @exponential({wide} {below})")
            code.effect(f"store {wide} {weight}, ptr {place}, align 4")
            weights.left = _sum(code, vectors, weights.held, weight)
        total = _everywhere(code, vectors, weights.held, _sum)
        for vector, place in ((highest, "%largest"), (total, "%totals")):
            code.store_at("float", code.value(f"extractelement {wide} {vector}, i32 0"), place, row)
    code.effect("ret void")
    return code.text()


def _end(vectors: Vectors) -> str:
    """Return ``end(record)``, which joins the chunks of every row in their order."""
    lanes, wide = vectors.lanes, vectors.wide
    code = Code("internal void @end(ptr %record) #0")
    items, rows, numbers, groups, chunks = (
        _RECORD.number(code, name) for name in ("items", "rows", "numbers", "groups", "chunks")
    )
    ranges, scratch, y = (_RECORD.pointer(code, name) for name in ("ranges", "scratch", "y"))
    lowest = vectors.constant(float("-inf"))
    with code.repeated("each_item", 0, items) as each_item:
        item = each_item.index
        begin, last = _range(code, ranges, code.arithmetic("sdiv", item, groups))
        of_item = code.arithmetic("mul", item, chunks)
        first = code.arithmetic("add", of_item, code.arithmetic("sdiv", begin, CHUNK))
        past = code.arithmetic("add", of_item, code.ceiling(last, CHUNK))
        with code.repeated("each_row", 0, rows) as each_row:
            row = each_row.index
            with code.repeated("each_largest", first, past, 1, (wide, lowest)) as highest:
                *_, largest, _ = _places(code, scratch, highest.index, rows, numbers)
                one = vectors.spread(code, code.load_at("float", largest, row))
                highest.left = _greater(code, vectors, highest.held, one)
            with code.repeated("each_total", first, past, 1, (wide, "zeroinitializer")) as total:
                *_, largest, totals = _places(code, scratch, total.index, rows, numbers)
                place = code.at("float", largest, row)
                below = code.value(f"fsub {wide} {vectors.spread(code, code.load('float', place))}, {highest.held}")
                factors = code.value(f"call {wide} @exponential({wide} {below})")
                code.effect(f"store float {code.value(f'extractelement {wide} {factors}, i32 0')}, ptr {place}")
                one = vectors.spread(code, code.load_at("float", totals, row))
                total.left = vectors.multiply_add(code, factors, one, total.held)
            of_row = code.arithmetic("mul", row, numbers)
            of_rows = code.arithmetic("mul", code.arithmetic("mul", item, rows), numbers)
            result = code.at("float", y, code.arithmetic("add", of_rows, of_row))
            with code.repeated("each_lane", 0, numbers, lanes) as lane:
                with code.repeated("each_chunk", first, past, 1, (wide, "zeroinitializer")) as sums:
                    _, weighted, largest, _ = _places(code, scratch, sums.index, rows, numbers)
                    factors = vectors.spread(code, code.load_at("float", largest, row))
                    of_part = code.arithmetic("add", of_row, lane.index)
                    part = code.load(wide, code.at("float", weighted, of_part), 4)
                    sums.left = vectors.multiply_add(code, factors, part, sums.held)
                mean = code.value(f"fdiv {wide} {sums.held}, {total.held}")
                code.effect(f"store {wide} {mean}, ptr {code.at('float', result, lane.index)}, align 4")
    code.effect("ret void")
    return code.text()


def _exponential(vectors: Vectors) -> str:
    """Return ``exponential(x)`` for x up to 0, exact to two units in the last place; 0 below -87.

    Cephes' expf (https://www.netlib.org/cephes): e**x is 2**n * e**r, r within half of log 2, and e**r a polynomial.
    """
    lanes, wide = vectors.lanes, vectors.wide
    code = Code(f"internal {wide} @exponential({wide} %x) #0")
    is_low = code.value(f"fcmp olt {wide} %x, {vectors.constant(-87.0)}")
    x = code.value(f"select <{lanes} x i1> {is_low}, {wide} {vectors.constant(-87.0)}, {wide} %x")
    # Adding 1.5 * 2**23 rounds away the fraction.
    shift = vectors.constant(12582912.0)
    shifted = vectors.multiply_add(code, x, vectors.constant(1.44269504088896341), shift)
    whole = code.value(f"fsub {wide} {shifted}, {shift}")
    rest = vectors.multiply_add(code, whole, vectors.constant(-0.693359375), x)
    rest = vectors.multiply_add(code, whole, vectors.constant(2.12194440e-4), rest)
    polynomial = vectors.constant(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
        polynomial = vectors.multiply_add(code, polynomial, rest, vectors.constant(factor))
    integers = f"<{lanes} x i32>"
    exponent = code.value(f"fptosi {wide} {whole} to {integers}")
    hiddened = code.value(f"add {integers} {exponent}, <{', '.join(['i32 127'] * lanes)}>")
    bits = code.value(f"shl {integers} {hiddened}, <{', '.join(['i32 23'] * lanes)}>")
    power = code.value(f"bitcast {integers} {bits} to {wide}")
    result = code.value(f"fmul {wide} {polynomial}, {power}")
    code.effect(f"ret {wide} {code.value(f'select <{lanes} x i1> {is_low}, {wide} zeroinitializer, {wide} {result}')}")
    return code.text()


def _greater(code: Code, vectors: Vectors, one: str, other: str) -> str:
    is_greater = code.value(f"fcmp ogt {vectors.wide} {one}, {other}")
    return code.value(f"select <{vectors.lanes} x i1> {is_greater}, {vectors.wide} {one}, {vectors.wide} {other}")


def _sum(code: Code, vectors: Vectors, one: str, other: str) -> str:
    return code.value(f"fadd {vectors.wide} {one}, {other}")


def _everywhere(code: Code, vectors: Vectors, vector: str, join: Callable[[Code, Vectors, str, str], str]) -> str:
    """Return the combination of all lanes, in each lane."""
    distance = 1
    while distance < vectors.lanes:
        mask = ", ".join(f"i32 {lane ^ distance}" for lane in range(vectors.lanes))
        turned = code.value(
            f"shufflevector {vectors.wide} {vector}, {vectors.wide} poison, <{vectors.lanes} x i32> <{mask}>"
        )
        vector = join(code, vectors, vector, turned)
        distance *= 2
    return vector
