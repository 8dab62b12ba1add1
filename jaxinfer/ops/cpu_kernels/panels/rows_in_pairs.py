"""Rows as they are, in pairs of bfloat16: what products with weights in 4 bits multiply by panels.

The sums are those of `few_bits.grouped_tiles`, which multiplies the same weights by rows.
"""

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.few_bits.grouped_tiles import add_pairs, pairs_function
from jaxinfer.ops.cpu_kernels.few_bits.tiles import sums_function, tile_declarations
from jaxinfer.ops.cpu_kernels.product_pieces import call_tile
from jaxinfer.ops.cpu_kernels.sixteen_outputs import BYTES, OUTPUTS
from jaxinfer.ops.cpu_kernels.tiles import Vectors
from jaxinfer.ops.few_bits.formats import RUN, Format

_LINE = 64


class RowsInPairs:
    """Rows of bfloat16, of which a step is a group of weights (`panel_code.RowKind`)."""

    element, has_row_scale, offset = "bfloat", False, 0

    def __init__(self, vectors: Vectors, form: Format) -> None:
        assert form.group is not None
        self._vectors, self._form, self.span, self.num_factors = vectors, form, form.group, int(form.is_shifted)

    def functions(self) -> list[str]:
        """Return declarations, and the functions that `make_ready` calls."""
        sums = [sums_function(self._vectors, self._form)] if self._form.is_shifted else []
        return [tile_declarations(self._vectors), pairs_function(), *sums]

    def make_ready(self, code: Code, x: str, to: str, factors: str, rows: str, length: str) -> None:
        """Append what writes rows in the order of pairs, and the sums of their groups."""
        runs = code.arithmetic("mul", rows, code.arithmetic("udiv", length, RUN))
        call_tile(code, "@pair_up", (x, to), (runs,))
        if self._form.is_shifted:
            groups = code.arithmetic("udiv", length, self.span)
            call_tile(code, "@add_groups", (x, factors), (rows, groups, str(self.span // RUN), groups))

    def multiply(self, code: Code, codes: str, places: list[str], factors: list[str]) -> list[str]:
        """Return each row's sums of the products of a group's codes with the numbers at its place."""
        found = ["zeroinitializer"] * len(places)
        run_bytes = OUTPUTS * self._form.row_bytes(RUN)
        for step in range(self.span // RUN):
            starts = range(step * run_bytes, (step + 1) * run_bytes, _LINE)
            lines = [code.load(BYTES, code.at("i8", codes, start), 1) for start in starts]
            found = add_pairs(code, self._vectors, self._form, lines, places, step * RUN, found)
        return found
