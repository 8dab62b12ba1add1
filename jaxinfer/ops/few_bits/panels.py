"""Weights on a CPU in panels of 16 outputs, whose codes and scales are in the order in which a kernel multiplies them.

A product takes half of the time of one with codes as they are stored, since nothing is put in order before it is
multiplied; the sums, and so the bits, are the same. For drafting there is a faster one, which rounds the numbers of a
row to bytes, with a scale for each 32 of them, and moves a row by half a percent of its length. Drafts may be of such
numbers; what is verified may not.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxinfer.notation import Array, Int
from jaxinfer.ops.few_bits.formats import RUN, Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray, is_quantized, take

# The outputs of a panel, and the neighbouring bytes of each that a vector holds.
OUTPUTS, FOUR = 16, 4
# Of `_turned_panels`: how many are turned at once, and how many fours are left between rows.
_PANELS_AT_ONCE, _APART = 8, 20


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PanelArray(QuantizedArray):
    """Weights ``[N, K]``: codes ``[P, R, B]`` of P panels and R runs of inputs, all else ``[P, G, 16]`` for G groups.

    A run of a panel is lines of 64 bytes, four of each of its outputs. Outputs past N are zeros. Of a stack of matrices
    each part has one more axis before its others. Products are those of the weights by rows, or, if it ``drafts``, of
    rows that are rounded in groups.
    """

    form: Format = dataclasses.field(metadata={"static": True})
    num_outputs: int = dataclasses.field(default=0, metadata={"static": True})
    drafts: bool = dataclasses.field(default=False, metadata={"static": True})

    @staticmethod
    def of_panels(form: Format, parts: Sequence[Any], num_outputs: int, drafts: bool = False) -> "PanelArray":
        """Return the array that has these parts, in the form's order."""
        named = {"scales": None, "minima": None, **dict(zip(form.part_names, parts, strict=True))}
        return PanelArray(**named, form=form, num_outputs=num_outputs, drafts=drafts)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights."""
        *lead, _, runs, _ = self.codes.shape
        return *lead, self.num_outputs, runs * RUN

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.codes.ndim - 1

    def specs(self, spec: PartitionSpec) -> list[PartitionSpec]:
        """Refuse: no mesh splits panels; `by_rows` comes first."""
        raise TypeError("weights in panels on several devices")

    def with_parts(self, parts: Any) -> "PanelArray":
        """Refuse, as `map_rows` does: other parts are those of weights by rows."""
        raise TypeError("parts of weights in panels")

    def map_rows(self, change: Any) -> "PanelArray":
        """Refuse: rows of panels are `rows`."""
        raise TypeError("rows of weights in panels")

    def by_rows(self) -> QuantizedArray:
        """Return the same weights as they are stored; of NumPy's arrays, NumPy's."""

        def turned(name: str, part: Any) -> Any:
            numpy = np if isinstance(part, np.ndarray) else jnp
            lines = numpy.moveaxis(part, -2, -4) if name == "codes" else part.swapaxes(-1, -2)
            *lead, panels, _ = self.codes.shape[:-1]
            return lines.reshape(*lead, panels * OUTPUTS, -1)[..., : self.num_outputs, :]

        return self._of_rows(turned)

    def rows(self, ids: Int[Array, "*shape"] | Int[np.ndarray, "*shape"]) -> QuantizedArray:
        """Return the rows of the matrix with these numbers."""
        panel, output = ids // OUTPUTS, ids % OUTPUTS

        def taken(name: str, part: Any) -> Any:
            every = slice(None)
            found = take(part, (panel, every, every, output) if name == "codes" else (panel, every, output))
            return found.reshape(*ids.shape, -1)

        return self._of_rows(taken)

    def dequantize(self) -> Any:
        """Return the weights in float32; of NumPy's arrays, an array of NumPy's."""
        return self.by_rows().dequantize()

    def _of_rows(self, read: Callable[[str, Any], Any]) -> QuantizedArray:
        """Return the array of what ``read`` makes of each part; codes are ``[P, R, lines, 16, 4]``."""

        def made(name: str, part: Any) -> Any:
            if name == "order":
                return part
            if name != "codes":
                return read(name, part)
            codes = read(name, part.reshape(*part.shape[:-1], -1, OUTPUTS, FOUR))
            return codes.astype(np.int8) if self.form.bits == 8 else codes

        return QuantizedArray.of(self.form, list(map(made, self.form.part_names, self.matrix)))


def lies_in_panels(form: Format, width: int) -> bool:
    """Whether weights of a form, in rows of ``width``, can be put in panels: codes of 4 or 8 bits."""
    has_groups = form.group is None or form.group % RUN == 0
    return form.kept is None and form.bits in (4, 8) and has_groups and width > 0 and width % form.unit == 0


def in_panels(array: QuantizedArray) -> PanelArray:
    """Return the same weights ``[..., N, K]``, of NumPy's arrays, in panels; check `lies_in_panels` first."""
    form, (*lead, outputs, width) = array.form, array.shape

    def turned(name: str, part: Any) -> Any:
        if name == "order":
            return part
        if outputs % OUTPUTS:
            part = np.pad(part, (*[(0, 0)] * len(lead), (0, -outputs % OUTPUTS), (0, 0)))
        if name != "codes":
            return np.ascontiguousarray(part.reshape(*lead, -1, OUTPUTS, part.shape[-1]).swapaxes(-1, -2))
        # Four bytes are moved as one number.
        fours = np.ascontiguousarray(part).view(np.uint32).reshape(-1, OUTPUTS, part.shape[-1] // FOUR)
        return _turned_panels(fours).view(np.uint8).reshape(*lead, -1, width // RUN, OUTPUTS * form.row_bytes(RUN))

    return PanelArray.of_panels(form, list(map(turned, form.part_names, array.matrix)), outputs)


def _turned_panels(fours: np.ndarray) -> np.ndarray:
    """Return fours ``[P, 16, F]`` of P panels as ``[P, F, 16]``: of all outputs side by side.

    Rows go some at a time into a memory where they are no power of two apart: at such distances they would put each
    other out of the processor's cache, and take up to ten times as long.
    """
    panels, outputs, width = fours.shape
    turned = np.empty((panels, width, outputs), fours.dtype)
    apart = np.empty((_PANELS_AT_ONCE, outputs, width + _APART), fours.dtype)[..., :width]
    for first in range(0, panels, _PANELS_AT_ONCE):
        some = fours[first : first + _PANELS_AT_ONCE]
        apart[: len(some)] = some
        turned[first : first + len(some)] = apart[: len(some)].swapaxes(1, 2)
    return turned


def without_panels(params: Any) -> Any:
    """Return parameters whose matrices in panels lie by rows; all others are unchanged."""
    return jax.tree.map(
        lambda leaf: leaf.by_rows() if isinstance(leaf, PanelArray) else leaf, params, is_leaf=is_quantized
    )
