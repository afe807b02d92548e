"""Access control of a server: identifies callers, and lets their requests through or refuses them.

    HTTP         Authorization ─▶ identify ─▶ Caller ─▶ body read ─▶ targets ─▶ rights ─▶ handler
    data plane   Challenge, Authenticate ─▶ Caller of the connection
                 each frame: is (kind, partition, group) allowed?

Invariants
    A request without a known caller is refused before its body is read.
    A frame is looked up in a set; rights are decided once for each kind, partition and group of a
    connection.
    The answer to a GET that waited is given only if its caller may still have it.
    However many callers are refused, the audit log grows slowly.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from ...protocol.access.quota import Quota
from ...protocol.access.tokens import check_no_token
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
from .audit_events import detail_of
from .caller import UNKNOWN_CALLER, AccessTarget, Caller
from .pacing import GRACE_MS, HTTP_HOLD_MS, NO_DELAY, Delay, Pacing, exceeded
from .peers import Peer

AUTHENTICATE_S = 5.0
"""Seconds within which a connection of the data plane must authenticate its caller."""
ALLOWED_MAX = 10_000
"""Number of decisions that a connection keeps."""
OF_KIND = Allowance(100, 1.0)
"""Lines about refusals of one kind: with the same caller, call, host and reason."""
OF_HOST = Allowance(500, 1.0)
"""Lines about refusals of callers from one host, so that it does not hide other hosts."""
REFUSALS = Allowance(2_000, 2.0)
"""Lines about all refusals of a server."""
READS_OF_KIND = Allowance(20, 1 / 60)
"""Lines about reads of one kind, so that reads of one subject use up no lines of another one."""
FRAME_RIGHTS: dict[type[Any], Rights] = {
    Append: Rights.PRODUCE,
    Schedule: Rights.PRODUCE,
    CancelScheduled: Rights.PRODUCE,
    Read: Rights.READ,
    EditParked: Rights.ADMINISTER,
    ReadEdited: Rights.CONSUME,
}
"""Right that a frame needs; the other frames belong to members of a group, which consume."""
_AUDITED = frozenset({Read, EditParked})
_STORING = frozenset({Append, Schedule})
FETCHING = frozenset({Pull, PullShared, Read})
"""Frames that wait by themselves, while the frames after them are served."""
_LEASING = frozenset({Rights.CONSUME, Rights.KNOWN})
"""Calls with which members of groups keep their leases."""
CALLER: ContextVar[Caller] = ContextVar("the caller of the request", default=UNKNOWN_CALLER)

Identify = Callable[[str], Awaitable[Caller]]
"""Function that returns the caller who sent this text after `Bearer`. Raises UnauthenticatedError,
CapabilityEndedError.
"""
TargetsOf = Callable[[Endpoint[Any], Any, Mapping[str, str]], Awaitable[Sequence[AccessTarget]]]
"""Function that returns the subjects and groups of a call, from its body and parameters. Unknown
names raise the errors of the call itself.
"""


class HeldCapability(Protocol):
    """The capability with which a connection of the data plane was authenticated."""

    @property
    def caller(self) -> Caller:
        """Caller of the connection."""
        ...

    @property
    def ends_in_ms(self) -> int:
        """Milliseconds for which it is still valid."""
        ...

    def check(self) -> None:
        """Raise CapabilityEndedError once it has ended."""
        ...


class DataJudge(Protocol):
    """A broker's knowledge of callers and targets on its data plane."""

    async def authenticate(self, nonce: bytes, asked: Authenticate) -> HeldCapability:
        """Return the capability of a caller. Raises UnauthenticatedError, CapabilityEndedError."""
        ...

    def target(self, request: Request) -> AccessTarget:
        """Return the subject and group of a frame. Raises PartitionUnknownError."""
        ...


class Passed(NamedTuple):
    """The result of a call that was let through."""

    answer: object
    caller: Caller
    waited_ms: int
    """Milliseconds that it waited for a quota."""


