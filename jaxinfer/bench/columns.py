"""Aligns tables of text."""

from collections.abc import Sequence


def align(titles: Sequence[str], rows: Sequence[Sequence[str]], num_left: int) -> list[str]:
    """Return the lines of a table: the first ``num_left`` columns align to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(titles, *rows)]
    lines = []
    for row in (titles, *rows):
        cells = [
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
