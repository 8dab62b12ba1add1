"""The innermost loops of products with integers of 8 bits, or codes of 4 bits in groups, by pairs of bfloat16.

A lane adds the products of one output of 16 (`sixteen_outputs`). Of a run of 32 codes, 16 vectors have two codes each
of every output. Codes of 4 bits are looked up where they lie in words, so a row's pairs are put into that order first;
integers of 8 bits are pairs as they lie, and their sums are two, of every other pair. A sum's order is group by group,
of which a whole row may be one: the minimum times the sum of the row's group, then the group's products times the
scale.
"""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.few_bits.tiles import bits_of_level, multiply_add
from jaxinfer.ops.cpu_kernels.sixteen_outputs import (
    BYTES,
    FLOATS,
    INTEGERS,
    LANES,
    OUTPUTS,
    PART,
    added_runs,
    each_group,
    fetch,
    fours,
    spread_four,
    store_some,
    times,
)
from jaxinfer.ops.cpu_kernels.tiles import Vectors
from jaxinfer.ops.few_bits.formats import RUN, Format

_WORDS, _PAIRS = f"<{RUN} x i16>", f"<{RUN} x bfloat>"
_BYTE, _BYTES_OF_LINE = 8, 64
# Codes in a word.
_HALVES = 4
_TILE = (
    "ptr %x, ptr %w, ptr %scales, ptr %minima, ptr %sums, ptr %y, i64 %groups, i64 %pitch, i64 %stride, "
    "i64 %sum_pitch, i64 %width, i64 %count"
)


def has_grouped_tiles(vectors: Vectors, form: Format) -> bool:
    """Whether products with weights of this form are computed 16 outputs at a time."""
    in_runs = (form.group or RUN) % RUN == 0
    is_known = (form.bits == 4 and form.group is not None) or (form.bits == 8 and not form.levels)
    return form.kept is None and in_runs and is_known and vectors.pairs_bfloat16 and vectors.lanes == LANES


def sums_of_row(form: Format) -> int:
    """Return how many sums of a row's products are added up apart."""
    return 2 if form.bits == _BYTE else 1


def tile_name(rows: int) -> str:
    """Return the name of a tile."""
    return f"grouped_few_bits_{rows}"


def grouped_tile(vectors: Vectors, form: Format, rows: int) -> str:
    """Return ``NAME(x, w, scales, minima, sums, y, groups, pitch, stride, sum_pitch, width, count)``.

    It multiplies rows of x, ``pitch`` numbers apart and in the order that `pair_up` gives, by 16 rows of codes,
    ``stride`` bytes apart, and writes ``count`` of the 16 outputs. Scales and minima are float32 in lines of 16, a line
    for each group. The sums of x's groups are ``sum_pitch`` apart, rows of y ``width``.
    """
    code, run_bytes = Code(f"internal void @{tile_name(rows)}({_TILE}) #0"), form.row_bytes(RUN)
    with each_group(code, vectors, form, rows, "bfloat") as group:

        def add(run: int | str, found: list[str]) -> list[str]:
            fetch(code, code.at("i8", group.ahead, times(code, run, OUTPUTS * run_bytes)), OUTPUTS * run_bytes)
            first = times(code, run, run_bytes)
            starts = [code.at("i8", start, first) for start in group.w]
            lines = [line for part in range(0, run_bytes, PART) for line in fours(code, starts, part)]
            places = [code.at("bfloat", place, times(code, run, RUN)) for place in group.x]
            return add_pairs(code, vectors, form, lines, places, found)

        sums = added_runs(code, group.runs, [(FLOATS, "zeroinitializer")] * (rows * sums_of_row(form)), add)
        group.found = added_up(code, form, sums)
    store_some(code, vectors, group.totals)
    code.effect("ret void")
    return code.text()


def add_pairs(
    code: Code, vectors: Vectors, form: Format, lines: list[str], places: list[str], to: list[str]
) -> list[str]:
    """Return each row's `sums_of_row`, to which the products of a run are added.

    The run's codes are in lines (`sixteen_outputs.fours`), its numbers of a row at each place.
    """
    found, apart = list(to), sums_of_row(form)
    for at, numbers in enumerate(_levels(code, form, lines) if form.bits == 4 else _pairs_of_bytes(code, lines)):
        for row, place in enumerate(places):
            pair = spread_four(code, code.at("bfloat", place, 2 * at))
            pair = code.value(f"bitcast {INTEGERS} {pair} to {_PAIRS}")
            own = apart * row + at % apart
            found[own] = multiply_add(vectors, code, numbers, pair, found[own])
    return found


def added_up(code: Code, form: Format, sums: list[str]) -> list[str]:
    """Return a sum of each row, of its `sums_of_row`."""
    if sums_of_row(form) == 1:
        return sums
    return [code.value(f"fadd {FLOATS} {one}, {other}") for one, other in zip(sums[::2], sums[1::2])]