class Guard:
    """
    The access control of one server.

    Args:
        version: returns a number that changes with the rights of callers.
        subject_rate: returns the bytes a second that a subject takes here; 0: no limit.
        on_audit: called with each event of the audit log.
        certified: returns the caller with a client's certificate; None: certificates name no
            principal.
    """

    def __init__(
        self,
        identify: Identify,
        targets_of: TargetsOf,
        *,
        clock: Clock,
        version: Callable[[], int] = lambda: 0,
        judge: DataJudge | None = None,
        subject_rate: Callable[[str], int] = lambda _subject: 0,
        on_audit: Callable[[AuditEvent], None] = lambda _event: None,
        certified: Callable[[Peer], Caller] | None = None,
    ) -> None:
        self._certified = certified
        self._on_audit = on_audit
        self.pacing = Pacing()
        self.refusals = LineLimit(OF_KIND, OF_HOST, REFUSALS)
        self.reads = LineLimit(READS_OF_KIND)
        self.subject_rate = subject_rate
        self._identify = identify
        self._targets_of = targets_of
        self._clock = clock
        self._version = version
        self._judge = judge

    async def caller(
        self, endpoint: Endpoint[Any], authorization: Sequence[str], peer: Peer | None = None
    ) -> Caller:
        """
        Return the caller of a call, from its `Authorization` headers; without one, from the
        certificate of its connection.

        Raises:
            UnauthenticatedError, CapabilityEndedError
        """
        if endpoint.rights is Rights.OPEN:
            return UNKNOWN_CALLER
        if not authorization and peer is not None and self._certified is not None:
            return self._certified(peer)
        if len(authorization) != 1:
            reason = "no token" if not authorization else "several tokens"
            raise UnauthenticatedError(f"the request has {reason}", problem=reason)
        kind, _, text = authorization[0].partition(" ")
        if kind.lower() != "bearer" or not text:
            raise UnauthenticatedError(
                "the header is: Authorization: Bearer TOKEN", problem="no bearer"
            )
        return await self._identify(text.strip())

    def check_url(self, path: str, query: Mapping[str, str]) -> None:
        """Raise InvalidRequestError if the URL contains a token."""
        check_no_token(path, query)

    async def pass_through(
        self,
        endpoint: Endpoint[Any],
        authorization: Sequence[str],
        remote: str,
        read: Callable[[], Awaitable[tuple[Any, Mapping[str, str], int]]],
        handle: Callable[[Any, Mapping[str, str]], Awaitable[object]],
        peer: Peer | None = None,
    ) -> Passed:
        """
        Make a call if its caller has the right, and write the audit log.

        Args:
            read: reads the body, and returns it with the parameters and its size in bytes.
            handle: makes the call.

        Raises:
            The errors of `read` and `handle`, and
            UnauthenticatedError, AccessDeniedError, CapabilityEndedError, QuotaExceededError
        """
        caller, target, waited_ms, detail = UNKNOWN_CALLER, AccessTarget(), 0, ""
        try:
            version = self._version()
            caller = await self.caller(endpoint, authorization, peer)
            CALLER.set(caller)
            waited_ms = await self._take_turn(caller, endpoint)
            body, params, size = await read()
            if self._version() != version:  # a caller may take its time with the body
                version = self._version()
                caller = await self.caller(endpoint, authorization, peer)
                CALLER.set(caller)
            detail = detail_of(body, params)
            targets = await self._targets_of(endpoint, body, params)
            for target in targets:
                caller.check(endpoint.rights, *target)
            self.charge(caller, size)
            waited_ms += await self._take_subject_turn(caller, endpoint, targets, size)
            answer = await handle(body, params)
            if endpoint.is_get and self._version() != version:
                now = await self.caller(endpoint, authorization, peer)
                for target in targets:
                    now.check(endpoint.rights, *target)
        except KeylaneError as error:
            if endpoint.rights is not Rights.OPEN and (
                _is_refusal(error) or audit.is_audited(endpoint)
            ):
                did = f"{endpoint.method} {endpoint.path}"
                self.note(caller, remote, did, target, error, detail=detail)
            raise
        if audit.is_audited(endpoint):
            did = f"{endpoint.method} {endpoint.path}"
            if endpoint.rights is Rights.READ:
                self.note_read(caller, remote, did, target, detail)
            else:
                self.note(caller, remote, did, target, detail=detail)
        return Passed(answer, caller, waited_ms)

    async def _take_turn(self, caller: Caller, endpoint: Endpoint[Any]) -> int:
        """
        Wait for the caller's quota of requests and bytes.

        Returns:
            Milliseconds that it waited.

        Raises:
            QuotaExceededError: the wait would be too long.
        """
        if not caller.is_paced:
            return 0
        principal, quota = caller.principal, caller.quota
        now_ms = self._clock.boot_ms()
        delay = self.pacing.delay(principal, quota, now_ms)
        if endpoint.rights in _LEASING and delay.ms <= GRACE_MS:
            delay = NO_DELAY
        if delay.ms > HTTP_HOLD_MS:
            raise exceeded(principal, delay)
        self.pacing.take(principal, quota, now_ms)
        if delay.ms:
            self.pacing.note_wait(principal, delay)
            await asyncio.sleep(delay.ms / 1000)
        return round(delay.ms)

    async def _take_subject_turn(
        self, caller: Caller, endpoint: Endpoint[Any], targets: Sequence[AccessTarget], size: int
    ) -> int:
        """
        Wait for the limit of the subject in which a call stores messages, and count its bytes.

        Return value and errors are those of `_take_turn`.
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
                raise exceeded(caller.principal, delay)
            self.pacing.take_subject(subject, rate, size, now_ms)
            if delay.ms:
                self.pacing.note_wait(caller.principal, delay)
                await asyncio.sleep(delay.ms / 1000)
                waited_ms += delay.ms
        return round(waited_ms)

    def charge(self, caller: Caller, size: int) -> None:
        """Count the bytes of a request or an answer."""
        if size and caller.is_paced:
            now_ms = self._clock.boot_ms()
            self.pacing.take(caller.principal, caller.quota, now_ms, size=size, requests=0)

    def note_refused(self, remote: str, did: str, error: KeylaneError) -> None:
        """Write a line about a request that was refused before its caller's rights were checked."""
        # The reason of a handshake is OpenSSL's; the texts of other refusals may have what the
        # caller sent.
        detail = error.details.get("problem", "") if error.reason is Reason.HANDSHAKE else ""
        self.note(CALLER.get(), remote, did, AccessTarget(), error, detail)

    def connection(self, remote: str) -> ConnectionAccess | None:
        """Return the access of a new connection of the data plane, which has no rights yet."""
        if self._judge is None:
            return None
        return ConnectionAccess(self, self._judge, remote, self._clock)

    def note_read(
        self, caller: Caller, remote: str, did: str, target: AccessTarget, detail: str
    ) -> None:
        """Write a line about a read that was allowed; if there are too many of a kind, only about
        some.
        """
        kind = (remote, caller.principal, did, *target)
        left_out = self.reads.admit(self._clock.boot_ms(), kind)
        if left_out is not None:
            self.note(caller, remote, did, target, detail=_after(left_out, "done", detail))

    def note(
        self,
        caller: Caller,
        remote: str,
        did: str,
        target: AccessTarget,
        error: KeylaneError | None = None,
        detail: str = "",
    ) -> None:
        """Write a line of the audit log; if there are too many refusals, only about some."""
        if error is not None:
            kind = (remote, caller.principal, did, error.code)
            left_out = self.refusals.admit(self._clock.boot_ms(), kind, remote, None)
            if left_out is None:
                return
            detail = _after(left_out, "refused", detail)
        event = audit.note(
            at_ms=self._clock.wall_ms(),
            who=caller.principal,
            remote=remote,
            did=did,
            target=target,
            error=error,
            detail=detail,
        )
        self._on_audit(event)


