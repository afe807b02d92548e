"""A client's credentials: a token that is sent to metaservers, and capabilities that are sent to
brokers.

    token ─▶ metaserver ─▶ capabilities ─▶ brokers        renewed after RENEW_SHARE of their
                                                          lifetime, or when one is refused

Invariants
    The token is sent only to the metaservers that the client was configured with.
    At most one renewal is in progress; all callers that need it share its result.
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
from ..race import start_task, wait_for_shared
from .credentials import CapabilityCredential
from .signing import OwnKey
from .token_file import TokenSource

RENEW_SHARE = 0.6

RequestCapabilities = Callable[[str, str | None, bytes], Awaitable[Capabilities]]
"""A function that requests capabilities from the metaserver at an address, with a token and the
holder's public key.
"""


class ClientCredentials:
    """
    Provides a client's token, and capabilities that are renewed before they expire.

    Args:
        source: the source of the token; None if metaservers identify the client by its certificate.
        request: requests capabilities from one metaserver.
    """

    def __init__(
        self,
        source: TokenSource | None,
        request: RequestCapabilities,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._source = source
        self._request = request
        self._boot_ms = (clock or SystemClock()).boot_ms
        self._metaservers: dict[str, None] = {}
        self._key = OwnKey()
        self._capabilities: Capabilities | None = None
        self._renew_at_ms = self._expires_at_ms = 0
        self._renewal: asyncio.Task[None] | None = None

    def add_metaservers(self, addresses: Sequence[str]) -> None:
        """See `Credentials.add_metaservers`."""
        self._metaservers.update(dict.fromkeys(addresses))

    async def bearer(self, address: str) -> str | None:
        """See `Credentials.bearer`. Raises ConfigError, UnauthenticatedError, NotSentError."""
        if address in self._metaservers:
            return None if self._source is None else self._source()
        capabilities = await self._current()
        return (capabilities.bearer or None) if capabilities is not None else None

    async def data_capability(self) -> CapabilityCredential | None:
        """See `Credentials.data_capability`. Raises the errors of `bearer`."""
        capabilities = await self._current()
        if capabilities is None or not capabilities.held:
            return None
        renew_in_s = max(0.0, (self._renew_at_ms - self._boot_ms()) / 1000)
        return CapabilityCredential(capabilities.held, self._key, renew_in_s)

    def mark_refused(self, text: str) -> bool:
        """See `Credentials.mark_refused`."""
        capabilities = self._capabilities
        if capabilities is None:
            return False
        if text in (capabilities.bearer, capabilities.held):
            self._capabilities = None
        return True

    async def _current(self) -> Capabilities | None:
        """Return valid capabilities, renewed if that is due; None if the client needs none."""
        now_ms = self._boot_ms()
        if self._source is None and not self._metaservers:
            return None  # for a client that only calls brokers
        if self._capabilities is None or now_ms >= self._renew_at_ms:
            try:
                await self._renew()
            except UnreachableError:
                if self._capabilities is None or now_ms >= self._expires_at_ms:
                    raise
        return self._capabilities

    async def _renew(self) -> None:
        """Renew the capabilities, or wait for a renewal that is already in progress."""
        if self._renewal is None:
            self._renewal = start_task(self._request_from_any())
            self._renewal.add_done_callback(self._on_renewed)
        closed = "the client was closed before a metaserver gave it a capability"
        await wait_for_shared(self._renewal, closed)

    def _on_renewed(self, task: asyncio.Task[None]) -> None:
        self._renewal = None
        if not task.cancelled():
            task.exception()  # mark it as retrieved, because every caller may have been cancelled

    async def _request_from_any(self) -> None:
        """Request capabilities from each metaserver in turn until one responds."""
        token = None if self._source is None else self._source()
        last_error: KeylaneError = NotSentError("no metaserver is known that issues capabilities")
        for address in list(self._metaservers):
            requested_at_ms = self._boot_ms()
            try:
                capabilities = await self._request(address, token, self._key.public)
            except InvalidRequestError as error:
                if error.reason is not Reason.ACCESS_OFF:
                    raise
                capabilities = Capabilities(principal="", bearer="", ends_in_ms=60_000)
            except UnreachableError as error:
                last_error = error
                continue
            self._capabilities = capabilities
            self._expires_at_ms = requested_at_ms + capabilities.ends_in_ms
            self._renew_at_ms = requested_at_ms + round(capabilities.ends_in_ms * RENEW_SHARE)
            return
        # The call that needs the capability has not been sent yet.
        raise NotSentError(f"no capability: {last_error.message}") from last_error

    async def close(self) -> None:
        """Cancel the renewal in progress."""
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
