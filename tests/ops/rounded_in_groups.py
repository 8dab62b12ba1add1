"""The definition of rows that products with panels read: whole multiples of a scale, one for each 32 numbers."""

from typing import Any

import numpy as np

from jaxinfer.ops.few_bits.formats import RUN


def rounded_in_groups(rows: Any) -> np.ndarray:
    """Return rows ``[..., K]`` of what the kernel's bytes and scales stand for."""
    groups = np.asarray(rows).astype(np.float32).reshape(*np.shape(rows)[:-1], -1, RUN)
    scales = np.abs(groups).max(axis=-1, keepdims=True) * np.float32(1 / 127)
    codes = np.rint(groups / np.where(scales == 0, np.float32(1), scales))
    return (codes * scales).reshape(np.shape(rows))
