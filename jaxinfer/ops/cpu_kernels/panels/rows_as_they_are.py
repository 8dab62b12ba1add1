"""Rows as they are, as products with weights in 4 or 8 bits multiply them by panels: pairs of bfloat16, or float32.

The sums are those of `few_bits.grouped_tiles`, which multiplies the same weights by rows.
"""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.few_bits.grouped_tiles import Numbers, added_up, numbers_of
from jaxinfer.ops.cpu_kernels.few_bits.tiles import sums_function
from jaxinfer.ops.cpu_kernels.product_pieces import call_tile
from jaxinfer.ops.cpu_kernels.sixteen_outputs import FLOATS, in_sixteen_lanes, lines_of_panel
from jaxinfer.ops.cpu_kernels.tiles import Vectors
from jaxinfer.ops.few_bits.formats import RUN, Format


class RowsAsTheyAre:
    """Rows of bfloat16, of which a step is a group of weights (`panel_code.RowKind`)."""

    has_row_scale, offset, sum_type = False, 0, FLOATS

    def __init__(self, vectors: Vectors, form: Format) -> None:
        self._vectors, self._form, self._numbers = in_sixteen_lanes(vectors), form, numbers_of(vectors, form)
        self.numbers: Numbers | None = self._numbers
        self.element, self.sums_of_row, self.rows = self._numbers.element, self._numbers.sums_of_row, self._numbers.rows
        self.span, self.num_factors = form.group, int(form.is_shifted)

    def functions(self) -> list[str]:
        """Return declarations, and the functions that `make_ready` calls."""
        sums = [sums_function(self._vectors, "bfloat")] if self._form.is_shifted else []
        return [*self._numbers.functions(), *sums]

    def make_ready(self, code: Code, x: str, to: str, factors: str, rows: str, length: str) -> None:
        """Append what writes rows as they are multiplied, and the sums of their groups."""
        runs = code.arithmetic("mul", rows, code.arithmetic("udiv", length, RUN))
        call_tile(code, "@arrange", (x, to), (runs,))
        if self._form.is_shifted:
            span = self.span or length
            groups = code.arithmetic("udiv", length, span)
            call_tile(code, "@add_groups", (x, factors), (rows, groups, code.arithmetic("udiv", span, RUN), groups))

    def add_run(self, code: Code, codes: str, places: list[str], sums: list[str]) -> list[str]:
        """Return each row's sums, to which the products of a run's codes with the numbers at its place are added."""
        lines = lines_of_panel(code, codes, self._form)
        return self._numbers.added(code, self._numbers.widened(code, lines), places, sums)

    def finish(self, code: Code, sums: list[str], factors: list[str]) -> list[str]:
        """Return a sum of each row."""
        return added_up(code, self._numbers, sums)
