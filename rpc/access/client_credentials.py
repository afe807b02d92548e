"""The credentials of a client: it shows its token to metaservers, and capabilities to brokers.

    token ─▶ metaserver ─▶ capabilities ─▶ brokers        renewed after RENEW_SHARE of their time,
                                                          or when one is refused

Invariants
    A token goes to the metaservers that the client was given, and nowhere else.
    At most one request is in progress, whose answer serves all callers that wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ...protocol.clock import Clock, SystemClock
from ...protocol.errors import (
    InvalidRequestError,
    KeylaneError,
    NotSentError,
    Reason,
    UnreachableError,
)
from ...protocol.http.access import Capabilities
from ..race import shared, start_task
from .credentials import ShownCapability
from .signing import OwnKey
from .token_file import TokenSource

RENEW_SHARE = 0.6

Ask = Callable[[str, str | None, bytes], Awaitable[Capabilities]]
"""Function that asks the metaserver at an address for capabilities, with a token and the holder's
public key.
"""


class ClientCredentials:
    """
    The identity of a client with a token.

    Args:
        source: source of the token; None: metaservers identify the client by its certificate.
    """

    def __init__(self, source: TokenSource | None, ask: Ask, *, clock: Clock | None = None) -> None:
        self._source = source
        self._ask = ask
        self._boot_ms = (clock or SystemClock()).boot_ms
        self._metaservers: dict[str, None] = {}
        self._key = OwnKey()
        self._have: Capabilities | None = None
        self._renew_at_ms = self._ends_at_ms = 0
        self._asking: asyncio.Task[None] | None = None

    def know_metaservers(self, addresses: Sequence[str]) -> None:
        """See `Credentials.know_metaservers`."""
        self._metaservers.update(dict.fromkeys(addresses))

    async def bearer(self, address: str) -> str | None:
        """See `Credentials.bearer`. Raises ConfigError, UnauthenticatedError,
        NotSentError.
        """
        if address in self._metaservers:
            return None if self._source is None else self._source()
        have = await self._current()
        return (have.bearer or None) if have is not None else None

    async def held(self) -> ShownCapability | None:
        """See `Credentials.held`. Raises the errors of `bearer`."""
        have = await self._current()
        if have is None or not have.held:
            return None
        left_s = max(0.0, (self._renew_at_ms - self._boot_ms()) / 1000)
        return ShownCapability(have.held, self._key, left_s)

    def refused(self, text: str) -> bool:
        """See `Credentials.refused`."""
        have = self._have
        if have is None:
            return False
        if text in (have.bearer, have.held):
            self._have = None
        return True

    async def _current(self) -> Capabilities | None:
        now_ms = self._boot_ms()
        if self._source is None and not self._metaservers:
            return None  # a client that only calls brokers
        if self._have is None or now_ms >= self._renew_at_ms:
            try:
                await self._renew()
            except UnreachableError:
                if self._have is None or now_ms >= self._ends_at_ms:
                    raise
        return self._have

    async def _renew(self) -> None:
        if self._asking is None:
            self._asking = start_task(self._ask_all())
            self._asking.add_done_callback(self._asked)
        await shared(self._asking, "the client was closed before a metaserver gave it a capability")

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking = None
        if not task.cancelled():
            task.exception()

    async def _ask_all(self) -> None:
        token = None if self._source is None else self._source()
        raised: KeylaneError = NotSentError("no metaserver is known that gives capabilities")
        for address in list(self._metaservers):
            began_ms = self._boot_ms()
            try:
                have = await self._ask(address, token, self._key.public)
            except InvalidRequestError as error:
                if error.reason is not Reason.ACCESS_OFF:
                    raise
                have = Capabilities(principal="", bearer="", ends_in_ms=60_000)
            except UnreachableError as error:
                raised = error
                continue
            self._have = have
            self._ends_at_ms = began_ms + have.ends_in_ms
            self._renew_at_ms = began_ms + round(have.ends_in_ms * RENEW_SHARE)
            return
        # The call that needs the capability has not begun yet.
        raise NotSentError(f"no capability: {raised.message}") from raised

    async def close(self) -> None:
        """End a request in progress."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
