"""A server's access control: identifies callers, and admits or refuses their requests.

    HTTP         Authorization ─▶ identify ─▶ Caller ─▶ body read ─▶ targets ─▶ rights ─▶ handler
    data plane   Challenge, Authenticate ─▶ Caller of the connection
                 each frame: is (kind, partition, group) allowed?

Invariants
    A request from an unknown caller is refused before its body is read.
    The right to send a frame is checked once per kind, partition and group on a connection; the
    decision is cached.
    A GET is only answered if its caller still has the right once the answer is ready.
    The audit log grows slowly, however many callers are refused.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from ...protocol.access.quota import Quota
from ...protocol.access.rights import allows
from ...protocol.clock import Clock
from ...protocol.errors import (
    KeylaneError,
    MessageTooLargeError,
    PartitionUnknownError,
    Reason,
    UnauthenticatedError,
)
from ...protocol.frames import (
    Append,
    Authenticate,
    Authenticated,
    CancelScheduled,
    EditParked,
    Follow,
    Pull,
    PullShared,
    Read,
    ReadEdited,
    Request,
    Schedule,
)
from ...protocol.http.access import AuditEvent
from ...protocol.http.endpoint import Endpoint, Rights
from ...protocol.ids import check_name
from ...protocol.log_filter import Allowance, LineLimit
from . import audit
from .audit_events import call_detail
from .caller import UNKNOWN_CALLER, AccessTarget, Caller
from .pacing import GRACE_MS, HTTP_HOLD_MS, NO_DELAY, Delay, Limited, Pacing, quota_exceeded
from .peers import Peer

AUTHENTICATE_S = 5.0
"""The time in seconds that a data-plane connection has to authenticate its caller."""
DECISIONS_MAX = 10_000
"""The maximum number of decisions that are cached per connection."""
REFUSALS_PER_KIND = Allowance(100, 1.0)
"""The rate limit of audit log lines for refusals with the same caller, call, host and error
code.
"""
REFUSALS_PER_HOST = Allowance(500, 1.0)
"""The rate limit of audit log lines for refusals of callers on one host, so that one host cannot
hide the others.
"""
REFUSALS_TOTAL = Allowance(2_000, 2.0)
"""The rate limit of audit log lines for all refusals by a server."""
READS_PER_KIND = Allowance(20, 1 / 60)
"""The rate limit of audit log lines for reads with the same caller, call and target, so that reads
of one subject cannot hide those of others.
"""
FRAME_RIGHTS: dict[type[Any], Rights] = {
    Append: Rights.PRODUCE,
    Schedule: Rights.PRODUCE,
    CancelScheduled: Rights.PRODUCE,
    Read: Rights.READ,
    EditParked: Rights.ADMINISTER,
    ReadEdited: Rights.CONSUME,
    Follow: Rights.CLUSTER,
}
"""The right that each frame needs. Other frames are sent by members of a group, and need
CONSUME.
"""
_AUDITED_FRAMES = frozenset({Read, EditParked})
_STORE_FRAMES = frozenset({Append, Schedule})
FETCH_FRAMES = frozenset({Pull, PullShared, Read})
"""Frames that wait for a quota without delaying later frames."""
_LEASE_RIGHTS = frozenset({Rights.CONSUME, Rights.KNOWN})
"""The rights for the calls with which group members keep their leases."""
CALLER: ContextVar[Caller] = ContextVar("the caller of the request", default=UNKNOWN_CALLER)


def is_allowed(right: Rights, subject: str) -> bool:
    """
    Return True if the caller of the request in progress has a right on a subject, or if access
    control is off.

    Not for calls with Rights.OPEN, whose callers are not identified.
    """
    caller = CALLER.get()
    return caller is UNKNOWN_CALLER or allows(caller.grants, right, subject)


Identify = Callable[[str], Awaitable[Caller]]
"""A function that returns the caller who sent this text after `Bearer`. Raises UnauthenticatedError
or CapabilityEndedError.
"""
TargetsOf = Callable[[Endpoint[Any], Any, Mapping[str, str]], Awaitable[Sequence[AccessTarget]]]
"""A function that returns the subjects and groups on which a call needs rights, from its body and
parameters. For unknown names it raises the same errors as the call itself.
"""


class VerifiedCapability(Protocol):
    """The capability that a data-plane connection was authenticated with."""

    @property
    def caller(self) -> Caller:
        """The caller that the capability identifies."""
        ...

    @property
    def ends_in_ms(self) -> int:
        """The time in milliseconds until the capability expires."""
        ...

    def check(self) -> None:
        """Raise CapabilityEndedError if the capability has expired or was revoked."""
        ...


class DataAuthorizer(Protocol):
    """Verifies capabilities and finds the subjects of frames, for a broker's data plane."""

    async def authenticate(self, nonce: bytes, request: Authenticate) -> VerifiedCapability:
        """Verify a capability's signature and the answer to the challenge `nonce`, and return the
        capability. Raises UnauthenticatedError or CapabilityEndedError.
        """
        ...

    def target(self, request: Request) -> AccessTarget:
        """Return the subject and group of a frame. Raises PartitionUnknownError."""
        ...


