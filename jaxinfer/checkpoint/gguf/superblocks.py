"""Dequantises GGUF's K-quants to float32: super-blocks of 256 weights in parts, each with its own scale.

Each function fills float32 values [Z, 256] from Z blocks of bytes. A part is 32 weights with a 6-bit scale and a 6-bit
minimum (``Q4_K``, ``Q5_K``), or 16 weights with a scale of 4 (``Q2_K``), 6 (``Q3_K``) or 8 bits (``Q6_K``). The packed
bits of 32 weights share their bytes with those of the next 32.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from gguf import GGMLQuantizationType


def read_float16(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return one float16 of every block, as a column of float32."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _fill_q2_k(blocks: np.ndarray, values: np.ndarray) -> None:
    scales, packed = blocks[:, :16], blocks[:, 16:80].reshape(-1, 2, 32)
    parts = values.reshape(-1, 2, 4, 32)
    for index in range(4):
        parts[:, :, index] = (packed >> 2 * index) & 3
    values = values.reshape(-1, 16, 16)
    values *= (read_float16(blocks, 80) * (scales & 15))[:, :, None]
    values -= (read_float16(blocks, 82) * (scales >> 4))[:, :, None]


def _fill_q3_k(blocks: np.ndarray, values: np.ndarray) -> None:
    high, packed, scales = blocks[:, :32], blocks[:, 32:96].reshape(-1, 2, 32), blocks[:, 96:108]
    parts = values.reshape(-1, 2, 4, 32)
    for half in range(2):
        for index in range(4):
            # If the high bit is 0, the weight is 4 less.
            weights = ((packed[:, half] >> 2 * index) & 3) | (_shift(high, 2 - 4 * half - index) & 4)
            parts[:, half, index] = weights.view(np.int8) - np.int8(4)
    low_bits = np.concatenate([scales[:, :8] & 15, scales[:, :8] >> 4], axis=1)
    high_bits = np.concatenate([_shift(scales[:, 8:], left) & 48 for left in (4, 2, 0, -2)], axis=1)
    signed = (low_bits | high_bits).view(np.int8) - np.int8(32)
    values = values.reshape(-1, 16, 16)
    values *= (read_float16(blocks, 108) * signed)[:, :, None]


def _fill_q4_k(blocks: np.ndarray, values: np.ndarray) -> None:
    _codes_of_q4_k(blocks, values)
    _scale_8_parts(blocks, values)


def _codes_of_q4_k(blocks: np.ndarray, codes: np.ndarray) -> None:
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    parts = codes.reshape(-1, 4, 2, 32)
    parts[:, :, 0] = packed & 15
    parts[:, :, 1] = packed >> 4


def _fill_q5_k(blocks: np.ndarray, values: np.ndarray) -> None:
    _codes_of_q5_k(blocks, values)
    _scale_8_parts(blocks, values)


def _codes_of_q5_k(blocks: np.ndarray, codes: np.ndarray) -> None:
    high, packed = blocks[:, 16:48], blocks[:, 48:].reshape(-1, 4, 32)
    parts = codes.reshape(-1, 4, 2, 32)
    for index in range(4):
        parts[:, index, 0] = (packed[:, index] & 15) | (_shift(high, 4 - 2 * index) & 16)
        parts[:, index, 1] = (packed[:, index] >> 4) | (_shift(high, 3 - 2 * index) & 16)


def _fill_q6_k(blocks: np.ndarray, values: np.ndarray) -> None:
    _codes_of_q6_k(blocks, values)
    values -= 32
    values = values.reshape(-1, 16, 16)
    values *= (read_float16(blocks, 208) * blocks[:, 192:208].view(np.int8))[:, :, None]


def _codes_of_q6_k(blocks: np.ndarray, codes: np.ndarray) -> None:
    packed, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 32)
    parts = codes.reshape(-1, 2, 4, 32)
    for index in range(4):
        low = packed[:, :, index % 2]
        parts[:, :, index] = (low & 15 if index < 2 else low >> 4) | (_shift(high, 4 - 2 * index) & 48)


def _scale_8_parts(blocks: np.ndarray, values: np.ndarray) -> None:
    """Apply the scales and minimums of eight parts."""
    scales, leasts = scales_of_8_parts(blocks)
    values = values.reshape(-1, 8, 32)
    values *= (read_float16(blocks, 0) * scales)[:, :, None]
    values -= (read_float16(blocks, 2) * leasts)[:, :, None]


def scales_of_8_parts(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 6-bit scales and minimums of eight parts, packed in 12 bytes: uint8 [Z, 8] each.

    Four bytes hold the first four scales and four the first four minimums; each also holds two high bits of the last
    four. The last four bytes hold the low halves of the last four.
    """
    scales, leasts, low_halves = blocks[:, 4:16].reshape(-1, 3, 4).swapaxes(0, 1)
    scales, leasts = (
        np.concatenate([first & 63, low | ((first >> 2) & 48)], axis=1)
        for first, low in ((scales, low_halves & 15), (leasts, low_halves >> 4))
    )
    return scales, leasts


def _shift(packed: np.ndarray, left: int) -> np.ndarray:
    return packed << left if left >= 0 else packed >> -left


SUPERBLOCKS: Mapping[GGMLQuantizationType, Callable[[np.ndarray, np.ndarray], None]] = MappingProxyType(
    {
        GGMLQuantizationType.Q2_K: _fill_q2_k,
        GGMLQuantizationType.Q3_K: _fill_q3_k,
        GGMLQuantizationType.Q4_K: _fill_q4_k,
        GGMLQuantizationType.Q5_K: _fill_q5_k,
        GGMLQuantizationType.Q6_K: _fill_q6_k,
    }
)

# Of types that are multiplied in their own bits: fills codes [Z, 256].
CODES: Mapping[GGMLQuantizationType, Callable[[np.ndarray, np.ndarray], None]] = MappingProxyType(
    {
        GGMLQuantizationType.Q4_K: _codes_of_q4_k,
        GGMLQuantizationType.Q5_K: _codes_of_q5_k,
        GGMLQuantizationType.Q6_K: _codes_of_q6_k,
    }
)
