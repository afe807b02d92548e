"""News of access that are older than others do not count, unless nothing newer is told for long."""

from __future__ import annotations

from msgspec.structs import replace

from keylane.broker.access.newest_news import OLDER_AFTER_MS, NewestNews
from keylane.protocol.access.capability import AccessNews

NEW = AccessNews(cluster="c", now_ms=0, keys={}, version=7)
OLD = replace(NEW, version=6)


def test_older_news_are_passed_over_while_newer_are_told() -> None:
    newest = NewestNews()
    assert newest.accept(NEW, 0)
    assert not newest.accept(OLD, 1_000)
    assert newest.accept(NEW, 9_000)
    assert not newest.accept(OLD, 9_000 + OLDER_AFTER_MS - 1)


def test_older_news_count_when_nothing_newer_was_told_for_long() -> None:
    """The database was restored from a backup."""
    newest = NewestNews()
    newest.accept(NEW, 0)
    assert newest.accept(OLD, OLDER_AFTER_MS)
    assert newest.accept(OLD, OLDER_AFTER_MS + 1)
    assert newest.accept(NEW, OLDER_AFTER_MS + 2)


def test_news_count_when_they_are_of_another_cluster() -> None:
    newest = NewestNews()
    newest.accept(NEW, 0)
    assert newest.accept(replace(OLD, cluster="d"), 1)