def _after(left_out: int, what: str, detail: str) -> str:
    """Return the detail of a line, with the number of equal events that had no line."""
    if not left_out:
        return detail
    before = f"{left_out} more were {what} before"
    return f"{before}; {detail}" if detail else before


def _is_refusal(error: KeylaneError) -> bool:
    return (
        1350 <= error.code < 1370
        or error.reason is Reason.REQUEST_TOO_SLOW
        or isinstance(error, MessageTooLargeError)
    )


class ConnectionAccess:
    """The access of one connection of the data plane."""

    def __init__(self, guard: Guard, judge: DataJudge, remote: str, clock: Clock) -> None:
        self.nonce = secrets.token_bytes(32)
        self._guard = guard
        self._judge = judge
        self._remote = remote
        self._boot_ms = clock.boot_ms
        self._began_ms = clock.boot_ms()
        self._held: HeldCapability | None = None
        self._caller = UNKNOWN_CALLER
        self._allowed: dict[tuple[object, ...], AccessTarget] = {}
        self._entered = ""
        """Principal among whose connections this one counts."""

    async def authenticate(
        self, asked: Authenticate, take_place: Callable[[str], None] = lambda _principal: None
    ) -> Authenticated:
        """
        Take a capability, the first one or a newer one.

        Args:
            take_place: takes a place for the principal before its capability is accepted; "": a
                server of the cluster needs none. It raises ConnectionQuotaError.

        Raises:
            UnauthenticatedError, CapabilityEndedError
            ConnectionQuotaError: the principal already has as many connections as it may have.
        """
        try:
            held = await self._judge.authenticate(self.nonce, asked)
        except KeylaneError as error:
            self._guard.note(self._caller, self._remote, "Authenticate", AccessTarget(), error)
            raise
        caller = held.caller
        entered = "" if caller.is_server else caller.principal
        if entered != self._entered or self._held is None:
            self._enter(entered, caller.quota, take_place)
        self._held = held
        self._caller = caller
        self._allowed.clear()
        return Authenticated(held.ends_in_ms)

    def _enter(self, principal: str, quota: Quota, take_place: Callable[[str], None]) -> None:
        """Count the connection as one of the principal, "" for a server, and no longer as one of
        the previous principal. Raises ConnectionQuotaError.
        """
        pacing = self._guard.pacing
        if principal:
            pacing.enter(principal, quota)
        try:
            take_place(principal)
        except KeylaneError:
            if principal:
                pacing.leave(principal)
            raise
        self.end()
        self._entered = principal

    def check_still(self) -> None:
        """
        Check that the connection may stay open; called often.

        Raises:
            UnauthenticatedError: the caller has not authenticated itself in time.
            CapabilityEndedError
        """
        if self._held is not None:
            self._held.check()
        elif self._boot_ms() - self._began_ms > AUTHENTICATE_S * 1000:
            raise UnauthenticatedError(
                "the connection has not said who calls", problem="not authenticated"
            )

    def note_end(self, error: KeylaneError) -> None:
        """Write a line about a connection that the server ends."""
        self._guard.note(self._caller, self._remote, "connection", AccessTarget(), error)

    def check(self, request: Request) -> None:
        """
        Check a frame.

        Raises:
            AccessDeniedError, PartitionUnknownError
            UnauthenticatedError: the caller has not authenticated itself.
        """
        key = _key(request)
        if key not in self._allowed:
            self._decide(request, key)

    def passes(self, request: Request) -> bool:
        """Return True if a frame may be served at once, without a check, a wait or a count; False
        means that it may need one.
        """
        caller = self._caller
        target = self._allowed.get(_key(request))
        if target is None:
            return False
        return caller.is_server or not (self._rate(request)[1] or caller.is_paced)

    def end(self) -> None:
        """Note that the connection is closed."""
        if self._entered:
            self._guard.pacing.leave(self._entered)
            self._entered = ""

    def delay(self, request: Request) -> Delay:
        """Return how long a frame that may be served has to wait now."""
        caller = self._caller
        if caller.is_server:
            return NO_DELAY
        subject, rate = self._rate(request)
        if not (rate or caller.is_paced):
            return NO_DELAY
        delay = self._guard.pacing.delay(
            caller.principal, caller.quota, self._boot_ms(), subject=subject, subject_rate=rate
        )
        if type(request) in _STORING or type(request) in FETCHING:
            return delay
        return Delay(delay.ms - GRACE_MS, delay.limit) if delay.ms > GRACE_MS else NO_DELAY

    def take(self, request: Request, size: int, *, requests: int = 1) -> None:
        """Count a frame, or `size` further bytes of its answer."""
        caller = self._caller
        if caller.is_server:
            return
        subject, rate = self._rate(request)
        if rate or caller.is_paced:
            self._guard.pacing.take(
                caller.principal,
                caller.quota,
                self._boot_ms(),
                size=size,
                requests=requests,
                subject=subject,
                subject_rate=rate,
            )

    def waits(self, delay: Delay) -> None:
        """Count a wait."""
        self._guard.pacing.note_wait(self._caller.principal, delay)

    def too_long(self, delay: Delay) -> KeylaneError:
        """Return the refusal of a frame that would wait too long."""
        return exceeded(self._caller.principal, delay)

    def _rate(self, request: Request) -> tuple[str, int]:
        """Return the subject of a frame that stores messages, and its limit in bytes a second."""
        if type(request) not in _STORING:
            return "", 0
        subject = self._allowed.get(_key(request), AccessTarget()).subject
        return subject, self._guard.subject_rate(subject)

    def _decide(self, request: Request, key: tuple[object, ...]) -> None:
        kind = type(request)
        target = AccessTarget()
        try:
            if self._held is None:
                raise UnauthenticatedError(
                    "the connection has not said who calls", problem="not authenticated"
                )
            _check_names(request)
            target = self._judge.target(request)
            self._caller.check(FRAME_RIGHTS.get(kind, Rights.CONSUME), *target)
        except PartitionUnknownError:
            raise
        except KeylaneError as error:
            if error.reason is Reason.NAME_INVALID:
                raise
            self._guard.note(self._caller, self._remote, kind.__name__, target, error)
            raise
        if kind in _AUDITED:
            where = f"partition {getattr(request, 'partition_id', '')}"
            did = (self._caller, self._remote, kind.__name__, target)
            if kind is not Read:
                self._guard.note(*did, detail=where)
                return  # each edit has a line of its own
            self._guard.note_read(*did, where)
        if kind is CancelScheduled:
            return  # each has an id of its own
        if len(self._allowed) >= ALLOWED_MAX:
            self._allowed.clear()
        self._allowed[key] = target


def _key(request: Request) -> tuple[object, ...]:
    """Return the fields of a frame that decide whether it is allowed."""
    partition_id = getattr(request, "partition_id", None)
    if partition_id is None:  # it is about a subject, or a scheduled message
        return type(request), getattr(request, "subject", request)
    return type(request), partition_id, getattr(request, "group", None)


def _check_names(request: Request) -> None:
    """Check the names that are kept with a decision, because a sender can make them long. Raises
    InvalidRequestError.
    """
    group = getattr(request, "group", None)
    if group is not None:
        check_name("consumer group", group)
    elif isinstance(request, Schedule):
        check_name("subject", request.subject)
