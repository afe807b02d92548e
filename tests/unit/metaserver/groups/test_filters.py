"""All members of a group must have the same filter."""

from __future__ import annotations

import pytest

from keylane.metaserver.groups.sessions import join_group, leave_group
from keylane.protocol.control import Join
from keylane.protocol.errors import Reason
from keylane.protocol.limits import TTL_MS_DEFAULT
from support.raising import raises
from support.sql.rows import Rows

A, B, C = "a" * 16, "b" * 16, "c" * 16


@pytest.fixture
def rows() -> Rows:
    rows = Rows()
    rows.report("g1")
    rows.create("s", 4)
    return rows


def join(rows: Rows, session: str, text: str, *, client: str = "") -> None:
    ask = Join(subject="s", group="g", session=session, filter=text, client=client)
    rows.run(join_group, ask, sessions_max=10)


def test_join_with_another_filter_is_refused_while_a_member_lives(rows: Rows):
    """The error names both filters. A filter ends with the last member that has it."""
    join(rows, A, "tags paid", client="first")
    join(rows, B, "tags paid")
    for other in ("tags new", ""):
        with raises(Reason.GROUP_FILTER) as caught:
            join(rows, C, other)
        assert (caught.value.stored, caught.value.asked) == ("tags paid", other)
    assert caught.value.client in {"first", ""}
    join(rows, A, "tags paid")  # a repeat
    for session in (A, B):
        rows.run(leave_group, session)
    join(rows, C, "tags new")


def test_expired_session_keeps_none_from_joining(rows: Rows):
    """A filter counts only until its session expires."""
    join(rows, A, "tags paid")
    rows.clock.advance(TTL_MS_DEFAULT)
    join(rows, B, "")
