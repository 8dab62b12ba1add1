"""Which pages the sequences of an engine hold, how many they may need, and which ones stay for prompts to come."""

from collections.abc import Iterable, Sequence

from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.pages import PagePool
from jaxinfer.engine.prefixes import PrefixIndex
from jaxinfer.engine.sequence import EngineSequence


class HeldPages:
    """The pages of a pool in the hands of sequences, and those that are pinned by name.

    A step writes ``headroom`` slots past the text. ``shares_answers`` lets later prompts find decoded tokens too. Each
    sequence has ``rows_each`` rows.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: PagePool,
        index: PrefixIndex,
        *,
        headroom: int,
        shares_answers: bool,
        rows_each: int = 1,
    ) -> None:
        self.config, self.pool, self.index, self.rows_each = config, pool, index, rows_each
        self.pinned: dict[str, list[int]] = {}
        # Replaced, never changed, since any thread may ask what fits.
        self._pinned_keys: dict[str, tuple[bytes, ...]] = {}
        self._num_pinned = 0
        self._headroom, self._shares_answers = headroom, shares_answers

    def pages_for(self, length: int) -> int:
        """Return how many pages a text of a length takes, with what a step writes past it."""
        return -(-(length + self._headroom) // self.config.page_size)

    def most_pages(self) -> int:
        """Return how many pages a single sequence can have for itself alone."""
        return self.pool.num_pages - 1 - self._num_pinned

    def longest_text(self) -> int:
        """Return how many tokens a sequence that finds no pinned page can reach, without what a step writes past it."""
        return self.most_pages() // self.rows_each * self.config.page_size - self._headroom

    def own_pages(self, sequence: EngineSequence, salt: str) -> int:
        """Return the most pages that a sequence may need besides the pinned ones that it finds."""
        of_row = self.pages_for(max(sequence.max_length, len(sequence.tokens) + 1))
        # Texts of several rows have but their prompt in common for certain.
        needed = of_row + (sequence.rows - 1) * (of_row - sequence.prompt_length // self.config.page_size)
        pinned = {key for keys in self._pinned_keys.values() for key in keys}
        if not pinned:
            return needed
        keys = self.index.keys(sequence.fill, salt)[: self._most_found(sequence)]
        return needed - next((at for at, key in enumerate(keys) if key not in pinned), len(keys))

    def fits(self, sequence: EngineSequence, salt: str) -> bool:
        """Whether a sequence can ever have the pages that it may need."""
        return self.own_pages(sequence, salt) <= self.most_pages()

    def cached_tokens(self, sequence: EngineSequence, salt: str) -> int:
        """Return how many tokens of a sequence, not added yet, stand on full pages that it would find now."""
        keys = self.index.keys(sequence.fill, salt)[: self._most_found(sequence)]
        return self.index.count(keys) * self.config.page_size

    def num_found(self, sequence: EngineSequence) -> int:
        """Return how many tokens of a sequence that waits stand on full pages now."""
        if self.config.prefix_cache == "off":
            return 0
        sequence.keys = self.index.keys(sequence.fill, sequence.salt, sequence.keys)
        return self.index.count(sequence.keys[: self._most_found(sequence)]) * self.config.page_size

    def find(self, sequence: EngineSequence) -> tuple[list[int], int, int]:
        """Return the pages that hold the beginning of a sequence, each with one more user.

        And the page that begins with what comes next, with how many tokens of it; none, with page 0.
        """
        if self.config.prefix_cache == "off":
            return [], 0, 0
        size = self.config.page_size
        sequence.keys = self.index.keys(sequence.fill, sequence.salt, sequence.keys)
        found = self.index.find(sequence.keys[: self._most_found(sequence)])
        # Never the last token, nor past the page.
        rest = sequence.fill[len(found) * size : min((len(found) + 1) * size, sequence.to_fill - 1)]
        return found, *self.index.find_tail(sequence.keys[: len(found)], sequence.salt, rest)

    def give_back(self, pages: Sequence[int]) -> None:
        """Count one user less of each page; those that can be found stay cached."""
        self.pool.release(pages, self.index.holds)

    def release(self, sequence: EngineSequence) -> None:
        """Take all pages from a sequence."""
        for table in sequence.tables:
            self.give_back(table)
        sequence.hold([[] for _ in sequence.tables])
        sequence.computed = 0

    def tables(self, owners: list[list[int]], pages: Sequence[int]) -> list[list[int]]:
        """Return each row's pages: its own, one after the other, and those of rows before it, which it shares."""
        following = iter(pages)
        tables: list[list[int]] = []
        for row, row_owners in enumerate(owners):
            table = [
                next(following) if owner == row else tables[owner][column] for column, owner in enumerate(row_owners)
            ]
            self.pool.share(page for page, owner in zip(table, row_owners) if owner != row)
            tables.append(table)
        return tables

    def forked(self, sequence: EngineSequence, tables: Sequence[Sequence[int]]) -> None:
        """Note which pages the rows of a running sequence have now: all of them are pages that it had."""
        before = [page for table in sequence.tables for page in table]
        columns = len(sequence.pages)
        sequence.hold([list(table[:columns]) for table in tables])
        # First those that are kept, so that none is free in between.
        for table in sequence.tables:
            self.pool.share(table)
        self.give_back(before)

    def share(self, sequence: EngineSequence) -> None:
        """Let later prompts find the pages that are full."""
        if self.config.prefix_cache == "off":
            return
        shared = min(sequence.computed, self._longest_shared(sequence))
        if not self._shares_answers:
            shared = min(shared, sequence.prompt_length)
        sequence.keys = self.index.keys(sequence.tokens[:shared], sequence.salt, sequence.keys)
        full = shared // self.config.page_size
        self.index.add(sequence.keys[:full], sequence.pages[:full])

    def tail_of(self, sequence: EngineSequence) -> list[int]:
        """Return the last page of a computed prompt, if it is not full."""
        full, rest = divmod(sequence.prompt_length, self.config.page_size)
        return sequence.pages[full : full + 1] if rest else []

    def share_tail(self, sequence: EngineSequence) -> None:
        """Let others copy what a prompt's last page begins with."""
        full = sequence.prompt_length // self.config.page_size
        if self.config.prefix_cache != "off":
            tokens = sequence.tokens[full * self.config.page_size : sequence.prompt_length]
            for page in self.tail_of(sequence):
                self.index.add_tail(sequence.keys[:full], sequence.salt, tokens, page)

    def pin(self, name: str, keys: Sequence[bytes], tail: Sequence[int] = ()) -> None:
        """Keep the pages of these keys, and the page ``tail`` after them, until `unpin`, whoever else uses them."""
        pages = self.index.find(keys)
        self.pool.share(tail)
        self.pinned[name] = [*pages, *tail]
        self._note_pins({**self._pinned_keys, name: tuple(keys[: len(pages)])})

    def unpin(self, name: str) -> None:
        """Let the pages of a name go; later prompts may still find them."""
        self.give_back(self.pinned.pop(name))
        self._note_pins({other: keys for other, keys in self._pinned_keys.items() if other != name})

    def lose_all(self) -> None:
        """Forget what can be found, and all that is pinned: its content is lost."""
        self.index.clear()
        for name in list(self.pinned):
            self.unpin(name)

    def check(self, sequences: Iterable[EngineSequence]) -> None:
        """Raise AssertionError unless each page has these sequences' tables and the pins as users, and no others."""
        users: dict[int, int] = {}
        for pages in (*(table for each in sequences for table in each.tables), *self.pinned.values()):
            for page in pages:
                users[page] = users.get(page, 0) + 1
        self.pool.check(users)

    def _note_pins(self, keys: dict[str, tuple[bytes, ...]]) -> None:
        self._pinned_keys = keys
        self._num_pinned = len({page for pages in self.pinned.values() for page in pages})

    def _most_found(self, sequence: EngineSequence) -> int:
        """Return how many pages of others serve: the last token is computed again, for what follows it."""
        return (min(sequence.to_fill, self._longest_shared(sequence) + 1) - 1) // self.config.page_size

    def _longest_shared(self, sequence: EngineSequence) -> int:
        """Return how long a text is that later prompts may find; the texts of several rows end like leaves."""
        return len(sequence.tokens) if sequence.rows == 1 else sequence.prompt_length
