"""The two small matrices of an adapter (LoRA; Hu et al., 2106.09685)."""

from typing import NamedTuple

import numpy as np


class LowRank(NamedTuple):
    """What an adapter adds to a matrix ``[out, in]``: ``up down``, with ``up`` scaled already; float32.

    With a ``magnitude`` ``[out]`` the rows of the sum then get these norms (DoRA; Liu et al., 2402.09353). A ``shift``
    ``[out]``, scaled already, is added to the outputs.
    """

    down_RI: np.ndarray
    up_OR: np.ndarray
    magnitude_O: np.ndarray | None = None
    shift_O: np.ndarray | None = None

    def added_to(self, kernel_OI: np.ndarray) -> np.ndarray:
        """Return the adapted matrix, in float32 or wider."""
        wide = kernel_OI.astype(np.promote_types(kernel_OI.dtype, np.float32)) + self.up_OR @ self.down_RI
        return wide if self.magnitude_O is None else wide * self.gain(kernel_OI)[:, None]

    def gain(self, kernel_OI: np.ndarray) -> np.ndarray:
        """Return what the rows of the sum with a matrix are multiplied by, ``[out]``."""
        assert self.magnitude_O is not None
        norms = np.linalg.norm(kernel_OI.astype(np.float32) + self.up_OR @ self.down_RI, axis=1)
        return self.magnitude_O / norms
