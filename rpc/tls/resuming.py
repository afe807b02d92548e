"""TLS contexts of clients that resume sessions: a new connection to a known server needs no
certificate.

    handshake ─▶ the server's tickets arrive with its first bytes ─▶ kept, one for each name
              ─▶ offered at the next handshake

A server that cannot use a ticket, for example after its restart, does a full handshake. A resumed
session rests on the certificate of the first one, so it is offered until that certificate ends, and
for at most RESUMED_S.

It uses only what `ssl` documents: `SSLContext.wrap_bio` with a session, and
`SSLContext.sslobject_class`.
"""

from __future__ import annotations

import ssl
from collections import OrderedDict
from typing import Any, NamedTuple

from ...protocol.clock import SystemClock

RESUMED_S = 3_600
"""Seconds for which a session is offered after its certificate was verified; OpenSSL's servers
accept it for two hours.
"""
NAMES_MAX = 16
"""Number of server names whose sessions a context keeps; its connections are to one server, which
usually has one name.
"""
READ_BYTES = 64 << 10
"""Bytes of the buffer that a read makes. Event loops ask for 256 KiB and get a record of 16 KiB.
"""


_wall_ms = SystemClock().wall_ms


def _now_s() -> float:
    """Return the time of the wall clock, in seconds like the dates of certificates."""
    return _wall_ms() / 1000


class _Kept(NamedTuple):
    session: ssl.SSLSession
    until_s: float


class BulkObject(ssl.SSLObject):
    """TLS of one connection; a read without its own buffer makes a small one."""

    def read(self, size: int = 1024, buffer: Any = None) -> Any:
        """See `ssl.SSLObject.read`."""
        return super().read(min(size, READ_BYTES)) if buffer is None else super().read(size, buffer)


class BulkContext(ssl.SSLContext):
    """A context whose connections read without large buffers."""

    sslobject_class = BulkObject


class _ResumingObject(BulkObject):
    """TLS of one connection of a client; it gives its context the session once it can be
    resumed.
    """

    _fresh = True

    def read(self, size: int = 1024, buffer: Any = None) -> Any:
        """See `ssl.SSLObject.read`; a server's tickets come before its first bytes."""
        taken = super().read(size, buffer)  # raises while nothing has arrived
        if self._fresh:
            self._fresh = False
            context = self.context
            assert isinstance(context, ResumingContext)
            context.take(self)
        return taken


class ResumingContext(ssl.SSLContext):
    """The context of a client's connections to one server."""

    sslobject_class = _ResumingObject
    _kept: OrderedDict[str, _Kept]

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """See `ssl.SSLContext.wrap_bio`; it offers the session that was kept for the name."""
        kept = self._sessions.get(str(server_hostname))
        if session is None and kept is not None and _now_s() < kept.until_s:
            session = kept.session
        return super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)

    def take(self, connection: ssl.SSLObject) -> None:
        """
        Keep the session of a connection for the next ones to the same name.

        A connection that has resumed a session brings no new one: the offered session is offered
        again until its time is over. Each read of `session` leaves a copy of it in memory for
        ever, with Python before 3.12.7, and with 3.13.0 (gh-116810), so it is read once for each
        full handshake.
        """
        if connection.session_reused:
            return
        session = connection.session
        if session is None or not session.has_ticket:
            return
        now_s = _now_s()
        certificate: Any = connection.getpeercert() or {}
        ends = certificate.get("notAfter")
        ends_s = ssl.cert_time_to_seconds(ends) if ends else now_s
        name = str(connection.server_hostname)
        self._sessions[name] = _Kept(session, min(ends_s, now_s + RESUMED_S))
        self._sessions.move_to_end(name)
        while len(self._sessions) > NAMES_MAX:
            self._sessions.popitem(last=False)

    @property
    def _sessions(self) -> OrderedDict[str, _Kept]:
        """Kept sessions, made at the first use because `ssl.SSLContext` is made by `__new__`."""
        if "_kept" not in self.__dict__:
            self._kept = OrderedDict()
        return self._kept
