"""Resumes a client's TLS sessions, which avoids verifying the server's certificate again.

    handshake ─▶ the server's tickets arrive with its first bytes ─▶ stored, one for each name
              ─▶ offered at the next handshake

A server that cannot use a ticket, for example after a restart, does a full handshake. A session
depends on the certificate that was originally verified, so it is offered only until that
certificate expires, and for at most RESUMED_S.

This only uses the documented interface of `ssl`: `SSLContext.wrap_bio` with a session, and
`SSLContext.sslobject_class`.
"""

from __future__ import annotations

import ssl
from collections import OrderedDict
from typing import Any, NamedTuple

from ...protocol.clock import SystemClock

RESUMED_S = 3_600
"""The time in seconds that a session is offered after its full handshake. OpenSSL servers accept it
for two hours.
"""
NAMES_MAX = 16
"""The maximum number of server names whose sessions a context stores. A context is used for one
server, which usually has one name.
"""
READ_BYTES = 64 << 10
"""The size of the buffer that is allocated for a read. Event loops ask for 256 KiB, but a TLS
record has at most 16 KiB.
"""


_wall_ms = SystemClock().wall_ms


def _now_s() -> float:
    """Return the wall-clock time in seconds since 1970, as used for the dates of certificates."""
    return _wall_ms() / 1000


class _StoredSession(NamedTuple):
    """A session, and the time until which it is offered."""

    session: ssl.SSLSession
    until_s: float


class SmallReadObject(ssl.SSLObject):
    """The TLS of one connection, which allocates a small buffer for a read without one."""

    def read(self, size: int = 1024, buffer: Any = None) -> Any:
        """See `ssl.SSLObject.read`."""
        return super().read(min(size, READ_BYTES)) if buffer is None else super().read(size, buffer)


class SmallReadContext(ssl.SSLContext):
    """A context whose connections do not allocate large buffers to read."""

    sslobject_class = SmallReadObject


class _ResumingObject(SmallReadObject):
    """The TLS of one client connection, which passes its session to the context so that it can be
    resumed later.
    """

    _is_first_read = True

    def read(self, size: int = 1024, buffer: Any = None) -> Any:
        """See `ssl.SSLObject.read`; a server's tickets arrive before its first bytes."""
        data = super().read(size, buffer)  # raises an error while nothing has arrived
        if self._is_first_read:
            self._is_first_read = False
            context = self.context
            assert isinstance(context, ResumingContext)
            context.store_session(self)
        return data


class ResumingContext(ssl.SSLContext):
    """The context for a client's connections to one server, which resume each other's sessions."""

    sslobject_class = _ResumingObject
    _sessions_by_name: OrderedDict[str, _StoredSession]

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """See `ssl.SSLContext.wrap_bio`. Offers the session that is stored for the name."""
        stored_session = self._sessions.get(str(server_hostname))
        if session is None and stored_session is not None and _now_s() < stored_session.until_s:
            session = stored_session.session
        return super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)

    def store_session(self, connection: ssl.SSLObject) -> None:
        """
        Store a connection's session for later connections to the same name.

        A resumed connection provides no new session; the stored one is offered again until its time
        is up. Before Python 3.12.7, and in 3.13.0, each access to `session` leaks a copy of it
        (gh-116810), so it is only read once per full handshake.
        """
        if connection.session_reused:
            return
        session = connection.session
        if session is None or not session.has_ticket:
            return
        now_s = _now_s()
        certificate: Any = connection.getpeercert() or {}
        expires = certificate.get("notAfter")
        expires_s = ssl.cert_time_to_seconds(expires) if expires else now_s
        name = str(connection.server_hostname)
        self._sessions[name] = _StoredSession(session, min(expires_s, now_s + RESUMED_S))
        self._sessions.move_to_end(name)
        while len(self._sessions) > NAMES_MAX:
            self._sessions.popitem(last=False)

    @property
    def _sessions(self) -> OrderedDict[str, _StoredSession]:
        """The stored sessions by name. Created on first use, because an `ssl.SSLContext` is created
        by `__new__`.
        """
        if "_sessions_by_name" not in self.__dict__:
            self._sessions_by_name = OrderedDict()
        return self._sessions_by_name
