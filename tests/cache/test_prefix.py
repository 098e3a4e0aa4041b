"""What the prefix tree gives back, shares, keeps apart and lets go, one situation a test."""

from __future__ import annotations

from array import array

import pytest

from mlxserve.cache.pages import HOLE, BookkeepingError, GroupSpec, PagePool, pages_for
from mlxserve.cache.prefix import Match, PrefixTree
from mlxserve.cache.radix import Cursor


class Desk:
    """A tree with its pools, and sequences that are computed at once and held until `close`."""

    def __init__(
        self,
        *windows: int | None,
        size: int = 4,
        pages: int = 32,
        states: int = 0,
        token_limit: int = 1 << 24,
    ) -> None:
        self.size = size
        self.groups = [GroupSpec(window, pages) for window in windows]
        self.pools = [PagePool(pages) for _ in windows]
        self.states = PagePool(states) if states else None
        self.tree = PrefixTree(self.groups, self.pools, size, self.states, token_limit)
        self.open: list[tuple[list[list[int]], Cursor]] = []

    def write(
        self, tokens: list[int], key: str = "base", *, state: bool = False, slid: bool = False
    ) -> Match:
        """Acquire what there is, compute the rest, insert; `slid`: windows slide before the insertion."""
        match = self.tree.acquire(key, tokens, len(tokens) - 1)
        tables = []
        for pool, shared, copy in zip(self.pools, match.shared, match.copy):
            fresh = pool.allocate(pages_for(len(tokens), self.size) - len(shared))
            pool.release([] if copy is None else [copy])
            tables.append(shared + fresh)
        for spec, pool, table in zip(self.groups, self.pools, tables):
            if slid and spec.window is not None:
                for i in range(max(0, len(tokens) - spec.window + 1) // self.size):
                    pool.release([table[i]])
                    table[i] = HOLE
        slot = None
        if self.states is not None:
            self.states.release([] if match.state is None else [match.state])
            slot = self.states.allocate(1)[0] if state else None
        assert match.cursor is not None
        self.tree.insert(match.cursor, tokens, tables, state=slot)
        self.open.append((tables, match.cursor))
        self.tree.check()
        return match

    def close(self, which: int = 0) -> None:
        tables, cursor = self.open.pop(which)
        self.tree.release(cursor)
        for pool, table in zip(self.pools, tables):
            pool.release(table)

    def found(self, tokens: list[int], key: str = "base") -> int:
        return self.tree.match(key, tokens).length


def talk(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


def test_nothing_is_found_in_an_empty_tree() -> None:
    desk = Desk(None, 8)
    assert desk.tree.match("base", [1, 2, 3]) == Match(0, [[], []], [None, None])
    assert desk.tree.match("base", []).length == 0


def test_case_33_keys_and_conversations_stay_apart() -> None:
    desk = Desk(None, pages=64)
    prompts = {f"adapter {i % 4}": talk(100 * i, 10) for i in range(16)}
    for i in range(16):
        assert desk.write([7, 7, 7, 100 + i, 1, 2], f"adapter {i % 4}").length == (3 if i >= 4 else 0)
    assert desk.found([7, 7, 7, 104], "adapter 1") == 3
    assert desk.found([7, 7, 7, 104], "adapter 0") == 4
    assert desk.found([7, 7, 7, 104], "nobody") == 0
    desk.tree.clear()
    assert all(desk.found(prompt, key) == 0 for key, prompt in prompts.items())
    assert desk.write([9, 9]).length == 0
    while desk.open:
        desk.close()


@pytest.mark.parametrize("size", [1, 4, 16])
def test_case_34_reuse_ends_at_the_shared_part(size: int) -> None:
    desk = Desk(None, size=size)
    stored = talk(0, 20)
    desk.write(stored)
    (table,) = desk.open[0][0]
    match = desk.tree.match("base", stored[:8] + talk(500, 5))
    assert match.length == 8
    assert match.shared == [table[: 8 // size]]
    # Inside a page, its first 8 positions are copied, never the page itself shared.
    assert match.copy == [table[0] if size == 16 else None]


def test_case_35_reuse_only_where_every_layer_can_resume() -> None:
    stored, request = talk(0, 20), talk(0, 12) + talk(500, 4)
    kept = Desk(None, 8)
    kept.write(stored)
    assert kept.found(request) == 12
    match = kept.tree.match("base", request)
    full, window = kept.open[0][0]
    assert match.shared == [full[:3], [HOLE, *window[1:3]]]  # positions 5 .. 11 are looked back at
    slid = Desk(None, 8)
    slid.write(stored, slid=True)
    assert slid.found(request) == 0  # the window before 12 is gone: compute again
    assert slid.found(stored) == 20
    assert slid.write(request).length == 0
    assert slid.found(request) == 16  # and now it is there
    assert slid.found(talk(0, 12)) == 12


def test_a_limit_leaves_tokens_to_compute() -> None:
    desk = Desk(None)
    desk.write(talk(0, 8))
    match = desk.tree.match("base", talk(0, 8), 7)
    assert (match.length, len(match.shared[0]), match.copy) == (7, 1, [desk.open[0][0][0][1]])


def test_arrays_of_tokens_are_as_good_as_lists() -> None:
    desk = Desk(None)
    desk.write(talk(0, 9))
    assert desk.found(array("i", talk(0, 9))) == desk.found(array("q", talk(0, 9))) == 9  # type: ignore[arg-type]


def test_duplicates_computed_side_by_side_become_one() -> None:
    desk = Desk(None)
    prompt = talk(0, 10)
    cursors = []
    for _ in range(2):
        match = desk.tree.acquire("base", prompt, 9)
        assert match.cursor is not None and match.length == 0
        cursors.append((match.cursor, [desk.pools[0].allocate(3)]))
    for cursor, tables in cursors:
        desk.tree.insert(cursor, prompt, tables)
    (_, (first,)), (_, (second,)) = cursors
    assert first[:2] == second[:2]  # whole pages are one
    assert first[2] != second[2]  # each goes on writing in its own
    assert desk.pools[0].held == 4
    assert desk.tree.stats.tokens_held == 10


def test_a_growing_sequence_extends_its_node() -> None:
    desk = Desk(None)
    tokens = talk(0, 50)
    match = desk.tree.acquire("base", tokens)
    tables: list[list[int]] = [[]]
    assert match.cursor is not None
    for length in range(1, 51):
        if pages_for(length, 4) > len(tables[0]):
            tables[0] += desk.pools[0].allocate(1)
        desk.tree.insert(match.cursor, tokens, tables, length=length)
        assert desk.tree.stats.nodes == 1
        assert desk.tree.stats.tokens_held == length == desk.found(tokens)
    assert desk.tree.match("base", tokens).shared[0] == tables[0][:12]


def test_page_of_a_branch_point_is_copied_and_both_branches_are_found() -> None:
    desk = Desk(None)
    desk.write([1, 2, 3, 4, 5, 6, 7, 8, 9])
    match = desk.write([1, 2, 3, 4, 5, 6, 70, 80, 90])
    assert match.length == 6
    assert match.copy == [desk.open[0][0][0][1]]
    assert desk.found([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 9
    assert desk.tree.match("base", [1, 2, 3, 4, 5, 6, 70, 80, 90]).shared == [desk.open[1][0][0][:2]]
    assert desk.tree.stats.tokens_held == 12


def test_eviction_takes_the_conversation_not_used_for_longest_from_its_end() -> None:
    desk = Desk(None, pages=12)
    for start in (0, 100, 200):
        desk.write(talk(start, 16))
    for _ in range(3):
        desk.close()
    desk.tree.abandon(desk.tree.acquire("base", talk(0, 16)))  # used again, so now the newest
    assert desk.pools[0].free == 0
    assert desk.tree.evict(0, 1) == 1
    assert [desk.found(talk(start, 16)) for start in (0, 100, 200)] == [16, 12, 16]
    assert desk.tree.evict(0, 5) == 5
    assert [desk.found(talk(start, 16)) for start in (0, 100, 200)] == [16, 0, 8]
    assert desk.tree.evict(0, 100) == 6
    assert desk.tree.evict(0, 1) == 0
    assert desk.pools[0].free == 12
    assert desk.tree.stats.evicted_pages == 12


def test_eviction_spares_what_a_sequence_uses() -> None:
    desk = Desk(None, pages=8)
    desk.write(talk(0, 16))
    desk.write(talk(0, 8) + talk(300, 8))
    desk.close(0)
    assert desk.tree.evict(0, 100) == 2
    assert desk.found(talk(0, 16)) == 8
    assert desk.found(talk(0, 8) + talk(300, 8)) == 16


def test_nothing_that_was_acquired_is_evicted_before_it_is_used() -> None:
    desk = Desk(None, 6, states=2)
    desk.write(talk(0, 10), state=True)
    desk.close()
    match = desk.tree.acquire("base", talk(0, 11))
    assert match.length == 10 and match.state is not None
    for g in range(2):
        desk.tree.evict(g, 100)
    desk.tree.evict_states(100)
    held = [page for page in match.shared[1] + match.copy if page is not None and page != HOLE]
    assert held and desk.states is not None
    assert all(desk.pools[1].references(page) for page in [*match.shared[1], match.copy[1]] if page != HOLE)
    assert all(desk.pools[0].references(page) for page in [*match.shared[0], match.copy[0]])
    assert desk.states.references(match.state) == 1 + desk.states.kept(match.state)
    desk.tree.abandon(match)
    for g in range(2):
        desk.tree.evict(g, 100)
    desk.tree.evict_states(100)
    assert [pool.free for pool in desk.pools] == [32, 32]
    assert desk.states.free == 2


def test_evicting_a_window_leaves_the_later_places_to_resume() -> None:
    desk = Desk(None, 4, pages=16)
    desk.write(talk(0, 32))
    for pool, table in zip(desk.pools, desk.open[0][0]):
        pool.release(table[:4])  # as the window slides, oldest first
        pool.retain(table[:4] if pool is desk.pools[0] else [])
    desk.open[0][0][1][:4] = [HOLE] * 4
    desk.close()
    assert desk.tree.evict(1, 4) == 4
    assert desk.found(talk(0, 32)) == 32
    assert desk.found(talk(0, 19)) == 19
    assert desk.found(talk(0, 18)) == 0  # looks back at position 15
    assert desk.tree.stats.tokens_held == 32
    assert desk.tree.evict(1, 1) == 1  # the end of the window: what lies behind is of no use to any group
    assert desk.found(talk(0, 32)) == 28
    assert desk.tree.stats.tokens_held == 28
    desk.tree.check()


def test_holes_are_filled_by_who_computes_them_again() -> None:
    desk = Desk(None, 8)
    desk.write(talk(0, 24), slid=True)
    assert desk.found(talk(0, 16)) == 0
    desk.write(talk(0, 17))
    assert desk.found(talk(0, 16)) == 16
    assert desk.tree.stats.tokens_held == 24


def test_a_hole_is_filled_as_far_as_the_branch_that_was_computed() -> None:
    desk = Desk(2)
    desk.write([0, 0, 0, 0, 0], slid=True)
    assert desk.found([0, 1]) == 0
    desk.write([0, 1])
    assert [desk.found([0, 1]), desk.found([0, 5]), desk.found([0, 0, 0])] == [2, 1, 1]


def test_every_window_must_resume_at_the_same_place() -> None:
    """At 24 only the first window can; at 16 only the second; at 8 both."""
    desk = Desk(8, 3)
    tokens = talk(0, 24)
    match = desk.tree.acquire("base", tokens)
    tables = [pool.allocate(6) for pool in desk.pools]
    for g, i in ((0, 2), (1, 4), (1, 5)):
        desk.pools[g].release([tables[g][i]])
        tables[g][i] = HOLE
    assert match.cursor is not None
    desk.tree.insert(match.cursor, tokens, tables)
    assert desk.found(tokens) == 8


def test_a_window_page_that_several_nodes_list_goes_from_all_of_them() -> None:
    desk = Desk(None, 6, size=8)
    desk.write(talk(0, 20))
    desk.write([0, 1, 50])  # parts inside the first page
    desk.write([0, 1, 2, 3, 60])
    for _ in range(3):
        desk.close()
    assert desk.tree.evict(1, 100) == 5
    desk.tree.check()
    assert desk.pools[1].free == 32
    assert desk.found(talk(0, 20)) == 0


def test_a_page_below_a_hole_counts_to_its_own_end() -> None:
    """Three nodes in one page, each listing a page of its own; the middle one's is evicted."""
    desk = Desk(None, 2, size=8)
    first_page = talk(0, 8)
    desk.write(talk(0, 12))
    desk.write([0, 1, 50])
    desk.write([0, 1, 2, 3, 60])
    table = desk.open[0][0][1]
    desk.pools[1].release([table[0]])  # it slides out
    table[0] = HOLE
    desk.tree.evict(1, 1)
    assert desk.found(first_page) == 0
    for tokens in ([0, 1], [0, 1, 2, 3, 70], [*first_page, 77]):
        desk.write(tokens)
    assert desk.found(first_page) == 8
    upper, middle = desk.open[3][1].node, desk.open[4][1].node.parent
    assert middle is not None and middle.parent is upper
    desk.tree._radix.drop_page(1, middle.pages[1][-1])
    assert middle.pages[1] == [HOLE] != upper.pages[1]
    assert (desk.found([0, 1]), desk.found([0, 1, 2, 3]), desk.found(first_page)) == (2, 2, 8)


def test_of_three_branches_inside_a_page_the_others_stay_when_one_goes() -> None:
    desk = Desk(None, pages=8)
    branches = [[1, 2, 3, 4, 5, 6, last] for last in (7, 8, 9)]
    for branch in branches:
        desk.write(branch)
    while desk.open:
        desk.close()
    free = desk.pools[0].free
    assert desk.tree.evict(0, 1) == 1  # the page of the first, which the common part lists as well
    assert desk.pools[0].free == free + 1
    assert [desk.found(branch) for branch in branches] == [6, 7, 7]
    desk.tree.check()


def test_recurrent_state_is_reused_at_checkpoints_or_not_at_all() -> None:
    desk = Desk(None, states=4)
    desk.write(talk(0, 10), state=True)
    assert desk.found(talk(0, 9)) == 0
    assert desk.found(talk(0, 30)) == 10
    desk.write(talk(0, 23), state=True)
    assert [desk.found(talk(0, n)) for n in (9, 10, 22, 23, 40)] == [0, 10, 10, 23, 23]
    assert desk.found(talk(0, 22) + [999]) == 10


def test_a_second_checkpoint_at_the_same_place_is_given_back() -> None:
    desk = Desk(None, states=4)
    desk.write(talk(0, 10), state=True)
    desk.write(talk(0, 10), state=True)
    assert desk.states is not None and desk.states.held == 1
    assert desk.tree.stats.states == 1


def test_a_checkpoint_without_a_state_pool_is_an_error() -> None:
    desk = Desk(None)
    match = desk.tree.acquire("base", [1])
    assert match.cursor is not None
    with pytest.raises(BookkeepingError):
        desk.tree.insert(match.cursor, [1], [desk.pools[0].allocate(1)], state=0)


def test_without_its_checkpoint_a_branch_goes_at_once() -> None:
    desk = Desk(None, states=4)
    desk.write(talk(0, 8), state=True)
    desk.write(talk(0, 16), state=True)
    desk.close()
    desk.close()
    assert desk.tree.evict_states(1) == 1  # the shorter one was used last when the longer one began
    assert [desk.found(talk(0, n)) for n in (8, 16)] == [0, 16]
    assert desk.tree.evict_states(1) == 1
    assert desk.tree.stats.tokens_held == 0
    assert desk.pools[0].free == 32


def test_a_model_without_attention_reuses_checkpoints() -> None:
    desk = Desk(states=3)
    desk.write(talk(0, 50), state=True)
    assert desk.found(talk(0, 60)) == 50
    assert desk.tree.match("base", talk(0, 60)).shared == []
    desk.write(talk(0, 40))  # without a checkpoint there is nothing to keep
    assert (desk.tree.stats.tokens_held, desk.tree.stats.nodes) == (50, 1)
    assert desk.tree.evict_states(5) == 1
    assert desk.tree.stats.tokens_held == 0


def test_tokens_stay_within_their_limit() -> None:
    desk = Desk(4, size=4, pages=64, token_limit=100)
    for i in range(20):
        desk.write(talk(1000 * i, 30), slid=True)
        desk.close()
        assert desk.tree.stats.tokens_held <= 100 + 30
    assert desk.found(talk(19000, 30)) == 30
    assert desk.found(talk(0, 30)) == 0


def test_forgetting_one_key_leaves_the_others() -> None:
    desk = Desk(None)
    desk.write(talk(0, 8), "one")
    desk.write(talk(0, 8), "two")
    desk.tree.forget("one")
    desk.tree.forget("never seen")
    assert (desk.found(talk(0, 8), "one"), desk.found(talk(0, 8), "two")) == (0, 8)
    tables, cursor = desk.open[0]
    assert cursor.position == 0
    desk.tree.insert(cursor, talk(0, 8), tables)  # the sequence goes on
    assert desk.found(talk(0, 8), "one") == 8


def test_a_cursor_survives_the_eviction_of_its_place() -> None:
    desk = Desk(None, pages=8)
    desk.write(talk(0, 12))
    tables, cursor = desk.open[0]
    desk.pools[0].release(tables[0][2:])
    tables[0][2:] = []
    assert desk.tree.evict(0, 8) == 1
    assert cursor.position == 8
    tables[0] += desk.pools[0].allocate(2)
    desk.tree.insert(cursor, talk(0, 16), tables)
    assert desk.found(talk(0, 16)) == 16


def test_statistics_count_lookups_and_hits() -> None:
    desk = Desk(None)
    desk.write(talk(0, 9))
    desk.write(talk(0, 9))
    stats = desk.tree.stats
    assert (stats.lookups, stats.lookup_tokens, stats.hit_tokens) == (2, 16, 8)
    assert (stats.tokens_held, stats.nodes) == (9, 1)
    assert desk.tree.pages_referenced(0).keys() == set(desk.pools[0].kept_pages())


def test_check_finds_damage() -> None:
    desk = Desk(None)
    desk.write(talk(0, 9))
    node = desk.open[0][1].node
    node.pages[0][0], node.pages[0][1] = node.pages[0][1], 31
    with pytest.raises(BookkeepingError, match="owner"):
        desk.tree.check()