class GuardedReply(NamedTuple):
    """The answer to an admitted call, its caller, and how long the call waited."""

    answer: object
    caller: Caller
    waited_ms: int
    """The time in milliseconds that the call waited for a quota."""


class Guard:
    """
    The access control of one server.

    Args:
        identify: returns the caller that has this bearer token or capability.
        targets_of: returns the subjects and groups on which a call needs rights.
        version: returns a number that changes when callers' rights change.
        authorizer: verifies callers of the data plane; None if this server has no data plane.
        subject_rate: returns a subject's limit at this server in bytes per second, or 0 for no
            limit.
        on_audit: called with each event of the audit log.
        identify_peer: returns the caller that a client certificate identifies; None if certificates
            identify no caller.
    """

    def __init__(
        self,
        identify: Identify,
        targets_of: TargetsOf,
        *,
        clock: Clock,
        version: Callable[[], int] = lambda: 0,
        authorizer: DataAuthorizer | None = None,
        subject_rate: Callable[[str], int] = lambda _subject: 0,
        on_audit: Callable[[AuditEvent], None] = lambda _event: None,
        identify_peer: Callable[[Peer], Caller] | None = None,
    ) -> None:
        self._identify_peer = identify_peer
        self._on_audit = on_audit
        self.pacing = Pacing()
        self.refusals = LineLimit(REFUSALS_PER_KIND, REFUSALS_PER_HOST, REFUSALS_TOTAL)
        self.reads = LineLimit(READS_PER_KIND)
        self.subject_rate = subject_rate
        self._identify = identify
        self._targets_of = targets_of
        self._clock = clock
        self._version = version
        self._authorizer = authorizer

    async def caller(
        self, endpoint: Endpoint[Any], authorization: Sequence[str], peer: Peer | None = None
    ) -> Caller:
        """
        Identify the caller by its `Authorization` header or, if there is none, by its certificate.

        Args:
            authorization: the values of the header; more than one is refused.
            peer: the verified client certificate of the connection, if there is one.

        Raises:
            UnauthenticatedError, CapabilityEndedError: the credentials are missing or were refused.
        """
        if endpoint.rights is Rights.OPEN:
            return UNKNOWN_CALLER
        if not authorization and peer is not None and self._identify_peer is not None:
            return self._identify_peer(peer)
        if len(authorization) != 1:
            reason = "no token" if not authorization else "several tokens"
            raise UnauthenticatedError(f"the request has {reason}", problem=reason)
        kind, _, text = authorization[0].partition(" ")
        if kind.lower() != "bearer" or not text:
            raise UnauthenticatedError(
                "the header is: Authorization: Bearer TOKEN", problem="no bearer"
            )
        return await self._identify(text.strip())

    async def handle_request(
        self,
        endpoint: Endpoint[Any],
        authorization: Sequence[str],
        remote: str,
        read_body: Callable[[], Awaitable[tuple[Any, Mapping[str, str], int]]],
        handle: Callable[[Any, Mapping[str, str]], Awaitable[object]],
        peer: Peer | None = None,
    ) -> GuardedReply:
        """
        Handle a request if its caller has the right to make it, and write to the audit log.

        Args:
            read_body: reads the body; returns the body, the parameters, and the size in bytes.
            handle: handles the request.

        Raises:
            UnauthenticatedError, CapabilityEndedError, AccessDeniedError, QuotaExceededError: the
                request is refused.
            KeylaneError: an error raised by `read_body` or `handle`.
        """
        caller, target, waited_ms, detail = UNKNOWN_CALLER, AccessTarget(), 0, ""
        try:
            version = self._version()
            caller = await self.caller(endpoint, authorization, peer)
            CALLER.set(caller)
            waited_ms = await self._wait_for_quota(caller, endpoint)
            body, params, size = await read_body()
            if self._version() != version:  # the body may take a long time to arrive
                version = self._version()
                caller = await self.caller(endpoint, authorization, peer)
                CALLER.set(caller)
            detail = call_detail(body, params)
            targets = await self._targets_of(endpoint, body, params)
            for target in targets:
                caller.check(endpoint.rights, *target)
            self.charge(caller, size)
            waited_ms += await self._wait_for_subject_rate(caller, endpoint, targets, size)
            answer = await handle(body, params)
            if endpoint.is_get and self._version() != version:
                current_caller = await self.caller(endpoint, authorization, peer)
                for target in targets:
                    current_caller.check(endpoint.rights, *target)
        except KeylaneError as error:
            if endpoint.rights is not Rights.OPEN and (
                _is_refusal(error) or audit.is_audited(endpoint)
            ):
                action = f"{endpoint.method} {endpoint.path}"
                self.record(caller, remote, action, target, error, detail=detail)
            raise
        if audit.is_audited(endpoint):
            action = f"{endpoint.method} {endpoint.path}"
            if endpoint.rights is Rights.READ:
                self.record_read(caller, remote, action, target, detail)
            else:
                self.record(caller, remote, action, target, detail=detail)
        return GuardedReply(answer, caller, waited_ms)

    async def _wait_for_quota(self, caller: Caller, endpoint: Endpoint[Any]) -> int:
        """
        Wait until the caller's quotas for requests and bytes allow the call.

        Returns:
            The milliseconds for which it waited.

        Raises:
            QuotaExceededError: the wait would be longer than HTTP_HOLD_MS.
        """
        if not caller.has_quotas:
            return 0
        principal, quota = caller.principal, caller.quota
        now_ms = self._clock.boot_ms()
        delay = self.pacing.delay(principal, quota, now_ms)
        if endpoint.rights in _LEASE_RIGHTS and delay.ms <= GRACE_MS:
            delay = NO_DELAY
        if delay.ms > HTTP_HOLD_MS:
            raise quota_exceeded(principal, delay)
        self.pacing.consume(principal, quota, now_ms)
        if delay.ms:
            self.pacing.record_wait(principal, delay)
            await asyncio.sleep(delay.ms / 1000)
        return round(delay.ms)

    async def _wait_for_subject_rate(
        self, caller: Caller, endpoint: Endpoint[Any], targets: Sequence[AccessTarget], size: int
    ) -> int:
        """
        Wait until the rate limit of the subject to which a call sends messages allows it, and count
        the bytes.

        Returns the same as `_wait_for_quota`, and raises the same error.
        """
        if endpoint.rights is not Rights.PRODUCE or not size or caller.is_server:
            return 0
        waited_ms = 0.0
        for subject in {target.subject for target in targets}:
            rate = self.subject_rate(check_name("subject", subject))
            if not rate:
                continue
            now_ms = self._clock.boot_ms()
            delay = self.pacing.subject_delay(subject, rate, now_ms)
            if delay.ms > HTTP_HOLD_MS:
                raise quota_exceeded(caller.principal, delay)
            self.pacing.consume_subject(subject, rate, size, now_ms)
            if delay.ms:
                self.pacing.record_wait(caller.principal, delay)
                self.pacing.note_limited(subject, delay, now_ms)
                await asyncio.sleep(delay.ms / 1000)
                waited_ms += delay.ms
        return round(waited_ms)

    def limited(self, subject: str) -> Limited:
        """Return the quota for which calls about a subject wait now."""
        return self.pacing.limited(subject, self._clock.boot_ms())

    def charge(self, caller: Caller, size: int) -> None:
        """Count the bytes of a request or an answer against the caller's quota."""
        if size and caller.has_quotas:
            now_ms = self._clock.boot_ms()
            self.pacing.consume(caller.principal, caller.quota, now_ms, size=size, requests=0)

    def record_refusal(self, remote: str, action: str, error: KeylaneError) -> None:
        """Audit a request that was refused before its caller's rights were checked."""
        # The text of a handshake error comes from OpenSSL; other texts may quote the caller.
        detail = error.details.get("problem", "") if error.reason is Reason.HANDSHAKE else ""
        self.record(CALLER.get(), remote, action, AccessTarget(), error, detail)

    def connection(self, remote: str) -> ConnectionAccess | None:
        """Return the access control for a new data-plane connection, which has no rights yet, or
        None if this server has no data plane.
        """
        if self._authorizer is None:
            return None
        return ConnectionAccess(self, self._authorizer, remote, self._clock)

    def record_read(
        self, caller: Caller, remote: str, action: str, target: AccessTarget, detail: str
    ) -> None:
        """Write an allowed read to the audit log. Frequent reads of the same kind are
        rate-limited.
        """
        kind = (remote, caller.principal, action, *target)
        suppressed_count = self.reads.admit(self._clock.boot_ms(), kind)
        if suppressed_count is not None:
            detail = _add_suppressed_count(suppressed_count, "done", detail)
            self.record(caller, remote, action, target, detail=detail)

    def record(
        self,
        caller: Caller,
        remote: str,
        action: str,
        target: AccessTarget,
        error: KeylaneError | None = None,
        detail: str = "",
    ) -> None:
        """Write a call or a refusal to the audit log. Frequent refusals are rate-limited."""
        if error is not None:
            kind = (remote, caller.principal, action, error.code)
            suppressed_count = self.refusals.admit(self._clock.boot_ms(), kind, remote, None)
            if suppressed_count is None:
                return
            detail = _add_suppressed_count(suppressed_count, "refused", detail)
        event = audit.record_event(
            at_ms=self._clock.wall_ms(),
            who=caller.principal,
            remote=remote,
            action=action,
            target=target,
            error=error,
            detail=detail,
        )
        self._on_audit(event)


