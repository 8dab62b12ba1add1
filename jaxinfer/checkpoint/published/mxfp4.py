"""Experts as floats of 4 bits (e2m1), 32 of which share a power of two (OCP Microscaling Formats, MXFP4).

Facts of the files of gpt-oss: ``*_blocks`` are ``[E, out, in / 32, 16]`` bytes of two codes each, the first in the
lower half; ``*_scales`` are ``[E, out, in / 32]`` exponents, 127 above the power's. Outputs of gate and up take turns.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from jaxinfer.checkpoint.published.quantization_keys import QuantizationKeys
from jaxinfer.checkpoint.published.scheme import Scheme
from jaxinfer.checkpoint.published.stored import Layer, Stored
from jaxinfer.notation import Float

_BLOCK, _BLOCK_BYTES = 32, 16
_BLOCKS, _SCALES = "_blocks", "_scales"
# By the name of a tensor of all experts: those of each expert's matrices, the first of their rows, and each how many.
_MATRICES = {"gate_up_proj": (("gate_proj", 0, 2), ("up_proj", 1, 2)), "down_proj": (("down_proj", 0, 1),)}
_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# The largest exponent with which the largest level is finite.
_BIAS, _LARGEST = 127, 252


@dataclass(frozen=True)
class MicroscaledMatrix:
    """Blocks ``[N, G, 16]`` and exponents ``[N, G]`` of a matrix; no product reads them as they are."""

    stored: Stored
    module: str
    rows: tuple[int | slice, ...]
    form: None = None

    def dense(self) -> Float[np.ndarray, "N K"]:
        """Return the weights in float32."""
        blocks, exponents = (
            self.stored.read(f"{self.module}{end}", None, "uint8")[self.rows] for end in (_BLOCKS, _SCALES)
        )
        if exponents.max(initial=0) > _LARGEST:
            why = "has a scale with which weights are no finite numbers; download the file again"
            raise self.stored.wrong(f"{self.module}{_SCALES}", why)
        pairs = _pairs()[blocks].view(np.float32).reshape(*exponents.shape, _BLOCK)
        pairs *= np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)[..., None]
        return pairs.reshape(len(exponents), -1)


def read_mxfp4(keys: QuantizationKeys) -> Scheme:
    """Return how a checkpoint of ``quant_method`` mxfp4 is read."""
    keys.words("modules_to_not_convert")
    keys.without_effect("dequantize")

    def layers(stored: Stored) -> dict[str, Layer]:
        found: dict[str, Layer] = {}
        for module in stored.ending_in(_BLOCKS):
            found |= _experts(stored, module)
        return found

    return keys.finish(Scheme("mxfp4", layers))


def _experts(stored: Stored, module: str) -> dict[str, Layer]:
    """Return the matrices of all experts in a pair of tensors, under the names of tensors of their own."""
    inside, _, name = module.rpartition(".")
    blocks, shape = f"{module}{_BLOCKS}", stored.shapes[f"{module}{_BLOCKS}"]
    if name not in _MATRICES:
        raise stored.wrong(blocks, f"is none of {', '.join(_MATRICES)}, whose blocks are known")
    matrices = _MATRICES[name]
    if len(shape) != 4 or shape[3] != _BLOCK_BYTES or shape[1] % len(matrices):
        raise stored.wrong(blocks, f"has shape {list(shape)}, but must hold blocks of {_BLOCK_BYTES} bytes of experts")
    stored.check(blocks, shape, "uint8")
    stored.check(f"{module}{_SCALES}", shape[:3], "uint8")
    return {
        f"{inside}.{expert}.{matrix}.weight": Layer(
            (blocks, f"{module}{_SCALES}"),
            (shape[1] // step, shape[2] * _BLOCK),
            partial(MicroscaledMatrix, stored, module, (expert, slice(first, None, step))),
            # A power of two times a level of three bits.
            holds="bfloat16",
        )
        for expert in range(shape[0])
        for matrix, first, step in matrices
    }


def _pairs() -> np.ndarray:
    """Return the two weights of every byte, as one number of their bits."""
    levels = np.concatenate([_LEVELS, -_LEVELS])
    codes = np.arange(256)
    return np.stack([levels[codes & 15], levels[codes >> 4]], axis=1).view(np.uint64)[:, 0]
