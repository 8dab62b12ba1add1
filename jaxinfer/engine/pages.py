"""Who has which page: counts of users, and pages that nobody uses but that later prompts may still find."""

from collections import OrderedDict
from collections.abc import Callable, Iterable


class PagePool:
    """Pages 1 to ``num_pages - 1``; page 0 belongs to nobody.

    A page is free, in use by one or more sequences, or *cached*: in use by none, but kept for its content until room is
    needed. The page that was let go first is the first to be used anew; ``forget`` then hears of it. ``freed`` hears of
    pages that become free otherwise.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.forget: Callable[[int], None] = lambda page: None
        self.freed: Callable[[int], None] = lambda page: None
        self._free = list(range(num_pages - 1, 0, -1))
        self._users = [0] * num_pages
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """How many pages can be taken."""
        return len(self._free) + len(self._cached)

    @property
    def free(self) -> int:
        """How many pages hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """How many pages nobody uses that later prompts may find."""
        return len(self._cached)

    @property
    def in_use(self) -> int:
        """How many pages sequences have."""
        return self.num_pages - 1 - self.available

    def take(self, count: int) -> list[int] | None:
        """Return so many pages for one user, None if there are not as many."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self.forget(page)
            self._users[page] = 1
            taken.append(page)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Count one more user of pages that are in use or cached."""
        for page in pages:
            if self._users[page] == 0:
                # A free page is nobody's: this raises KeyError.
                del self._cached[page]
            self._users[page] += 1

    def release(self, pages: Iterable[int], keeps: Callable[[int], bool] = lambda page: False) -> None:
        """Count one user less of each page; a page without users that ``keeps`` names stays cached.

        Give the pages of a sequence in order: its last ones are then the first to be used anew.
        """
        for page in reversed(list(pages)):
            if self._users[page] < 1:
                raise ValueError(f"page {page} is released more often than it was taken")
            self._users[page] -= 1
            if self._users[page]:
                continue
            if keeps(page):
                self._cached[page] = None
            else:
                self._free.append(page)
                self.freed(page)

    def drop_cached(self) -> None:
        """Make all cached pages free."""
        while self._cached:
            page, _ = self._cached.popitem()
            self.forget(page)
            self._free.append(page)

    def check(self, expected: dict[int, int]) -> None:
        """Raise AssertionError unless pages have exactly the users expected, and each page is in one place."""
        for page in range(1, self.num_pages):
            assert self._users[page] == expected.get(page, 0), f"page {page}: {self._users[page]} users"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached, "a page is free and cached"
        unused = {page for page in range(1, self.num_pages) if not self._users[page]}
        assert free | cached == unused, "a page is lost, or in use and free"