def _add_suppressed_count(suppressed_count: int, outcome: str, detail: str) -> str:
    """Return the detail of a line, with the number of earlier events of the same kind that were not
    logged.
    """
    if not suppressed_count:
        return detail
    count = f"{suppressed_count} more were {outcome} before"
    return f"{count}; {detail}" if detail else count


def _is_refusal(error: KeylaneError) -> bool:
    return (
        1350 <= error.code < 1370
        or error.reason is Reason.REQUEST_TOO_SLOW
        or isinstance(error, MessageTooLargeError)
    )


class ConnectionAccess:
    """The access control of one data-plane connection."""

    def __init__(self, guard: Guard, authorizer: DataAuthorizer, remote: str, clock: Clock) -> None:
        self.nonce = secrets.token_bytes(32)
        self._guard = guard
        self._authorizer = authorizer
        self._remote = remote
        self._boot_ms = clock.boot_ms
        self._began_ms = clock.boot_ms()
        self._capability: VerifiedCapability | None = None
        self._caller = UNKNOWN_CALLER
        self._cached_decisions: dict[tuple[object, ...], AccessTarget] = {}
        self._counted_principal = ""
        """The principal whose connection count includes this one; "" before it is known, and for
        servers.
        """

    async def authenticate(
        self, request: Authenticate, acquire_slot: Callable[[str], None] = lambda _principal: None
    ) -> Authenticated:
        """
        Accept the first capability of the connection, or a newer one.

        Args:
            acquire_slot: called with the principal to take a connection slot before the capability
                is accepted, or with "" for a server of the cluster, which needs no slot. May raise
                ConnectionQuotaError.

        Raises:
            UnauthenticatedError, CapabilityEndedError: the capability was refused.
            ConnectionQuotaError: the principal already has its maximum number of connections.
        """
        try:
            capability = await self._authorizer.authenticate(self.nonce, request)
        except KeylaneError as error:
            self._guard.record(self._caller, self._remote, "Authenticate", AccessTarget(), error)
            raise
        caller = capability.caller
        principal = "" if caller.is_server else caller.principal
        if principal != self._counted_principal or self._capability is None:
            self._count_connection(principal, caller.quota, acquire_slot)
        self._capability = capability
        self._caller = caller
        self._cached_decisions.clear()
        return Authenticated(capability.ends_in_ms)

    def _count_connection(
        self, principal: str, quota: Quota, acquire_slot: Callable[[str], None]
    ) -> None:
        """Count the connection for the principal ("" for a server), and no longer for the previous
        one. Raises ConnectionQuotaError.
        """
        pacing = self._guard.pacing
        if principal:
            pacing.add_connection(principal, quota)
        try:
            acquire_slot(principal)
        except KeylaneError:
            if principal:
                pacing.remove_connection(principal)
            raise
        self.release_connection()
        self._counted_principal = principal

    def check_valid(self) -> None:
        """
        Check that the connection may stay open. This is called often.

        Raises:
            UnauthenticatedError: the caller did not authenticate within AUTHENTICATE_S.
            CapabilityEndedError: its capability has expired.
        """
        if self._capability is not None:
            self._capability.check()
        elif self._boot_ms() - self._began_ms > AUTHENTICATE_S * 1000:
            raise UnauthenticatedError(
                "the connection has not said who calls", problem="not authenticated"
            )

    def record_end(self, error: KeylaneError) -> None:
        """Write to the audit log that the server is closing the connection because of `error`."""
        self._guard.record(self._caller, self._remote, "connection", AccessTarget(), error)

    def check(self, request: Request) -> None:
        """
        Check that the caller may send this frame.

        Raises:
            AccessDeniedError: the caller may not send it.
            PartitionUnknownError: this broker does not have the partition.
            UnauthenticatedError: the caller has not authenticated.
        """
        key = _decision_key(request)
        if key not in self._cached_decisions:
            self._authorize(request, key)

    def is_allowed_at_once(self, request: Request) -> bool:
        """Return True if a frame is allowed by a cached decision and needs no quota, so that it can
        be handled immediately. Otherwise, call `check`, `delay` and `consume`.
        """
        caller = self._caller
        target = self._cached_decisions.get(_decision_key(request))
        if target is None:
            return False
        return caller.is_server or not (self._subject_rate(request)[1] or caller.has_quotas)

    def release_connection(self) -> None:
        """Record that the connection has been closed."""
        if self._counted_principal:
            self._guard.pacing.remove_connection(self._counted_principal)
            self._counted_principal = ""

    def delay(self, request: Request) -> Delay:
        """Return how long an allowed frame would have to wait for a quota now."""
        caller = self._caller
        if caller.is_server:
            return NO_DELAY
        subject, rate = self._subject_rate(request)
        if not (rate or caller.has_quotas):
            return NO_DELAY
        now_ms = self._boot_ms()
        delay = self._guard.pacing.delay(
            caller.principal, caller.quota, now_ms, subject=subject, subject_rate=rate
        )
        if type(request) not in _STORE_FRAMES and type(request) not in FETCH_FRAMES:
            return Delay(delay.ms - GRACE_MS, delay.limit) if delay.ms > GRACE_MS else NO_DELAY
        if delay.ms:
            target = self._cached_decisions.get(_decision_key(request), AccessTarget())
            self._guard.pacing.note_limited(target.subject, delay, now_ms)
        return delay

    def consume(self, request: Request, size: int, *, requests: int = 1) -> None:
        """Count a frame, or `size` more bytes of its answer, against the quotas."""
        caller = self._caller
        if caller.is_server:
            return
        subject, rate = self._subject_rate(request)
        if rate or caller.has_quotas:
            self._guard.pacing.consume(
                caller.principal,
                caller.quota,
                self._boot_ms(),
                size=size,
                requests=requests,
                subject=subject,
                subject_rate=rate,
            )

    def record_wait(self, delay: Delay) -> None:
        """Count a wait in the metrics."""
        self._guard.pacing.record_wait(self._caller.principal, delay)

    def quota_error(self, delay: Delay) -> KeylaneError:
        """Return the error for a frame that would have to wait too long."""
        return quota_exceeded(self._caller.principal, delay)

    def _subject_rate(self, request: Request) -> tuple[str, int]:
        """Return the subject that a frame sends messages to, and the subject's limit in bytes per
        second; "" and 0 for other frames.
        """
        if type(request) not in _STORE_FRAMES:
            return "", 0
        subject = self._cached_decisions.get(_decision_key(request), AccessTarget()).subject
        return subject, self._guard.subject_rate(subject)

    def _authorize(self, request: Request, key: tuple[object, ...]) -> None:
        kind = type(request)
        target = AccessTarget()
        try:
            if self._capability is None:
                raise UnauthenticatedError(
                    "the connection has not said who calls", problem="not authenticated"
                )
            _check_names(request)
            target = self._authorizer.target(request)
            self._caller.check(FRAME_RIGHTS.get(kind, Rights.CONSUME), *target)
        except PartitionUnknownError:
            raise
        except KeylaneError as error:
            if error.reason is Reason.NAME_INVALID:
                raise
            self._guard.record(self._caller, self._remote, kind.__name__, target, error)
            raise
        if kind in _AUDITED_FRAMES:
            detail = f"partition {getattr(request, 'partition_id', '')}"
            audit_arguments = (self._caller, self._remote, kind.__name__, target)
            if kind is not Read:
                self._guard.record(*audit_arguments, detail=detail)
                return  # not cached, because each edit is audited
            self._guard.record_read(*audit_arguments, detail)
        if kind is CancelScheduled:
            return  # not cached, because each one has a different id
        if len(self._cached_decisions) >= DECISIONS_MAX:
            self._cached_decisions.clear()
        self._cached_decisions[key] = target


def _decision_key(request: Request) -> tuple[object, ...]:
    """Return a cache key: the fields of a frame that determine whether it is allowed."""
    partition_id = getattr(request, "partition_id", None)
    if partition_id is None:  # these frames name a subject or a scheduled message
        return type(request), getattr(request, "subject", request)
    return type(request), partition_id, getattr(request, "group", None)


def _check_names(request: Request) -> None:
    """Check the names that are cached as part of a decision, because a sender can make them long.
    Raises InvalidRequestError.
    """
    group = getattr(request, "group", None)
    if group is not None:
        check_name("consumer group", group)
    elif isinstance(request, Schedule):
        check_name("subject", request.subject)
