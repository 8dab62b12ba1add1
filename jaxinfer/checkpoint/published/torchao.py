"""torchao's files: each matrix's tensors, and in the file's metadata the class that they are of.

``X.weight`` of the class Int8Tensor, for example, is ``X._weight_qdata`` and ``X._weight_scale``, and its metadata has
the size of the block that shares a scale. Integers of fewer than 8 bits are bytes in one class, halves of bytes, the
first weight in the low half, in another, whose scales and minima are ``[G, N]``.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer.checkpoint.published.coded_matrix import CodedMatrix, even_groups
from jaxinfer.checkpoint.published.fp8 import ACTIVATIONS, float_codes
from jaxinfer.checkpoint.published.quantization_keys import QuantizationKeys
from jaxinfer.checkpoint.published.scheme import Scheme
from jaxinfer.checkpoint.published.stored import Layer, Stored, in_halves
from jaxinfer.ops.few_bits.formats import FP8, SIGNED, UNSIGNED

_PLAIN = ("Tensor", "torch.Tensor")
# What is known of each class, besides the block: attributes, of which none changes a weight.
_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "Int8Tensor": "dtype act_quant_kwargs reduce_range",
        "IntxUnpackedToInt8Tensor": "dtype target_dtype activation_quantization",
        "Float8Tensor": "dtype mm_config act_quant_kwargs kernel_preference",
        "Int4Tensor": "shape activation_dtype",
    }
)
# Tensors that belong to a matrix's inputs; products here do not round these.
_OF_INPUTS = ("act_quant_scale", "act_quant_zero_point")
_MIDDLE = 8


def read_torchao(keys: QuantizationKeys) -> Scheme:
    """Return how a checkpoint of ``quant_method`` torchao is read; its files say of each matrix how it is stored."""
    made = keys.section("quant_type")
    if made is None:
        raise keys.refuse("quant_type", None, "it must say how weights were quantized")
    default = made.section("default")
    if default is None:
        raise made.refuse("default", None, "it must say how weights were quantized")
    rounds_inputs = "Activation" in default.text("_type")
    default.without_effect("_data _version")
    default.finish(None)
    made.finish(None)
    keys.words("modules_to_not_convert")  # they are stored as plain numbers
    keys.without_effect("include_input_output_embeddings")
    keys.empty("untie_embedding_weights", "quant_type_kwargs")

    def layers(stored: Stored) -> dict[str, Layer]:
        names = [name for name in stored.metadata if name != "tensor_names" and "." in name]
        found = {name: _layer(stored, name) for name in names}
        return {name: layer for name, layer in found.items() if layer is not None}

    return keys.finish(Scheme("torchao", layers, (), ACTIVATIONS if rounds_inputs else None))


def _layer(stored: Stored, name: str) -> Layer | None:
    described = _described(stored, name)
    kind = str(described.get("_type"))
    if kind in _PLAIN:
        return None
    data = described.get("_data")
    if kind not in _CLASSES or not isinstance(data, Mapping):
        raise stored.wrong(name, f"is of class {kind!r:.60}; known are {', '.join(_CLASSES)}")
    unknown = sorted(data.keys() - {"block_size", *_CLASSES[kind].split()})
    if unknown:
        raise stored.wrong(name, f"has {unknown[0]!r:.60}, which is not known of {kind}")
    module, _, weight = name.rpartition(".")
    parts = {part.removeprefix(f"{module}._{weight}_"): part for part in stored.starting_with(f"{module}._{weight}_")}
    if others := sorted(parts.keys() - {"qdata", "scale", "zero_point", *_OF_INPUTS}):
        raise stored.wrong(parts[others[0]], f"is not known of {kind}")
    if missing := sorted({"qdata", "scale"} - parts.keys()):
        raise stored.wrong(name, f"has no {missing[0]}; fetch all files of the model")
    outputs, stored_width = stored.matrix_shape(parts["qdata"])
    width = stored_width * 2 if kind == "Int4Tensor" else stored_width
    block = _block(stored, name, data.get("block_size"), outputs, width)
    reader = _Matrix(stored, parts, (outputs, width), block)
    read = {
        "Int8Tensor": reader.integers,
        "IntxUnpackedToInt8Tensor": lambda: reader.integers(_is_narrow(data.get("target_dtype"))),
        "Float8Tensor": reader.floats,
        "Int4Tensor": reader.halves,
    }[kind]
    return Layer(tuple(parts.values()), (outputs, width), read)


class _Matrix:
    """The tensors ``parts`` of a matrix of which each block shares a scale."""

    def __init__(self, stored: Stored, parts: Mapping[str, str], shape: tuple[int, int], block: tuple[int, int]):
        self._stored, self._parts, self._shape, self._block = stored, parts, shape, block
        self._groups = even_groups(shape[1], block[1])

    def integers(self, is_narrow: bool = False) -> CodedMatrix:
        """Return bytes as integers; if they are narrow, of 4 bits."""
        name, zeros = self._parts["qdata"], self._zeros(127 - _MIDDLE * is_narrow)
        self._stored.check(name, self._shape, "int8")
        scales = self._stored.block_scales(self._parts["scale"], self._shape, self._block)

        def codes() -> np.ndarray:
            found = self._stored.read(name, self._shape, "int8")
            if not is_narrow:
                return found
            if found.min() < -_MIDDLE or found.max() >= _MIDDLE:
                raise self._stored.wrong(name, "has a number of more than 4 bits")
            return (found + _MIDDLE).view(np.uint8)

        if not is_narrow:
            return CodedMatrix(8, codes, scales, self._groups, (), zeros)
        if zeros is None:
            return CodedMatrix(4, codes, scales, self._groups, SIGNED)
        return CodedMatrix(4, codes, scales, self._groups, UNSIGNED, (zeros + _MIDDLE).astype(np.int8))

    def floats(self) -> CodedMatrix:
        """Return floats of 8 bits."""
        name = self._parts["qdata"]
        self._stored.check(name, self._shape, "float8_e4m3fn")
        scales = self._stored.block_scales(self._parts["scale"], self._shape, self._block)
        return CodedMatrix(8, lambda: float_codes(self._stored, name, self._shape), scales, self._groups, FP8.levels)

    def halves(self) -> CodedMatrix:
        """Return integers of 4 bits, with a minimum for each group."""
        name, (outputs, width) = self._parts["qdata"], self._shape
        self._stored.check(name, (outputs, width // 2), "int8", "uint8")
        grid = width // self._block[1], outputs
        scales = self._stored.scales(self._parts["scale"], grid).T
        minima = self._stored.scales(self._parts.get("zero_point", name), grid).T

        def codes() -> np.ndarray:
            found = self._stored.read(name, (outputs, width // 2), "int8", "uint8").view(np.uint8)
            return in_halves(found) ^ _MIDDLE  # they are signed

        return CodedMatrix(4, codes, scales, self._groups, SIGNED, minima=minima.astype(scales.dtype))

    def _zeros(self, most: int) -> np.ndarray | None:
        """Return integer zeros; None where all are 0. None may be larger than ``most``, which is below 128."""
        name = self._parts.get("zero_point")
        if name is None:
            return None
        if self._stored.check(name, None, "int8", "float32", "bfloat16", "float16") == np.int8:
            zeros = self._stored.block_scales(name, self._shape, self._block, "int8")
        else:
            zeros = self._stored.block_scales(name, self._shape, self._block)
        whole = zeros.astype(np.float32)
        if (whole != np.round(whole)).any() or whole.min() < -128 or whole.max() > most:
            raise self._stored.wrong(name, "has zeros that are no small integers")
        return whole.astype(np.int8) if whole.any() else None


def _described(stored: Stored, name: str) -> Mapping[str, Any]:
    try:
        found = json.loads(stored.metadata[name])
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, Mapping):
        raise stored.wrong(name, "is described by no JSON object; download the file again")
    return found


def _block(stored: Stored, name: str, value: Any, outputs: int, width: int) -> tuple[int, int]:
    """Return how many outputs and inputs share a scale; an empty list is all."""
    value = [outputs, width] if value in ([], None) else value
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(each) is int and each > 0 for each in value)
    if not is_pair or outputs % value[0] or width % value[1]:
        raise stored.wrong(name, f"has blocks of {value!r:.60}, which do not divide {[outputs, width]}")
    return value[0], value[1]


def _is_narrow(dtype: Any) -> bool:
    return isinstance(dtype, Mapping) and dtype.get("_data") in ("int1", "int2", "int3", "int4")
