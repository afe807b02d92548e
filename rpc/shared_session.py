"""The aiohttp session that the networks of one event loop share: kept connections serve all clients of a program.

aiohttp keeps connections apart by host, port and TLS context, and every request brings its own token, so nothing of one
client is shown for another.  A network with TLS has contexts of its own, and so connections of its own.
"""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

import aiohttp

from .home import process_id


class SharedSession:
    """A session, until the last of its users has left."""

    def __init__(self) -> None:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=False), trust_env=False
        )
        self.users: set[object] = set()
        self._loop = asyncio.get_running_loop()
        self._process_id = process_id()

    @property
    def is_here(self) -> bool:
        """True in the event loop and the process that made it: a child must not speak on connections of its parent."""
        return self._loop is asyncio.get_running_loop() and self._process_id == process_id()

    async def leave(self, user: object) -> None:
        """Note that `user` needs it no longer; the last one closes it, and with it every connection."""
        self.users.discard(user)
        if not self.users:
            if _sessions.get(id(self._loop)) is self:
                del _sessions[id(self._loop)]
            await self.session.close()


_sessions: WeakValueDictionary[int, SharedSession] = WeakValueDictionary()
"""By event loop; weak, because a session keeps its event loop."""


def shared_session(user: object) -> SharedSession:
    """The session of the running event loop, for `user` until it leaves."""
    key = id(asyncio.get_running_loop())
    shared = _sessions.get(key)
    if shared is None or not shared.is_here:
        shared = _sessions[key] = SharedSession()
    shared.users.add(user)
    return shared
