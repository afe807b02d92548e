"""The broker's access control: determines the subject and group that a request accesses, from the
partitions that the broker hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...protocol.access.quota import subject_limit
from ...protocol.access.rights import SOME_SUBJECT
from ...protocol.clock import Clock
from ...protocol.endpoints import CANCEL_SCHEDULED
from ...protocol.frames import Authenticate, CancelScheduled, Follow, Request, Schedule
from ...protocol.http.endpoint import Endpoint, Rights
from ...protocol.reading.bounds import AskBounds
from ...protocol.text import parse_number
from ...rpc.access.caller import AccessTarget
from ...rpc.access.guard import Guard
from ..scheduled.scheduler import Scheduler
from ..store.store import Store
from .audit_sender import AuditSender
from .judge import CapabilityJudge, JudgedCapability

RATES_MAX = 10_000
"""The maximum number of subjects whose limits are cached."""


class BrokerGuard:
    """
    Determines the targets of requests for a `Guard`; implements `guard.DataAuthorizer`.

    Args:
        address: returns the broker's own address, once the broker listens.
        audit: receives the events of the audit log.
    """

    def __init__(
        self,
        judge: CapabilityJudge,
        store: Store,
        scheduler: Scheduler,
        *,
        clock: Clock,
        address: Callable[[], str],
        audit: AuditSender,
    ) -> None:
        self.audit = audit
        self.judge = judge
        self._state = store.state
        self._scheduler = scheduler
        scheduler.limits = lambda: judge.scheduled_bytes
        self._address = address
        self.guard = Guard(
            judge.identify,
            self._find_targets,
            clock=clock,
            version=lambda: judge.version,
            authorizer=self,
            subject_rate=self._subject_rate,
            on_audit=audit.buffer.add,
        )
        self._cached_rates: tuple[object, dict[str, int]] = ({}, {})

    def _subject_rate(self, subject: str) -> int:
        """Return a subject's limit in bytes per second, or 0 if it has none. The result is cached
        until the limits change.
        """
        limits = self.judge.subject_bytes
        if not limits:
            return 0
        if self._cached_rates[0] is not limits or len(self._cached_rates[1]) > RATES_MAX:
            self._cached_rates = (limits, {})
        cached = self._cached_rates[1]
        if subject not in cached:
            cached[subject] = subject_limit(subject, limits)
        return cached[subject]

    async def authenticate(self, nonce: bytes, request: Authenticate) -> JudgedCapability:
        """See `CapabilityJudge.authenticate`."""
        return await self.judge.authenticate(nonce, request, self._address())

    def target(self, request: Request) -> AccessTarget:
        """Return the target of a frame. Raises PartitionUnknownError."""
        if isinstance(request, Schedule):
            return AccessTarget(request.subject)
        if isinstance(request, Follow):
            return AccessTarget()
        if isinstance(request, CancelScheduled):
            return _scheduled_target(self._scheduler.subject_of(request.scheduled_id))
        partition_id: int = request.partition_id  # type: ignore[union-attr]  # all others have one
        return self._partition_target(partition_id, getattr(request, "group", ""))

    def _partition_target(self, partition_id: int, group: str = "") -> AccessTarget:
        """Return the target for a partition. Raises PartitionUnknownError."""
        subject = self._state.partition(partition_id).facts.subject
        return AccessTarget(subject, group, f"partition {partition_id}")

    async def _find_targets(
        self, endpoint: Endpoint[Any], body: Any, params: Mapping[str, str]
    ) -> Sequence[AccessTarget]:
        """Return the targets of an HTTP request."""
        if endpoint.rights is Rights.CLUSTER:
            return (AccessTarget(),)
        if "{subject}" in endpoint.path:
            return (AccessTarget(params["subject"]),)
        if isinstance(body, AskBounds):
            ids = [bounds.partition_id for bounds in body.partitions]
            return [
                self._partition_target(partition_id)
                for partition_id in ids
                if partition_id in self._state.partitions
            ]
        if endpoint is CANCEL_SCHEDULED:
            return (_scheduled_target(self._scheduled_subject(params["id"])),)
        if "{id}" in endpoint.path:
            partition_id = parse_number(params["id"])
            if partition_id is None:
                return ()  # the handler reports it
            return (self._partition_target(partition_id, getattr(body, "group", "")),)
        if "subject" in endpoint.query:
            return (AccessTarget(params.get("subject", "")),)
        return (AccessTarget(),)

    def _scheduled_subject(self, hex_id: str) -> str | None:
        try:
            return self._scheduler.subject_of(bytes.fromhex(hex_id))
        except ValueError:
            return None


def _scheduled_target(subject: str | None) -> AccessTarget:
    """Return the target for a scheduled message; `subject` is None if it is unknown."""
    if subject is None:
        return AccessTarget(SOME_SUBJECT)
    return AccessTarget(subject, called="this scheduled message")
