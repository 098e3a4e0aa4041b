"""Random lives of sequences on page pools and the prefix tree, against a naive model.

The model keeps what a device would: for every page, which prefix the value at each position belongs to
(keys and values of a token depend on all tokens before it). A page that the tree or a match hands out with
another prefix in it is a wrong answer. What may be reused is worked out afresh from plain sets of prefixes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxserve.cache.pages import HOLE, GroupSpec, OutOfPages, PagePool, first_live_page, pages_for
from mlxserve.cache.prefix import Match, PrefixTree
from mlxserve.cache.radix import Cursor, Node

Prefix = tuple[str, tuple[int, ...]]
# Conversations to take prompts and answers from: the same for a while, then apart inside a page.
TALKS = [
    [0] * 60,
    [0, 1] * 30,
    [0, 1, 1, 0, 1] + [2, 0, 1] * 20,
    ([0] * 9 + [1]) * 6,
    [0] * 6 + [2] + [0] * 53,
]
TALK = st.integers(0, len(TALKS) - 1)
TWIST = st.none() | st.integers(0, 2)


@dataclass(eq=False)
class Sequence:
    key: str
    tokens: list[int]
    tables: list[list[int]]
    cursor: Cursor
    talk: int
    inserted: int = 0
    pending: list[int] = field(default_factory=list)

    def prefix(self, length: int) -> Prefix:
        return self.key, tuple(self.tokens[:length])


class Lives(RuleBasedStateMachine):
    """Sequences start, grow, are inserted and end; pages are evicted; the model watches."""

    windows: tuple[int | None, ...] = (None,)
    recurrent = False
    page_size = 4
    pages = 14
    token_limit = 1000

    @initialize()
    def build(self) -> None:
        self.groups = [GroupSpec(window, self.pages) for window in self.windows]
        self.pools = [PagePool(spec.pages) for spec in self.groups]
        self.states = PagePool(4) if self.recurrent else None
        self.tree = PrefixTree(self.groups, self.pools, self.page_size, self.states, self.token_limit)
        self.content: list[list[list[Prefix | None]]] = [
            [[None] * self.page_size for _ in range(self.pages)] for _ in self.groups
        ]
        self.state_content: dict[int, Prefix] = {}
        self.running: list[Sequence] = []
        # What was inserted and, as long as nothing was taken away, must be found again.
        self.given: list[set[Prefix]] = [set() for _ in self.groups]
        self.given_states: set[Prefix] = set()
        self.lossless = True

    # -- what sequences do ----------------------------------------------------------------------------

    @rule(key=st.sampled_from("aab"), talk=TALK, n=st.integers(1, 40), twist=TWIST, spare=st.integers(0, 2))
    def start(self, key: str, talk: int, n: int, twist: int | None, spare: int) -> None:
        prompt = TALKS[talk][:n] if twist is None else [*TALKS[talk][: n - 1], twist]
        self._start(key, prompt, max(0, n - spare), talk)

    @rule(key=st.sampled_from("ab"), talk=TALK, n=st.integers(1, 40))
    def start_and_think_better_of_it(self, key: str, talk: int, n: int) -> None:
        match = self.tree.acquire(key, TALKS[talk], n)
        self._judge(match, key, TALKS[talk], n)
        self.tree.abandon(match)

    def _start(self, key: str, prompt: list[int], limit: int, talk: int) -> None:
        match = self.tree.acquire(key, prompt, limit)
        self._judge(match, key, prompt, limit)
        assert match.cursor is not None
        start, rest = prompt[: match.length], prompt[match.length :]
        sequence = Sequence(key, start, match.shared, match.cursor, talk, match.length, rest)
        if match.length % self.page_size:
            try:
                self._resume_inside_page(match)
            except OutOfPages:
                self.tree.abandon(match)
                return
        if match.state is not None and self.states is not None:
            self.states.release((match.state,))
        self.running.append(sequence)

    def _resume_inside_page(self, match: Match) -> None:
        fresh = []
        for g, source in enumerate(match.copy):
            try:
                fresh.append(self._allocate(g))
            except OutOfPages:
                for pool, page in zip(self.pools, fresh):
                    pool.release([page])
                raise
            self.content[g][fresh[g]] = (
                [None] * self.page_size if source is None else list(self.content[g][source])
            )
        for g, source in enumerate(match.copy):
            if source is not None:
                self.pools[g].release([source])
            match.shared[g].append(fresh[g])

    def _allocate(self, group: int) -> int:
        pool = self.pools[group]
        if not pool.free:
            self._evict(group, 1)
        return pool.allocate(1)[0]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), n=st.integers(1, 12), twist=TWIST, insert=st.booleans())
    def grow(self, data: st.DataObject, n: int, twist: int | None, insert: bool) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        at = len(sequence.tokens)
        tokens = sequence.pending[:n] or TALKS[sequence.talk][at : at + n]
        if twist is not None and not sequence.pending:
            tokens[-1:] = [twist]
        for token in tokens:
            if not self._compute(sequence, token):
                self._end(sequence)  # preempted
                return
        if insert:
            self._insert(sequence)
        self._slide(sequence)

    def _slide(self, sequence: Sequence) -> None:
        for spec, pool, table in zip(self.groups, self.pools, sequence.tables):
            live = first_live_page(len(sequence.tokens), spec.window, self.page_size)
            for i in range(min(live, len(table))):
                pool.release([table[i]])
                table[i] = HOLE

    def _compute(self, sequence: Sequence, token: int) -> bool:
        """One token; False where memory is out, although everything idle was evicted."""
        position = len(sequence.tokens)
        if position % self.page_size == 0:
            fresh = []
            for g in range(len(self.groups)):
                try:
                    fresh.append(self._allocate(g))
                except OutOfPages:
                    assert self.pools[g].available == 0
                    for pool, page in zip(self.pools, fresh):
                        pool.release([page])
                    return False
            for table, page in zip(sequence.tables, fresh):
                table.append(page)
        sequence.pending[:1] = []
        sequence.tokens.append(token)
        prefix = sequence.prefix(position + 1)
        for g, table in enumerate(sequence.tables):
            self.content[g][table[-1]][position % self.page_size] = prefix
        return True

    @precondition(lambda self: self.running)
    @rule(data=st.data(), checkpoint=st.booleans())
    def insert(self, data: st.DataObject, checkpoint: bool) -> None:
        self._insert(data.draw(st.sampled_from(self.running)), checkpoint)

    def _insert(self, sequence: Sequence, checkpoint: bool = True) -> None:
        slot = None
        if self.states is not None and checkpoint:
            if not self.states.free:
                self._evict_states(1)
            if not self.states.free:
                return
            (slot,) = self.states.allocate(1)
            self.state_content[slot] = sequence.prefix(len(sequence.tokens))
            self.given_states.add(self.state_content[slot])
        padded = [*sequence.tokens, 7, 7]
        self._note_given(sequence)
        self.tree.insert(sequence.cursor, padded, sequence.tables, length=len(sequence.tokens), state=slot)
        sequence.inserted = len(sequence.tokens)
        busy = sum(len(one.tokens) for one in self.running)
        assert self.tree.stats.tokens_held <= self.token_limit + busy
        node, position = sequence.cursor.node, sequence.cursor.position
        page = position // self.page_size - node.start // self.page_size
        if position < node.end and any(HOLE in pages[page : page + 1] for pages in node.pages):
            self.lossless = False  # ends in a page that the tree has lost: not taken before it is whole

    def _note_given(self, sequence: Sequence) -> None:
        if self.tree.stats.tokens_held + len(sequence.tokens) > self.token_limit:
            self.lossless = False
        inserted = sequence.cursor.position // self.page_size
        if any(HOLE in table[inserted:] for table in sequence.tables):
            self.lossless = False  # slid out before it was inserted
        for g, table in enumerate(sequence.tables):
            for position in range(len(sequence.tokens)):
                if table[position // self.page_size] != HOLE:
                    self.given[g].add(sequence.prefix(position + 1))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), insert=st.booleans())
    def end(self, data: st.DataObject, insert: bool) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        if insert:
            self._insert(sequence)
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        self.tree.release(sequence.cursor)
        for pool, table in zip(self.pools, sequence.tables):
            pool.release(table)
        self.running.remove(sequence)

    # -- what memory does -----------------------------------------------------------------------------

    @rule(group=st.integers(0, 3), n=st.integers(1, 6))
    def evict(self, group: int, n: int) -> None:
        if self.groups:
            self._evict(group % len(self.groups), n)

    def _evict(self, group: int, n: int) -> None:
        pool = self.pools[group]
        idle, free = pool.idle, pool.free
        freed = self.tree.evict(group, n)
        assert freed == pool.free - free
        assert freed >= min(n, idle)
        assert freed >= n or pool.idle == 0
        if len(self.groups) == 1 and self.states is None:
            assert freed <= n
        self.lossless = self.lossless and not freed

    @precondition(lambda self: self.recurrent)
    @rule(n=st.integers(1, 3))
    def evict_states(self, n: int) -> None:
        self._evict_states(n)

    def _evict_states(self, n: int) -> None:
        assert self.states is not None
        idle = self.states.idle
        freed = self.tree.evict_states(n)
        assert freed >= min(n, idle)
        self.lossless = self.lossless and not freed

    @rule(key=st.sampled_from("ab"), really=st.integers(0, 3))
    def forget(self, key: str, really: int) -> None:
        if really == 0:
            self.tree.forget(key)
            assert all(self.tree.match(key, talk).length == 0 for talk in TALKS)
            self.lossless = False

    # -- what must hold -------------------------------------------------------------------------------

    @rule(
        key=st.sampled_from("ab"),
        talk=TALK,
        n=st.integers(0, 40),
        tail=st.lists(st.integers(0, 2), max_size=5),
    )
    def look_up(self, key: str, talk: int, n: int, tail: list[int]) -> None:
        prompt = TALKS[talk][:n] + tail
        self._judge(self.tree.match(key, prompt), key, prompt, len(prompt))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def look_up_known(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self._judge(self.tree.match(sequence.key, sequence.tokens), sequence.key, sequence.tokens, 10**9)

    def _judge(self, match: Match, key: str, prompt: list[int], limit: int) -> None:
        limit = min(limit, len(prompt))
        listed, checkpoints = self._listed(key, tuple(prompt[:limit]))
        assert match.length == self._longest(key, prompt, limit, listed, checkpoints)
        if self.lossless:
            assert match.length == self._longest(key, prompt, limit, self.given, self.given_states)
        for g, spec in enumerate(self.groups):
            low = 0 if spec.window is None else max(0, match.length - max(spec.window, 2) + 1)
            whole = match.length // self.page_size
            assert len(match.shared[g]) == whole
            pages = [*match.shared[g], HOLE if match.copy[g] is None else match.copy[g]]
            assert all(page == HOLE for page in pages[: low // self.page_size])
            for position in range(low, match.length):
                page = pages[position // self.page_size]
                assert page is not None and page != HOLE
                assert self.content[g][page][position % self.page_size] == (
                    key,
                    tuple(prompt[: position + 1]),
                )
        if self.recurrent and match.length:
            assert match.state is not None
            assert self.state_content[match.state] == (key, tuple(prompt[: match.length]))

    def _longest(
        self, key: str, prompt: list[int], limit: int, listed: list[set[Prefix]], checkpoints: set[Prefix]
    ) -> int:
        def held(g: int, position: int) -> bool:
            return (key, tuple(prompt[: position + 1])) in listed[g]

        for length in range(limit, 0, -1):
            if self.recurrent and (key, tuple(prompt[:length])) not in checkpoints:
                continue
            lows = [0 if w is None else max(0, length - max(w, 2) + 1) for w in self.windows]
            if all(held(g, p) for g, low in enumerate(lows) for p in range(low, length)):
                return length
        return 0

    def _nodes(self) -> list[tuple[str, tuple[int, ...], Node]]:
        found = []
        for key, root in self.tree._radix.roots.items():
            for node in root.below():
                path, at = (), node
                while at.parent is not None:
                    path, at = tuple(at.tokens) + path, at.parent
                found.append((str(key), path, node))
        return found

    def _listed(self, key: str, prompt: tuple[int, ...]) -> tuple[list[set[Prefix]], set[Prefix]]:
        """Prefixes whose last position lies in a page of a node on the prompt's path; all checkpoints."""
        listed: list[set[Prefix]] = [set() for _ in self.groups]
        for where, path, node in self._nodes():
            begin = path[: node.start + 1]
            if key != where or begin != prompt[: len(begin)]:
                continue
            first = node.start // self.page_size
            for g, pages in enumerate(node.pages):
                for i, page in enumerate(pages, first):
                    if page != HOLE:
                        stop = min(node.end, (i + 1) * self.page_size)
                        listed[g].update((key, path[: p + 1]) for p in range(i * self.page_size, stop))
        return listed, {(where, path) for where, path, node in self._nodes() if node.state is not None}

    @invariant()
    def pages_hold_what_the_tree_says(self) -> None:
        for key, path, node in self._nodes():
            first = node.start // self.page_size
            for g, pages in enumerate(node.pages):
                for i, page in enumerate(pages, first):
                    for p in range(i * self.page_size, min(node.end, (i + 1) * self.page_size)):
                        if page != HOLE:
                            assert self.content[g][page][p % self.page_size] == (key, path[: p + 1])
            if node.state is not None:
                assert self.state_content[node.state] == (key, path)

    @invariant()
    def books_agree(self) -> None:
        self.tree.check()
        for g, pool in enumerate(self.pools):
            assert pool.free + pool.held == pool.total
            expected = self.tree.pages_referenced(g)
            for sequence in self.running:
                for page in sequence.tables[g]:
                    if page != HOLE:
                        expected[page] = expected.get(page, 0) + 1
            pool.check(expected)
        if self.states is not None:
            self.states.check(self.tree.states_referenced())

    @invariant()
    def sequences_read_what_they_wrote(self) -> None:
        for sequence in self.running:
            assert sequence.cursor.position <= sequence.inserted
            for g, table in enumerate(sequence.tables):
                assert len(table) == pages_for(len(sequence.tokens), self.page_size)
                low = 0
                if (window := self.groups[g].window) is not None:
                    low = max(0, len(sequence.tokens) - window + 1)
                for p in range(low, len(sequence.tokens)):
                    page = table[p // self.page_size]
                    assert self.content[g][page][p % self.page_size] == sequence.prefix(p + 1)

    def teardown(self) -> None:
        if not hasattr(self, "tree"):
            return
        for sequence in list(self.running):
            self._end(sequence)
        for g, pool in enumerate(self.pools):
            self.tree.evict(g, pool.total)
            assert pool.free == pool.total, "a page did not come back"
        if self.states is not None:
            self.tree.evict_states(self.states.total)
            assert self.states.free == self.states.total
        assert self.tree.stats.tokens_held == 0
        assert not self.tree._radix.roots


SETTINGS = settings(
    max_examples=int(os.environ.get("MLXSERVE_EXAMPLES", "40")),
    stateful_step_count=50,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
KINDS = {
    "full": {"windows": (None,)},
    "full_big_pages": {"windows": (None,), "page_size": 8, "pages": 9},
    "page_of_one_token": {"windows": (None,), "page_size": 1, "pages": 40},
    "few_tokens": {"windows": (None,), "token_limit": 30},
    "full_and_window": {"windows": (None, 6)},
    "window_on_big_pages": {"windows": (None, 3), "page_size": 8, "pages": 9},
    "windows_only": {"windows": (5, 2), "token_limit": 40},
    "window_of_one": {"windows": (None, 1)},
    "recurrent_only": {"windows": (), "recurrent": True, "token_limit": 50},
    "hybrid": {"windows": (None,), "recurrent": True},
    "hybrid_and_window": {"windows": (None, 7), "recurrent": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_tree_against_naive_model(kind: str) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    machine = type(f"Lives_{kind}", (Lives,), KINDS[kind])
    run_state_machine_as_test(machine, settings=SETTINGS)
