"""Answers appends, pulls and acks where they arrive, without a task, if nothing has to be waited
for but a commit or news.

    append ─▶ decided ─▶ durable ─▶ answered
    ack    ─▶ decided ─▶ durable ─▶ answered
    pull   ─▶ see `open_pulls`

What needs more (room in the commit queue, a large batch to unpack, a read of the disk, tags) is
left to `BrokerService.handle`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ...protocol.clock import Clock
from ...protocol.errors import KeylaneError
from ...protocol.frames import Ack, Acked, Append, Appended, Pull, Request
from ...rpc.plane.prompt import PromptCall
from ..partition.partition import Group, HostedPartition
from ..store.group_commit import Ended
from ..store.store import DURABLE, Store
from .open_pulls import OpenPulls, PullDecisions
from .unpack_checks import UnpackChecks
from .waiting import LongPolls

Beginning = Callable[[Any, memoryview, PromptCall, int], bool]
"""As `DataService.begin`; the last argument is the boot clock's nanoseconds at the arrival of the
request.
"""


class Decisions(PullDecisions, Protocol):
    """What a service decides, with a task or without."""

    def decide_ack(self, request: Ack, now_ms: int) -> tuple[int, HostedPartition, Group]:
        """The cursor, and whose progress has to be saved before the cursor is told."""
        ...

    def save(self, partition: HostedPartition, group: Group, ended: Ended) -> bool:
        """Have `ended` called once the progress of a group is durable; False: it is."""
        ...

    def acked(self, cursor: int, group: Group) -> Acked:
        """The answer to an ack that is durable."""
        ...


class PromptAnswers:
    """The part of a service that needs no task."""

    def __init__(
        self,
        service: Decisions,
        store: Store,
        waiting: LongPolls,
        clock: Clock,
        unpack_checks: UnpackChecks,
    ) -> None:
        self._service = service
        self._store = store
        self._unpack_checks = unpack_checks
        self._pulls = OpenPulls(service, store, waiting, clock)
        self._boot_ns = clock.boot_ns
        self.beginnings: dict[type[Request], Beginning] = {
            Append: self._append,
            Pull: self._pull,
            Ack: self._ack,
        }
        """Kind of a request → what answers it without a task."""

    def _append(
        self, request: Append, payload: memoryview, call: PromptCall, began_ns: int
    ) -> bool:
        if not self._store.commit.takes_now(len(payload)):
            return False
        checks = self._unpack_checks
        if request.partition_id in checks.latest or checks.is_large(payload):
            return False
        store = self._store

        def ended(error: KeylaneError | None) -> None:
            if error is not None:
                call.refuse(error)
                return
            store.traffic.appends.observe(self._boot_ns() - began_ns)
            call.answer(Appended(base_offset, DURABLE, duplicate))

        base_offset, duplicate = store.append(request.partition_id, payload, ended, in_turn=True)
        return True

    def _ack(self, request: Ack, _payload: memoryview, call: PromptCall, now_ns: int) -> bool:
        service = self._service
        cursor, partition, group = service.decide_ack(request, now_ns // 1_000_000)

        def ended(error: KeylaneError | None) -> None:
            if error is not None:
                call.refuse(error)
            else:
                call.answer(service.acked(cursor, group))

        if not service.save(partition, group, ended):
            call.answer(service.acked(cursor, group))
        return True

    def _pull(self, request: Pull, _payload: memoryview, call: PromptCall, now_ns: int) -> bool:
        return self._pulls.begin(request, call, now_ns // 1_000_000)
