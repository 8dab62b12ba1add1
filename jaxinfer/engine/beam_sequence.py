"""A beam search as the scheduler sees it: one sequence of several rows, whose texts have a past in common."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.engine.sequence import EngineSequence


@dataclass(eq=False, kw_only=True)
class BeamSequence(EngineSequence):
    """The ``width`` rows of a search, which come and go together.

    ``tokens`` are those of its best running text, ``others`` the pages of the rows after the first. Rows share the full
    pages that their texts have in common, and each has a page of its own that steps write to. A search that had to make
    room keeps its texts and scores in ``kept``, on the host; ``texts`` are its running texts, and ``kept_owners`` tell
    which rows had which pages in common. These pages are then computed again row by row, each from the first one on
    that no row before it had; ``row`` is the one that is computed now. A search that has not begun has none of these.
    """

    width: int
    others: list[list[int]] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    kept: Any = None
    kept_owners: list[list[int]] = field(default_factory=list)
    row: int = 0

    @property
    def rows(self) -> int:
        return self.width

    @property
    def tables(self) -> list[list[int]]:
        return [self.pages, *self.others]

    @property
    def row_to_fill(self) -> int:
        return self.row

    @property
    def left_to_fill(self) -> int:
        return self.to_fill - self.computed + (self.width - 1 - self.row) * (self.to_fill - self.prompt_length)

    @property
    def most_tokens(self) -> int:
        return self.max_length + (self.width - 1) * (self.max_length - self.prompt_length)

    @property
    def fill(self) -> Sequence[int]:
        return (self.texts[self.row] if self.texts else self.tokens)[: self.to_fill]

    def owners(self, columns: int, page_size: int) -> list[list[int]]:
        if not self.kept_owners:
            common = [0] * min(self.prompt_length // page_size, columns)
            return [common + [row] * (columns - len(common)) for row in range(self.width)]
        return [(kept + [row] * columns)[:columns] for row, kept in enumerate(self.kept_owners)]

    def hold(self, tables: list[list[int]]) -> None:
        self.pages, self.others = tables[0], tables[1:]
        self.row = 0

    def next_row(self, page_size: int) -> bool:
        for row in range(self.row + 1, len(self.texts)):
            own = self.kept_owners[row]
            first = own.index(row) if row in own else len(own)
            if first * page_size < self.to_fill:
                self.row, self.computed = row, first * page_size
                return True
        return False

    def leave(self, kept: Any, texts: list[list[int]], columns: int) -> None:
        """Note what the search needs to go on later; its rows have so many pages that are in use."""
        firsts: dict[tuple[int, int], int] = {}
        self.kept_owners = [
            [firsts.setdefault((column, page), row) for column, page in enumerate(table[:columns])]
            for row, table in enumerate(self.tables)
        ]
        self.kept, self.texts, self.tokens = kept, texts, list(texts[0])

    def begin_anew(self) -> None:
        """Forget what has been searched, of which nobody has been told anything."""
        self.kept, self.saved, self.texts, self.kept_owners = None, None, [], []
        self.tokens = self.tokens[: self.prompt_length]
        self.context_length, self.row = self.prompt_length, 0

    def went_on(self) -> None:
        """Forget what was kept: the search runs."""
        self.kept, self.saved, self.texts, self.kept_owners = None, None, [], []
