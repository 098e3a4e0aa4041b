"""The prefix tree: which tokens' keys and values lie in which pages, so that no prefix is computed twice.

Knows: what a sequence may reuse, what a sequence leaves behind, what goes first when memory is short.
Knows nothing of arrays, models or requests.

A radix tree over token ids with one root a key (the adapter, ...). Rules that keep answers right:

- Only whole pages are shared. The page that a prefix ends in is copied by whoever resumes there, so a page
  has one writer, and the writer only appends behind the tokens it has inserted. Insert committed tokens
  only, and never rewind a sequence behind what it inserted.
- A prefix is reused at length L only if every group can resume there: full attention has all pages of
  [0, L), a window of W those of [L - W + 1, L), recurrent layers a checkpoint exactly at L.
- A running sequence holds the tree's whole pages of its path: `insert` swaps its duplicates for them. So
  the pages behind an idle page (one that only the tree holds) are idle too, the one that has been idle for
  longest ends a branch, and eviction, which cuts branches from their ends, can get back every idle page.
- What eviction makes useless goes at once: a branch without its last checkpoint, or without the last
  pages of a window, is cut back in all groups.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from mlxserve.cache.pages import HOLE, BookkeepingError, GroupSpec, PagePool, pages_for
from mlxserve.cache.radix import Cursor, Node, Radix, common_length, compact


@dataclass(frozen=True, slots=True)
class Match:
    """A reusable prefix of `length` tokens.

    shared: for each group the length // page_size whole pages to use as they are, HOLE where a window does
    not reach. copy: for each group the page whose first length % page_size positions are to be copied into
    a fresh page of the sequence, None where there is nothing to copy. state: the slot to copy recurrent
    state from. cursor: set by `acquire`.
    """

    length: int
    shared: list[list[int]]
    copy: list[int | None]
    state: int | None = None
    cursor: Cursor | None = None


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Counts since the start; tokens_held, nodes and states as of now."""

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    evicted_states: int = 0
    tokens_held: int = 0
    nodes: int = 0
    states: int = 0


@dataclass(slots=True)
class _Path:
    """Nodes from below the root to where a lookup ended, `matched` tokens deep."""

    nodes: list[Node] = field(default_factory=list)
    matched: int = 0


def first_needed(length: int, window: int | None) -> int:
    """The first position whose keys must be there to resume after `length` tokens.

    The last one always must, also for a window of 1: a page that is copied is copied from its beginning.
    """
    return 0 if window is None else max(0, length - max(window, 2) + 1)


