"""By how much scores fall with the distance in each head (ALiBi, 2108.12409, section 3)."""

import math


def usual_slopes(num_heads: int) -> tuple[float, ...]:
    """Return a geometric series that ends at 2 ** -8; past a power of two of heads, every other one of a finer one."""
    whole = 2 ** math.floor(math.log2(num_heads))
    first = [2.0 ** (-8 * (head + 1) / whole) for head in range(whole)]
    rest = [2.0 ** (-4 * (2 * head + 1) / whole) for head in range(num_heads - whole)]
    return (*first, *rest)


def mpt_slopes(num_heads: int, largest: float) -> tuple[float, ...]:
    """Return a geometric series that ends at 2 ** -largest; where heads are no power of two, of the next one's, too."""
    whole = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-largest * (head + 1) / whole) for head in range(whole)]
    return tuple(slopes if whole == num_heads else [*slopes[1::2], *slopes[::2]][:num_heads])
