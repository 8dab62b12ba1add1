"""Vectors of a fixed number of lanes, whatever the processor's have, and the order in which a row's numbers are added.

Number i of a row belongs to lane ``i % LANES``. Each lane adds its numbers in order, and every product and sum is
rounded. Then the upper half of the lanes is added to the lower half, until one lane is left. So a row's sum depends on
its numbers and on their count alone, and is the same on all processors.
"""

from collections.abc import Callable

from jaxinfer.ops.cpu_kernels.assembly import Code, float_constant

# Two registers of the widest vectors, so that an addition need not wait for the one before.
LANES = 32
WIDE = f"<{LANES} x float>"
_MASK, _ORDER_TYPE = f"<{LANES} x i1>", f"<{LANES} x i32>"
_ORDER = f"<{', '.join(f'i32 {lane}' for lane in range(LANES))}>"

DECLARATIONS = (
    f"declare {WIDE} @llvm.masked.load.v{LANES}f32.p0(ptr, i32 immarg, {_MASK}, {WIDE})\n"
    f"declare void @llvm.masked.store.v{LANES}f32.p0({WIDE}, ptr, i32 immarg, {_MASK})\n"
)


def visit_row(code: Code, name: str, length: str, visit: Callable[[str, str, str | None], str]) -> str:
    """Append a loop over a row's vectors and then the rest; return what ``visit(index, held, mask)`` returned last.

    A visit gets the index of its first number, what the visit before returned (at first zeros), and a mask of the lanes
    that the row still has, which may be none; without a mask it has all. ``name`` is a unique block name.
    """
    whole = code.arithmetic("and", length, -LANES)
    with code.repeated(name, 0, whole, LANES, (WIDE, "zeroinitializer")) as each:
        each.left = visit(each.index, each.held, None)
    left = code.value(f"trunc i64 {code.arithmetic('sub', length, whole)} to i32")
    mask = code.value(f"icmp slt {_ORDER_TYPE} {_ORDER}, {_spread(code, _ORDER_TYPE, 'i32', left)}")
    return visit(whole, each.held, mask)


def load_lanes(code: Code, row: str, index: str, mask: str | None) -> str:
    """Return a row's numbers from ``index`` on, and 0 in lanes outside the mask."""
    place = code.at("float", row, index)
    if mask is None:
        return code.load(WIDE, place, 4)
    operands = f"ptr {place}, i32 4, {_MASK} {mask}, {WIDE} zeroinitializer"
    return code.value(f"call {WIDE} @llvm.masked.load.v{LANES}f32.p0({operands})")


def store_lanes(code: Code, numbers: str, row: str, index: str, mask: str | None) -> None:
    """Write a row's numbers from ``index`` on, in the mask."""
    place = code.at("float", row, index)
    if mask is None:
        code.effect(f"store {WIDE} {numbers}, ptr {place}, align 4")
    else:
        operands = f"{WIDE} {numbers}, ptr {place}, i32 4, {_MASK} {mask}"
        code.effect(f"call void @llvm.masked.store.v{LANES}f32.p0({operands})")


def masked(code: Code, numbers: str, mask: str | None) -> str:
    """Return the numbers, and 0 in lanes outside the mask."""
    if mask is None:
        return numbers
    return code.value(f"select {_MASK} {mask}, {WIDE} {numbers}, {WIDE} zeroinitializer")


def spread_lanes(code: Code, number: str) -> str:
    """Return a vector with one float32 in every lane."""
    return _spread(code, WIDE, "float", number)


def constant_lanes(number: float) -> str:
    """Return a vector with a constant in every lane."""
    return f"<{', '.join([f'float {float_constant(number)}'] * LANES)}>"


def add_up_lanes(code: Code, sums: str) -> str:
    """Return the sum of a vector's lanes."""
    lanes = LANES
    while lanes > 1:
        half = lanes // 2
        lower, upper = (
            code.value(
                f"shufflevector <{lanes} x float> {sums}, <{lanes} x float> poison, "
                f"<{half} x i32> <{', '.join(f'i32 {lane}' for lane in range(first, first + half))}>"
            )
            for first in (0, half)
        )
        sums = code.value(f"fadd <{half} x float> {lower}, {upper}")
        lanes = half
    return code.value(f"extractelement <1 x float> {sums}, i32 0")


def _spread(code: Code, kind: str, element: str, value: str) -> str:
    single = code.value(f"insertelement {kind} poison, {element} {value}, i32 0")
    return code.value(f"shufflevector {kind} {single}, {kind} poison, <{LANES} x i32> zeroinitializer")
