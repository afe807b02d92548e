"""The routes of the subjects with waiting rows.

A route is fetched when it is needed: for the first row of a subject, and after a partition has
refused a batch or has not replied. Sealed partitions refuse batches, so an outdated route costs a
call but never breaks the order.

The partitions of a deleted subject store nothing further. Its unsent rows wait until an operator
creates a subject of this name, because sending a message does not recreate a deleted subject.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..protocol import endpoints
from ..protocol.backoff import Backoff
from ..protocol.errors import (
    DeliveryError,
    KeylaneError,
    Reason,
    SubjectDeletedError,
    SubjectUnknownError,
)
from ..protocol.routing import Partition, Route, route_table
from ..rpc.client import MetaClient
from ..rpc.liveness.recent import RecentNames
from ..rpc.race import start_task, wait_for_shared

log = logging.getLogger("keylane.outbox")
MISSING_PAUSE_MS_MAX = 60_000
"""The maximum pause, in milliseconds, between requests for the route of a subject that does not
exist.
"""
DELETED_KNOWN_MAX = 10_000
"""The maximum number of deleted subjects that are remembered; others are treated as after a
restart.
"""
_NO_SUBJECT = (SubjectDeletedError, SubjectUnknownError)
_DELETED = "the subject was deleted: its rows wait until an operator creates one of this name"


@dataclass(slots=True)
class RouteState:
    """The latest route of a subject, and the state of the requests for it."""

    route: Route | None = None
    open: dict[int, Partition] = field(default_factory=dict)
    partition_ids: Sequence[int] = ()
    """The open partition of each logical partition; empty while no route is known."""
    closed: dict[int, Partition] = field(default_factory=dict)
    """Partitions with unsettled batches that are not open."""
    gone: Mapping[int, KeylaneError] = field(default_factory=dict)
    """Partitions for which no broker can answer any more, with the reason: an operator has accepted
    their loss, or their subject is deleted.
    """
    problem: str = ""
    """The reason why the last request returned no route; empty if it did."""
    last_error: str = ""
    """The error message of the last request; empty if it succeeded."""
    not_found_count: int = 0
    """The number of consecutive replies that the subject does not exist."""

    def pause_ms(self, attempt: int, backoff: Backoff, rng: random.Random) -> int:
        """Return the pause, in milliseconds, after `attempt` consecutive requests without a
        route.
        """
        if not self.not_found_count:
            return backoff.wait_ms(attempt, rng)
        # Not `attempt`, because a metaserver that is being rebuilt after a failure may lack its
        # subjects for a moment.
        longest = replace(backoff, max_ms=max(backoff.max_ms, MISSING_PAUSE_MS_MAX))
        return longest.wait_ms(self.not_found_count, rng)


class OutboxRoutes:
    """The routes of all subjects of one outbox."""

    def __init__(self, meta: MetaClient) -> None:
        self._meta = meta
        self.states: dict[str, RouteState] = {}
        """Routes by subject, least recently used first."""
        self._deleted = RecentNames(DELETED_KNOWN_MAX)
        """Deleted subjects, until a new subject of the same name is known."""
        self._pending_fetches: dict[str, asyncio.Task[RouteState]] = {}

    def mark_used(self, subject: str) -> None:
        """Mark a subject as the most recently used one."""
        if subject in self.states:
            self.states[subject] = self.states.pop(subject)

    async def fetch(self, subject: str, unsettled: Collection[int]) -> RouteState:
        """
        Fetch the latest route. Concurrent calls for a subject share the request.

        Args:
            unsettled: the ids of partitions with unsettled batches. If the route no longer lists
                one of them, the subject's history is fetched as well.
        """
        task = self._pending_fetches.get(subject)
        if task is None:
            task = start_task(self._fetch_state(subject, unsettled), name=f"route {subject}")
            self._pending_fetches[subject] = task
            task.add_done_callback(lambda _: self._pending_fetches.pop(subject, None))
        return await wait_for_shared(task, "the outbox was closed")

    async def _fetch_state(self, subject: str, unsettled: Collection[int]) -> RouteState:
        state = self.states.setdefault(subject, RouteState())
        try:
            subject_id = 0 if state.route is None else state.route.subject_id
            route = await self._meta.route_to_send(subject, subject_id=subject_id)
            state.not_found_count = 0
            if state.route is not None and route.version < state.route.version:
                state.problem = "the metaserver's route is older than the one followed"
                return state
            partition_ids = [each.partition_id for each in route_table(route)]
            partitions: dict[int, Partition] = {
                each.partition_id: each for each in route.partitions
            }
            if not partitions.keys() >= set(unsettled):
                history = (await self._meta.call(endpoints.HISTORY, subject=subject)).partitions
                partitions |= {each.partition.partition_id: each.partition for each in history}
                lost_ids = [each.partition.partition_id for each in history if each.lost]
                state.gone = {
                    each: DeliveryError(Reason.ACCEPTED_AS_LOST, partition_id=each)
                    for each in lost_ids
                } | {
                    each: SubjectDeletedError(subject=subject)
                    for each in unsettled
                    if each not in partitions
                }
            state.route = route
            state.partition_ids = partition_ids
            state.problem = state.last_error = ""
            state.open = {each.partition_id: each for each in route.open_partitions()}
            state.closed = {each: partitions[each] for each in unsettled if each in partitions}
            self._deleted.discard(subject)
        except KeylaneError as error:
            # Repeated errors are logged at DEBUG only.
            level = logging.WARNING if isinstance(error, _NO_SUBJECT) else logging.INFO
            level = logging.DEBUG if state.last_error == error.message else level
            log.log(level, "rows of subject %s wait to be sent: %s", subject, error.message)
            not_found_count = state.not_found_count + 1 if isinstance(error, _NO_SUBJECT) else 0
            if isinstance(error, SubjectDeletedError):
                self._deleted.add(subject)
                self.states[subject] = state = RouteState()
            state.last_error = error.message
            state.not_found_count = not_found_count
            if subject in self._deleted and isinstance(error, _NO_SUBJECT):
                state.gone = dict.fromkeys(unsettled, SubjectDeletedError(subject=subject))
                state.problem = _DELETED
            else:
                state.problem = error.message
        return state

    async def close(self) -> None:
        """Cancel the pending requests."""
        tasks = list(self._pending_fetches.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
