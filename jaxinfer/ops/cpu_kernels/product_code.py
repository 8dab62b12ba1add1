"""The assembly of products: tiles over all rows and outputs, and the foreign functions around them."""

from functools import partial

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.dot_tiles import dot_tile
from jaxinfer.ops.cpu_kernels.handlers import Buffer, Plan, Record, make_module
from jaxinfer.ops.cpu_kernels.product_pieces import chosen_matrix, chosen_tile, each_tile, even_tiles
from jaxinfer.ops.cpu_kernels.tiles import LLVM_TYPES, OUTPUTS, SIZES, Vectors

# Several pieces per thread even out the threads' other work. `jaxinfer bench latency` measures another value.
_PIECES_PER_THREAD = 4
# The bytes of a block of weights: half of a second-level cache or less, and part of a first-level cache where the
# processor multiplies pairs and all tiles fetch ahead. Its outputs are limited because each tile has sums that are left
# in memory between two parts of rows.
_BLOCK_BYTES, _BLOCK_BYTES_OF_PAIRS = 2**20, 2**14
_BLOCK_OUTPUTS = 256
# How far ahead weights are fetched, into the second-level cache. A half and twice as much are slower.
_AHEAD_BYTES = 3 * 2**12
# Rows as long as this are read fastest side by side, each from pages of its own, if one tile passes over them.
_LONG_BYTES = 2**14
# So few tiles of rows wait for memory all the time, and so pass over a few weights at a time.
_FEW_TILES = 2
# The bytes of a part of a row: a tile's parts of x and w take up to two thirds of a first-level cache.
_PART_BYTES = 3072

# The fields of a call's record: shared ones, and those of each matrix.
_SHARED = ("x", "rows", "length", "groups", "first_batch", "per_group", "span")
OF_MATRIX = ("w", "y", "outputs", "stride", "lines", "first_piece")


def dot_module(vectors: Vectors, dtype: str, count: int = 1) -> str:
    """Return the assembly of ``handler(x [I, M, K], l, w [L, B, S, F], ...) -> y [I, M, N], ...``.

    There are ``count`` matrices w, each with its own S, F, y and N. I = B * C, F >= C * K, S >= N. w is of ``dtype``, x
    of its `Vectors.row_dtype`; y is float32, l int32. Part c of row n of w[l, b] is multiplied with the rows of
    x[b * C + c].
    """
    record = Record(*_SHARED, *(f"{each}{matrix}" for matrix in range(count) for each in OF_MATRIX))

    def plan(code: Code, arguments: list[Buffer], results: list[Buffer], threads: str) -> Plan:
        x, layer, *matrices = arguments
        items, rows, length = x.shape(code, 3)
        layers, batches = matrices[0].shape(code, 2)
        outputs = [y.shape(code, 3)[2] for y in results]
        all_outputs = code.total(outputs)
        wanted = code.ceiling(code.arithmetic("mul", threads, _PIECES_PER_THREAD), items)
        span = code.arithmetic("mul", code.ceiling(code.ceiling(all_outputs, wanted), OUTPUTS), OUTPUTS)
        pieces = [code.ceiling(each, span) for each in outputs]
        per_group = code.total(pieces)
        pointers = {"x": x.numbers}
        numbers = {
            "rows": rows, "length": length, "groups": code.arithmetic("sdiv", items, batches), "per_group": per_group,
            "first_batch": code.arithmetic("mul", layer.layer(code, layers), batches), "span": span,
        }  # fmt: skip
        for index, (w, y) in enumerate(zip(matrices, results)):
            _, _, lines, stride = w.shape(code, 4)
            pointers |= {f"w{index}": w.numbers, f"y{index}": y.numbers}
            values = outputs[index], stride, lines, code.total(pieces[:index])
            numbers |= {f"{name}{index}": value for name, value in zip(OF_MATRIX[2:], values)}
        weights = code.arithmetic("mul", items, code.arithmetic("mul", all_outputs, length))
        return Plan(pointers, numbers, code.arithmetic("mul", items, per_group), weights)

    functions = [*dot_functions(vectors, dtype), _piece(vectors, record, dtype, count)]
    return make_module(vectors, functions, record, (2 + count, count), plan)


def dot_functions(vectors: Vectors, dtype: str) -> list[str]:
    """Return ``dots(x, w, y, rows, outputs, length, pitch, stride, width)`` and its tiles (`dot_tile`)."""
    counts = range(1, vectors.rows + 1)
    tiles = [dot_tile(vectors, dtype, outputs, rows) for outputs in (OUTPUTS, 1) for rows in counts]
    return [*tiles, _dots(vectors, dtype)]


