"""Judges capabilities by the last answer of a metaserver, without asking others for each.

    text ─▶ known already? ─▶ signature by a known key ─▶ cluster, end, version ─▶ the principal's
        rights

For an unknown key a metaserver is asked once: it may have begun to sign with that key since its
last answer. A broker that reaches no metaserver judges by what it knows, because capabilities
expire by themselves. Meanwhile operators can use the tokens of the servers' settings: the broker
knows its own token, and the hashes of the others.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from ...protocol.access.capability import AccessNews, Capability, check_current, parts_of
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

KNOWN_MAX = 10_000
"""The number of verified capabilities that are kept; the most recently used ones stay."""
ASK_AGAIN_MS = 200


class JudgedCapability(NamedTuple):
    """A capability of a connection; see `guard.HeldCapability`."""

    judge: CapabilityJudge
    capability: Capability

    @property
    def caller(self) -> Caller:
        """The caller to whom the capability was given."""
        return _caller(self.capability)

    @property
    def ends_in_ms(self) -> int:
        """The time in milliseconds for which the capability is still valid."""
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
    The facts about access that a broker knows.

    Args:
        ask_news: asks a metaserver.
        own_token: returns the broker's own token; None if it has none.
        operators: see `AccessNews.operators`; these were kept from the last start.
        keep: keeps other operators for the next start.
    """

    def __init__(
        self,
        clock: Clock,
        ask_news: Callable[[], Awaitable[AccessNews]],
        *,
        own_token: Callable[[], str] | None = None,
        operators: Mapping[str, str] | None = None,
        keep: Callable[[dict[str, str]], object] = lambda _operators: None,
    ) -> None:
        self._own_token = own_token
        self._operators = dict(operators or {})
        self._keep = keep
        self._boot_ms = clock.boot_ms
        self._ask_news = ask_news
        self._newest = NewestNews()
        self._news: AccessNews | None = None
        self._ahead_ms = 0
        self._verified: OrderedDict[str, Capability] = OrderedDict()
        self._asking: asyncio.Task[None] | None = None
        self._asked_at_ms = -ASK_AGAIN_MS
        self.version = 0
        """Changes with the news."""
        self.subject_bytes: dict[str, int] = {}
        """The limits of subjects; a new object after each change."""
        self.scheduled_bytes: dict[str, int] = {}
        """The limits of scheduled messages."""

    def take_news(self, news: AccessNews) -> None:
        """
        Judge by these news from now on, unless newer ones are known.

        Between news, the metaserver's calendar advances with this machine's boot clock.
        """
        if not self._newest.take(news, self._boot_ms()):
            return
        self._ahead_ms = news.now_ms - self._boot_ms()
        before = self._news
        if before is None or (before.changed, before.keys, before.floor, before.cluster) != (
            news.changed,
            news.keys,
            news.floor,
            news.cluster,
        ):
            self._verified.clear()
            self.version += 1
        self._news = news
        if self.subject_bytes != news.subject_bytes:
            self.subject_bytes = dict(news.subject_bytes)
        self.scheduled_bytes = news.scheduled_bytes
        if news.operators and news.operators != self._operators:  # an earlier metaserver has none
            self._operators = news.operators
            self._keep(news.operators)

    def now_ms(self) -> int:
        """Return the time of the metaserver's calendar."""
        return self._boot_ms() + self._ahead_ms

    def check(self, capability: Capability) -> None:
        """Raise UnauthenticatedError or CapabilityEndedError if the capability is not valid now."""
        news = self._news
        if news is None:
            raise CapabilityEndedError(
                "this broker has received no signing keys from a metaserver yet"
            )
        check_current(
            capability,
            cluster=news.cluster,
            now_ms=self.now_ms(),
            changed=news.changed,
            floor=news.floor,
        )

    async def believe(self, text: str) -> Capability:
        """
        Return the capability in a text, if it may be trusted now.

        Raises:
            UnauthenticatedError, CapabilityEndedError
        """
        capability = self._verified.get(text)
        if capability is None:
            capability = await self._verify(text)
            self._verified[text] = capability
            if len(self._verified) > KNOWN_MAX:
                self._verified.popitem(last=False)
        self.check(capability)
        return capability

    async def _verify(self, text: str) -> Capability:
        capability, packed, signature = parts_of(text)
        if self._news is None or capability.key not in self._news.keys:
            await self._ask()
        public = None if self._news is None else self._news.keys.get(capability.key)
        if self._news is None:
            self.check(capability)
        if public is None or not is_signed(public, signature, packed):
            raise UnauthenticatedError(
                "no metaserver of this cluster has signed the capability", problem="not signed"
            )
        return capability

    async def _ask(self) -> None:
        """Ask a metaserver for news, unless it was asked just now. Without an answer nothing
        changes.
        """
        if self._asking is None:
            if self._boot_ms() - self._asked_at_ms < ASK_AGAIN_MS:
                return
            self._asking = asyncio.create_task(self._take_asked())
        await shield(self._asking)

    async def _take_asked(self) -> None:
        try:
            self.take_news(await self._ask_news())
        except KeylaneError:
            pass  # the known news stay in force
        finally:
            self._asked_at_ms = self._boot_ms()
            self._asking = None

    # ── the two ways to call ──────────────────────────────────────────────────────────────────────
    async def identify(self, text: str) -> Caller:
        """
        Return the caller who sends this text with an HTTP request.

        Raises:
            UnauthenticatedError, CapabilityEndedError
        """
        operator = self._operator(text)
        if operator is not None:
            return operator
        capability = await self.believe(text)
        if capability.holder:
            raise UnauthenticatedError(
                "this capability is for connections of its holder", problem="held"
            )
        return _caller(capability)

    def _operator(self, text: str) -> Caller | None:
        """Return the caller who has this token of the servers' settings, or None if it is none of
        these tokens.
        """
        if not is_own_token(text):
            return None
        hashed = token_hash(text)
        principal = self._operators.get(hashed)
        if (
            principal is None
            and self._own_token is not None
            and hashed == token_hash(self._own_token())
        ):
            principal = CLUSTER
        if principal is None:
            return None
        return Caller(principal, ADMIN_GRANTS if principal == ADMIN else CLUSTER_GRANTS)

    async def authenticate(
        self, nonce: bytes, asked: Authenticate, address: str
    ) -> JudgedCapability:
        """
        Return the capability of the peer of a connection to which this challenge was given.

        Args:
            address: this broker's own address.

        Raises:
            UnauthenticatedError, CapabilityEndedError
        """
        capability = await self.believe(asked.capability)
        if not capability.holder:
            raise UnauthenticatedError(
                "a bearer's capability is for HTTP, not for connections", problem="not held"
            )
        told = asked.address == address
        if not told or not is_proof(capability.holder, asked.proof, nonce, asked.address):
            raise UnauthenticatedError(
                "the capability was issued to another client",
                problem="no proof",
            )
        return JudgedCapability(self, capability)
