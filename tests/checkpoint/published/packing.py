"""Matrices as other programs store them in few bits, made of random codes, with the weights that they stand for.

Each function draws codes and scales, computes the weights from them in float64, and packs them bit by bit as the
format's authors do. Nothing here reads what it wrote, and nothing of the library is used.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Rng = np.random.Generator
Tensors = dict[str, np.ndarray]
Packed = tuple[Tensors, np.ndarray]
BFLOAT16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


def draw_scales(rng: Rng, shape: tuple[int, ...], width: int, dtype: Any, largest: float = 8.0) -> np.ndarray:
    """Return scales that make weights of about the size of a linear layer's."""
    return (rng.uniform(0.5, 1.5, shape) * width**-0.5 * 2 / largest).astype(dtype)


def in_words(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Return codes in 32-bit integers along an axis, the first in the lowest bits; the last word is filled with 0."""
    moved = np.moveaxis(codes.astype(np.int64), axis, -1)
    count = 32 // bits
    moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % count)])
    words = np.zeros((*moved.shape[:-1], moved.shape[-1] // count), np.int64)
    for place in range(count):
        words |= moved[..., place::count] << bits * place
    return np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)


def gptq(
    rng: Rng,
    outputs: int,
    width: int,
    bits: int = 4,
    group: int = 128,
    symmetric: bool = True,
    version: int = 1,
    act_order: bool = False,
    dtype: Any = np.float16,
) -> Packed:
    size = width if group == -1 else group
    num_groups = -(-width // size)
    places = np.arange(width) // size
    if act_order:
        places = rng.permutation(places)
    codes = rng.integers(0, 1 << bits, (width, outputs))
    zeros = np.full((num_groups, outputs), 1 << bits - 1)
    if not symmetric:
        zeros = rng.integers(1 if version == 1 else 0, 1 << bits, zeros.shape)
    scales = draw_scales(rng, zeros.shape, width, dtype, 1 << bits - 1)
    weights = scales.astype(np.float64)[places] * (codes - zeros[places])
    stored = (zeros - 1 if version == 1 else zeros) & (1 << bits) - 1
    tensors = {
        "qweight": in_words(codes, bits, 0),
        "qzeros": in_words(stored, bits, 1),
        "scales": scales,
        "g_idx": places.astype(np.int32),
    }
    return tensors, weights.T


def awq(rng: Rng, outputs: int, width: int, group: int = 128) -> Packed:
    codes = rng.integers(0, 16, (width, outputs))
    zeros = rng.integers(0, 16, (width // group, outputs))
    scales = draw_scales(rng, zeros.shape, width, np.float16)

    def packed(values: np.ndarray) -> np.ndarray:
        words = np.zeros((len(values), outputs // 8), np.int64)
        for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words |= values[:, output::8] << 4 * place
        return words.astype(np.uint32).view(np.int32)

    weights = np.repeat(scales.astype(np.float64), group, 0) * (codes - np.repeat(zeros, group, 0))
    return {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}, weights.T


def compressed_integers(
    rng: Rng,
    outputs: int,
    width: int,
    bits: int = 4,
    group: int | None = 32,
    symmetric: bool = True,
    act_order: bool = False,
    packed: bool = True,
    whole: bool = False,
) -> Packed:
    """``group`` None is one scale a row, and ``whole`` one of the matrix."""
    size = group or width
    half = 1 << bits - 1
    codes = rng.integers(-half, half, (outputs, width))
    shape = (1,) if whole else (outputs, width // size)
    scales = draw_scales(rng, shape, width, BFLOAT16, half)
    zeros = np.zeros(shape, np.int64) if symmetric else rng.integers(-half, half, shape)
    places = np.arange(width) // size
    places = rng.permutation(places) if act_order else places
    each_scale, each_zero = (
        np.broadcast_to(part.reshape(-1, shape[-1]), (outputs, shape[-1])) for part in (scales, zeros)
    )
    weights = each_scale.astype(np.float64)[:, places] * (codes - each_zero[:, places])
    tensors = {"weight_scale": scales}
    if packed:
        tensors |= {"weight_packed": in_words(codes + half, bits, 1), "weight_shape": np.array([outputs, width])}
        tensors |= {} if symmetric else {"weight_zero_point": in_words(zeros + half, bits, 0)}
    else:
        tensors["weight"] = codes.astype(np.int8)
        tensors |= {} if symmetric else {"weight_zero_point": zeros.astype(np.int8)}
    return tensors | ({"weight_g_idx": places.astype(np.int32)} if act_order else {}), weights


def floats(
    rng: Rng,
    outputs: int,
    width: int,
    block: tuple[int, int] | None = None,
    name: str = "weight_scale",
    dtype: Any = np.float32,
    flat: bool = False,
) -> Packed:
    """``block`` None is one scale of the matrix; ``flat`` scales have no second axis."""
    height, length = block or (outputs, width)
    length = min(length, width)
    codes = (rng.standard_normal((outputs, width)) * 100).clip(-448, 448).astype(FP8)
    scales = draw_scales(rng, (-(-outputs // height), -(-width // length)), width, dtype, 200)
    each = np.repeat(np.repeat(scales.astype(np.float64), height, 0)[:outputs], length, 1)[:, :width]
    stored = scales if block and not flat else scales.reshape(-1)
    return {"weight": codes, name: stored}, each * codes.astype(np.float64)


# bitsandbytes' levels, in the order of their codes.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4 = tuple(sign * each / 12 for sign in (1, -1) for each in (0, 0.0625, 8, 12, 4, 6, 2, 3))


def four_bits(
    rng: Rng, outputs: int, width: int, kind: str = "nf4", block: int = 64, nested: bool = True, storage: Any = np.uint8
) -> Packed:
    levels = np.array(NF4 if kind == "nf4" else FP4, np.float32)
    codes = rng.integers(0, 16, outputs * width)
    num_blocks = -(-len(codes) // block)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [outputs, width]}
    tensors: Tensors = {}
    absmax = draw_scales(rng, (num_blocks,), width, np.float32, 1.0)
    tensors["weight.absmax"] = absmax
    if nested:
        codes_of_scales = rng.integers(0, 256, num_blocks).astype(np.uint8)
        map_of_scales = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        inner = np.full(-(-num_blocks // 256), 0.5 * width**-0.5, np.float32)
        offset = float(np.float32(width**-0.5))
        absmax = map_of_scales[codes_of_scales] * np.repeat(inner, 256)[:num_blocks] + np.float32(offset)
        tensors |= {"weight.absmax": codes_of_scales, "weight.nested_absmax": inner}
        tensors["weight.nested_quant_map"] = map_of_scales
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    weights = levels.astype(np.float64)[codes] * np.repeat(absmax, block)[: len(codes)]
    tensors["weight"] = (codes[::2] << 4 | codes[1::2]).astype(np.uint8).view(storage)[:, None]
    tensors["weight.quant_map"] = levels
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return tensors, weights.reshape(outputs, width)


def int8_rows(rng: Rng, outputs: int, width: int) -> Packed:
    codes = rng.integers(-127, 128, (outputs, width)).astype(np.int8)
    largest = draw_scales(rng, (outputs,), width, np.float32, 1.0)
    tensors = {"weight": codes, "SCB": largest, "weight_format": np.array(0, np.uint8)}
    return tensors, codes * (largest.astype(np.float64)[:, None] / 127)


def ternary(rng: Rng, outputs: int, width: int, divides: bool = False, packed: bool = True) -> Packed:
    """Scales multiply, or divide; what is not packed are the numbers of which training made -1, 0 and 1."""
    if not packed:
        plain = (rng.standard_normal((outputs, width)) * width**-0.5).astype(BFLOAT16)
        wide = plain.astype(np.float64)
        mean = np.abs(wide).mean()
        return {"weight": plain}, np.clip(np.round(wide / mean), -1, 1) * mean
    codes, scale = rng.integers(0, 3, (outputs, width)), draw_scales(rng, (1,), width, BFLOAT16, 1.0)
    rows = outputs // 4
    stored = sum(codes[place * rows : (place + 1) * rows] << 2 * place for place in range(4)).astype(np.uint8)
    kept = (1 / scale.astype(np.float64)).astype(BFLOAT16) if divides else scale
    factor = kept.astype(np.float64)
    return {"weight": stored, "weight_scale": kept}, (codes - 1) * (1 / factor if divides else factor)


def of_class(
    rng: Rng,
    outputs: int,
    width: int,
    kind: str = "Int8Tensor",
    block: tuple[int, int] | None = None,
    bits: int = 8,
    symmetric: bool = True,
) -> Packed:
    """torchao's; what is text belongs to the file's metadata. ``block`` None is a row."""
    height, length = block or (1, width)
    grid, half = (outputs // height, width // length), 1 << bits - 1
    if kind == "Float8Tensor":
        tensors, weights = floats(rng, outputs, width, (height, length), "scale")
        codes, scales, zeros = tensors["weight"], tensors["scale"], None
    else:
        codes = rng.integers(-half, half, (outputs, width)).astype(np.int8)
        scales = draw_scales(rng, grid, width, np.float32 if kind == "Int8Tensor" else BFLOAT16, half)
        zeros = np.zeros(grid, np.int8) if symmetric else rng.integers(-half, half, grid).astype(np.int8)
        if kind == "Int4Tensor":
            zeros = draw_scales(rng, grid, width, BFLOAT16, 1.0)
        of_each = [np.repeat(np.repeat(part.astype(np.float64), height, 0), length, 1) for part in (scales, zeros)]
        weights = of_each[0] * codes + of_each[1] if kind == "Int4Tensor" else of_each[0] * (codes - of_each[1])
    attributes: dict[str, Any] = {"block_size": [height, length], "dtype": {"_type": "torch.dtype", "_data": "float32"}}
    if kind == "IntxUnpackedToInt8Tensor":
        attributes["target_dtype"] = {"_type": "torch.dtype", "_data": f"int{bits}"}
    if kind == "Int4Tensor":
        attributes = {"block_size": [height, length], "shape": [outputs, width]}
        codes, scales, zeros = codes[:, ::2] & 15 | codes[:, 1::2] << 4, scales.T, zeros.T
    tensors = {"_weight_qdata": codes, "_weight_scale": scales} | (
        {} if zeros is None else {"_weight_zero_point": zeros}
    )
    names = [name.removeprefix("_weight_") for name in tensors]
    described = {"_type": kind, "_data": attributes, "_tensor_data_names": names}
    return {**tensors, "weight": json.dumps(described)}, weights  # pyright: ignore[reportReturnType]


class Case(NamedTuple):
    """A ``quantization_config``, and what packs a matrix so; ``widened`` where products do not have its form."""

    config: Mapping[str, Any]
    pack: Callable[[Rng, int, int], Packed]
    widened: bool = False
