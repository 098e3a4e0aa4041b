"""The nodes under the prefix tree: token runs, the pages that hold them, and the tree's own references.

Knows: how branches grow, split and are cut, and which node answers for which page. Does not know what a
sequence may reuse or when to evict: that is `prefix`.

A node covers tokens [start, end) of its path and lists, for every group, the pages that hold them. Nodes end
where sequences part, not at page boundaries; where one starts inside a page, its first page also holds the
tokens of that page before `start`:

    page_size 4    root ── [0, 6) pages 7 3 ─┬─ [6, 11) pages 3 9      the sequence that came first
                                             └─ [6, 10) pages 5 8      page 5: copy of 3 up to token 6

The tree holds one reference of a page, however many nodes list it. The deepest of them is its owner.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence

from mlxserve.cache.pages import HOLE, BookkeepingError, GroupSpec, PagePool, pages_for


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

    def below(self) -> Iterator[Node]:
        """All nodes under this one, parents before children."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class Cursor:
    """Where in the tree a running sequence is: after `position` tokens, inside or at the end of `node`.

    It spares insertion the walk from the root. It holds no pages and hinders no eviction; when its place
    is evicted it moves back to what is left.
    """

    __slots__ = ("node", "position")

    def __init__(self, node: Node, position: int) -> None:
        self.node = node
        self.position = position
        node.cursors.add(self)

    def move(self, node: Node, position: int) -> None:
        if node is not self.node:
            self.node.cursors.discard(self)
            node.cursors.add(self)
            self.node = node
        self.position = position


def compact(tokens: Sequence[int], start: int, stop: int | None) -> array[int]:
    """tokens[start:stop] as 4-byte integers; a sequence that is such an array already is not converted."""
    part = tokens if start == 0 and stop is None else tokens[start:stop]
    return part if isinstance(part, array) and part.typecode == "i" else array("i", part)


def common_length(a: array[int], i: int, b: array[int], j: int) -> int:
    """How many tokens a[i:] and b[j:] have in common at their beginning."""
    low, high = 0, min(len(a) - i, len(b) - j)
    if a[i : i + high] == b[j : j + high]:
        return high
    while high - low > 1:  # the first `low` tokens agree, the first `high` do not
        middle = (low + high) // 2
        if a[i + low : i + middle] == b[j + low : j + middle]:
            low = middle
        else:
            high = middle
    return low


