"""Page pools: all-or-nothing allocation, reference counts, and the order in which pages fall idle."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.cache.pages import (
    HOLE,
    BookkeepingError,
    OutOfPages,
    PagePool,
    first_live_page,
    pages_for,
)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for_rounds_up(tokens: int, pages: int) -> None:
    assert pages_for(tokens, 16) == pages


@given(st.integers(0, 100), st.none() | st.integers(1, 20), st.integers(1, 8))
def test_first_live_page_is_the_page_of_the_oldest_visible_key(
    position: int, window: int | None, size: int
) -> None:
    visible = [p for p in range(position + 1) if window is None or p > position - window]
    assert first_live_page(position, window, size) == min(p // size for p in visible)


def test_allocation_is_all_or_nothing() -> None:
    pool = PagePool(4)
    taken = pool.allocate(3)
    assert sorted(set(taken)) == sorted(taken)
    assert all(pool.references(page) == 1 for page in taken)
    with pytest.raises(OutOfPages) as caught:
        pool.allocate(2)
    assert (caught.value.needed, caught.value.free) == (2, 1)
    assert (pool.free, pool.held) == (1, 3)
    assert pool.allocate(0) == []


def test_a_page_comes_free_with_its_last_reference() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.retain([page, HOLE])
    assert pool.release([HOLE, page]) == 0
    assert pool.release([page]) == 1
    assert pool.free == 2


def test_a_pool_shrinks_to_what_is_not_held_and_grows_again() -> None:
    pool = PagePool(6)
    first, second = pool.allocate(2)
    with pytest.raises(BookkeepingError, match="from 1 on"):
        pool.resize(1)
    pool.resize(3)
    assert (pool.total, pool.free, pool.allocate(1)) == (3, 1, [2])
    with pytest.raises(OutOfPages):
        pool.allocate(1)
    pool.resize(5)
    pool.release([first])
    assert pool.allocate(3) == [first, 3, 4]
    pool.check({first: 1, second: 1, 2: 1, 3: 1, 4: 1})


def test_giving_back_what_one_does_not_hold_is_an_error() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.keep(page)
    pool.release([page])
    with pytest.raises(BookkeepingError, match="more often"):
        pool.release([page])  # the last reference is the tree's
    pool.drop(page)
    with pytest.raises(BookkeepingError, match="more often"):
        pool.release([page])
    with pytest.raises(BookkeepingError, match="free"):
        pool.retain([page])
    with pytest.raises(BookkeepingError):
        pool.keep(page)
    with pytest.raises(BookkeepingError):
        pool.drop(page)
    assert pool.free == 2


def test_idle_pages_are_ordered_by_when_they_fell_idle_ends_of_tables_first() -> None:
    pool = PagePool(6)
    first, second = pool.allocate(2), pool.allocate(2)
    for page in first + second:
        pool.keep(page)
    assert (pool.idle, pool.available) == (0, 2)
    pool.release(second)
    pool.release(first)
    assert list(pool.idle_pages()) == [*reversed(second), *reversed(first)]
    pool.retain([second[1]])  # in use again
    assert pool.oldest_idle() == second[0]
    pool.release([second[1]])
    assert list(pool.idle_pages())[-1] == second[1]
    assert (pool.idle, pool.available, pool.free) == (4, 6, 2)
    assert pool.drop(first[0])
    assert pool.kept_pages() == sorted([first[1], *second])
    assert not pool.kept(first[0])


def test_check_compares_with_what_holders_say() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.check({page: 1})
    with pytest.raises(BookkeepingError, match="expected"):
        pool.check({})
    with pytest.raises(BookkeepingError, match="expected"):
        pool.check({page: 2})


def test_check_finds_a_damaged_free_list_and_idle_list() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool._free.append(page)
    with pytest.raises(BookkeepingError, match="free list"):
        pool.check({page: 1})
    pool._free.pop()
    pool._idle[page] = None
    with pytest.raises(BookkeepingError, match="idle list"):
        pool.check({page: 1})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_counts_against_a_plain_dictionary(data: st.DataObject) -> None:
    pool, held, kept = PagePool(5), list[int](), set[int]()
    for _ in range(data.draw(st.integers(1, 30))):
        step = data.draw(st.sampled_from(["allocate", "retain", "release", "keep", "drop"]))
        if step == "allocate":
            n = data.draw(st.integers(0, 5))
            if n <= pool.free:
                held += pool.allocate(n)
        elif step == "retain" and (held or kept):
            page = data.draw(st.sampled_from(sorted({*held, *kept})))
            pool.retain([page])
            held.append(page)
        elif step == "release" and held:
            page = data.draw(st.sampled_from(held))
            held.remove(page)
            assert pool.release([page]) == (page not in held and page not in kept)
        elif step == "keep" and set(held) - kept:
            page = data.draw(st.sampled_from(sorted(set(held) - kept)))
            pool.keep(page)
            kept.add(page)
        elif step == "drop" and kept:
            page = data.draw(st.sampled_from(sorted(kept)))
            kept.remove(page)
            assert pool.drop(page) == (page not in held)
        pool.check({page: held.count(page) + (page in kept) for page in {*held, *kept}})
        assert pool.idle == len(kept - set(held))
        assert pool.free == 5 - len({*held, *kept})
