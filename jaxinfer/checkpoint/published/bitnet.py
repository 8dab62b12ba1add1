"""BitNet's files: weights of -1, 0 and 1 with one scale a matrix, four of them in a byte, or still to be rounded.

Byte ``[i, k]`` holds the weights of rows ``i``, ``i + N / 4``, ``i + N / 2`` and ``i + 3 N / 4``, the first in its
lowest bits. Files for training (mode ``online``) have plain weights, which are rounded as training rounded them
(2402.17764).
"""

import re
from collections.abc import Callable

import numpy as np

from jaxinfer.checkpoint.published.coded_matrix import CodedMatrix, even_groups
from jaxinfer.checkpoint.published.fp8 import ACTIVATIONS
from jaxinfer.checkpoint.published.quantization_keys import QuantizationKeys
from jaxinfer.checkpoint.published.scheme import Scheme
from jaxinfer.checkpoint.published.stored import FLOATS, Layer, Stored
from jaxinfer.ops.few_bits.formats import SIGNED

_SCALE, _LEAST_MEAN = ".weight_scale", np.float32(1e-5)
# The codes of -1, 0 and 1 among signed integers of 4 bits, as the files count from 0.
_FIRST = SIGNED.index(-1.0)
# How the names of linear layers end, those of Mixtral's experts too. Routers are none of them.
_LINEAR = "_proj", ".w1", ".w2", ".w3"


def read_bitnet(keys: QuantizationKeys) -> Scheme:
    """Return how a checkpoint of ``quant_method`` bitnet is read."""
    divides = keys.one_of("linear_class", ("bitlinear", "autobitlinear"), "bitlinear") == "bitlinear"
    is_packed = keys.one_of("quantization_mode", ("offline", "online"), "offline") == "offline"
    if keys.boolean("use_rms_norm", default=False):
        raise keys.refuse("use_rms_norm", True, "only models without norms before each product are known")
    keys.without_effect("rms_norm_eps")
    kept = keys.words("modules_to_not_convert") or ("lm_head",)
    for each in kept:
        try:
            re.compile(each)
        except (re.error, RecursionError):
            raise keys.refuse("modules_to_not_convert", each, "it is no regular expression") from None

    def layers(stored: Stored) -> dict[str, Layer]:
        if is_packed:
            return {f"{module}.weight": _packed(stored, module, divides) for module in stored.ending_in(_SCALE)}
        found = (f"{module}{name}" for name in _LINEAR for module in stored.ending_in(f"{name}.weight"))
        rounded = (module for module in found if not any(_names(each, module) for each in kept))
        return {f"{module}.weight": _plain(stored, f"{module}.weight") for module in rounded}

    return keys.finish(Scheme("bitnet", layers, (), ACTIVATIONS))


def _names(key: str, module: str) -> bool:
    """Whether a key is a module's end, or a regular expression for what it is, or is inside."""
    return module.endswith(key) or re.match(rf"(?:{key})(?:(?<=\.)|(?=\.|$))", module) is not None


def _packed(stored: Stored, module: str, divides: bool) -> Layer:
    name, scale = f"{module}.weight", f"{module}{_SCALE}"
    rows, width = stored.matrix_shape(name)
    shape = 4 * rows, width

    def codes() -> np.ndarray:
        found = stored.read(name, (rows, width), "uint8")
        two_bits = np.concatenate([found >> place & 3 for place in (0, 2, 4, 6)])
        if (two_bits == 3).any():
            raise stored.wrong(name, "has weights that are none of -1, 0 and 1; download the file again")
        return two_bits + np.uint8(_FIRST)

    def read() -> CodedMatrix:
        stored.check(name, (rows, width), "uint8")
        found = stored.scales(scale, (1,), ()).astype(np.float32)
        if divides and not found.all():
            raise stored.wrong(scale, "is zero, by which weights are divided; download the file again")
        return _of_one_scale(codes, 1 / found if divides else found, shape)

    return Layer((name, scale), shape, read)


def _plain(stored: Stored, name: str) -> Layer:
    shape = stored.matrix_shape(name)

    def read() -> CodedMatrix:
        weights = stored.read(name, shape, *FLOATS).astype(np.float32)
        mean = np.maximum(np.abs(weights).mean(), _LEAST_MEAN)
        if not np.isfinite(mean):
            raise stored.wrong(name, "has weights that are no numbers; download the file again")
        rounded = np.clip(np.round(weights * (1 / mean)), -1, 1).astype(np.int8)
        return _of_one_scale(lambda: (rounded + np.int8(_FIRST + 1)).view(np.uint8), mean[None], shape)

    return Layer((name,), shape, read)


def _of_one_scale(codes: Callable[[], np.ndarray], scale: np.ndarray, shape: tuple[int, int]) -> CodedMatrix:
    outputs, width = shape
    return CodedMatrix(4, codes, np.repeat(scale[:, None], outputs, axis=0), even_groups(width, width), SIGNED)
