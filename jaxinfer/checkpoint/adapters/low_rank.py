"""The two small matrices of an adapter (LoRA; Hu et al., 2106.09685)."""

from typing import NamedTuple

import numpy as np

from jaxinfer.models.families.family import Part


class LowRank(NamedTuple):
    """What an adapter adds to a matrix ``[out, in]``: ``up down``, with ``up`` scaled already; float32.

    With a ``magnitude`` ``[out]`` the rows of the sum then get these norms (DoRA; Liu et al., 2402.09353). A ``shift``
    ``[out]``, scaled already, is added to the outputs.
    """

    down_RI: np.ndarray
    up_OR: np.ndarray
    magnitude_O: np.ndarray | None = None
    shift_O: np.ndarray | None = None

    def of_part(self, part: Part, outputs: int) -> "LowRank":
        """Return what is added to an expert's kernel ``[out, in]``, which is a part of the matrix as it is stored."""
        if part.transposed:
            step = part.every or 1
            columns = self.down_RI[:, part.first : part.first + outputs * step : step]
            return LowRank(np.ascontiguousarray(self.up_OR.T), np.ascontiguousarray(columns.T))
        return LowRank(self.down_RI, self.up_OR[part.first : part.first + outputs])

    def added_to(self, kernel_OI: np.ndarray) -> np.ndarray:
        """Return the adapted matrix, in float32 or wider."""
        wide = kernel_OI.astype(np.promote_types(kernel_OI.dtype, np.float32)) + self.up_OR @ self.down_RI
        return wide if self.magnitude_O is None else wide * self.gain(kernel_OI)[:, None]

    def gain(self, kernel_OI: np.ndarray) -> np.ndarray:
        """Return what the rows of the sum with a matrix are multiplied by, ``[out]``."""
        assert self.magnitude_O is not None
        norms = np.linalg.norm(kernel_OI.astype(np.float32) + self.up_OR @ self.down_RI, axis=1)
        return self.magnitude_O / norms
