"""The prefix tree: which tokens' keys and values lie in which pages, so that no prefix is computed twice.

Knows: token ids, page ids, reference counts. Knows nothing of arrays, models or requests.

A radix tree over token ids, one root a key (adapter, ...). A node covers tokens [start, end) of its path
and lists, for every group, the pages that hold them. Nodes end where sequences part, not at page
boundaries; where one starts inside a page, its first page also holds the tokens before `start`:

    page_size 4    root ── [0, 6) pages 7 3 ─┬─ [6, 11) pages 3 9      the sequence that came first
                                             └─ [6, 10) pages 5 8      page 5: copy of 3 up to token 6

Rules that keep answers right:

- Only whole pages are shared. The page that a prefix ends in is copied by whoever resumes there, so a page
  has one writer, and that writer only appends behind the tokens it has inserted. Insert committed tokens
  only, and never take back (rewind) a sequence behind what it inserted.
- The tree holds one reference of each page in it, whatever the number of nodes that list the page.
- A prefix is reused at length L only if every group can resume there: full attention has all pages of
  [0, L), a window of W those of [L - W + 1, L), recurrent layers a checkpoint exactly at L.
- A running sequence holds all whole pages of its path (`insert` swaps its duplicates for the tree's). So a
  page nobody else holds has only such pages behind it, and the oldest idle page ends a branch: eviction
  cuts branches from their ends, oldest first, and gets back every idle page.
- A branch ends in a token where some sequence could resume; what eviction leaves behind the last such
  token goes with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from mlxserve.cache.pages import HOLE, BookkeepingError, GroupSpec, PagePool, pages_for

Tables = Sequence[list[int]]


class Node:
    """Tokens [start, end) of one path; `pages[group][i]` is page `start // page_size + i` of the path."""

    __slots__ = ("children", "cursors", "key", "pages", "parent", "start", "state", "tokens")

    def __init__(self, parent: Node | None, start: int, tokens: array[int], pages: list[list[int]]) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.pages = pages
        self.children: dict[int, Node] = {}  # by first token
        self.state: int | None = None  # slot of the recurrent state after token end - 1
        self.cursors: set[Cursor] = set()
        self.key: Hashable = None  # set on roots

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Cursor:
    """Where in the tree a running sequence is: after `position` tokens, inside or at the end of `node`.

    It spares `insert` the walk from the root. It holds no pages and hinders no eviction; when its place
    is evicted it moves back to what is left.
    """

    __slots__ = ("key", "node", "position")

    def __init__(self, key: Hashable, node: Node, position: int) -> None:
        self.key = key
        self.node = node
        self.position = position
        node.cursors.add(self)

    def move(self, node: Node, position: int) -> None:
        if node is not self.node:
            self.node.cursors.discard(self)
            node.cursors.add(self)
            self.node = node
        self.position = position


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
class Entry:
    """A reusable prefix that the tree holds, as the disk tier wants it: `tables` has all pages, HOLEs included."""

    key: Hashable
    tokens: array[int]
    tables: list[list[int]]
    state: int | None


@dataclass(slots=True)
class Stats:
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


class PrefixTree:
    """Token-granular prefix reuse over page pools. One thread only.

    groups, pools: one pool of pages for each group of layers. state_pool: slots of recurrent state, for
    models that have any; then prefixes can be reused only where a checkpoint was inserted. token_limit:
    tokens held at most, 4 bytes of host memory each (the oldest idle ones go first).
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
        self.stats = Stats()
        # Groups in which a prefix without its last pages is of no use to anyone.
        self._windowed = [g for g, spec in enumerate(groups) if spec.window is not None and spec.window > 1]
        self._roots: dict[Hashable, Node] = {}
        # The deepest node that lists a page, and the node a state slot belongs to.
        self._owner: list[dict[int, Node]] = [{} for _ in groups]
        self._state_owner: dict[int, Node] = {}

    # -- lookup ---------------------------------------------------------------------------------------

    def match(self, key: Hashable, tokens: Sequence[int], limit: int | None = None) -> Match:
        """The longest reusable prefix of `tokens`, at most `limit` long. Changes nothing, promises nothing."""
        path = self._walk(key, _compact(tokens, 0, limit))
        return self._match(path)

    def acquire(self, key: Hashable, tokens: Sequence[int], limit: int | None = None) -> Match:
        """`match`, and take a reference of everything in it at once, so that no eviction comes between.

        The caller owns the references of `shared` from now on, and releases those of `copy` and `state`
        when it has copied them; `match.cursor` is for `insert` and goes back with `release`. To give up
        the whole, `abandon`.
        """
        wanted = _compact(tokens, 0, limit)
        path = self._walk(key, wanted)
        found = self._match(path)
        for pool, shared, copy in zip(self.pools, found.shared, found.copy):
            pool.retain(shared)
            pool.retain(() if copy is None else (copy,))
        if found.state is not None and self.state_pool is not None:
            self.state_pool.retain((found.state,))
        self.stats.lookups += 1
        self.stats.lookup_tokens += len(wanted)
        self.stats.hit_tokens += found.length
        node = next((n for n in path.nodes if n.start < found.length <= n.end), None) or self._root(key)
        cursor = Cursor(key, node, found.length)
        return Match(found.length, found.shared, found.copy, found.state, cursor)

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
        """The sequence of `cursor` has ended or starts anew. Its pages are given back to the pools, not here."""
        cursor.node.cursors.discard(cursor)
        self._forget_root(cursor.node)

    def _walk(self, key: Hashable, tokens: array[int]) -> _Path:
        path = _Path()
        node = self._roots.get(key)
        while node is not None and path.matched < len(tokens):
            node = node.children.get(tokens[path.matched])
            if node is not None:
                path.nodes.append(node)
                path.matched += _common(node.tokens, 0, tokens, path.matched)
                if path.matched < node.end:
                    break
        return path

    def _match(self, path: _Path) -> Match:
        tables = [self._table(path, g) for g in range(len(self.groups))]
        length = self._resumable(path, tables)
        whole, rest = divmod(length, self.page_size)
        shared, copies = [], []
        for spec, (table, _) in zip(self.groups, tables):
            low = 0 if spec.window is None else max(0, length - spec.window + 1)
            holes = min(low // self.page_size, whole)
            shared.append([HOLE] * holes + table[holes:whole])
            copies.append(table[whole] if rest and low < length else None)
        state = None
        if self.state_pool is not None and length:
            state = next(node.state for node in path.nodes if node.end == length)
        return Match(length, shared, copies, state)

    def _table(self, path: _Path, group: int) -> tuple[list[int], dict[int, int]]:
        """The path's pages, and for those not valid to their end (or to `matched`) where they end."""
        table: list[int] = []
        ends: dict[int, int] = {}
        for node in path.nodes:
            pages = node.pages[group]
            first = node.start // self.page_size
            if first == len(table):
                table += pages
                continue
            if pages[0] != HOLE:
                table[first] = pages[0]
                ends.pop(first, None)
            else:
                ends.setdefault(first, node.start)
            table += pages[1:]
        del table[pages_for(path.matched, self.page_size) :]
        return table, ends

    def _resumable(self, path: _Path, tables: list[tuple[list[int], dict[int, int]]]) -> int:
        """The greatest length at which every group, and recurrent state, can resume."""
        length = path.matched
        while True:
            before = length
            for g in self._windowed:
                length = self._window_end(*tables[g], length, self.groups[g].window or 0)
            if self.state_pool is not None:
                length = max(
                    (n.end for n in path.nodes if n.state is not None and n.end <= length), default=0
                )
            if length == before:
                return length

    def _window_end(self, table: list[int], ends: dict[int, int], length: int, window: int) -> int:
        """The greatest L <= length for which the pages of [L - window + 1, L) are all there."""
        size = self.page_size
        page = (length - 1) // size
        while page >= max(0, length - window + 1) // size and length > 0:
            valid = ends.get(page, (page + 1) * size) if table[page] != HOLE else page * size
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
        tables: Tables,
        *,
        length: int | None = None,
        state: int | None = None,
    ) -> None:
        """Record that the pages in `tables` hold keys and values of the first `length` of `tokens`.

        cursor: the sequence's own, from `acquire`; it moves to `length`, and only tokens behind it are
        looked at. tables: one list a group, from page 0; windows may have HOLEs. The tree takes references
        of its own. Where it has a whole page of the same tokens already, the entry in `tables` is replaced
        by the tree's page and the sequence's reference moves over (a duplicate comes free). state: a slot
        with the recurrent state after exactly `length` tokens; the caller's reference goes to the tree,
        or back to the pool if the tree has such a checkpoint. With a state_pool only checkpoints make a
        prefix reusable, so insert where there is one.
        """
        new = _compact(tokens, cursor.position, length)
        node, position, done = cursor.node, cursor.position, 0
        while done < len(new):
            if position < node.end:
                same = _common(node.tokens, position - node.start, new, done)
                self._reconcile(node, position, position + same, tables)
                position += same
                done += same
                if position < node.end and done < len(new):
                    node = self._split(node, position)
            elif new[done] in node.children:
                node = node.children[new[done]]
            else:
                node = self._append(node, new[done:], tables)
                position, done = node.end, len(new)
        if state is not None:
            node = self._checkpoint(node, position, state)
        cursor.move(node, position)
        self._shrink()

    def _reconcile(self, node: Node, low: int, high: int, tables: Tables) -> None:
        """Tokens [low, high) of `node` were computed again: one page for both, holes filled."""
        first = node.start // self.page_size
        last = high // self.page_size
        for g, (mine, theirs) in enumerate(zip(node.pages, tables)):
            for i in range(low // self.page_size, last):
                kept, own = mine[i - first], theirs[i]
                if kept == own or own == HOLE:
                    continue
                if kept == HOLE:
                    self._set(node, g, i - first, own)
                else:
                    self.pools[g].retain((kept,))
                    theirs[i] = kept
                    self.pools[g].release((own,))
            if high == node.end and high % self.page_size and mine[-1] == HOLE and theirs[last] != HOLE:
                self._set(node, g, last - first, theirs[last])

    def _append(self, node: Node, tokens: array[int], tables: Tables) -> Node:
        """Tokens nobody had, behind `node`: longer leaf where that is possible, else a new one."""
        start = node.end
        stop = pages_for(start + len(tokens), self.page_size)
        whole, rest = divmod(start, self.page_size)
        grows = node.parent is not None and not node.children and node.state is None
        leaf = node if grows else self._child(node, start, tokens[:1], len(self.groups))
        if grows:
            leaf.tokens.extend(tokens)
        else:
            leaf.tokens.extend(tokens[1:])
        offset = whole - leaf.start // self.page_size  # of the first page to set in the leaf's lists
        for g, table in enumerate(tables):
            leaf.pages[g] += [HOLE] * (stop - leaf.start // self.page_size - len(leaf.pages[g]))
            for i in range(whole, stop):
                self._set(leaf, g, i - whole + offset, table[i])
        if rest and not grows:
            self._share_boundary(node)
        self.stats.tokens_held += len(tokens)
        return leaf

    def _child(self, node: Node, start: int, tokens: array[int], groups: int) -> Node:
        child = Node(node, start, tokens, [[] for _ in range(groups)])
        node.children[tokens[0]] = child
        self.stats.nodes += 1
        return child

    def _split(self, node: Node, position: int) -> Node:
        """Cut `node` in two at `position`; the new upper part. The page cut through is listed in both."""
        assert node.parent is not None
        first = node.start // self.page_size
        whole, rest = divmod(position, self.page_size)
        cut = position - node.start
        upper_pages = [pages[: whole - first + bool(rest)] for pages in node.pages]
        upper = Node(node.parent, node.start, node.tokens[:cut], upper_pages)
        node.parent.children[node.tokens[0]] = upper
        upper.children[node.tokens[cut]] = node
        node.parent, node.start, node.tokens = upper, position, node.tokens[cut:]
        for owner, pages in zip(self._owner, upper.pages):
            owner.update((page, upper) for page in pages[: whole - first] if page != HOLE)
        node.pages = [pages[whole - first :] for pages in node.pages]
        for cursor in [c for c in node.cursors if c.position <= position]:
            cursor.move(upper, cursor.position)
        self.stats.nodes += 1
        return upper

    def _checkpoint(self, node: Node, position: int, state: int) -> Node:
        if self.state_pool is None:
            raise BookkeepingError("a checkpoint needs a tree with a state_pool")
        if node.parent is not None and position < node.end:
            node = self._split(node, position)
        if node.parent is not None and node.state is None:
            self.state_pool.keep(state)
            node.state = state
            self._state_owner[state] = node
            self.stats.states += 1
        self.state_pool.release((state,))
        return node

    # -- pages of nodes -------------------------------------------------------------------------------

    def _set(self, node: Node, group: int, offset: int, page: int) -> None:
        """Put `page` (or HOLE) into a node's list, with the tree's reference if it is the first to list it."""
        old = node.pages[group][offset]
        if old == page:
            return
        node.pages[group][offset] = page
        if page != HOLE:
            owner = self._owner[group].get(page)
            if owner is None:
                self.pools[group].keep(page)
            if owner is None or owner.start < node.start:
                self._owner[group][page] = node
        if old != HOLE:
            self._unlist(node, group, old)

    def _unlist(self, node: Node, group: int, page: int) -> None:
        """`node` lists `page` no more: an ancestor that does becomes its owner, else the tree gives it back."""
        if self._owner[group][page] is not node:
            return
        above = next((n for n in self._same_page(node) if n.pages[group][-1] == page), None)
        if above is None:
            del self._owner[group][page]
            self.pools[group].drop(page)
            return
        self._owner[group][page] = above
        self._share_boundary(above)

    def _same_page(self, node: Node) -> Iterator[Node]:
        """The ancestors whose last page is the (one) page that `node` starts inside of."""
        boundary = node.start // self.page_size * self.page_size
        while node.parent is not None and node.start > boundary:
            node = node.parent
            yield node

    def _share_boundary(self, node: Node) -> None:
        """Let a node that ends inside a page list a child's page there: it holds the same and more.

        Otherwise the page would stay when its branch goes, in the middle of a path, out of eviction's reach.
        Pages of windows are evicted one by one and need no such care.
        """
        child = next(iter(node.children.values()), None)
        if child is None or node.parent is None:
            return
        for g, spec in enumerate(self.groups):
            if spec.window is None and self._owner[g].get(node.pages[g][-1]) is node:
                self._set(node, g, -1, child.pages[g][0])

    # -- eviction -------------------------------------------------------------------------------------

    def evict(self, group: int, pages_needed: int) -> int:
        """Free at least `pages_needed` pages of a group's pool, or as many as are idle; returns how many.

        Least recently used first. Full attention loses the ends of branches, and all groups with it; a
        window loses single pages, wherever in the tree, and with them the places to resume behind them.
        """
        pool = self.pools[group]
        before = pool.free
        while pool.free - before < pages_needed and (page := pool.oldest_idle()) is not None:
            if self.groups[group].window is None:
                self._cut(self._last_leaf(self._owner[group][page]))
            else:
                self._drop_page(group, page)
        self.stats.evicted_pages += pool.free - before
        return pool.free - before

    def evict_states(self, n: int) -> int:
        """Free n state slots, or as many as are idle; returns how many. Least recently used first."""
        pool = self.state_pool
        if pool is None:
            return 0
        before = pool.free
        while pool.free - before < n and (slot := pool.oldest_idle()) is not None:
            node = self._state_owner[slot]
            self._drop_state(node)
            self._prune(node)
        self.stats.evicted_states += pool.free - before
        return pool.free - before

    def clear(self, key: Hashable | None = None) -> None:
        """Forget everything, or everything under one key. Pages that sequences hold stay theirs."""
        for root in [r for k, r in self._roots.items() if key is None or k == key]:
            for leaf in [node for node in _below(root) if not node.children]:
                while leaf.parent is not None and not leaf.children:
                    parent = leaf.parent
                    self._remove(leaf)
                    leaf = parent

    def _shrink(self) -> None:
        while self.stats.tokens_held > self.token_limit:
            freed = next((g for g, pool in enumerate(self.pools) if self.evict(g, 1)), None)
            if freed is None and not self.evict_states(1):
                return

    def _last_leaf(self, node: Node) -> Node:
        while node.children:
            node = next(reversed(node.children.values()))
        return node

    def _cut(self, leaf: Node) -> None:
        """Take the last page off a leaf, or the leaf itself where nothing reusable would stay."""
        cut = (leaf.end - 1) // self.page_size * self.page_size
        if cut <= leaf.start or self.state_pool is not None:
            parent = leaf.parent
            self._remove(leaf)
            assert parent is not None
            self._prune(parent)
        else:
            self._shorten(leaf, cut)
            self._prune(leaf)

    def _prune(self, leaf: Node) -> None:
        """Take from the end of a branch what no sequence could resume in."""
        while leaf.parent is not None and not leaf.children:
            parent = leaf.parent
            lost = any(leaf.pages[g][-1] == HOLE for g in self._windowed)
            if self.state_pool is not None and leaf.state is not None and not lost:
                return
            if self.state_pool is None and not lost:
                return
            cut = (leaf.end - 1) // self.page_size * self.page_size
            if self.state_pool is None and cut > leaf.start:
                self._shorten(leaf, cut)
            else:
                self._remove(leaf)
                leaf = parent
        self._forget_root(leaf)

    def _shorten(self, leaf: Node, cut: int) -> None:
        """Keep [start, cut) of a leaf; `cut` is a page boundary."""
        self.stats.tokens_held -= leaf.end - cut
        keep = pages_for(cut, self.page_size) - leaf.start // self.page_size
        del leaf.tokens[cut - leaf.start :]
        for g, pages in enumerate(leaf.pages):
            dropped = pages[keep:]
            del pages[keep:]
            for page in reversed(dropped):
                if page != HOLE:
                    self._unlist(leaf, g, page)
        for cursor in leaf.cursors:
            cursor.position = min(cursor.position, cut)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None and not leaf.children
        del parent.children[leaf.tokens[0]]
        self.stats.nodes -= 1
        self.stats.tokens_held -= len(leaf.tokens)
        for g, pages in enumerate(leaf.pages):
            for page in reversed(pages):
                if page != HOLE:
                    self._unlist(leaf, g, page)
        self._drop_state(leaf)
        for cursor in list(leaf.cursors):
            cursor.move(parent, parent.end)

    def _drop_page(self, group: int, page: int) -> None:
        """Leave a HOLE wherever a window's page is listed."""
        node = self._owner[group].pop(page)
        index = node.pages[group].index(page)
        node.pages[group][index] = HOLE
        if index == 0:
            for above in self._same_page(node):
                if above.pages[group][-1] == page:
                    above.pages[group][-1] = HOLE
        self.pools[group].drop(page)
        self._prune(node)

    def _drop_state(self, node: Node) -> None:
        if node.state is not None and self.state_pool is not None:
            del self._state_owner[node.state]
            self.state_pool.drop(node.state)
            self.stats.states -= 1
            node.state = None

    # -- roots, books ---------------------------------------------------------------------------------

    def _root(self, key: Hashable) -> Node:
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Node(None, 0, array("i"), [[] for _ in self.groups])
            root.key = key
        return root

    def _forget_root(self, node: Node) -> None:
        if node.parent is None and not node.children and not node.cursors:
            self._roots.pop(node.key, None)

    @property
    def tokens_held(self) -> int:
        return self.stats.tokens_held


def _compact(tokens: Sequence[int], start: int, stop: int | None) -> array[int]:
    """tokens[start:stop] as 4-byte integers; a sequence that is such an array already is not converted."""
    part = tokens if start == 0 and stop is None else tokens[start:stop]
    return part if isinstance(part, array) else array("i", part)


def _common(a: array[int], i: int, b: array[int], j: int) -> int:
    """How many tokens a[i:] and b[j:] have in common at their beginning."""
    low, high = 0, min(len(a) - i, len(b) - j)
    if a[i : i + high] == b[j : j + high]:
        return high
    while high - low > 1:  # the first low tokens agree, the first high do not
        middle = (low + high) // 2
        if a[i + low : i + middle] == b[j + low : j + middle]:
            low = middle
        else:
            high = middle
    return low


def _below(node: Node) -> Iterator[Node]:
    stack = list(node.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
