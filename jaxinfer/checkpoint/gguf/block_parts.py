"""Splits GGUF's blocks into what a `QuantizedArray` holds apart: codes, scales, minima, and the units of both.

Codes of blocks of 32 lie as in the file; those of super-blocks are put into runs of 32 codes.
"""

import numpy as np
from gguf import GGMLQuantizationType

from jaxinfer.checkpoint.gguf.superblocks import CODES, scales_of_8_parts
from jaxinfer.ops.few_bits.formats import GGUF_FORMATS, RUN

_SUPERBLOCK = 256
_NEGATIVE = 0x8000  # the sign of a float16


def split_blocks(blocks: np.ndarray, kind: str) -> list[np.ndarray]:
    """Return the parts of blocks ``[Z, bytes]`` of a type, each ``[Z, ...]``, in the order of the type's form."""
    form = GGUF_FORMATS[kind]
    if form.scale_dtype == "uint8":
        return [blocks[:, 1:], blocks[:, :1]]
    if form.supers is None:
        first = 4 if form.has_minima else 2
        groups = [blocks[:, at : at + 2].copy().view(np.float16) for at in range(0, first, 2)]
        codes = blocks[:, first:]
        if form.bits == 5:  # the fifth bits come first
            codes = np.concatenate([codes[:, 4:], codes[:, :4]], axis=1)
        return [codes.view(np.int8) if form.bits == 8 else codes, *groups]
    codes = np.empty((len(blocks), _SUPERBLOCK), np.uint8)
    CODES[GGMLQuantizationType[kind]](blocks, codes)
    codes = _packed(codes.reshape(-1, RUN), form.bits).reshape(len(blocks), -1)
    if not form.has_minima:
        return [codes, blocks[:, 192:208].view(np.int8), blocks[:, 208:].copy().view(np.float16)]
    units = blocks[:, :4].copy().view(np.uint16)
    units[:, 1] ^= _NEGATIVE  # minima are subtracted
    units = units.view(np.float16)
    return [codes, *(part.view(np.int8) for part in scales_of_8_parts(blocks)), units[:, :1], units[:, 1:]]


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return runs of codes, one a byte, in their bits."""
    low, high = codes & 15, codes >> 4
    parts: list[np.ndarray] = [low[:, : RUN // 2] | (low[:, RUN // 2 :] << 4)]
    if bits == 5:
        parts.append(np.packbits(high, axis=1, bitorder="little"))
    elif bits == 6:
        eighths = high.reshape(-1, 4, RUN // 4)
        parts.append(eighths[:, 0] | (eighths[:, 1] << 2) | (eighths[:, 2] << 4) | (eighths[:, 3] << 6))
    return np.concatenate(parts, axis=1)
