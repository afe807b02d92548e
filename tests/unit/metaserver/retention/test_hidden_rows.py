"""Since when hidden subjects count as idle, and what the list says of it."""

from __future__ import annotations

from keylane.metaserver.cluster.subjects import open_subject, subject_summaries
from keylane.metaserver.publications.hiding import plan_hidden
from keylane.metaserver.publications.publishing import begin_publication
from keylane.metaserver.retention.hidden_subjects import (
    IdleHiddenSubject,
    list_idle_hidden,
    restart_idle_time,
    start_hidden_idle_times,
)
from keylane.metaserver.sql.clock_restart import restart_times
from keylane.protocol.operations import HideSubject, PublishSubject
from support.sql.rows import Rows

HOUR = 3_600_000


class HiddenSubjectRows(Rows):
    """A subject `s`, and calls that make and list hidden ones beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.report("g1")
        self.create("s", 1)

    def hide(self, name: str) -> int:
        row = self.run(plan_hidden, "s", HideSubject(hidden=name), subjects_max=100)
        self.run(open_subject, name)
        return row.subject_id

    def idle(self) -> list[IdleHiddenSubject]:
        return self.run(list_idle_hidden, at_least_ms=10 * HOUR)

    def left(self) -> dict[str, int | None]:
        listed = self.run(subject_summaries, hidden_expires_ms=10 * HOUR)
        return {each.subject: each.expires_in_ms for each in listed}


def test_hidden_subject_is_idle_since_it_was_made_asked_for_or_filled():
    rows = HiddenSubjectRows()
    first, second = rows.hide("a"), rows.hide("b")
    rows.clock.advance(9 * HOUR)
    assert rows.hide("a") == first
    rows.clock.advance(HOUR)
    assert rows.left() == {"a": 9 * HOUR, "b": 0, "s": None}
    idle = IdleHiddenSubject(subject_id=second, subject="b", target="s", messages=0)
    assert rows.idle() == [idle]
    rows.run(restart_idle_time, second, 5)
    rows.clock.advance(10 * HOUR)
    assert [(each.subject, each.messages) for each in rows.idle()] == [("a", 0), ("b", 5)]


def test_hidden_subject_counts_anew_with_the_clock_and_no_longer_when_published():
    """So does one that an earlier version has made."""
    rows = HiddenSubjectRows()
    rows.hide("a")
    rows.clock.advance(11 * HOUR)
    rows.run(restart_times, broker_ttl_ms=1_000)
    assert rows.idle() == []
    rows.run(start_hidden_idle_times)
    rows.clock.advance(11 * HOUR)
    assert [each.subject for each in rows.idle()] == ["a"]
    rows.run(begin_publication, "a", PublishSubject(target="s"), driver="d", lease_ms=1_000)
    assert rows.idle() == []
