"""Rows as they are, in pairs of bfloat16: what products with weights in 4 or 8 bits multiply by panels.

The sums are those of `few_bits.grouped_tiles`, which multiplies the same weights by rows.
"""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.few_bits.grouped_tiles import add_pairs, added_up, pairs_function, sums_of_row
from jaxinfer.ops.cpu_kernels.few_bits.tiles import sums_function, tile_declarations
from jaxinfer.ops.cpu_kernels.product_pieces import call_tile
from jaxinfer.ops.cpu_kernels.sixteen_outputs import BYTES, FLOATS, OUTPUTS
from jaxinfer.ops.cpu_kernels.tiles import Vectors
from jaxinfer.ops.few_bits.formats import RUN, Format

_LINE = 64


class RowsInPairs:
    """Rows of bfloat16, of which a step is a group of weights (`panel_code.RowKind`)."""

    element, has_row_scale, offset, sum_type = "bfloat", False, 0, FLOATS

    def __init__(self, vectors: Vectors, form: Format) -> None:
        self._vectors, self._form, self.span, self.num_factors = vectors, form, form.group, int(form.is_shifted)
        self.sums_of_row = sums_of_row(form)

    def functions(self) -> list[str]:
        """Return declarations, and the functions that `make_ready` calls."""
        sums = [sums_function(self._vectors, self._form)] if self._form.is_shifted else []
        return [tile_declarations(self._vectors), pairs_function(self._form), *sums]

    def make_ready(self, code: Code, x: str, to: str, factors: str, rows: str, length: str) -> None:
        """Append what writes rows in the order of pairs, and the sums of their groups."""
        runs = code.arithmetic("mul", rows, code.arithmetic("udiv", length, RUN))
        call_tile(code, "@pair_up", (x, to), (runs,))
        if self._form.is_shifted:
            span = self.span or length
            groups = code.arithmetic("udiv", length, span)
            call_tile(code, "@add_groups", (x, factors), (rows, groups, code.arithmetic("udiv", span, RUN), groups))

    def add_run(self, code: Code, codes: str, places: list[str], sums: list[str]) -> list[str]:
        """Return each row's sums, to which the products of a run's codes with the numbers at its place are added."""
        starts = range(0, OUTPUTS * self._form.row_bytes(RUN), _LINE)
        lines = [code.load(BYTES, code.at("i8", codes, start), 1) for start in starts]
        return add_pairs(code, self._vectors, self._form, lines, places, sums)

    def finish(self, code: Code, sums: list[str], factors: list[str]) -> list[str]:
        """Return a sum of each row."""
        return added_up(code, self._form, sums)
