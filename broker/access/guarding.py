"""The access control of a broker: what calls and frames are about, by the partitions that it hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...protocol.access.quota import limit_of
from ...protocol.access.rights import SOME_SUBJECT
from ...protocol.clock import Clock
from ...protocol.endpoints import CANCEL_SCHEDULED
from ...protocol.frames import Authenticate, CancelScheduled, Request, Schedule
from ...protocol.http.endpoint import Endpoint, Rights
from ...protocol.reading.bounds import AskBounds
from ...rpc.access.caller import AccessTarget
from ...rpc.access.guard import Guard
from ..scheduled.scheduler import Scheduler
from ..store.store import Store
from .audit_sending import AuditSending
from .judge import CapabilityJudge, JudgedCapability

RATES_MAX = 10_000
"""Subjects whose limit is known."""


class BrokerGuarding:
    """
    Finds what callers ask about; see `guard.DataJudge`.

    Args:
        address: the broker's own, once it listens.
        audit: where events of the audit log go.
    """

    def __init__(
        self,
        judge: CapabilityJudge,
        store: Store,
        scheduler: Scheduler,
        *,
        clock: Clock,
        address: Callable[[], str],
        audit: AuditSending,
    ) -> None:
        self.audit = audit
        self.judge = judge
        self._state = store.state
        self._scheduler = scheduler
        scheduler.limits = lambda: judge.scheduled_bytes
        self._address = address
        self.guard = Guard(
            judge.identify,
            self._targets,
            clock=clock,
            version=lambda: judge.version,
            judge=self,
            subject_rate=self._subject_rate,
            on_audit=audit.buffer.add,
        )
        self._rates: tuple[object, dict[str, int]] = ({}, {})

    def _subject_rate(self, subject: str) -> int:
        """The bytes a second of a subject; looked up once after each change."""
        limits = self.judge.subject_bytes
        if not limits:
            return 0
        if self._rates[0] is not limits or len(self._rates[1]) > RATES_MAX:
            self._rates = (limits, {})
        known = self._rates[1]
        if subject not in known:
            known[subject] = limit_of(subject, limits)
        return known[subject]

    async def authenticate(self, nonce: bytes, asked: Authenticate) -> JudgedCapability:
        """See `CapabilityJudge.authenticate`."""
        return await self.judge.authenticate(nonce, asked, self._address())

    def target(self, request: Request) -> AccessTarget:
        """What a frame is about.  Raises PartitionUnknownError."""
        if isinstance(request, Schedule):
            return AccessTarget(request.subject)
        if isinstance(request, CancelScheduled):
            return AccessTarget(self._scheduler.subject_of(request.scheduled_id) or SOME_SUBJECT)
        partition_id: int = request.partition_id  # type: ignore[union-attr]  # all others have one
        return AccessTarget(self._subject(partition_id), getattr(request, "group", ""))

    def _subject(self, partition_id: int) -> str:
        return self._state.partition(partition_id).facts.subject

    async def _targets(
        self, endpoint: Endpoint[Any], body: Any, params: Mapping[str, str]
    ) -> Sequence[AccessTarget]:
        if endpoint.rights is Rights.CLUSTER:
            return (AccessTarget(),)
        if "{subject}" in endpoint.path:
            return (AccessTarget(params["subject"]),)
        if isinstance(body, AskBounds):
            ids = [bounds.partition_id for bounds in body.partitions]
            hosted = [self._state.partitions.get(partition_id) for partition_id in ids]
            return [AccessTarget(each.facts.subject) for each in hosted if each is not None]
        if endpoint is CANCEL_SCHEDULED:
            return (AccessTarget(self._scheduled(params["id"]) or SOME_SUBJECT),)
        if "{id}" in endpoint.path:
            return self._of_partition(params["id"], getattr(body, "group", ""))
        if "subject" in endpoint.query:
            return (AccessTarget(params.get("subject", "")),)
        return (AccessTarget(),)

    def _of_partition(self, text: str, group: str) -> Sequence[AccessTarget]:
        """The subject of a partition; about text that is no number the call itself complains."""
        if not (text.isascii() and text.isdecimal() and len(text) < 20):
            return ()
        return (AccessTarget(self._subject(int(text)), group),)

    def _scheduled(self, text: str) -> str | None:
        try:
            return self._scheduler.subject_of(bytes.fromhex(text))
        except ValueError:
            return None
