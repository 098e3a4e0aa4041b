"""Page ids and who holds them: reference counts, the free list, and what only the cache still keeps.

Knows: integers. Knows nothing of arrays, tokens or sequences.

A model's attention layers fall into groups; the layers of a group share page ids. Page i of a sequence's
table holds positions [i * page_size, (i + 1) * page_size) of every layer of its group:

    table     [ 7,  3, 12,  5]          full attention
    table     [-1, -1, 12,  5]          sliding window: HOLE where all positions slid out
    position   0   16  32  48  ..       page_size 16

Slots of recurrent state are counted by a pool of their own, one id for the state of all such layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

HOLE = -1


class OutOfPages(Exception):
    """A pool cannot give `needed` pages, it has `free`. The scheduler's cue to evict or to preempt."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} pages needed, {free} free")
        self.needed = needed
        self.free = free


class BookkeepingError(RuntimeError):
    """The books contradict each other: a bug, never a user's mistake."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group of layers. `window` None attends to everything; W makes position p see keys (p - W, p]."""

    window: int | None
    pages: int


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold positions [0, tokens)."""
    return -(-tokens // page_size)


def first_live_page(position: int, window: int | None, page_size: int) -> int:
    """Index of the first page that a query at `position`, or any later one, still looks at."""
    return 0 if window is None else max(0, position - window + 1) // page_size


class PagePool:
    """Reference counts of page ids 0 .. total - 1.

    Sequences take pages with `allocate` or `retain` and give them back with `release`. The prefix tree
    holds at most one reference a page (`keep`, `drop`). A page that only the tree holds is *idle*; idle
    pages are ordered by when they became so, oldest first, which is the order of eviction. All methods
    cost O(1) a page. HOLEs in a list of pages are skipped.
    """

    __slots__ = ("_counts", "_free", "_idle", "_kept", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self._counts = [0] * total
        self._free = list(range(total - 1, -1, -1))
        self._kept = bytearray(total)
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return self.total - len(self._free)

    @property
    def idle(self) -> int:
        """Pages that only the tree holds: evicting gets all of them back."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Pages that `allocate` can give, if need be after evicting."""
        return len(self._free) + len(self._idle)

    def references(self, page: int) -> int:
        return self._counts[page]

    def kept(self, page: int) -> bool:
        """True if one of the references is the tree's."""
        return bool(self._kept[page])

    def allocate(self, n: int) -> list[int]:
        """n pages with one reference each, or none at all: raises OutOfPages."""
        free = self._free
        if n > len(free):
            raise OutOfPages(n, len(free))
        if n <= 0:
            return []
        pages = free[: -n - 1 : -1]  # ascending where ids are fresh: attention reads runs in place
        del free[-n:]
        for page in pages:
            self._counts[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to each page. Raises BookkeepingError for a page nobody holds."""
        counts = self._counts
        for page in pages:
            if page < 0:
                continue
            count = counts[page]
            if count == 0:
                raise BookkeepingError(f"page {page} is retained but free")
            counts[page] = count + 1
            if count == 1 and self._kept[page]:
                del self._idle[page]

    def release(self, pages: Sequence[int]) -> int:
        """Give back a reference of each page; how many came free.

        Goes from the last page to the first, so that of one table the end is evicted before the beginning.
        Raises BookkeepingError for a page the caller cannot hold.
        """
        freed = 0
        counts = self._counts
        for page in reversed(pages):
            if page < 0:
                continue
            count = counts[page] - 1
            if count < self._kept[page]:
                raise BookkeepingError(f"page {page} is released more often than it was taken")
            counts[page] = count
            if count == 0:
                self._free.append(page)
                freed += 1
            elif count == 1 and self._kept[page]:
                self._idle[page] = None
        return freed

    def keep(self, page: int) -> None:
        """Add the tree's reference to a page that somebody holds."""
        if self._kept[page] or not self._counts[page]:
            raise BookkeepingError(f"page {page} is free or kept already")
        self._counts[page] += 1
        self._kept[page] = 1

    def drop(self, page: int) -> bool:
        """Give back the tree's reference; True if the page came free."""
        if not self._kept[page]:
            raise BookkeepingError(f"page {page} is not kept")
        self._kept[page] = 0
        self._counts[page] -= 1
        if self._counts[page]:
            return False
        del self._idle[page]
        self._free.append(page)
        return True

    def resize(self, total: int) -> None:
        """Hand out ids below `total` alone from now on.

        Raises BookkeepingError if somebody holds one of those that go.
        """
        if any(self._counts[total:]):
            raise BookkeepingError(f"a page from {total} on is held and cannot go")
        fresh = range(total - 1, self.total - 1, -1)  # none when there will be fewer
        self._free = [*fresh, *(page for page in self._free if page < total)]
        del self._counts[total:], self._kept[total:]
        self._counts += [0] * len(fresh)
        self._kept += bytes(len(fresh))
        self.total = total

    def oldest_idle(self) -> int | None:
        return next(iter(self._idle), None)

    def idle_pages(self) -> Iterator[int]:
        """Idle pages, the next to evict first."""
        return iter(self._idle)

    def kept_pages(self) -> list[int]:
        return [page for page in range(self.total) if self._kept[page]]

    def check(self, expected: Mapping[int, int]) -> None:
        """Raise BookkeepingError unless every page has exactly the `expected` references (absent is 0)."""
        wrong = {
            page: (count, expected.get(page, 0))
            for page, count in enumerate(self._counts)
            if count != expected.get(page, 0)
        }
        if wrong:
            raise BookkeepingError(f"page: (references, expected) {wrong}")
        free = set(self._free)
        if len(free) != len(self._free) or free != {p for p, count in enumerate(self._counts) if not count}:
            raise BookkeepingError("the free list is not the pages without references")
        if set(self._idle) != {p for p, count in enumerate(self._counts) if count == 1 and self._kept[p]}:
            raise BookkeepingError("the idle list is not the pages that only the tree holds")
