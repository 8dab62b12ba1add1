"""The assembly of attention: scores, their softmax, and sums of values, each in the order of the sequence.

A slot's score depends on its key and the query alone. Weights and weighted values are added up slot by slot, from the
first position to the last, in one accumulator per output, and a hidden slot adds exactly zero. A head's sink, a score
without a value, is the first weight of all. So a query's results are the same in every bit whatever lies between the
slots that it sees, wherever a ring begins, and whatever other queries, rows and threads there are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module, wait_for
from jaxinfer.ops.cpu_kernels.product_code import dot_functions
from jaxinfer.ops.cpu_kernels.slot_bytes import scale_functions
from jaxinfer.ops.cpu_kernels.softmax_code import soften_functions
from jaxinfer.ops.cpu_kernels.tiles import LLVM_TYPES, SIZES, Vectors, in_bytes
from jaxinfer.ops.cpu_kernels.weighted_sums import WIDEST, tile_rows, weighted_sum_functions

# The slots of a piece of scores: a multiple of the lanes of all processors.
CHUNK = 128
# With more query rows per head than this, a thread takes as many rows from scores to results; with fewer, threads share
# the slots. `jaxinfer bench latency` measures another value.
BLOCK = 32
# The slots that are worked on while the next ones are fetched.
_AHEAD = 32
# What a processor fetches at once.
_LINE_BYTES = 64

_RECORD = Record(
    "q", "near", "k", "v", "table", "mask", "ranges", "walk", "softcap", "sinks", "y", "scratch", "rows", "numbers",
    "tokens", "slots", "stride", "lines", "columns", "groups", "first_page", "chunks", "blocks", "bands", "parts",
    "width", "scored", "softened",
)  # fmt: skip


def attention_module(vectors: Vectors, dtype: str = "float32") -> str:
    """Return the assembly of ``handler(q, near, l, k, v, table, mask, ranges, walk, softcap, sinks) -> y, scratch``.

    q and near [I, X, H], k and v [L, N, Z, F], y [I, X, H], softcap [1], sinks [C * X / T] and scratch
    [`scratch_numbers`] are float32; mask [B, T, P] are bytes; l, table [B, W], ranges [B, T, 2] and walk [B, 3] are
    int32. I = B * C, F >= C * H, P is a multiple of CHUNK. Slot s of batch row b is k[l, table[b, s / Z], s % Z], and
    so for v: N pages of Z slots. Row x of q[b * C + c] belongs to token t = x % T. It attends to part c of those slots
    ranges[b, t, 0] <= s < ranges[b, t, 1] whose mask[b, t, s] is not 0, and reads no others but those that another
    token of its row, or of its block of rows, may see. Slots before ``near_slots`` are multiplied with rows of near.

    ``walk[b]`` is (near_slots, turn, ring_end): in the order of the sequence, slots are those before near_slots, then
    from turn to before ring_end, from near_slots to before turn, and from ring_end on. A softcap c that is not 0 bounds
    a score x to c * tanh(x / c). ``sinks[c * X / T + x / T]`` is a score of row x of part c that no value has; minus
    infinity is none.

    Where ``dtype`` is float16, k and v are, and are widened as they are read; where it is int8 or uint8, they are rows
    in bytes of C heads (`jaxinfer.ops.rows_in_bytes`).
    """
    # Bytes are widened to float32 and never paired.
    of_dots = replace(vectors, pairs_bfloat16=False)
    functions = [
        *dot_functions(of_dots, dtype), *soften_functions(vectors), *weighted_sum_functions(vectors, dtype),
        *(scale_functions(vectors, dtype, _AHEAD) if in_bytes(dtype) else []),
    ]  # fmt: skip
    own = [_scores(dtype), _values(vectors, dtype), _seen(), _piece(), _short_piece(vectors), _long_piece(vectors)]
    plan = _Planner(vectors).plan
    return make_module(vectors, [*functions, *own], _RECORD, (11, 2), plan)


def scratch_numbers(items: int, rows: int, numbers: int, slots: int, vectors: Vectors) -> int:
    """Return how many float32 of scratch a call needs: scores, sums of weights and what
    these start from, where threads share the slots.
    """
    parts = -(-numbers // _widths(vectors)[0])
    return items * rows * (slots + parts * vectors.lanes + 1) if rows <= BLOCK else 1


def _widths(vectors: Vectors) -> tuple[int, int]:
    """Return how many columns of results a piece has: the fewer are for few rows, whose columns threads share."""
    return WIDEST // 2 * vectors.lanes, WIDEST * vectors.lanes


class _Planner:
    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors

    def plan(self, code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
        q, near, layer, k, v, table, mask, ranges, walk, softcap, sinks = arguments
        items, rows, numbers = q.shape(code, 3)
        layers, pages, lines, stride = k.shape(code, 4)
        _, columns = table.shape(code, 2)
        batches, tokens, slots = mask.shape(code, 3)
        groups = code.arithmetic("sdiv", items, batches)
        chunks, blocks = code.arithmetic("sdiv", slots, CHUNK), code.ceiling(rows, BLOCK)
        bands = code.ceiling(rows, tile_rows(self.vectors))
        narrow, wide = _widths(self.vectors)
        width = code.value(f"select i1 {code.value(f'icmp eq i64 {bands}, 1')}, i64 {narrow}, i64 {wide}")
        parts = code.ceiling(numbers, width)
        # Where threads share the slots: pieces of scores, then rows of them, then parts of the results.
        scored = code.arithmetic("mul", items, chunks)
        softened = code.arithmetic("add", scored, code.arithmetic("mul", items, rows))
        of_item = code.arithmetic("mul", bands, parts)
        shared = code.arithmetic("add", softened, code.arithmetic("mul", items, of_item))
        is_short = code.value(f"icmp eq i64 {blocks}, 1")
        pieces = code.value(f"select i1 {is_short}, i64 {shared}, i64 {code.arithmetic('mul', items, blocks)}")
        with code.repeated("each_row", 0, code.arithmetic("mul", batches, tokens)) as seen:
            first, last = _range(code, ranges.numbers, seen.index)
            seen.left = code.arithmetic("add", seen.held, code.arithmetic("sub", last, first))
        of_slots = code.arithmetic("mul", code.arithmetic("mul", groups, numbers), 2)
        pointers = {
            "q": q, "near": near, "k": k, "v": v, "table": table, "mask": mask, "ranges": ranges, "walk": walk,
            "softcap": softcap, "sinks": sinks, "y": results[0], "scratch": results[1],
        }  # fmt: skip
        integers = {
            "rows": rows, "numbers": numbers, "tokens": tokens, "slots": slots, "stride": stride, "lines": lines,
            "columns": columns, "groups": groups, "chunks": chunks, "blocks": blocks, "bands": bands, "parts": parts,
            "first_page": code.arithmetic("mul", layer.layer(code, layers), pages), "width": width, "scored": scored,
            "softened": softened,
        }  # fmt: skip
        places = {name: buffer.numbers for name, buffer in pointers.items()}
        return Plan(places, integers, pieces, code.arithmetic("mul", seen.held, of_slots))


def _range(code: Code, ranges: str, token: str) -> tuple[str, str]:
    """Return the first slot that a token sees and the one after the last; tokens are counted over all rows."""
    word = code.arithmetic("mul", token, 2)
    return _integer(code, ranges, word), _integer(code, ranges, code.arithmetic("add", word, 1))


def _integer(code: Code, integers: str, index: str) -> str:
    return code.value(f"sext i32 {code.load_at('i32', integers, index)} to i64")


def _numbers(code: Code, *names: str) -> tuple[str, ...]:
    return tuple(_RECORD.number(code, name) for name in names)


def _seen() -> str:
    """Return ``seen(record, batch, row, count, end)``: the first slot that rows of a batch row see, or after the last.

    The rows are ``count`` from ``row`` on.
    """
    code = Code("internal i64 @seen(ptr %record, i64 %batch, i64 %row, i64 %count, i1 %end) #0")
    (tokens, slots), ranges = _numbers(code, "tokens", "slots"), _RECORD.pointer(code, "ranges")
    initial = code.value(f"select i1 %end, i64 0, i64 {slots}")
    of_batch = code.arithmetic("mul", "%batch", tokens)
    begin = code.arithmetic("srem", "%row", tokens)
    with code.repeated("each_token", 0, code.smaller("%count", tokens), 1, ("i64", initial)) as found:
        token = code.arithmetic("add", begin, found.index)
        is_around = code.value(f"icmp sge i64 {token}, {tokens}")
        token = code.value(f"select i1 {is_around}, i64 {code.arithmetic('sub', token, tokens)}, i64 {token}")
        first, last = _range(code, ranges, code.arithmetic("add", of_batch, token))
        smaller, larger = code.smaller(found.held, first), code.larger(found.held, last)
        found.left = code.value(f"select i1 %end, i64 {larger}, i64 {smaller}")
    code.effect(f"ret i64 {found.held}")
    return code.text()


@contextmanager
def _in_pages(
    code: Code, block: str, name: str, item: str, first: str, last: str, dtype: str
) -> Iterator[tuple[str, str, str, str]]:
    """Repeat what is written inside for each page of an item's keys or values that has slots from first to before last.

    It gets the first of these slots in the page, the one after the last, and the first one's address and, in bytes, the
    address of its scale.
    """
    groups, columns, lines, stride, numbers = _numbers(code, "groups", "columns", "lines", "stride", "numbers")
    batch, group = code.arithmetic("sdiv", item, groups), code.arithmetic("srem", item, groups)
    row = code.arithmetic("mul", batch, columns)
    pages = code.arithmetic("sdiv", first, lines), code.ceiling(last, lines)
    with code.repeated(f"{block}_page", *pages) as column:
        start = code.arithmetic("mul", column.index, lines)
        begin, end = code.larger(first, start), code.smaller(last, code.arithmetic("add", start, lines))
        page = _integer(code, _RECORD.pointer(code, "table"), code.arithmetic("add", row, column.index))
        page = code.arithmetic("add", page, *_numbers(code, "first_page"))
        line = code.arithmetic("add", code.arithmetic("mul", page, lines), code.arithmetic("sub", begin, start))
        line = code.at(LLVM_TYPES[dtype], _RECORD.pointer(code, name), code.arithmetic("mul", line, stride))
        scale = code.at("i8", line, code.arithmetic("add", code.arithmetic("mul", groups, numbers), group))
        yield begin, end, code.at(LLVM_TYPES[dtype], line, code.arithmetic("mul", group, numbers)), scale


@contextmanager
def _part_by_part(
    code: Code, block: str, places: str, count: str, stride: str, width: str, dtype: str, scale: str
) -> Iterator[tuple[str, str, str, str]]:
    """Repeat what is written inside for parts of so many slots, while the processor fetches the next part.

    It gets how many slots are before a part's, how many these are, and the addresses of their numbers and of, in bytes,
    their scales.
    """

    def part_from(first: str) -> tuple[str, str, str]:
        several = code.smaller(code.arithmetic("sub", count, first), _AHEAD)
        place = code.arithmetic("mul", first, stride)
        return several, code.at(LLVM_TYPES[dtype], places, place), code.at("i8", scale, place)

    def fetch(name: str, several: str, line: str, of_scale: str) -> None:
        _prefetch(code, f"{block}_{name}", line, several, stride, width, dtype, of_scale)

    fetch("first", *part_from("0"))
    with code.repeated(f"{block}_part", 0, count, _AHEAD) as part:
        fetch("ahead", *part_from(code.arithmetic("add", part.index, _AHEAD)))
        yield part.index, *part_from(part.index)


def _walk(code: Code, batch: str) -> list[str]:
    """Return how many slots are near, where the ring turns, and where it ends."""
    walk, word = _RECORD.pointer(code, "walk"), code.arithmetic("mul", batch, 3)
    return [_integer(code, walk, code.arithmetic("add", word, index)) for index in range(3)]


def _prefetch(code: Code, block: str, places: str, count: str, stride: str, width: str, dtype: str, scale: str) -> None:
    """Fetch slots at once; otherwise the processor would wait for each slot's few numbers."""
    kind = LLVM_TYPES[dtype]
    with code.repeated(f"{block}_slot", 0, count) as slot:
        begun = code.arithmetic("mul", slot.index, stride)
        line = code.at(kind, places, begun)
        with code.repeated(f"{block}_line", 0, width, _LINE_BYTES // SIZES[kind]) as part:
            _fetch(code, code.at(kind, line, part.index))
        if kind == "i8":
            # Rows do not begin with a line.
            _fetch(code, code.at(kind, line, code.arithmetic("sub", width, 1)))
            _fetch(code, code.at(kind, scale, begun))


def _fetch(code: Code, place: str) -> None:
    code.effect(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 2, i32 1)")


def _scores(dtype: str) -> str:
    """Return ``score(record, item, row, count, first, last, scores)``: the scores of rows and slots.

    Those of slot s stand at s; rows are ``slots`` apart.
    """
    parameters = "ptr %record, i64 %item, i64 %row, i64 %count, i64 %first, i64 %last, ptr %scores"
    code = Code(f"internal void @score({parameters}) #0")
    rows, numbers, slots, stride, groups = _numbers(code, "rows", "numbers", "slots", "stride", "groups")
    near_slots, *_ = _walk(code, code.arithmetic("sdiv", "%item", groups))
    row = code.arithmetic("add", code.arithmetic("mul", "%item", rows), "%row")
    for name, first, last in (
        ("near", "%first", code.smaller("%last", near_slots)),
        ("q", code.larger("%first", near_slots), "%last"),
    ):
        query = code.at("float", _RECORD.pointer(code, name), code.arithmetic("mul", row, numbers))
        with _in_pages(code, name, "k", "%item", first, last, dtype) as (begin, end, places, scale):
            several = places, code.arithmetic("sub", end, begin), stride, numbers, dtype, scale
            with _part_by_part(code, name, *several) as (before, count, line, of_scale):
                integers = ", ".join(f"i64 {each}" for each in ("%count", count, numbers, numbers, stride, slots))
                scores = code.at("float", "%scores", code.arithmetic("add", begin, before))
                code.effect(f"call void @dots(ptr {query}, ptr {line}, ptr {scores}, {integers})")
                if in_bytes(dtype):
                    integers = ", ".join(f"i64 {each}" for each in ("%count", count, slots, stride, groups))
                    code.effect(f"call void @scale_scores(ptr {scores}, ptr {of_scale}, {integers})")
    code.effect("ret void")
    return code.text()


def _values(vectors: Vectors, dtype: str) -> str:
    """Return ``add_values(record, item, row, count, first, last, weights, totals, starts, column)``: results of rows.

    They are a piece's columns from ``column`` on. ``totals`` is scratch of a vector a row, ``starts`` what each row's
    sum of weights starts from.
    """
    parameters = "ptr %record, i64 %item, i64 %row, i64 %count, i64 %first, i64 %last, ptr %weights, ptr %totals"
    code = Code(f"internal void @add_values({parameters}, ptr %starts, i64 %column) #0")
    rows, numbers, slots, stride, groups, width = _numbers(
        code, "rows", "numbers", "slots", "stride", "groups", "width"
    )
    scales = "" if not in_bytes(dtype) else code.value(f"alloca [{_AHEAD} x float], align 64")
    columns = code.smaller(code.arithmetic("sub", numbers, "%column"), width)
    row = code.arithmetic("add", code.arithmetic("mul", "%item", rows), "%row")
    place = code.arithmetic("add", code.arithmetic("mul", row, numbers), "%column")
    y = code.at("float", _RECORD.pointer(code, "y"), place)
    code.effect(f"call void @clear(ptr {y}, ptr %totals, ptr %starts, i64 %count, i64 {numbers}, i64 {columns})")
    near_slots, turn, ring_end = _walk(code, code.arithmetic("sdiv", "%item", groups))
    stretches = ("0", near_slots), (turn, ring_end), (near_slots, turn), (ring_end, slots)
    for index, (begin, end) in enumerate(stretches):
        stretch = code.larger(begin, "%first"), code.smaller(end, "%last")
        name = f"stretch_{index}"
        with _in_pages(code, name, "v", "%item", *stretch, dtype) as (begin, end, places, scale):
            places = code.at(LLVM_TYPES[dtype], places, "%column")
            several = places, code.arithmetic("sub", end, begin), stride, columns, dtype, scale
            with _part_by_part(code, name, *several) as (before, count, line, of_scale):
                integers = ", ".join(f"i64 {each}" for each in ("%count", count, slots, stride, numbers, columns))
                weights = code.at("float", "%weights", code.arithmetic("add", begin, before))
                if scales:
                    of_slots = f"i64 {count}, i64 {stride}, i64 {groups}"
                    code.effect(f"call void @read_scales(ptr {of_scale}, ptr {scales}, {of_slots})")
                    integers += f", ptr {scales}"
                code.effect(f"call void @add_weighted(ptr {weights}, ptr {line}, ptr {y}, ptr %totals, {integers})")
    code.effect(f"call void @divide(ptr {y}, ptr %totals, i64 %count, i64 {numbers}, i64 {columns})")
    code.effect("ret void")
    return code.text() + _clear(vectors) + _divide(vectors)


def _clear(vectors: Vectors) -> str:
    """Return ``clear(y, totals, starts, rows, width, columns)``: sums of no values yet."""
    code = Code("internal void @clear(ptr %y, ptr %totals, ptr %starts, i64 %rows, i64 %width, i64 %columns) #0")
    with code.repeated("each_row", 0, "%rows") as row:
        line = code.at("float", "%y", code.arithmetic("mul", row.index, "%width"))
        with code.repeated("each_column", 0, "%columns") as column:
            code.store_at("float", "0.0", line, column.index)
        place = code.at("float", "%totals", code.arithmetic("mul", row.index, vectors.lanes))
        start = vectors.spread(code, code.load_at("float", "%starts", row.index))
        code.effect(f"store {vectors.wide} {start}, ptr {place}, align 4")
    code.effect("ret void")
    return code.text()


def _divide(vectors: Vectors) -> str:
    """Return ``divide(y, totals, rows, width, columns)``: sums to means."""
    code = Code("internal void @divide(ptr %y, ptr %totals, i64 %rows, i64 %width, i64 %columns) #0")
    with code.repeated("each_row", 0, "%rows") as row:
        line = code.at("float", "%y", code.arithmetic("mul", row.index, "%width"))
        total = code.load_at("float", "%totals", code.arithmetic("mul", row.index, vectors.lanes))
        with code.repeated("each_column", 0, "%columns") as column:
            mean = code.value(f"fdiv float {code.load_at('float', line, column.index)}, {total}")
            code.store_at("float", mean, line, column.index)
    code.effect("ret void")
    return code.text()


def _soften_row(code: Code, item: str, row: str, first: str, last: str, scores: str, start: str) -> None:
    """Append the softmax of a row's scores, which stand at ``scores``; the weight of its sink goes to ``start``."""
    groups, tokens, slots, rows = _numbers(code, "groups", "tokens", "slots", "rows")
    head = code.arithmetic("mul", code.arithmetic("srem", item, groups), code.arithmetic("sdiv", rows, tokens))
    head = code.arithmetic("add", head, code.arithmetic("sdiv", row, tokens))
    sink = code.load_at("float", _RECORD.pointer(code, "sinks"), head)
    token = code.arithmetic("mul", code.arithmetic("sdiv", item, groups), tokens)
    token = code.arithmetic("add", token, code.arithmetic("srem", row, tokens))
    mask = code.at("i8", _RECORD.pointer(code, "mask"), code.arithmetic("mul", token, slots))
    softcap = code.load("float", _RECORD.pointer(code, "softcap"))
    operands = f"ptr {scores}, ptr {mask}, i64 {first}, i64 {last}, float {softcap}, float {sink}, ptr {start}"
    code.effect(f"call void @soften({operands})")


def _piece() -> str:
    """Return ``piece(record, index)``: of all slots that threads share, or of a block of rows."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    (blocks,) = _numbers(code, "blocks")
    code.branch(code.value(f"icmp eq i64 {blocks}, 1"), "short", "long")
    for name in ("short", "long"):
        code.start(name)
        code.effect(f"call void @{name}_piece(ptr %record, i64 %index)")
        code.effect("ret void")
    return code.text()


def _short_piece(vectors: Vectors) -> str:
    """Return ``short_piece(record, index)``: scores of a chunk, or a row's softmax, or some columns of results."""
    lanes = vectors.lanes
    code = Code("internal void @short_piece(ptr %record, i64 %index) #0")
    rows, slots, groups, chunks, bands, parts, width, scored, softened = _numbers(
        code, "rows", "slots", "groups", "chunks", "bands", "parts", "width", "scored", "softened"
    )
    scratch = _RECORD.pointer(code, "scratch")
    all_rows = code.arithmetic("mul", code.arithmetic("sdiv", scored, chunks), rows)
    all_scores = code.arithmetic("mul", all_rows, slots)
    all_totals = code.arithmetic("mul", code.arithmetic("mul", all_rows, parts), lanes)
    starts = code.at("float", scratch, code.arithmetic("add", all_scores, all_totals))

    def seen(item: str, row: str, count: str) -> tuple[str, str]:
        batch = code.arithmetic("sdiv", item, groups)
        operands = f"ptr %record, i64 {batch}, i64 {row}, i64 {count}"
        first, last = (code.value(f"call i64 @seen({operands}, i1 {end})") for end in ("false", "true"))
        return first, last

    def scores_of(item: str) -> str:
        return code.at("float", scratch, code.arithmetic("mul", item, code.arithmetic("mul", rows, slots)))

    code.branch(code.value(f"icmp slt i64 %index, {scored}"), "score", "not_score")
    code.start("score")
    item, chunk = code.arithmetic("sdiv", "%index", chunks), code.arithmetic("srem", "%index", chunks)
    begin = code.arithmetic("mul", chunk, CHUNK)
    first, last = seen(item, "0", rows)
    first, last = code.larger(first, begin), code.smaller(last, code.arithmetic("add", begin, CHUNK))
    operands = f"ptr %record, i64 {item}, i64 0, i64 {rows}, i64 {first}, i64 {last}, ptr {scores_of(item)}"
    code.effect(f"call void @score({operands})")
    code.effect("ret void")

    code.start("not_score")
    wait_for(code, "%record", scored, vectors.pause, "for_scores")
    code.branch(code.value(f"icmp slt i64 %index, {softened}"), "soften", "add")
    code.start("soften")
    place = code.arithmetic("sub", "%index", scored)
    item, row = code.arithmetic("sdiv", place, rows), code.arithmetic("srem", place, rows)
    # All rows' slots, for sums of all rows read the weights of all of these.
    first, last = seen(item, "0", rows)
    first = code.arithmetic("and", first, -lanes)
    scores = code.at("float", scratch, code.arithmetic("mul", place, slots))
    _soften_row(code, item, row, first, last, scores, code.at("float", starts, place))
    code.effect("ret void")

    code.start("add")
    wait_for(code, "%record", softened, vectors.pause, "for_weights")
    place = code.arithmetic("sub", "%index", softened)
    band, part = code.arithmetic("sdiv", place, parts), code.arithmetic("srem", place, parts)
    item, band = code.arithmetic("sdiv", band, bands), code.arithmetic("srem", band, bands)
    row = code.arithmetic("mul", band, tile_rows(vectors))
    count = code.smaller(code.arithmetic("sub", rows, row), tile_rows(vectors))
    first, last = seen(item, row, count)
    of_row = code.arithmetic("add", code.arithmetic("mul", item, rows), row)
    weights = code.at("float", scratch, code.arithmetic("mul", of_row, slots))
    # Each part of a row has sums of its own.
    of_totals = code.arithmetic("mul", all_rows, part)
    of_totals = code.arithmetic("mul", code.arithmetic("add", of_totals, of_row), lanes)
    totals = code.at("float", scratch, code.arithmetic("add", all_scores, of_totals))
    operands = f"ptr %record, i64 {item}, i64 {row}, i64 {count}, i64 {first}, i64 {last}, ptr {weights}"
    column = code.arithmetic("mul", part, width)
    own_starts = code.at("float", starts, of_row)
    code.effect(f"call void @add_values({operands}, ptr {totals}, ptr {own_starts}, i64 {column})")
    code.effect("ret void")
    return code.text()


def _long_piece(vectors: Vectors) -> str:
    """Return ``long_piece(record, index)``: the results of a block of rows, in memory that stays in the cache."""
    lanes = vectors.lanes
    code = Code("internal void @long_piece(ptr %record, i64 %index) #0")
    rows, numbers, slots, groups, blocks, width = _numbers(
        code, "rows", "numbers", "slots", "groups", "blocks", "width"
    )
    item, row = code.arithmetic("sdiv", "%index", blocks), code.arithmetic("srem", "%index", blocks)
    row = code.arithmetic("mul", row, BLOCK)
    count = code.smaller(code.arithmetic("sub", rows, row), BLOCK)
    operands = f"ptr %record, i64 {code.arithmetic('sdiv', item, groups)}, i64 {row}, i64 {count}"
    first, last = (code.value(f"call i64 @seen({operands}, i1 {end})") for end in ("false", "true"))
    aligned = code.arithmetic("and", first, -lanes)
    size = code.arithmetic("mul", code.arithmetic("add", slots, lanes + 1), 4 * BLOCK)
    scores = code.value(f"call ptr @malloc(i64 {size})")
    totals = code.at("float", scores, code.arithmetic("mul", slots, BLOCK))
    starts = code.at("float", totals, lanes * BLOCK)
    operands = f"ptr %record, i64 {item}, i64 {row}, i64 {count}, i64 {first}, i64 {last}, ptr {scores}"
    code.effect(f"call void @score({operands})")
    with code.repeated("each_row", 0, count) as each_row:
        of_row = code.at("float", scores, code.arithmetic("mul", each_row.index, slots))
        start = code.at("float", starts, each_row.index)
        _soften_row(code, item, code.arithmetic("add", row, each_row.index), aligned, last, of_row, start)
    with code.repeated("each_part", 0, code.ceiling(numbers, width)) as part:
        column = code.arithmetic("mul", part.index, width)
        code.effect(f"call void @add_values({operands}, ptr {totals}, ptr {starts}, i64 {column})")
    code.effect(f"call void @free(ptr {scores})")
    code.effect("ret void")
    return code.text()
