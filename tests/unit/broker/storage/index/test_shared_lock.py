"""Threads share the lock, or one thread holds it exclusively; a thread that waits for that keeps
newer ones out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from keylane.broker.storage.index.rocksdb_tables import SharedLock

QUIET_S = 0.1
"""How long a thread is watched that must not get the lock."""
END_S = 60


class LockTaker:
    """A thread that takes the lock, and leaves when it is told to."""

    def __init__(self, enter: Callable[[], AbstractContextManager[None]]) -> None:
        self.inside = threading.Event()
        self._leave = threading.Event()
        self._enter = enter
        self._thread = threading.Thread(target=self._visit, daemon=True)
        self._thread.start()

    def _visit(self) -> None:
        with self._enter():
            self.inside.set()
            self._leave.wait(END_S)

    def close_unflushed(self) -> None:
        assert self.inside.wait(END_S)
        self._leave.set()
        self._thread.join(END_S)
        assert not self._thread.is_alive()


def test_threads_share_the_lock():
    lock = SharedLock()
    visitors = [LockTaker(lock.shared), LockTaker(lock.shared)]
    assert all(visitor.inside.wait(END_S) for visitor in visitors)
    for visitor in visitors:
        visitor.close_unflushed()


@pytest.mark.parametrize(
    ("first", "second"),
    [("shared", "exclusive"), ("exclusive", "shared"), ("exclusive", "exclusive")],
)
def test_thread_waits_when_it_or_another_is_exclusive(first: str, second: str):
    lock = SharedLock()
    inside = LockTaker(getattr(lock, first))
    assert inside.inside.wait(END_S)
    waiting = LockTaker(getattr(lock, second))
    assert not waiting.inside.wait(QUIET_S)
    inside.close_unflushed()
    waiting.close_unflushed()


def test_new_thread_is_kept_out_when_another_waits_to_be_exclusive():
    lock = SharedLock()
    reader = LockTaker(lock.shared)
    assert reader.inside.wait(END_S)
    writer = LockTaker(lock.exclusive)
    assert not writer.inside.wait(QUIET_S)
    newer = LockTaker(lock.shared)
    assert not newer.inside.wait(QUIET_S)
    reader.close_unflushed()
    writer.close_unflushed()
    newer.close_unflushed()


def test_lock_is_free_when_its_thread_has_failed():
    lock = SharedLock()
    for enter in (lock.shared, lock.exclusive):
        with pytest.raises(ValueError, match="failed"), enter():
            raise ValueError("failed")
    LockTaker(lock.exclusive).close_unflushed()
