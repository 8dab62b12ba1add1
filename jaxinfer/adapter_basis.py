"""Adapters of a model as it was, for the model into which factors have been folded since (`jaxinfer.models.folded`).

There inputs of some linear layers are divided, and outputs of some linear layers and norms: what reads such inputs is
multiplied, and what is added to such outputs is divided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxinfer.checkpoint.adapters.low_rank import LowRank
from jaxinfer.checkpoint.adapters.peft_folder import Place
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.folded import Folded


class OfKernel(NamedTuple):
    """What an adapter adds to one kernel, in its order of outputs; see `jaxinfer.models.adapters`."""

    down_RI: np.ndarray
    up_RO: np.ndarray
    gain_O: np.ndarray | None
    shift_O: np.ndarray | None


@dataclass(frozen=True)
class AdapterBasis:
    """What was folded into a model; None is nothing, and changes nothing."""

    config: DecoderConfig
    folded: Folded | None

    def of_kernel(self, layer: int, name: str, own: OfKernel) -> OfKernel:
        """Return what an adapter adds to a kernel."""
        inputs, outputs = self._factors(layer, name)
        if inputs is not None:
            own = own._replace(down_RI=own.down_RI * inputs)
        if outputs is not None:
            shift = None if own.shift_O is None else own.shift_O / outputs
            own = own._replace(up_RO=own.up_RO / outputs, shift_O=shift)
        return own

    def of_pair(self, layer: int, name: str, expert: int, low: LowRank) -> LowRank:
        """Return what is added to a router, a shared expert's gate or one expert's kernel."""
        inputs, outputs = (
            each if each is None or each.ndim == 1 else each[expert]
            for each in self._factors(layer, name.removesuffix(".weights"))
        )
        down = low.down_RI if inputs is None else low.down_RI * inputs
        return low._replace(down_RI=down, up_OR=low.up_OR if outputs is None else low.up_OR / outputs[:, None])

    def of_vector(self, layer: int | None, name: str, vector: np.ndarray) -> np.ndarray:
        """Return a norm's weight or bias, or a linear layer's bias, that replaces the model's."""
        module, _, part = name.rpartition(".")
        outputs = None if layer is None or self.folded is None else self.folded.outputs(layer, module)
        if outputs is None:
            return vector
        # What multiplies may be the weight and one.
        added = 1.0 - self.config.neutral_scale if part == "scale" else 0.0
        return ((added + vector) / outputs - added).astype(vector.dtype)

    def unfolded(
        self, kernel_OI: np.ndarray, places: Sequence[Place], shapes: Mapping[str, tuple[int, int]]
    ) -> np.ndarray:
        """Return a matrix that kernels in these places are the rows of, as it was before."""
        if self.folded is None:
            return kernel_OI
        kernel_OI = kernel_OI.copy()
        for place in places:
            rows = place.part.rows(shapes[place.name][0])
            inputs, outputs = self._factors(place.layer, place.name)
            if inputs is not None:
                kernel_OI[rows] /= inputs
            if outputs is not None:
                kernel_OI[rows] *= outputs[:, None]
        return kernel_OI

    def _factors(self, layer: int, name: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        if self.folded is None:
            return None, None
        return self.folded.inputs(layer, name), self.folded.outputs(layer, name)
