"""Experts as floats of 4 bits (e2m1), 32 of which share a power of two (OCP Microscaling Formats, MXFP4).

Facts of the files of gpt-oss: ``*_blocks`` are ``[E, out, in / 32, 16]`` bytes of two codes each, the first in the
lower half; ``*_scales`` are ``[E, out, in / 32]`` exponents, 127 above the power's. Outputs of gate and up take turns.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from jaxinfer.checkpoint.published.coded_matrix import owned, packed
from jaxinfer.checkpoint.published.quantization_keys import QuantizationKeys
from jaxinfer.checkpoint.published.scheme import Scheme
from jaxinfer.checkpoint.published.stored import Layer, Stored, in_halves
from jaxinfer.notation import Float
from jaxinfer.ops.few_bits.formats import MOST_EXPONENT, MXFP4, RUN, Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray

_BLOCK_BYTES = RUN // 2
_BLOCKS, _SCALES = "_blocks", "_scales"
# By the name of a tensor of all experts: those of each expert's matrices, the first of their rows, and each how many.
_MATRICES = {"gate_up_proj": (("gate_proj", 0, 2), ("up_proj", 1, 2)), "down_proj": (("down_proj", 0, 1),)}


@dataclass(frozen=True)
class MicroscaledMatrix:
    """Blocks ``[N, G, 16]`` and exponents ``[N, G]`` of a matrix."""

    stored: Stored
    module: str
    rows: tuple[int | slice, ...]

    @property
    def form(self) -> Format:
        """The form of the weights in their own bits."""
        return MXFP4

    def dense(self) -> Float[np.ndarray, "N K"]:
        """Return the weights in float32."""
        return self.quantized().dequantize()

    def quantized(self) -> QuantizedArray:
        """Return the weights in their own bits."""
        blocks, exponents = (
            self.stored.read(f"{self.module}{end}", None, "uint8")[self.rows] for end in (_BLOCKS, _SCALES)
        )
        if exponents.max(initial=0) > MOST_EXPONENT:
            why = "has a scale with which weights are no finite numbers; download the file again"
            raise self.stored.wrong(f"{self.module}{_SCALES}", why)
        codes = in_halves(blocks.reshape(len(blocks), -1))
        return QuantizedArray.of(MXFP4, [packed(codes, MXFP4.bits), owned(exponents)])


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
            (shape[1] // step, shape[2] * RUN),
            partial(MicroscaledMatrix, stored, module, (expert, slice(first, None, step))),
            # A power of two times a level of three bits.
            holds="bfloat16",
        )
        for expert in range(shape[0])
        for matrix, first, step in matrices
    }
