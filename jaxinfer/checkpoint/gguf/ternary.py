"""Dequantises GGUF's blocks of 256 weights that are -1, 0 or 1 times a float16.

``TQ2_0`` has 64 bytes of four weights, two bits each. ``TQ1_0`` has 48 bytes of five weights and 4 of four: a byte is a
fraction of 256 whose digits in base 3 are the weights plus one. Bytes of a group of 32, 16 or 4 hold the group's first
weights in their first digit. The float16 comes last.
"""

import numpy as np

from jaxinfer.checkpoint.gguf.superblocks import read_float16

# Where groups of bytes begin, how many bytes and how many digits they have.
_GROUPS = ((0, 32, 5), (32, 16, 5), (48, 4, 4))


def fill_tq1_0(blocks: np.ndarray, values: np.ndarray) -> None:
    """Fill float32 values [Z, 256] from Z blocks of bytes."""
    filled = 0
    for start, count, digits in _GROUPS:
        rest = blocks[:, start : start + count].copy()
        for _ in range(digits):
            values[:, filled : filled + count] = (rest.astype(np.uint16) * 3 >> 8).astype(np.int8) - np.int8(1)
            filled += count
            rest *= np.uint8(3)  # the whole part, which is the digit, is lost
    values *= read_float16(blocks, 52)


def fill_tq2_0(blocks: np.ndarray, values: np.ndarray) -> None:
    """Fill float32 values [Z, 256] from Z blocks of bytes."""
    packed, parts = blocks[:, :64].reshape(-1, 2, 32), values.reshape(-1, 2, 4, 32)
    for index in range(4):
        parts[:, :, index] = (packed >> 2 * index & 3).view(np.int8) - np.int8(1)
    values *= read_float16(blocks, 64)
