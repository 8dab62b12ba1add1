"""What pieces of all products have in common: which matrix is theirs, and how they go over rows in tiles."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.handlers import Record


def chosen_matrix(
    code: Code, record: Record, count: int, piece: str, pointers: Sequence[str], integers: Sequence[str]
) -> list[str]:
    """Load the fields of the matrix, among ``count``, that a piece belongs to.

    A record has each field once for each matrix, with its number behind the name. The last integer is the number of the
    matrix's first piece.
    """
    kinds = *["ptr"] * len(pointers), *["i64"] * len(integers)

    def fields(matrix: int) -> list[str]:
        loaded = [record.pointer(code, f"{name}{matrix}") for name in pointers]
        return [*loaded, *(record.number(code, f"{name}{matrix}") for name in integers)]

    chosen = fields(0)
    for matrix in range(1, count):
        other = fields(matrix)
        is_other = code.value(f"icmp sge i64 {piece}, {other[-1]}")
        chosen = [
            code.value(f"select i1 {is_other}, {kind} {new}, {kind} {old}")
            for kind, new, old in zip(kinds, other, chosen)
        ]
    return chosen


class RowTiles(NamedTuple):
    """How rows are cut into tiles of about equally many: a tile of one would read as many weights as one of many."""

    count: str
    least_rows: str
    larger: str


class RowTile(NamedTuple):
    """A tile: its number, its first row and how many it has."""

    index: str
    row: str
    count: str


def even_tiles(code: Code, rows: str, most: int | str) -> RowTiles:
    """Cut rows into as few tiles of at most ``most`` rows as there can be."""
    count = code.ceiling(rows, most)
    return RowTiles(count, code.arithmetic("sdiv", rows, count), code.arithmetic("srem", rows, count))


@contextmanager
def each_tile(code: Code, tiles: RowTiles) -> Iterator[RowTile]:
    """Repeat what is written inside for each tile."""
    with code.repeated("each_tile", 0, tiles.count) as each:
        is_larger = code.value(f"icmp slt i64 {each.index}, {tiles.larger}")
        count = code.arithmetic("add", tiles.least_rows, code.value(f"zext i1 {is_larger} to i64"))
        each.left = code.arithmetic("add", each.held, count)
        yield RowTile(each.index, each.held, count)


def chosen_tile(code: Code, rows: str, most: int, address: Callable[[int], str], least: int = 1) -> str:
    """Return the address of the function for some rows, ``least`` to ``most``, given that for each number of them."""
    tile = address(most)
    for count in range(least, most):
        is_own = code.value(f"icmp eq i64 {rows}, {count}")
        tile = code.value(f"select i1 {is_own}, ptr {address(count)}, ptr {tile}")
    return tile


def call_tile(code: Code, function: str, pointers: Sequence[str], integers: Sequence[str]) -> None:
    """Append a call of a function of addresses and integers."""
    operands = [*(f"ptr {each}" for each in pointers), *(f"i64 {each}" for each in integers)]
    code.effect(f"call void {function}({', '.join(operands)})")
