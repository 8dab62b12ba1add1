"""Weights for drafting on a CPU: codes in panels of 16 outputs, in the order in which a kernel multiplies them.

Such a product takes a fraction of the time of one with codes as they lie, since nothing is put in order. It rounds the
numbers of a row to bytes, with a scale for each 32 of them, which moves a row by half a percent of its length. Drafts
may be of such numbers; what is verified may not.
"""

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxinfer.notation import Array, Int
from jaxinfer.ops.few_bits.formats import RUN, Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray

# The outputs of a panel, and the neighbouring codes of each that a vector holds.
OUTPUTS, FOUR = 16, 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PanelArray(QuantizedArray):
    """Weights ``[N, K]``: codes ``[P, G, B]`` of P panels and G groups of `RUN` inputs, scales ``[P, G or 1, S]``.

    A group of a panel is lines of 64 bytes, four of each of its outputs; of 4 bits, the low halves are codes of the
    first 16 inputs and the high ones of the others. S are the scales of the 16 outputs, and their minima if the form
    has such; if it has one scale a row, there is one line. Outputs past N are zeros.
    """

    form: Format = dataclasses.field(metadata={"static": True})
    num_outputs: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights."""
        return self.num_outputs, self.codes.shape[1] * RUN

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return 2

    @property
    def matrix(self) -> tuple[Any, ...]:
        """The arrays that a product reads."""
        return self.codes, self.scales

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
        """Return the same weights by rows, in groups of `RUN` or with one scale a row."""
        return self.rows(jnp.arange(self.num_outputs))

    def rows(self, ids: Int[Array, "*shape"]) -> QuantizedArray:
        """Return the rows of the matrix with these numbers."""
        panels, groups, size = self.codes.shape
        codes = self.codes.reshape(panels, groups, size // (OUTPUTS * FOUR), OUTPUTS, FOUR)
        codes = codes[ids // OUTPUTS, :, :, ids % OUTPUTS].reshape(*ids.shape, -1)
        scales = self.scales.reshape(panels, self.scales.shape[1], -1, OUTPUTS)[ids // OUTPUTS, :, :, ids % OUTPUTS]
        parts = [codes.astype(jnp.int8) if self.form.bits == 8 else codes, *jnp.moveaxis(scales, -1, 0)]
        return QuantizedArray.of(replace(self.form, group=self.form.group and RUN), parts)

    def dequantize(self) -> Any:
        """Return the weights in float32."""
        return self.by_rows().dequantize()


def lies_in_panels(form: Format, width: int) -> bool:
    """Whether weights of a form, in rows of ``width``, can be put in panels: integers of 4 or 8 bits."""
    is_plain = form.offset is not None and form.supers is None and not (form.has_zeros or form.is_ordered)
    has_groups = form.group is None or form.group % RUN == 0
    is_known = form.bits in (4, 8) and form.scale_dtype in ("float32", "float16", "bfloat16")
    return is_plain and has_groups and is_known and width > 0 and width % form.unit == 0


def in_panels(array: QuantizedArray) -> PanelArray:
    """Return the same weights ``[N, K]``, of NumPy's arrays, in panels; check `lies_in_panels` first."""
    form, (outputs, width) = array.form, array.shape
    codes, *others = (np.pad(part, ((0, -outputs % OUTPUTS), (0, 0))) for part in array.matrix)
    # Four bytes are moved as one number.
    fours = codes.view(np.uint32).reshape(-1, OUTPUTS, width // RUN, form.row_bytes(RUN) // FOUR)
    codes = np.ascontiguousarray(fours.transpose(0, 2, 3, 1)).view(np.uint8)
    scales = np.stack(others, axis=1).reshape(-1, OUTPUTS, len(others), others[0].shape[1]).transpose(0, 3, 2, 1)
    if form.group is not None:
        scales = np.repeat(scales, form.group // RUN, axis=1)
    codes, scales = (each.reshape(*each.shape[:2], -1) for each in (codes, scales))
    return PanelArray(codes, scales, None, form, num_outputs=outputs)
