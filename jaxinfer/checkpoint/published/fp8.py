"""Weights as floats of 8 bits (e4m3), with a scale for each block, each row, or the whole matrix."""

import numpy as np

from jaxinfer.checkpoint.published.coded_matrix import CodedMatrix, even_groups
from jaxinfer.checkpoint.published.quantization_keys import QuantizationKeys
from jaxinfer.checkpoint.published.scheme import Scheme
from jaxinfer.checkpoint.published.stored import Layer, Stored
from jaxinfer.ops.few_bits.formats import FP8

# The bits, besides the sign, of a code that is no number.
_NO_NUMBER = 0x7F
_SCALES = (".weight_scale_inv", ".weight_scale")
# Scales of inputs, of those who quantize them.
INPUT_SCALES = (".input_scale", ".activation_scale", ".input_zero_point", ".input_global_scale")
ACTIVATIONS = "activations stay as they are: the checkpoint's scheme for them is not used"


def read_fp8(keys: QuantizationKeys) -> Scheme:
    """Return how a checkpoint of ``quant_method`` fp8 is read: DeepSeek's and Qwen's blocks, or a scale a matrix."""
    keys.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    # Scales that are powers of two are stored as floats too, in DeepSeek-V3.1 for one; other types are refused below.
    keys.one_of("scale_fmt", ("float", "ue8m0"), "float")
    keys.one_of("expert_dtype", ("fp8",), "fp8")
    keys.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    block = (0, 0)
    if keys.has("weight_block_size"):
        block = keys.sizes("weight_block_size")
    keys.without_effect("weight_block_size dequantize")
    for key in ("modules_to_not_convert", "ignored_layers"):
        keys.words(key)
    keys.empty("modules_to_convert", "kv_cache_scheme", "kv_cache_quant_method")

    def layers(stored: Stored) -> dict[str, Layer]:
        return {
            f"{module}.weight": float_layer(stored, module, block, f"{module}{suffix}")
            for suffix in _SCALES
            for module in stored.ending_in(suffix)
        }

    return keys.finish(Scheme("fp8", layers, INPUT_SCALES, ACTIVATIONS))


def read_fbgemm_fp8(keys: QuantizationKeys) -> Scheme:
    """Return how a checkpoint of ``quant_method`` fbgemm_fp8 is read: a scale a row."""
    keys.words("modules_to_not_convert")
    keys.without_effect("activation_scale_ub")

    def layers(stored: Stored) -> dict[str, Layer]:
        suffix = ".weight_scale"
        return {
            f"{module}.weight": float_layer(stored, module, (1, 0), f"{module}{suffix}")
            for module in stored.ending_in(suffix)
        }

    return keys.finish(Scheme("fbgemm_fp8", layers, (*INPUT_SCALES, ".input_scale_ub"), ACTIVATIONS))


def float_layer(stored: Stored, module: str, block: tuple[int, int], scales: str) -> Layer:
    """Return a layer with a scale for each block of so many rows and inputs, of which 0 means all."""
    name = f"{module}.weight"
    shape = stored.matrix_shape(name)

    def read() -> CodedMatrix:
        stored.check(name, shape, "float8_e4m3fn")
        found = stored.block_scales(scales, shape, block)
        groups = even_groups(shape[1], block[1] or shape[1])
        return CodedMatrix(8, lambda: float_codes(stored, name, shape), found, groups, FP8.levels)

    return Layer((name, scales), shape, read)


def float_codes(stored: Stored, name: str, shape: tuple[int, int]) -> np.ndarray:
    """Return a tensor's floats as bytes, all of which are numbers."""
    codes = stored.read(name, shape, "float8_e4m3fn").view(np.uint8)
    if ((codes & _NO_NUMBER) == _NO_NUMBER).any():
        raise stored.wrong(name, "has weights that are no numbers; download the file again")
    return codes