def _piece(vectors: Vectors, record: Record, dtype: str, count: int) -> str:
    """Return ``piece(record, index)``, which computes ``span`` outputs of one matrix for all rows of one x."""
    code = Code("internal void @piece(ptr %record, i64 %index) #0")
    row_kind = LLVM_TYPES[vectors.row_dtype(dtype)]
    x = record.pointer(code, "x")
    rows, length, groups, first_batch, per_group, span = (record.number(code, each) for each in _SHARED[1:])
    which = code.arithmetic("sdiv", "%index", per_group)
    among = code.arithmetic("srem", "%index", per_group)
    w, y, outputs, stride, lines, first_piece = chosen_matrix(code, record, count, among, OF_MATRIX[:2], OF_MATRIX[2:])
    first = code.arithmetic("mul", code.arithmetic("sub", among, first_piece), span)
    width = code.smaller(span, code.arithmetic("sub", outputs, first))
    of_x = code.arithmetic("mul", which, code.arithmetic("mul", rows, length))
    of_y = code.arithmetic("mul", which, code.arithmetic("mul", rows, outputs))
    batch = code.arithmetic("add", first_batch, code.arithmetic("sdiv", which, groups))
    group = code.arithmetic("srem", which, groups)
    line = code.arithmetic("mul", batch, code.arithmetic("mul", lines, stride))
    of_w = code.arithmetic("add", line, code.arithmetic("mul", group, length))
    of_w = code.arithmetic("add", of_w, code.arithmetic("mul", first, stride))
    operands = [
        f"ptr {code.at(row_kind, x, of_x)}",
        f"ptr {code.at(LLVM_TYPES[dtype], w, of_w)}",
        f"ptr {code.at('float', y, code.arithmetic('add', of_y, first))}",
        *(f"i64 {number}" for number in (rows, width, length, length, stride, outputs)),
    ]
    code.effect(f"call void @dots({', '.join(operands)})")
    code.effect("ret void")
    return code.text()


