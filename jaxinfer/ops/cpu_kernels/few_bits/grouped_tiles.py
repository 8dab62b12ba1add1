"""The innermost loops of products with codes of 4 bits in groups, 16 outputs at a time, by pairs of bfloat16.

A lane adds the products of one output (`sixteen_outputs`). Of a run of 32 codes, 16 vectors have two codes each of
every output, which are looked up where they lie in words; so a row's pairs are put into that order first. A sum's order
is group by group: the minimum times the sum of the row's group, then the group's products, by pairs, times the scale.
"""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.few_bits.tiles import bits_of_level, multiply_add
from jaxinfer.ops.cpu_kernels.sixteen_outputs import (
    BYTES,
    INTEGERS,
    LANES,
    each_group,
    fours,
    spread_four,
    store_some,
    totals,
)
from jaxinfer.ops.cpu_kernels.tiles import Vectors
from jaxinfer.ops.few_bits.formats import RUN, Format

_WORDS, _PAIRS = f"<{RUN} x i16>", f"<{RUN} x bfloat>"
# Codes in a word.
_HALVES = 4
_TILE = (
    "ptr %x, ptr %w, ptr %scales, ptr %minima, ptr %sums, ptr %y, i64 %groups, i64 %pitch, i64 %stride, "
    "i64 %sum_pitch, i64 %width, i64 %count"
)


def has_grouped_tiles(vectors: Vectors, form: Format) -> bool:
    """Whether products with weights of this form are computed 16 outputs at a time."""
    in_runs = form.kept is None and form.bits == 4 and form.group is not None and form.group % RUN == 0
    return in_runs and vectors.pairs_bfloat16 and vectors.lanes == LANES


def tile_name(rows: int) -> str:
    """Return the name of a tile."""
    return f"grouped_few_bits_{rows}"


def grouped_tile(vectors: Vectors, form: Format, rows: int) -> str:
    """Return ``NAME(x, w, scales, minima, sums, y, groups, pitch, stride, sum_pitch, width, count)``.

    It multiplies rows of x, ``pitch`` numbers apart and in the order of `pairs_function`, by 16 rows of codes,
    ``stride`` bytes apart, and writes ``count`` of the 16 outputs. Scales and minima are float32 in lines of 16, a line
    for each group. The sums of x's groups are ``sum_pitch`` apart, rows of y ``width``.
    """
    assert form.group is not None
    code = Code(f"internal void @{tile_name(rows)}({_TILE}) #0")
    with each_group(code, vectors, form, rows, "bfloat") as group:
        group.found = ["zeroinitializer"] * rows
        for step in range(form.group // RUN):
            lines = fours(code, group.w, step * form.row_bytes(RUN))
            group.found = add_pairs(code, vectors, form, lines, group.x, step * RUN, group.found)
    store_some(code, vectors, totals(rows))
    code.effect("ret void")
    return code.text()


def add_pairs(
    code: Code, vectors: Vectors, form: Format, lines: list[str], places: list[str], first: int, to: list[str]
) -> list[str]:
    """Return each row's sums, to which the products of a run are added.

    The run's codes are in lines (`sixteen_outputs.fours`), its numbers of a row ``first`` past each place.
    """
    found = list(to)
    for at, numbers in enumerate(_levels(code, form, lines)):
        for row, place in enumerate(places):
            pair = spread_four(code, code.at("bfloat", place, first + 2 * at))
            pair = code.value(f"bitcast {INTEGERS} {pair} to {_PAIRS}")
            found[row] = multiply_add(vectors, code, numbers, pair, found[row])
    return found


def pairs_function() -> str:
    """Return ``pair_up(x, to, runs)``, which writes runs of x in the order in which tiles multiply pairs."""
    code = Code("internal void @pair_up(ptr %x, ptr %to, i64 %runs) #0")
    order = ", ".join(f"i32 {place}" for place in _order())
    with code.repeated("each_run", 0, "%runs") as each:
        at = code.arithmetic("mul", each.index, RUN)
        numbers = code.load(_PAIRS, code.at("bfloat", "%x", at), 2)
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


def _order() -> list[int]:
    """Return the places of a run's codes in the order of `_levels`, of one output.

    A word is two bytes, which have the codes i and i + 16, i + 1 and i + 17 from the lowest bits up.
    """
    return [
        4 * four + 2 * word + (0, 16, 1, 17)[half] for four in range(4) for half in range(_HALVES) for word in range(2)
    ]
