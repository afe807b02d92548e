"""Tokens and principals, of which clusters make and revoke some for years."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from keylane.metaserver.access import rows
from keylane.metaserver.access.book import CHANGED_MS
from keylane.metaserver.access.rows import (
    create_access_state,
    create_token,
    grant,
    read_tokens,
    revoke_token,
)
from keylane.protocol.access.rights import AccessGrant, Rights
from keylane.protocol.errors import OverloadedError
from keylane.protocol.http.access import ChangeGrant, CreateToken, TokenView

LATER = CHANGED_MS + 1


def make(
    connection: sa.Connection, name: str, *, now_ms: int = 0, ends_at_ms: int = 0
) -> TokenView:
    ask = CreateToken(principal=name, ends_at_ms=ends_at_ms)
    return create_token(connection, ask, f"{name} {now_ms}", now_ms=now_ms)


def listed(connection: sa.Connection, now_ms: int) -> list[int]:
    return [view.token_id for view in read_tokens(connection, None, now_ms)]


@pytest.fixture
def connection(engine: sa.Engine):
    with engine.begin() as connection:
        create_access_state(connection, "c")
        yield connection


def test_token_is_created_when_as_many_were_revoked_as_there_may_be(connection, monkeypatch):
    """A program whose token is renewed each day could have none after its 10,000th."""
    monkeypatch.setattr(rows, "TOKENS_MAX", 3)
    made = []
    for day in range(1, 10):
        made.append(make(connection, "shop", now_ms=day).token_id)
        revoke_token(connection, made[-1], now_ms=day)
    made.append(make(connection, "shop", now_ms=10).token_id)
    assert listed(connection, 10) == made[-3:]


def test_place_of_a_revoked_token_is_taken_before_that_of_one_that_ended(connection, monkeypatch):
    """A calendar that is wrong for a while ends no token that is in use, as long as there are
    others.
    """
    monkeypatch.setattr(rows, "TOKENS_MAX", 3)
    ended, revoked, used = (
        make(connection, name, now_ms=1, ends_at_ms=ends_at_ms).token_id
        for name, ends_at_ms in (("a", 5), ("b", 0), ("c", 0))
    )
    revoke_token(connection, revoked, now_ms=8)
    first = make(connection, "d", now_ms=9).token_id
    assert listed(connection, 9) == [ended, used, first]
    second = make(connection, "e", now_ms=10).token_id
    assert listed(connection, 10) == [used, first, second]


def test_token_is_refused_when_every_other_may_still_be_used(connection, monkeypatch):
    monkeypatch.setattr(rows, "TOKENS_MAX", 2)
    held = [make(connection, "a", ends_at_ms=9).token_id, make(connection, "b").token_id]
    with pytest.raises(OverloadedError, match="revoke unused ones"):
        make(connection, "c", now_ms=8)
    assert listed(connection, 8) == held


def test_principal_begins_when_others_have_no_right_and_no_token_any_more(connection, monkeypatch):
    """A cluster that names a principal for each job could name none after its 10,000th."""
    monkeypatch.setattr(rows, "PRINCIPALS_MAX", 2)
    for number in range(5):
        now_ms = (number + 1) * LATER
        token = make(connection, f"job-{number}", now_ms=now_ms)
        revoke_token(connection, token.token_id, now_ms=now_ms)
    names = [view.principal for view in read_tokens(connection, None, 0)]
    assert names == ["job-3", "job-4"]


@pytest.mark.parametrize("kept_by", ["right", "token", "change"])
def test_principal_is_refused_when_every_other_is_in_use(connection, monkeypatch, kept_by):
    """Or was changed so lately that brokers have to be told."""
    monkeypatch.setattr(rows, "PRINCIPALS_MAX", 1)
    token = make(connection, "a", now_ms=1)
    if kept_by == "right":
        right = AccessGrant(Rights.READ, "orders", "*")
        grant(connection, ChangeGrant(principal="a", grant=right), now_ms=1)
    if kept_by != "token":
        revoke_token(connection, token.token_id, now_ms=1)
    with pytest.raises(OverloadedError, match="revoke unused ones"):
        make(connection, "b", now_ms=1 + CHANGED_MS if kept_by == "change" else 1 + LATER)
    assert listed(connection, LATER) == [token.token_id]