def _dots(vectors: Vectors, dtype: str) -> str:
    """Return ``dots(x, w, y, rows, outputs, length, pitch, stride, width)``: tiles over all rows and outputs.

    A tile's rows of x stay in the first-level cache while it passes over a block of w, which stays in a cache for all
    rows. Of long rows, a part at a time passes over the block.
    """
    kind, row_kind, step = LLVM_TYPES[dtype], LLVM_TYPES[vectors.row_dtype(dtype)], vectors.step(dtype)
    most = vectors.rows
    parameters = "ptr %x, ptr %w, ptr %y, i64 %rows, i64 %outputs, i64 %length, i64 %pitch, i64 %stride, i64 %width"
    code = Code(f"internal void @dots({parameters}) #0")
    tiles = even_tiles(code, "%rows", most)
    is_few = code.value(f"icmp sle i64 {tiles.count}, {_FEW_TILES}")
    in_pairs = vectors.pairs(dtype)
    numbers = (_BLOCK_BYTES_OF_PAIRS if in_pairs else _BLOCK_BYTES) // SIZES[kind]
    fitting = code.arithmetic("and", code.arithmetic("sdiv", numbers, "%length"), -OUTPUTS)
    block = code.larger(code.smaller(fitting, _BLOCK_OUTPUTS), OUTPUTS)
    block = code.value(f"select i1 {is_few}, i64 {OUTPUTS}, i64 {block}")
    is_one = code.value(f"icmp eq i64 {tiles.count}, 1")
    block = code.value(f"select i1 {is_one}, i64 %outputs, i64 {block}")
    parts = code.ceiling("%length", _PART_BYTES // SIZES[row_kind])
    parts = code.value(f"select i1 {is_few}, i64 1, i64 {parts}")
    part = code.arithmetic("mul", code.ceiling(code.ceiling("%length", parts), step), step)
    fetched = _Fetched(code, kind, step, tiles.count, block, part, "true" if in_pairs else is_few)
    size = vectors.lanes * OUTPUTS * most
    # A block has tiles of one output for less than OUTPUTS ones.
    all_sums = code.arithmetic("mul", code.arithmetic("add", code.arithmetic("sdiv", block, OUTPUTS), OUTPUTS), size)
    memory, sums = _allocate(code, f"icmp slt i64 {part}, %length", all_sums)
    with code.repeated("each_block", 0, "%outputs", block) as each_block:
        first = each_block.index
        past = code.smaller(code.arithmetic("add", first, block), "%outputs")
        whole = code.arithmetic("and", code.arithmetic("sub", past, first), -OUTPUTS)
        past_whole = code.arithmetic("add", first, whole)
        with each_tile(code, tiles) as tile:
            row_x = code.at(row_kind, "%x", code.arithmetic("mul", tile.row, "%pitch"))
            row_y = code.at("float", "%y", code.arithmetic("mul", tile.row, "%width"))
            chosen = {
                outputs: chosen_tile(code, tile.count, most, partial("@dot_{}x{}".format, outputs))
                for outputs in (OUTPUTS, 1)
            }
            with code.repeated("each_part", 0, "%length", part) as each_part:
                left = code.arithmetic("sub", "%length", each_part.index)
                begins = code.value(f"icmp eq i64 {each_part.index}, 0")
                ends = code.value(f"icmp sle i64 {left}, {part}")
                part_x, part_w = code.at(row_kind, row_x, each_part.index), code.at(kind, "%w", each_part.index)
                integers = f"i64 {code.smaller(left, part)}, i64 %pitch, i64 %stride, i64 %width"
                place = sums
                for name, outputs, start, end in (("wide", OUTPUTS, first, past_whole), ("one", 1, past_whole, past)):
                    with code.repeated(f"each_{name}", start, end, outputs, ("ptr", place)) as each:
                        tile_w = code.at(kind, part_w, code.arithmetic("mul", each.index, "%stride"))
                        tile_y = code.at("float", row_y, each.index)
                        ahead = code.at(kind, part_w, fetched.place(tile.index, first, each.index, outputs))
                        pointers = f"ptr {part_x}, ptr {tile_w}, ptr {tile_y}, ptr {each.held}"
                        ways = f"ptr {ahead}, {fetched.way}, i1 {begins}, i1 {ends}"
                        code.effect(f"call void {chosen[outputs]}({pointers}, {integers}, {ways})")
                        each.left = code.at("float", each.held, size)
                    place = each.held
    code.branch(code.value(f"icmp eq ptr {memory}, null"), "end", "release")
    code.start("release")
    code.effect(f"call void @free(ptr {memory})")
    code.effect("br label %end")
    code.start("end")
    code.effect("ret void")
    return code.text()


class _Fetched:
    """What tiles fetch while they multiply.

    Where rows of w lie one after the other, it is what comes some way ahead in memory, line by line: a processor reads
    that up to twice as fast as four short rows side by side. If the tiles of a block share it (``shares``), each
    fetches a part: if the first one fetched it all, memory would rest while the others work. Elsewhere each tile
    fetches the rows after its own.
    """

    def __init__(self, code: Code, kind: str, step: int, tiles: str, block: str, part: str, shares: str) -> None:
        """Begin in ``code``, where as many ``tiles`` pass over each block, a ``part`` of the rows at a time."""
        self._code, self._kind, self._block = code, kind, block
        is_whole, is_dense = code.value(f"icmp sge i64 {part}, %length"), code.value("icmp eq i64 %stride, %length")
        are_several = code.value(f"icmp sgt i64 {tiles}, 1")
        is_short = code.value(f"icmp slt i64 %length, {_LONG_BYTES // SIZES[kind]}")
        fits = code.value(f"or i1 {is_short}, {are_several}")
        self._in_line = code.value(f"and i1 {fits}, {code.value(f'and i1 {is_whole}, {is_dense}')}")
        self._shared = code.value(f"and i1 {self._in_line}, {shares}")
        are_many = [code.value(f"icmp sgt i64 {tiles}, {number}") for number in (1, 3)]
        halved = [code.value(f"and i1 {self._shared}, {each}") for each in are_many]
        self._halvings = code.total([code.value(f"zext i1 {each} to i64") for each in halved])
        others = code.arithmetic("lshr", OUTPUTS - 1, self._halvings)
        apart = code.value(f"select i1 {self._in_line}, i64 {step}, i64 %stride")
        along = code.value(f"select i1 {self._in_line}, i64 {code.arithmetic('add', others, 1)}, i64 1")
        # As `dot_tile` takes them.
        self.way = f"i64 {others}, i64 {apart}, i64 {along}"

    def place(self, tile: str, first: str, output: str, outputs: int) -> str:
        """Return how many numbers past ``%w`` the tile of ``outputs`` from ``output`` on begins to fetch.

        It is number ``tile`` of those that pass over the block from ``first`` on.
        """
        code = self._code
        turn = code.value(f"select i1 {self._shared}, i64 {tile}, i64 0")
        passed = code.arithmetic(
            "add", code.arithmetic("mul", turn, self._block), code.arithmetic("sub", output, first)
        )
        share = code.arithmetic("lshr", passed, self._halvings)
        ahead = code.arithmetic("mul", code.arithmetic("add", first, share), "%stride")
        ahead = code.arithmetic("add", ahead, _AHEAD_BYTES // SIZES[self._kind])
        # Once a block is fetched, its tiles ask for what they have: what is not near takes time even if it is there.
        own = code.arithmetic("mul", output, "%stride")
        is_fetched = code.value(f"icmp sge i64 {share}, {self._block}")
        ahead = code.value(f"select i1 {is_fetched}, i64 {own}, i64 {ahead}")
        next_rows = code.arithmetic("mul", code.arithmetic("add", output, outputs), "%stride")
        return code.value(f"select i1 {self._in_line}, i64 {ahead}, i64 {next_rows}")


def _allocate(code: Code, needed: str, numbers: str) -> tuple[str, str]:
    """Return memory to free and the address of that many float32 in it, if they are needed; otherwise, null."""
    line = 64
    code.branch(code.value(needed), "allocate", "allocated")
    code.start("allocate")
    size = code.arithmetic("add", code.arithmetic("mul", numbers, SIZES["float"]), line)
    own = code.value(f"call ptr @malloc(i64 {size})")
    # A vector that begins with a cache line takes one line, not two.
    past = code.arithmetic("and", code.value(f"ptrtoint ptr {own} to i64"), line - 1)
    aligned = code.at("i8", own, code.arithmetic("sub", line, past))
    code.effect("br label %allocated")
    code.start("allocated")
    memory = code.value(f"phi ptr [ null, %entry ], [ {own}, %allocate ]")
    return memory, code.value(f"phi ptr [ null, %entry ], [ {aligned}, %allocate ]")
