"""Verifies capabilities using the latest access news from a metaserver, without one call per
capability.

    text ─▶ cached? ─▶ signed with a known key? ─▶ cluster, expiry, version ─▶ rights

If the key is unknown, a metaserver is asked once: it may have started to sign with that key since
it last sent news. A broker that cannot reach a metaserver keeps using the news it has, because
capabilities expire by themselves. In the meantime, operators can use the tokens from the servers'
settings: the broker knows its own token, and the hashes of the others.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from ...protocol.access.capability import AccessNews, Capability, check_current, parse_capability
from ...protocol.access.principals import ADMIN, CLUSTER
from ...protocol.access.rights import ADMIN_GRANTS, CLUSTER_GRANTS
from ...protocol.access.tokens import is_own_token, token_hash
from ...protocol.clock import Clock
from ...protocol.errors import CapabilityEndedError, KeylaneError, UnauthenticatedError
from ...protocol.frames import Authenticate
from ...rpc.access.caller import Caller
from ...rpc.access.signing import is_proof, is_signed
from ...rpc.race import shield
from .newest_news import NewestNews

CACHED_MAX = 10_000
"""The maximum number of verified capabilities that are cached; the most recent ones are kept."""
ASK_AGAIN_MS = 200
"""The minimum interval, in milliseconds, between two requests for news."""


class JudgedCapability(NamedTuple):
    """The capability of an authenticated connection; see `guard.VerifiedCapability`."""

    judge: CapabilityJudge
    capability: Capability

    @property
    def caller(self) -> Caller:
        """The caller to whom the capability was issued."""
        return _caller(self.capability)

    @property
    def ends_in_ms(self) -> int:
        """The time until the capability expires, in milliseconds."""
        return max(0, self.capability.ends_at_ms - self.judge.now_ms())

    def check(self) -> None:
        """Raise CapabilityEndedError if the capability is no longer valid."""
        self.judge.check(self.capability)


def _caller(capability: Capability) -> Caller:
    return Caller(
        capability.principal,
        capability.grants,
        capability.groups,
        capability.quota,
        capability.ends_at_ms,
    )


class CapabilityJudge:
    """
    Verifies callers' capabilities and tokens.

    Args:
        fetch_news: requests the access news from a metaserver.
        own_token: returns the broker's own token; None if it has none.
        operators: the operators that were saved before the last shutdown; see
            `AccessNews.operators`.
        save_operators: saves changed operators for the next start.
    """

    def __init__(
        self,
        clock: Clock,
        fetch_news: Callable[[], Awaitable[AccessNews]],
        *,
        own_token: Callable[[], str] | None = None,
        operators: Mapping[str, str] | None = None,
        save_operators: Callable[[dict[str, str]], object] = lambda _operators: None,
    ) -> None:
        self._own_token = own_token
        self._operators = dict(operators or {})
        self._save_operators = save_operators
        self._boot_ms = clock.boot_ms
        self._fetch_news = fetch_news
        self._newest_news = NewestNews()
        self._news: AccessNews | None = None
        self._clock_offset_ms = 0
        self._verified_capabilities: OrderedDict[str, Capability] = OrderedDict()
        self._refresh_task: asyncio.Task[None] | None = None
        self._refreshed_at_ms = -ASK_AGAIN_MS
        self.version = 0
        """Incremented when verified capabilities may have become invalid."""
        self.subject_bytes: dict[str, int] = {}
        """The subjects' limits in bytes per second. Every change replaces the dict."""
        self.scheduled_bytes: dict[str, int] = {}
        """The limits of scheduled messages."""

    def update_news(self, news: AccessNews) -> None:
        """
        Replace the current news, unless the given news is older.

        Between two updates, the metaserver's time is extrapolated with this machine's boot clock.
        """
        if not self._newest_news.accept(news, self._boot_ms()):
            return
        self._clock_offset_ms = news.now_ms - self._boot_ms()
        previous = self._news
        if previous is None or (
            previous.changed,
            previous.keys,
            previous.floor,
            previous.cluster,
        ) != (
            news.changed,
            news.keys,
            news.floor,
            news.cluster,
        ):
            self._verified_capabilities.clear()
            self.version += 1
        self._news = news
        if self.subject_bytes != news.subject_bytes:
            self.subject_bytes = dict(news.subject_bytes)
        self.scheduled_bytes = news.scheduled_bytes
        if news.operators and news.operators != self._operators:  # an older metaserver sends none
            self._operators = news.operators
            self._save_operators(news.operators)

    def now_ms(self) -> int:
        """Return the metaserver's wall-clock time, in milliseconds."""
        return self._boot_ms() + self._clock_offset_ms

    def check(self, capability: Capability) -> None:
        """Raise UnauthenticatedError or CapabilityEndedError if the capability is not valid."""
        news = self._news
        if news is None:
            raise CapabilityEndedError(
                "this broker has received no signing keys from a metaserver yet"
            )
        check_current(
            capability,
            cluster=news.cluster,
            now_ms=self.now_ms(),
            changed_versions=news.changed,
            version_floor=news.floor,
        )

    async def verify(self, text: str) -> Capability:
        """
        Decode a capability, and verify its signature and its validity.

        Raises:
            UnauthenticatedError, CapabilityEndedError
        """
        capability = self._verified_capabilities.get(text)
        if capability is None:
            capability = await self._verify(text)
            self._verified_capabilities[text] = capability
            if len(self._verified_capabilities) > CACHED_MAX:
                self._verified_capabilities.popitem(last=False)
        self.check(capability)
        return capability

    async def _verify(self, text: str) -> Capability:
        """Decode a capability and verify its signature, refreshing the news if the key is
        unknown.
        """
        capability, packed, signature = parse_capability(text)
        if self._news is None or capability.key not in self._news.keys:
            await self._refresh()
        public = None if self._news is None else self._news.keys.get(capability.key)
        if self._news is None:
            self.check(capability)
        if public is None or not is_signed(public, signature, packed):
            raise UnauthenticatedError(
                "no metaserver of this cluster has signed the capability", problem="not signed"
            )
        return capability

    async def _refresh(self) -> None:
        """Request news from a metaserver, at most once per ASK_AGAIN_MS; concurrent callers share a
        request. If it fails, the current news remains in effect.
        """
        if self._refresh_task is None:
            if self._boot_ms() - self._refreshed_at_ms < ASK_AGAIN_MS:
                return
            self._refresh_task = asyncio.create_task(self._request_news())
        await shield(self._refresh_task)

    async def _request_news(self) -> None:
        try:
            self.update_news(await self._fetch_news())
        except KeylaneError:
            pass  # the current news remains in effect
        finally:
            self._refreshed_at_ms = self._boot_ms()
            self._refresh_task = None

    # ── HTTP requests, connections
    # ────────────────────────────────────────────────────────────────────
    async def identify(self, text: str) -> Caller:
        """
        Return the caller that an HTTP request's token or capability identifies.

        Raises:
            UnauthenticatedError, CapabilityEndedError
        """
        operator = self._find_operator(text)
        if operator is not None:
            return operator
        capability = await self.verify(text)
        if capability.holder:
            raise UnauthenticatedError(
                "this capability is only for connections of its holder", problem="held"
            )
        return _caller(capability)

    def _find_operator(self, text: str) -> Caller | None:
        """Return the caller that a token from the servers' settings identifies, or None if the text
        is not such a token.
        """
        if not is_own_token(text):
            return None
        token_digest = token_hash(text)
        principal = self._operators.get(token_digest)
        if (
            principal is None
            and self._own_token is not None
            and token_digest == token_hash(self._own_token())
        ):
            principal = CLUSTER
        if principal is None:
            return None
        return Caller(principal, ADMIN_GRANTS if principal == ADMIN else CLUSTER_GRANTS)

    async def authenticate(
        self, nonce: bytes, request: Authenticate, address: str
    ) -> JudgedCapability:
        """
        Verify a peer's reply to a challenge, and return the peer's capability.

        Args:
            nonce: the challenge.
            address: this broker's own address.

        Raises:
            UnauthenticatedError, CapabilityEndedError
        """
        capability = await self.verify(request.capability)
        if not capability.holder:
            raise UnauthenticatedError(
                "a bearer capability is only for HTTP, not for connections", problem="not held"
            )
        is_ours = request.address == address
        if not is_ours or not is_proof(capability.holder, request.proof, nonce, request.address):
            raise UnauthenticatedError(
                "the capability was issued to another client",
                problem="no proof",
            )
        return JudgedCapability(self, capability)
