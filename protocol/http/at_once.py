"""Bodies of the control calls that renew several sessions at once.  Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..control import ErrorBody, Grants, Heartbeat
from ..limits import SESSIONS_AT_ONCE_MAX


class Heartbeats(Struct, frozen=True, kw_only=True):
    """Heartbeats of several sessions of one client program.  The answer is sent when the grants of
    one of them differ.
    """

    heartbeats: Annotated[
        tuple[Heartbeat, ...], Meta(min_length=1, max_length=SESSIONS_AT_ONCE_MAX)
    ]
    """The heartbeats; the shortest `wait_ms` among them holds for all."""


class HeartbeatNews(Struct, frozen=True, kw_only=True):
    """The answer to one of several heartbeats: grants, or the error of its session."""

    session: str
    grants: Grants | None = None
    error: ErrorBody | None = None


class HeartbeatAnswers(Struct, frozen=True, kw_only=True):
    """The sessions with news.  A session that is not named was renewed, and its grants have the
    version that its heartbeat knew.
    """

    news: tuple[HeartbeatNews, ...] = ()
