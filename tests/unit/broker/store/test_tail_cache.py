"""The cache gives whole batches in order, and stays within its budget."""

from __future__ import annotations

from keylane.broker.store.tail_cache import ENTRY_BYTES, TailCache


def filled(cache: TailCache, count: int = 4, partition_id: int = 1) -> TailCache:
    for number in range(count):
        cache.add(partition_id, 2 * number, 2 * number + 2, header=b"h", body=b"%03d" % number)
    return cache


def test_batches_come_in_order_up_to_the_budget():
    """At least one batch, then as many as fit."""
    cache = filled(TailCache(1 << 20))
    assert cache.read(1, 2, bytes_max=8) == ([b"h", b"001", b"h", b"002"], 6)
    assert cache.read(1, 2, bytes_max=1) == ([b"h", b"001"], 4)
    assert cache.read(1, 0, bytes_max=100)[1] == 8


def test_cache_gives_nothing_when_it_lacks_the_batch():
    """An offset within a batch, an unknown one, or another partition gives nothing."""
    cache = filled(TailCache(1 << 20))
    assert cache.read(1, 1, bytes_max=100) == ([], 1)
    assert cache.read(1, 8, bytes_max=100) == ([], 8)
    assert cache.read(2, 0, bytes_max=100) == ([], 0)


def test_oldest_leave_first():
    """Beyond the budget the oldest batches go, whatever their partition."""
    cache = TailCache(3 * (ENTRY_BYTES + 4))
    filled(cache, 2, partition_id=1)
    filled(cache, 2, partition_id=2)

    assert cache.read(1, 0, bytes_max=1) == ([], 0)
    assert cache.read(1, 2, bytes_max=1)[1] == 4
    assert cache.read(2, 0, bytes_max=100)[1] == 4


def test_no_budget_keeps_nothing():
    """A cache of no bytes is off."""
    assert filled(TailCache(0)).read(1, 6, bytes_max=100) == ([], 6)
