"""bitsandbytes' files: blocks of 4 bits, counted over all of a matrix, or rows of int8.

A matrix in 4 bits is a tensor of bytes, the first weight in the high half of the first one. ``quant_state`` is JSON:
the kind of the codes, the size of a block, the matrix's shape. Blocks' scales, ``absmax``, may themselves be codes of 8
bits in blocks, plus an offset.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.checkpoint.published.coded_matrix import CodedMatrix, even_groups
from jaxinfer.checkpoint.published.quantization_keys import QuantizationKeys
from jaxinfer.checkpoint.published.scheme import Scheme
from jaxinfer.checkpoint.published.stored import Layer, Stored, in_halves
from jaxinfer.errors import InvalidCheckpoint
from jaxinfer.ops.few_bits.formats import FP4_TIMES_12, NORMAL

_WITHOUT_EFFECT = """
    bnb_4bit_compute_dtype bnb_4bit_use_double_quant bnb_4bit_quant_storage llm_int8_enable_fp32_cpu_offload
    llm_int8_has_fp16_weight llm_int8_threshold _load_in_4bit _load_in_8bit load_in_4bit load_in_8bit
"""
_STATE = ".quant_state.bitsandbytes__"
# What bitsandbytes multiplies by for a division by 127.
_ONE_OF_127 = np.float32(7.874015718698502e-3)
_LONGEST_STATE = 4096
# Types in which bytes of two weights each may be written.
_STORAGES = ("uint8", "int8", "float16", "bfloat16", "float32")
# Levels, and what they are divided by.
_LEVELS: Mapping[str, tuple[tuple[float, ...], float]] = {"nf4": (NORMAL, 1.0), "fp4": (FP4_TIMES_12, 12.0)}


def read_bitsandbytes(keys: QuantizationKeys) -> Scheme:
    """Return how a checkpoint of ``quant_method`` bitsandbytes is read."""
    four, eight = (keys.boolean(f"load_in_{bits}bit", default=False) for bits in (4, 8))
    if four == eight:
        raise keys.refuse("load_in_8bit", eight, "either this or load_in_4bit must be true")
    kind = keys.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    keys.words("llm_int8_skip_modules")
    keys.without_effect(_WITHOUT_EFFECT)

    def layers(stored: Stored) -> dict[str, Layer]:
        if eight:
            return {f"{module}.weight": _rows(stored, module) for module in stored.ending_in(".SCB")}
        return {name: _blocks(stored, name, kind) for name in stored.ending_in(f"{_STATE}{kind}")}

    return keys.finish(Scheme(f"bitsandbytes, {kind if four else 'int8'}", layers))


def _rows(stored: Stored, module: str) -> Layer:
    name, scales, order = f"{module}.weight", f"{module}.SCB", f"{module}.weight_format"
    outputs, width = stored.matrix_shape(name)
    if order in stored.shapes and stored.read(order, None, "uint8").any():
        raise stored.wrong(order, "is no order of rows; save the model with a newer bitsandbytes")

    def read() -> CodedMatrix:
        stored.check(name, (outputs, width), "int8")
        found = stored.scales(scales, (outputs, 1), (outputs,)).astype(np.float32) * _ONE_OF_127
        return CodedMatrix(8, lambda: stored.read(name, (outputs, width), "int8"), found, even_groups(width, width))

    return Layer(tuple(part for part in (name, scales, order) if part in stored.shapes), (outputs, width), read)


def _blocks(stored: Stored, name: str, kind: str) -> Layer:
    state = _State(stored, f"{name}{_STATE}{kind}")
    outputs, width = state.shape("shape")
    block = state.size("blocksize")
    num_blocks = -(-outputs * width // block)
    nested = [f"{name}.nested_absmax", f"{name}.nested_quant_map"] if f"{name}.nested_absmax" in stored.shapes else []
    parts = (name, f"{name}.absmax", f"{name}.quant_map", state.name, *nested)
    if stored.num_bytes(name) * 2 != outputs * width:
        raise stored.wrong(name, f"does not hold the {outputs} rows of {width} weights that its state speaks of")

    def absmax() -> np.ndarray:
        if not nested:
            return stored.scales(f"{name}.absmax", (num_blocks,)).astype(np.float32)
        codes = stored.read(f"{name}.absmax", (num_blocks,), "uint8")
        size = state.size("nested_blocksize")
        scales = stored.scales(nested[0], (-(-num_blocks // size),)).astype(np.float32)
        levels = stored.scales(nested[1], (256,)).astype(np.float32)
        return levels[codes] * scales[even_groups(num_blocks, size)] + state.number("nested_offset")

    def codes() -> np.ndarray:
        data = np.ascontiguousarray(stored.read(name, None, *_STORAGES)).reshape(-1).view(np.uint8)
        return in_halves(data, high_first=True).reshape(outputs, width)

    def read() -> CodedMatrix:
        levels, divisor = _LEVELS[kind]
        written = stored.scales(f"{name}.quant_map", (16,)).astype(np.float32)
        if np.abs(written - np.array(levels, np.float32) / np.float32(divisor)).max() > 1e-6:
            raise stored.wrong(f"{name}.quant_map", f"has other levels than {kind}")
        stored.check(name, None, *_STORAGES)
        # Blocks run over the ends of rows, so groups are what rows and blocks have in common.
        size = math.gcd(width, block)
        starts = np.arange(outputs * width // size) * size // block
        scales = (absmax() / np.float32(divisor))[starts].reshape(outputs, -1)
        return CodedMatrix(4, codes, scales, even_groups(width, size), levels)

    return Layer(parts, (outputs, width), read)


class _State:
    """A matrix's ``quant_state``."""

    def __init__(self, stored: Stored, name: str):
        self.name, self._stored = name, stored
        if math.prod(stored.shapes[name]) > _LONGEST_STATE:
            raise stored.wrong(name, "is too long for a state")
        try:
            state = json.loads(stored.read(name, None, "uint8").tobytes())
        except (ValueError, RecursionError):
            state = None
        if not isinstance(state, dict):
            raise stored.wrong(name, "is no JSON object; download the file again")
        self._state: dict[str, Any] = state

    def size(self, key: str) -> int:
        value = self._state.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 20:
            raise self._wrong(key)
        return value

    def shape(self, key: str) -> tuple[int, int]:
        value = self._state.get(key)
        if not (isinstance(value, list) and len(value) == 2 and all(type(each) is int for each in value)):
            raise self._wrong(key)
        if not all(1 <= each < 1 << 31 for each in value):
            raise self._wrong(key)
        return value[0], value[1]

    def number(self, key: str) -> np.float32:
        value = self._state.get(key)
        if not isinstance(value, float | int) or not math.isfinite(value):
            raise self._wrong(key)
        return np.float32(value)

    def _wrong(self, key: str) -> InvalidCheckpoint:
        return self._stored.wrong(self.name, f"has no usable {key}")
