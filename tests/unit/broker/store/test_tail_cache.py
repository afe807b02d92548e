"""The cache gives whole batches in order, and stays within its budget."""

from __future__ import annotations

import gc

from keylane.broker.store.tail_cache import COPIED_BYTES_MAX, ENTRY_BYTES, TailCache


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


def test_small_bodies_are_no_objects_of_the_garbage_collector():
    """A broker keeps thousands of them; views of them would be looked at by each full
    collection.
    """
    cache = TailCache(1 << 20)
    large = memoryview(bytes(COPIED_BYTES_MAX + 1))
    for base_offset, body in ((0, memoryview(b"small")), (1, large)):
        cache.add(1, base_offset, base_offset + 1, header=bytearray(b"h"), body=body)

    pieces, _ = cache.read(1, 0, bytes_max=1 << 20)
    assert pieces == [b"h", b"small", b"h", large]
    assert [gc.is_tracked(piece) for piece in pieces] == [False, False, False, True]
    assert pieces[-1] is large, "a large one is not copied"
