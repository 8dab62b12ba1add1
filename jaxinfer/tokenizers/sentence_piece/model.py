"""Writes a SentencePiece model from a bare vocabulary, so that SentencePiece itself encodes with it.

A model is a protocol buffer (sentencepiece_model.proto): fields are a key, ``number << 3 | wire type``, and a value.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum

_BPE = 2


class PieceKind(IntEnum):
    """The kinds of pieces in SentencePiece and in a GGUF file's ``token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def write_sentence_piece_model(
    pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int], *, add_dummy_prefix: bool = True
) -> bytes:
    """Return the ``tokenizer.model`` of a BPE vocabulary without normalization.

    Pieces write a space as U+2581 and bytes as ``<0x0A>``; pairs of higher score merge first. The model does not record
    names other than ``<s>`` and ``</s>`` for the pieces that begin and end a text.
    """
    written = [
        _field(1, _field(1, piece.encode()) + _float(2, score) + _number(3, kind))
        for piece, score, kind in zip(pieces, scores, kinds, strict=True)
    ]
    trainer = _number(3, _BPE) + _number(35, PieceKind.BYTE in kinds)
    normalizer = _field(1, b"identity") + _number(3, add_dummy_prefix) + _number(4, False) + _number(5, True)
    return b"".join(written) + _field(2, trainer) + _field(3, normalizer)


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(int(value))


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    """Write seven bits per byte, the lowest first; all bytes but the last have their top bit set."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])
