"""Dequantises GGUF's blocks of 32 weights to float32, many rows at a time.

The gguf package converts 16 rows at a time and so holds the interpreter's lock: with two threads it takes two to three
times as long. Layouts: ``Q4_0`` is a float16 scale and 16 bytes; ``Q4_1`` a scale, a minimum and 16 bytes; ``Q8_0`` a
scale and 32 signed bytes. ``Q5_0`` and ``Q5_1`` have 4 more bytes before their 16, with the fifth bit of each weight. A
byte of two weights holds weight i in its low half and weight i + 16 in its high half.
"""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxinfer.checkpoint.gguf.superblocks import SUPERBLOCKS, read_float16
from jaxinfer.checkpoint.gguf.ternary import fill_tq1_0, fill_tq2_0

_Kind = GGMLQuantizationType
_FILLED = {**SUPERBLOCKS, _Kind.TQ1_0: fill_tq1_0, _Kind.TQ2_0: fill_tq2_0}


def dequantize_rows(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Return the float32 values of rows of bytes, one row of values for each."""
    block_weights, block_bytes = GGML_QUANT_SIZES[kind]
    if kind in _FILLED:
        blocks = rows.reshape(-1, block_bytes)
        values = np.empty((len(blocks), block_weights), np.float32)
        _FILLED[kind](blocks, values)
    elif kind in (_Kind.Q4_0, _Kind.Q4_1):
        values = _read_4_bits(rows.reshape(-1, block_bytes), has_least=kind == _Kind.Q4_1)
    elif kind in (_Kind.Q5_0, _Kind.Q5_1):
        values = _read_5_bits(rows.reshape(-1, block_bytes), has_least=kind == _Kind.Q5_1)
    elif kind == _Kind.Q8_0:
        blocks = rows.reshape(-1, block_bytes)
        values = blocks[:, 2:].view(np.int8) * read_float16(blocks, 0)
    else:
        return dequantize(rows, kind)
    return values.reshape(len(rows), -1)


def _read_4_bits(blocks: np.ndarray, has_least: bool) -> np.ndarray:
    packed, scales = blocks[:, -16:], read_float16(blocks, 0)
    values = np.empty((len(blocks), 2, 16), np.float32)
    for half, weights in enumerate((packed & 15, packed >> 4)):
        np.multiply(weights if has_least else weights.view(np.int8) - np.int8(8), scales, out=values[:, half])
    if has_least:
        values += read_float16(blocks, 2)[:, :, None]
    return values


def _read_5_bits(blocks: np.ndarray, has_least: bool) -> np.ndarray:
    packed = blocks[:, -16:]
    fifth = np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little").reshape(-1, 2, 16) << 4
    values = np.empty((len(blocks), 2, 16), np.float32)
    for half, weights in enumerate((packed & 15, packed >> 4)):
        weights |= fifth[:, half]
        values[:, half] = weights if has_least else weights.view(np.int8) - np.int8(16)
    values *= read_float16(blocks, 0)[:, :, None]
    if has_least:
        values += read_float16(blocks, 2)[:, :, None]
    return values
