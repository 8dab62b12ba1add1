"""A matrix of a published checkpoint, whatever its format: codes, scales, and the group of each input."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jaxinfer.checkpoint.aligned import aligned_empty
from jaxinfer.notation import Float
from jaxinfer.ops.few_bits.formats import GROUPS, RUN, Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray


@dataclass(frozen=True)
class CodedMatrix:
    """Weights ``[N, K]``: ``scale * (level[code] - zero) + minimum``, with what an input's group has.

    ``read_codes`` returns bytes ``[N, K]`` of ``bits`` bits each; without ``levels`` they are signed integers. Scales,
    zeros and minima are ``[N, G]``; zeros are int8 or None, minima like scales or None. ``groups`` is the group of each
    input, ``[K]``, below G.
    """

    bits: int
    read_codes: Callable[[], np.ndarray]
    scales: np.ndarray
    groups: np.ndarray
    levels: tuple[float, ...] = ()
    zeros: np.ndarray | None = None
    minima: np.ndarray | None = None

    def dense(self) -> Float[np.ndarray, "N K"]:
        """Return the weights in float32."""
        codes = self.read_codes()
        if self.levels:
            weights = np.array(self.levels, np.float32)[codes.view(np.uint8)]
        else:
            weights = codes.view(np.int8).astype(np.float32)
        if self.zeros is not None:
            weights -= self.zeros.astype(np.float32)[:, self.groups]
        weights *= self.scales.astype(np.float32)[:, self.groups]
        if self.minima is not None:
            weights += self.minima.astype(np.float32)[:, self.groups]
        return weights

    @property
    def form(self) -> Format | None:
        """The form of the weights in their own bits; None where groups are not of equal whole runs of 32 inputs.

        Groups wider than 128 become several that have the same scale.
        """
        counts = np.bincount(self.groups, minlength=self.scales.shape[1])
        size = int(counts[0])
        if (counts != size).any() or size % RUN:
            return None
        # A row that is one group has no form with a minimum.
        is_row = len(counts) == 1 and self.minima is None
        group = None if is_row else max(each for each in GROUPS if size % each == 0)
        form = Format(
            self.bits,
            group,
            self.levels,
            has_minima=self.minima is not None,
            has_zeros=self.zeros is not None,
            is_ordered=self._is_ordered,
        )
        kind = self.scales.dtype.name if group else "float32"
        return form if form.scale_dtype == kind else replace(form, scale_type=kind)

    def quantized(self) -> QuantizedArray:
        """Return the weights in their own bits; check `form` first."""
        form = self.form
        assert form is not None
        codes, width = self.read_codes(), len(self.groups)
        repeats = form.groups(width) // self.scales.shape[1]
        given = {"scales": self.scales.astype(form.scale_dtype), "minima": self.minima, "zeros": self.zeros}
        parts = {
            "codes": packed(codes[:, self._order] if form.is_ordered else codes, self.bits),
            "order": self._order[None],
            **{name: np.repeat(part, repeats, axis=1) for name, part in given.items() if part is not None},
        }
        return QuantizedArray.of(form, [owned(parts[name]) for name in form.part_names])

    @cached_property
    def _order(self) -> np.ndarray:
        return np.argsort(self.groups, kind="stable").astype(np.int32)

    @property
    def _is_ordered(self) -> bool:
        return bool((self._order != np.arange(len(self.groups))).any())


def even_groups(width: int, size: int) -> np.ndarray:
    """Return the group of each of ``width`` inputs where the first ``size`` are the first group, and so on."""
    return np.arange(width) // size


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return codes as `QuantizedArray` has them: bytes, or the halves of bytes."""
    if bits == 8:
        return codes.view(np.int8)
    runs = codes.reshape(len(codes), -1, RUN)
    return (runs[..., : RUN // 2] | runs[..., RUN // 2 :] << 4).reshape(len(codes), -1)


def owned(part: np.ndarray) -> np.ndarray:
    """Return a copy that JAX may take over; what it takes over must never be a file that could change."""
    copy = aligned_empty(part.shape, part.dtype)
    copy[...] = part
    return copy