class PrefixTree:
    """Token-granular prefix reuse over page pools, for one thread.

    groups, pools: one pool of pages for each group of layers. state_pool: slots of recurrent state, for
    models that have any; then prefixes can be reused only where a checkpoint was inserted. token_limit:
    tokens held at most, at 4 bytes of host memory each, beyond those of running sequences.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        pools: Sequence[PagePool],
        page_size: int,
        state_pool: PagePool | None = None,
        token_limit: int = 1 << 24,
    ) -> None:
        self.groups = tuple(groups)
        self.pools = tuple(pools)
        self.page_size = page_size
        self.state_pool = state_pool
        self.token_limit = token_limit
        self._radix = Radix(groups, pools, page_size, state_pool)
        self._lookups = self._lookup_tokens = self._hit_tokens = 0
        self._evicted_pages = self._evicted_states = 0

    # -- lookup ---------------------------------------------------------------------------------------

    def match(self, key: Hashable, tokens: Sequence[int], limit: int | None = None) -> Match:
        """The longest reusable prefix of `tokens`, at most `limit` long.

        Changes nothing and holds nothing: the answer is good until the tree is next changed.
        """
        return self._match(self._walk(key, compact(tokens, 0, limit)))

    def acquire(self, key: Hashable, tokens: Sequence[int], limit: int | None = None) -> Match:
        """`match`, and take a reference of everything in it, so that no eviction comes between.

        The caller owns the references of `shared` from now on, and releases those of `copy` and `state`
        when it has copied them; `match.cursor` is for `insert` and goes back with `release`. `abandon`
        gives up the whole.
        """
        wanted = compact(tokens, 0, limit)
        path = self._walk(key, wanted)
        match = self._match(path)
        for pool, shared, copy in zip(self.pools, match.shared, match.copy):
            pool.retain(shared)
            pool.retain(() if copy is None else (copy,))
        if match.state is not None and self.state_pool is not None:
            self.state_pool.retain((match.state,))
        self._lookups += 1
        self._lookup_tokens += len(wanted)
        self._hit_tokens += match.length
        node = next((n for n in path.nodes if n.start < match.length <= n.end), None)
        return replace(match, cursor=Cursor(node or self._radix.root(key), match.length))

    def abandon(self, match: Match) -> None:
        """Give back all that `acquire` took. Only for a match of which nothing was given back yet."""
        for pool, shared, copy in zip(self.pools, match.shared, match.copy):
            pool.release(() if copy is None else (copy,))
            pool.release(shared)
        if match.state is not None and self.state_pool is not None:
            self.state_pool.release((match.state,))
        if match.cursor is not None:
            self.release(match.cursor)

    def release(self, cursor: Cursor) -> None:
        """The sequence of `cursor` has ended or starts anew. Its pages go back to the pools by themselves."""
        cursor.node.cursors.discard(cursor)
        self._radix.forget_root(cursor.node)

    def _walk(self, key: Hashable, tokens: array[int]) -> _Path:
        path = _Path()
        node = self._radix.roots.get(key)
        while node is not None and path.matched < len(tokens):
            node = node.children.get(tokens[path.matched])
            if node is not None:
                path.nodes.append(node)
                path.matched += common_length(node.tokens, 0, tokens, path.matched)
                if path.matched < node.end:
                    break
        return path

    def _match(self, path: _Path) -> Match:
        tables = [self._table(path, g) for g in range(len(self.groups))]
        length = self._resumable(path, tables)
        whole, rest = divmod(length, self.page_size)
        shared: list[list[int]] = []
        copies: list[int | None] = []
        for spec, (table, _) in zip(self.groups, tables):
            low = first_needed(length, spec.window)
            holes = min(low // self.page_size, whole)
            shared.append([HOLE] * holes + table[holes:whole])
            copies.append(table[whole] if rest and low < length else None)
        state = None
        if self.state_pool is not None and length:
            state = next(node.state for node in path.nodes if node.end == length)
        return Match(length, shared, copies, state)

    def _table(self, path: _Path, group: int) -> tuple[list[int], dict[int, int]]:
        """The path's pages; and the end of what is valid in a page, where that is not the page's end."""
        table: list[int] = []
        ends: dict[int, int] = {}
        for node in path.nodes:
            pages = node.pages[group]
            first = node.start // self.page_size
            if first < len(table):  # starts inside the page that its parent ends in
                if pages[0] == HOLE:
                    ends.setdefault(first, node.start)
                    pages = [table[first], *pages[1:]]
                else:
                    ends.pop(first, None)
                del table[first]
            table += pages
        del table[pages_for(path.matched, self.page_size) :]
        return table, ends

    def _resumable(self, path: _Path, tables: list[tuple[list[int], dict[int, int]]]) -> int:
        """The greatest length at which every window, and recurrent state, can resume."""
        length, before = path.matched, -1
        while length != before:
            before = length
            for g in self._radix.windowed:
                length = self._window_end(*tables[g], length, self.groups[g].window)
            if self.state_pool is not None:
                length = max(
                    (n.end for n in path.nodes if n.state is not None and n.end <= length), default=0
                )
        return length

    def _window_end(self, table: list[int], ends: dict[int, int], length: int, window: int | None) -> int:
        """The greatest L <= length for which the pages of all that a window looks back at are there."""
        size = self.page_size
        page = (length - 1) // size
        while length > 0 and page >= first_needed(length, window) // size:
            valid = page * size if table[page] == HOLE else ends.get(page, (page + 1) * size)
            if valid < min(length, (page + 1) * size):
                length = valid
                page = (length - 1) // size
            else:
                page -= 1
        return length

    # -- insertion ------------------------------------------------------------------------------------

    def insert(
        self,
        cursor: Cursor,
        tokens: Sequence[int],
        tables: Sequence[list[int]],
        *,
        length: int | None = None,
        state: int | None = None,
    ) -> None:
        """Record that the pages in `tables` hold keys and values of the first `length` of `tokens`.

        cursor: the sequence's own, from `acquire`. It moves to `length`, and only tokens behind it are
        looked at, so the cost is that of the new tokens. tables: one list a group, from page 0; windows may
        have HOLEs. The tree takes references of its own. Where it has a whole page of the same tokens
        already, the entry in `tables` is replaced by the tree's page and the sequence's reference moves
        over (its duplicate comes free). state: a slot with the recurrent state after exactly `length`
        tokens; the caller's reference goes to the tree, or back to the pool if the tree has that checkpoint.
        With a state_pool only checkpoints make a prefix reusable: insert where there is one.
        """
        if state is not None and self.state_pool is None:
            raise BookkeepingError("a checkpoint needs a tree with a state_pool")
        if state is None and not self.groups:
            return  # neither pages nor a checkpoint: nothing that anybody could reuse
        new = compact(tokens, cursor.position, length)
        node, position, done = cursor.node, cursor.position, 0
        while done < len(new):
            if position < node.end:
                same = common_length(node.tokens, position - node.start, new, done)
                self._reconcile(node, position, position + same, tables)
                position += same
                done += same
                if position < node.end and done < len(new):
                    node = self._split(node, position, tables)
            elif new[done] in node.children:
                node = node.children[new[done]]
            else:
                node = self._radix.append(node, new[done:], tables)
                position, done = node.end, len(new)
        if state is not None:
            if node.parent is not None and position < node.end:
                node = self._split(node, position, tables)
            self._radix.checkpoint(node, state)
        cursor.move(node, position)
        if self._radix.tokens > self.token_limit:
            self._shrink()

    def _split(self, node: Node, position: int, tables: Sequence[list[int]]) -> Node:
        upper = self._radix.split(node, position)
        self._reconcile(upper, position, position, tables)  # a HOLE in its last page can be filled now
        return upper

    def _reconcile(self, node: Node, low: int, high: int, tables: Sequence[list[int]]) -> None:
        """Tokens [low, high) of `node` were computed again: keep one page of each pair, fill HOLEs."""
        first = node.start // self.page_size
        last = high // self.page_size
        for g, (mine, theirs) in enumerate(zip(node.pages, tables)):
            for i in range(low // self.page_size, last):
                kept, own = mine[i - first], theirs[i]
                if kept == own or own == HOLE:
                    continue
                if kept == HOLE:
                    self._radix.set_page(node, g, i - first, own)
                else:
                    self.pools[g].retain((kept,))
                    theirs[i] = kept
                    self.pools[g].release((own,))
            if high == node.end and high % self.page_size and mine[-1] == HOLE:
                self._radix.set_page(node, g, last - first, theirs[last])

    # -- eviction -------------------------------------------------------------------------------------

    def evict(self, group: int, pages_needed: int) -> int:
        """Free at least `pages_needed` pages of a group's pool, or all idle ones; returns how many.

        Least recently used first. Full attention loses the ends of branches, and all groups with it; a
        window loses single pages, wherever in the tree, and with them the places to resume behind them.
        """
        pool = self.pools[group]
        before = pool.free
        while pool.free - before < pages_needed and (page := pool.oldest_idle()) is not None:
            if self.groups[group].window is None:
                self._radix.cut_below(self._radix.owner[group][page])
            else:
                self._radix.drop_page(group, page)
        self._evicted_pages += pool.free - before
        return pool.free - before

    def evict_from(self, group: int, first: int) -> None:
        """Free every page from id `first` on, and what is of no use without it. No sequence may hold one."""
        pool, owner = self.pools[group], self._radix.owner[group]
        before = pool.free
        for page in [page for page in pool.kept_pages() if page >= first]:
            while page in owner and self.groups[group].window is None:
                self._radix.cut_below(owner[page])
            if page in owner:
                self._radix.drop_page(group, page)
        self._evicted_pages += pool.free - before

    def evict_states(self, n: int) -> int:
        """Free n state slots, or all idle ones; returns how many. Least recently used first."""
        pool = self.state_pool
        if pool is None:
            return 0
        before = pool.free
        while pool.free - before < n and (slot := pool.oldest_idle()) is not None:
            node = self._radix.state_owner[slot]
            self._radix.drop_state(node)
            self._radix.tidy(node)
        self._evicted_states += pool.free - before
        return pool.free - before

    def _shrink(self) -> None:
        """Evict until the tokens fit their limit, or all that is left is in use."""
        full_first = sorted(range(len(self.groups)), key=lambda g: self.groups[g].window is not None)
        while self._radix.tokens > self.token_limit:
            if not any(self.evict(g, 1) for g in full_first) and not self.evict_states(1):
                return

    def clear(self) -> None:
        """Forget everything. Pages that sequences hold stay theirs; cursors go back to the root."""
        for root in list(self._radix.roots.values()):
            self._radix.clear(root)

    def forget(self, key: Hashable) -> None:
        """Forget everything under one key, for example of an adapter that was taken away."""
        if key in self._radix.roots:
            self._radix.clear(self._radix.roots[key])

    # -- looking in -----------------------------------------------------------------------------------

    @property
    def stats(self) -> PrefixStats:
        return PrefixStats(
            lookups=self._lookups,
            lookup_tokens=self._lookup_tokens,
            hit_tokens=self._hit_tokens,
            evicted_pages=self._evicted_pages,
            evicted_states=self._evicted_states,
            tokens_held=self._radix.tokens,
            nodes=self._radix.nodes,
            states=len(self._radix.state_owner),
        )

    def pages_referenced(self, group: int) -> dict[int, int]:
        """page -> references that the tree holds of it (1), for PagePool.check."""
        return dict.fromkeys(self._radix.owner[group], 1)

    def states_referenced(self) -> dict[int, int]:
        """slot -> references that the tree holds of it (1)."""
        return dict.fromkeys(self._radix.state_owner, 1)

    def check(self) -> None:
        """Raise BookkeepingError if tree and pools contradict each other. Walks the whole tree."""
        self._radix.check()
