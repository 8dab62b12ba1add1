"""Turns GGUF's quantised blocks of 32 weights into float32, whole slabs at a time.

The gguf package does the same in groups of 16 rows, which takes twice as long. Layouts: ``Q4_0`` is a float16
scale and 16 bytes, ``Q4_1`` a scale, a least value and 16 bytes, ``Q8_0`` a scale and 32 signed bytes. A byte of two
weights holds weight i in its low half and weight i + 16 in its high half.
"""

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize


def dequantize_rows(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Return the float32 values of rows of bytes, a row of values for each."""
    if kind == GGMLQuantizationType.Q4_1:
        return _read_halves(rows, 20, offset=0)
    if kind == GGMLQuantizationType.Q4_0:
        return _read_halves(rows, 18, offset=8)
    if kind == GGMLQuantizationType.Q8_0:
        blocks = rows.reshape(-1, 34)
        return (blocks[:, 2:].view(np.int8) * _read_float16(blocks, 0)).reshape(len(rows), -1)
    return dequantize(rows, kind)


def _read_halves(rows: np.ndarray, block_bytes: int, offset: int) -> np.ndarray:
    blocks = rows.reshape(-1, block_bytes)
    packed, scales = blocks[:, -16:], _read_float16(blocks, 0)
    values = np.empty((len(blocks), 2, 16), np.float32)
    for half, weights in enumerate((packed & 15, packed >> 4)):
        shifted = weights.view(np.int8) - np.int8(offset) if offset else weights
        np.multiply(shifted, scales, out=values[:, half])
    if block_bytes == 20:
        values += _read_float16(blocks, 2)[:, :, None]
    return values.reshape(len(rows), -1)


def _read_float16(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return one float16 of every block, as a column of float32."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)
