"""Bodies of the control calls that renew several sessions at once.  Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..control import ErrorBody, Grants, Heartbeat
from ..limits import SESSIONS_AT_ONCE_MAX


class Heartbeats(Struct, frozen=True, kw_only=True):
    """Heartbeats of several sessions of one client program.  The answer comes when the grants of
    one of them differ.
    """

    heartbeats: Annotated[
        tuple[Heartbeat, ...], Meta(min_length=1, max_length=SESSIONS_AT_ONCE_MAX)
    ]
    """Each with a `wait_ms` of its own; the shortest counts for all."""


class HeartbeatNews(Struct, frozen=True, kw_only=True):
    """The answer to one heartbeat of several: grants, or why there are none."""

    session: str
    grants: Grants | None = None
    error: ErrorBody | None = None


class HeartbeatAnswers(Struct, frozen=True, kw_only=True):
    """A session that is not named here was renewed, and has the grants whose version its heartbeat
    knew.
    """

    news: tuple[HeartbeatNews, ...] = ()
