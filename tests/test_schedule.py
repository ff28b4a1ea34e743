"""Orders of items: which shards are needed at a time, who writes where, who runs what of a shared conversion."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nvfp4prep.schedule import apart, by_shards, shares
from nvfp4prep.spool import most_bytes, peak_bytes

NEEDS = {0: "d", 1: "ab", 2: "", 3: "a", 4: "cb", 5: "b", 6: "ad", 7: "a"}


def test_items_are_ordered_by_the_shards_they_need() -> None:
    sizes = dict.fromkeys("abcd", 10)
    order = by_shards(NEEDS)
    assert order == [2, 3, 7, 1, 5, 4, 6, 0]
    peak = peak_bytes(order, NEEDS, sizes)
    assert peak == 30  # a stays for item 6
    assert peak_bytes(order, NEEDS, {}) == 0
    assert by_shards({}) == [] and peak_bytes([], {}, sizes) == 0
    assert most_bytes(peak, sizes, "abcd") == 40
    assert most_bytes(peak, sizes, "abc") == 30  # no more than there are


def test_workers_begin_far_from_each_other() -> None:
    assert apart(range(7), 2) == [0, 4, 1, 5, 2, 6, 3]
    assert apart(range(3), 1) == [0, 1, 2]
    assert apart(range(2), 5) == [0, 1]
    assert apart([], 4) == []


@given(st.lists(st.integers(), unique=True), st.integers(1, 9))
def test_no_item_is_lost(order: list[int], workers: int) -> None:
    assert sorted(apart(order, workers)) == sorted(order)


def test_shares_are_runs_of_the_order() -> None:
    needs = [NEEDS[number] for number in range(8)]
    assert shares(needs, [10] * 8, 2) == [2, 1, 1, 1, 2, 2, 2, 1]
    assert shares(needs, [70, 0, 0, 0, 0, 0, 0, 0], 2) == [2, 1, 1, 1, 1, 1, 1, 1]
    assert shares([], [], 3) == []


@given(st.lists(st.tuples(st.sets(st.sampled_from("abcdef")), st.integers(0, 10**12)), max_size=40), st.integers(1, 12))
def test_shares_hold_about_the_same(items: list[tuple[set[str], int]], count: int) -> None:
    sizes = [size for _, size in items]
    owners = shares([needs for needs, _ in items], sizes, count)
    assert all(1 <= owner <= count for owner in owners)
    for share in range(1, count + 1):
        held = sum(size for size, owner in zip(sizes, owners, strict=True) if owner == share)
        assert held <= (sum(sizes) + len(sizes)) / count + max(sizes, default=0) + 1