def pairs_function(form: Format) -> str:
    """Return ``pair_up(x, to, runs)``, which writes runs of x in the order in which tiles multiply pairs."""
    code = Code("internal void @pair_up(ptr %x, ptr %to, i64 %runs) #0")
    order = ", ".join(f"i32 {place}" for place in (_order() if form.bits == 4 else range(RUN)))
    with code.repeated("each_run", 0, "%runs") as each:
        at = code.arithmetic("mul", each.index, RUN)
        numbers = code.load(_PAIRS, code.at("bfloat", "%x", at), 2)
        if form.bits == _BYTE:
            wide = f"<{RUN} x float>"
            scaled = code.value(f"fpext {_PAIRS} {numbers} to {wide}")
            scaled = code.value(f"fmul {wide} {scaled}, <{', '.join([f'float {2.0**-24}'] * RUN)}>")
            numbers = code.value(f"fptrunc {wide} {scaled} to {_PAIRS}")
        pairs = code.value(f"shufflevector {_PAIRS} {numbers}, {_PAIRS} poison, <{RUN} x i32> <{order}>")
        code.effect(f"store {_PAIRS} {pairs}, ptr {code.at('bfloat', '%to', at)}, align 2")
    code.effect("ret void")
    return code.text()


def _levels(code: Code, form: Format, lines: list[str]) -> list[str]:
    """Return the levels of a run's codes, which are in lines: each vector has two of every output."""
    table = ", ".join(f"i16 {bits_of_level(level)}" for level in form.levels * (RUN // len(form.levels)))
    found = []
    for packed in lines:
        words = code.value(f"bitcast {BYTES} {packed} to {_WORDS}")
        for half in range(_HALVES):
            shift = ", ".join([f"i16 {4 * half}"] * RUN)
            # A look-up reads five bits, of which the table leaves the uppermost out.
            codes = code.value(f"lshr {_WORDS} {words}, <{shift}>")
            operands = f"{_WORDS} <{table}>, {_WORDS} {codes}"
            levels = code.value(f"call {_WORDS} @llvm.x86.avx512.permvar.hi.512({operands})")
            found.append(code.value(f"bitcast {_WORDS} {levels} to {_PAIRS}"))
    return found


def _pairs_of_bytes(code: Code, lines: list[str]) -> list[str]:
    """Return a run's integers, four of every output in each line: each vector has two of every output."""
    found, words = [], range(0, _BYTES_OF_LINE, 4)
    # A byte becomes the first of its four, below which there is nothing: an integer 2^24 times the code.
    moved = [[place for word in words for place in (-1, -1, -1, word % 16 + byte)] for byte in range(3)]
    uppermost = ", ".join(f"i8 {-1 if at % 4 == 3 else 0}" for at in range(_BYTES_OF_LINE))
    halves = [place for word in words for place in (word % 16 + 2, word % 16 + 3, -1, -1)]
    is_lower = ", ".join(f"i1 {at % 4 < 2}".lower() for at in range(_BYTES_OF_LINE))
    for packed in lines:
        # Floats of codes have nothing in their lower halves: the upper ones are the numbers in bfloat16.
        floats = []
        last = code.value(f"and {BYTES} {packed}, <{uppermost}>")
        for alone in (*(_shuffled(code, packed, order) for order in moved), last):
            number = code.value(f"bitcast {BYTES} {alone} to {INTEGERS}")
            number = code.value(f"sitofp {INTEGERS} {number} to {FLOATS}")
            floats.append(code.value(f"bitcast {FLOATS} {number} to {BYTES}"))
        for first, second in (floats[:2], floats[2:]):
            lower = _shuffled(code, first, halves)
            both = code.value(f"select <{_BYTES_OF_LINE} x i1> <{is_lower}>, {BYTES} {lower}, {BYTES} {second}")
            found.append(code.value(f"bitcast {BYTES} {both} to {_PAIRS}"))
    return found


def _shuffled(code: Code, line: str, places: list[int]) -> str:
    """Return the bytes of a line in another order in each quarter of it; -1 is a zero."""
    order = ", ".join(f"i8 {place}" for place in places)
    return code.value(f"call {BYTES} @llvm.x86.avx512.pshuf.b.512({BYTES} {line}, {BYTES} <{order}>)")


def _order() -> list[int]:
    """Return the places of a run's codes in the order of `_levels`, of one output.

    A word is two bytes, which have the codes i and i + 16, i + 1 and i + 17 from the lowest bits up.
    """
    return [
        4 * four + 2 * word + (0, 16, 1, 17)[half] for four in range(4) for half in range(_HALVES) for word in range(2)
    ]