class Radix:
    """All nodes, and the books that tie them to the pools. Counts: `tokens`, `nodes`."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        pools: Sequence[PagePool],
        page_size: int,
        state_pool: PagePool | None,
    ) -> None:
        self.groups = tuple(groups)
        self.pools = tuple(pools)
        self.page_size = page_size
        self.state_pool = state_pool
        self.windowed = tuple(g for g, spec in enumerate(groups) if spec.window is not None)
        self.roots: dict[Hashable, Node] = {}
        self.owner: list[dict[int, Node]] = [{} for _ in groups]
        self.state_owner: dict[int, Node] = {}
        self.tokens = 0
        self.nodes = 0

    def root(self, key: Hashable) -> Node:
        root = self.roots.get(key)
        if root is None:
            root = self.roots[key] = Node(None, 0, array("i"), [[] for _ in self.groups])
            root.key = key
        return root

    def forget_root(self, node: Node) -> None:
        if node.parent is None and not node.children and not node.cursors:
            self.roots.pop(node.key, None)

    # -- growing --------------------------------------------------------------------------------------

    def append(self, node: Node, tokens: array[int], tables: Sequence[Sequence[int]]) -> Node:
        """Put tokens behind `node`, which has no such child: a leaf grows, otherwise it gets a new one."""
        start = node.end
        if node.parent is not None and not node.children and node.state is None:
            leaf = node
            leaf.tokens.extend(tokens)
        else:
            leaf = node.children[tokens[0]] = Node(node, start, tokens, [[] for _ in self.groups])
            self.nodes += 1
        self.tokens += len(tokens)
        first = leaf.start // self.page_size
        stop = pages_for(leaf.end, self.page_size)
        for g, table in enumerate(tables):
            leaf.pages[g] += [HOLE] * (stop - first - len(leaf.pages[g]))
            # From the page that `start` lies in: the sequence's own one holds what was there and more.
            for i in range(start // self.page_size, stop):
                self.set_page(leaf, g, i - first, table[i])
        if leaf is not node:
            self._share_boundary(node)
        return leaf

    def split(self, node: Node, position: int) -> Node:
        """Cut `node` in two at `position`; the new upper part. A page cut through is listed in both."""
        parent, size = node.parent, self.page_size
        assert parent is not None and node.start < position < node.end
        first, cut = node.start // size, position - node.start
        upper_pages = [pages[: pages_for(position, size) - first] for pages in node.pages]
        upper = Node(parent, node.start, node.tokens[:cut], upper_pages)
        parent.children[node.tokens[0]] = upper
        upper.children[node.tokens[cut]] = node
        node.parent, node.start, node.tokens = upper, position, node.tokens[cut:]
        whole = position // size - first
        for owner, pages in zip(self.owner, node.pages):
            owner.update((page, upper) for page in pages[:whole] if page != HOLE)
            del pages[:whole]
        for cursor in [c for c in node.cursors if c.position <= position]:
            cursor.move(upper, cursor.position)
        self.nodes += 1
        return upper

    def checkpoint(self, node: Node, state: int) -> None:
        """Adopt the caller's reference of a slot with the state at the end of `node`, unless it has one."""
        assert self.state_pool is not None
        if node.parent is not None and node.state is None:
            self.state_pool.keep(state)
            node.state = state
            self.state_owner[state] = node
        self.state_pool.release((state,))

    # -- which node lists which page ------------------------------------------------------------------

    def set_page(self, node: Node, group: int, offset: int, page: int) -> None:
        """Let a node list `page` (or HOLE) at `offset` in place of what it has there."""
        old = node.pages[group][offset]
        if old == page:
            return
        node.pages[group][offset] = page
        if page != HOLE:
            owner = self.owner[group].get(page)
            if owner is None:
                self.pools[group].keep(page)
            if owner is None or owner.start < node.start:
                self.owner[group][page] = node
        if old != HOLE:
            self._unlist(node, group, old)

    def _unlist(self, node: Node, group: int, page: int) -> None:
        """`node` lists `page` no more. An ancestor that does becomes the owner, else it is given back."""
        if self.owner[group][page] is not node:
            return
        above = next((n for n in self._same_page(node) if n.pages[group][-1] == page), None)
        if above is None:
            del self.owner[group][page]
            self.pools[group].drop(page)
        else:
            self.owner[group][page] = above
            self._share_boundary(above)

    def _same_page(self, node: Node) -> Iterator[Node]:
        """The ancestors whose last page is the one that `node` starts inside of."""
        boundary = node.start // self.page_size * self.page_size
        while node.parent is not None and node.start > boundary:
            node = node.parent
            yield node

    def _share_boundary(self, node: Node) -> None:
        """Let a node that ends inside a page list a child's page there: that one holds the same and more.

        Otherwise the node's own page would stay when its branch goes, in the middle of a path, where
        eviction does not look. Pages of windows are evicted one by one and need no such care.
        """
        child = next(iter(node.children.values()), None)
        if child is None or child.start % self.page_size == 0 or node.parent is None:
            return
        for g, spec in enumerate(self.groups):
            if spec.window is None and self.owner[g].get(node.pages[g][-1]) is node:
                self.set_page(node, g, -1, child.pages[g][0])

    # -- cutting --------------------------------------------------------------------------------------

    def cut_below(self, node: Node) -> None:
        """Take the last page off a branch that runs through `node`."""
        while node.children:
            node = next(reversed(node.children.values()))
        self.tidy(self._cut(node))

    def drop_page(self, group: int, page: int) -> None:
        """Leave a HOLE wherever a window's page is listed."""
        node = self.owner[group].pop(page)
        index = node.pages[group].index(page)
        node.pages[group][index] = HOLE
        for above in self._same_page(node) if index == 0 else ():
            if above.pages[group][-1] == page:
                above.pages[group][-1] = HOLE
        self.pools[group].drop(page)
        self.tidy(node)

    def drop_state(self, node: Node) -> None:
        if node.state is not None and self.state_pool is not None:
            del self.state_owner[node.state]
            self.state_pool.drop(node.state)
            node.state = None

    def tidy(self, node: Node) -> None:
        """After a cut: take away what no sequence can resume in or behind, join what need not be apart."""
        while node.parent is not None and not node.children and self._useless(node):
            node = self._cut(node)
        if node.parent is None:
            self.forget_root(node)
        elif len(node.children) == 1 and node.state is None:
            self._join(node)

    def _useless(self, leaf: Node) -> bool:
        """True if nobody can resume inside the last page of a leaf."""
        lost = any(leaf.pages[g][-1] == HOLE for g in self.windowed)
        return lost or (self.state_pool is not None and leaf.state is None)

    def _cut(self, leaf: Node) -> Node:
        """Take the last page off a leaf, or the leaf out of the tree; the node that then ends the branch."""
        cut = (leaf.end - 1) // self.page_size * self.page_size
        if cut > leaf.start and self.state_pool is None:  # without its checkpoint a leaf is of no use
            self._shorten(leaf, cut)
            return leaf
        assert leaf.parent is not None
        self._take_out(leaf)
        self._shorten(leaf, leaf.start)
        return leaf.parent

    def _take_out(self, leaf: Node) -> None:
        assert leaf.parent is not None and not leaf.children
        del leaf.parent.children[leaf.tokens[0]]
        self.drop_state(leaf)
        self.nodes -= 1
        for cursor in list(leaf.cursors):
            cursor.move(leaf.parent, leaf.start)

    def _shorten(self, leaf: Node, cut: int) -> None:
        """Keep [start, cut) of a leaf; `cut` is a page boundary, or the start where nothing is kept."""
        self.tokens -= leaf.end - cut
        del leaf.tokens[cut - leaf.start :]
        keep = cut // self.page_size - leaf.start // self.page_size
        for g, pages in enumerate(leaf.pages):
            dropped = pages[keep:]
            del pages[keep:]
            for page in reversed(dropped):
                if page != HOLE:
                    self._unlist(leaf, g, page)
        for cursor in leaf.cursors:
            cursor.position = min(cursor.position, cut)

    def _join(self, node: Node) -> None:
        """Make one node of `node` and its only child; it is the child that stays."""
        (child,) = node.children.values()
        assert node.parent is not None
        inside = child.start % self.page_size != 0
        for g, pages in enumerate(node.pages):
            if inside:  # the child's page holds all of it; a HOLE there is a HOLE of the whole
                self.set_page(node, g, -1, child.pages[g][0])
                pages = pages[:-1]
            owner = self.owner[g]
            owner.update((page, child) for page in pages if page != HOLE and owner[page] is node)
            child.pages[g][:0] = pages
        child.parent, child.start = node.parent, node.start
        child.tokens = node.tokens + child.tokens
        node.parent.children[node.tokens[0]] = child
        for cursor in list(node.cursors):
            cursor.move(child, cursor.position)
        self.nodes -= 1

    def clear(self, root: Node) -> None:
        """Take out everything under a root."""
        for leaf in [node for node in root.below() if not node.children]:
            while leaf.parent is not None and not leaf.children:
                parent = leaf.parent
                self._take_out(leaf)
                self._shorten(leaf, leaf.start)
                leaf = parent
        self.forget_root(root)

    # -- books ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise BookkeepingError unless nodes, owners and the pools' books agree. Walks the whole tree."""
        owner: list[dict[int, Node]] = [{} for _ in self.groups]
        nodes = tokens = 0
        states: dict[int, Node] = {}
        for root in self.roots.values():
            for node in root.below():
                nodes, tokens = nodes + 1, tokens + len(node.tokens)
                self._check_node(node)
                for mine, pages in zip(owner, node.pages):
                    mine.update((page, node) for page in pages if page != HOLE)  # deeper ones come later
                if node.state is not None:
                    states[node.state] = node
        _expect(owner == self.owner, "a page is listed by other nodes than its owner says")
        _expect(states == self.state_owner, "a state slot belongs to another node than its owner says")
        _expect((nodes, tokens) == (self.nodes, self.tokens), "nodes or tokens are miscounted")
        for pool, mine in zip(self.pools, owner):
            _expect(mine.keys() == set(pool.kept_pages()), "the pool keeps other pages than the tree lists")
        if self.state_pool is not None:
            _expect(states.keys() == set(self.state_pool.kept_pages()), "the pool keeps other state slots")

    def _check_node(self, node: Node) -> None:
        parent, size = node.parent, self.page_size
        _expect(parent is not None and len(node.tokens) > 0, "a node below the root is empty")
        assert parent is not None
        _expect(parent.children.get(node.tokens[0]) is node, "a node is not its parent's child")
        _expect(parent.end == node.start, "a node does not begin where its parent ends")
        count = pages_for(node.end, size) - node.start // size
        _expect(all(len(pages) == count for pages in node.pages), "a node lists too few or too many pages")
        _expect(all(node.start < c.position <= node.end for c in node.cursors), "a cursor is out of place")
        _expect(all(c.node is node for c in node.cursors), "a cursor is registered elsewhere")
        for g, spec in enumerate(self.groups):
            if spec.window is None:
                _expect(HOLE not in node.pages[g], "full attention has a HOLE")
                shared = not node.children or node.end % size == 0
                _expect(shared or self.owner[g][node.pages[g][-1]] is not node, "a page cannot be evicted")


def _expect(condition: bool, complaint: str) -> None:
    if not condition:
        raise BookkeepingError(complaint)
