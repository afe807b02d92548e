"""Sends the waiting rows in the table while this process holds the lease.

    wake ─▶ round (a transaction) ─▶ senders send ─▶ replies ─▶ round ─▶ … ─▶ no rows remain:
                                                                              release the lease

After a database error, or when another process has taken the lease, this process discards its state
and reads the tables again: the tables contain everything needed to continue.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Coroutine
from itertools import groupby
from typing import Any

from ..protocol.errors import Fate, InternalError, KeylaneError
from ..protocol.limits import MESSAGE_BYTES_MAX
from ..rpc.client import BrokerClient
from ..rpc.environment import DrawBits
from ..rpc.race import start_task
from . import rows
from .assignment import CapacityTable, SizeLimit, SubjectKey, capacity_table
from .batches import OutboxBatch, SendSession
from .database import Transactions
from .lease import TokenChangedError, release
from .partition_sender import WARN_AT, PartitionSender
from .round import RoundInput, RoundOutcome, SettledBatches, run_round
from .routes import OutboxRoutes, RouteState
from .settings import OutboxSettings
from .tables import OutboxTables
from .waiters import RowWaiters

log = logging.getLogger("keylane.outbox")
CACHED_SUBJECTS_MAX = 1_000
"""The maximum number of idle subjects whose routes and senders are cached."""


class Drainer:
    """The task of an open outbox that takes the lease and runs the rounds; also owns the
    senders.
    """

    def __init__(
        self,
        database: Transactions,
        tables: OutboxTables,
        routes: OutboxRoutes,
        *,
        owner: str,
        broker_at: Callable[[str], BrokerClient],
        settings: OutboxSettings,
        rng: random.Random,
        draw_identity: DrawBits,
        waiters: RowWaiters,
    ) -> None:
        self._database = database
        self._tables = tables
        self._routes = routes
        self._owner = owner
        self._broker_at = broker_at
        self._settings = settings
        self._rng = rng
        self._draw_identity = draw_identity
        self._waiters = waiters
        self._wake = asyncio.Event()
        self._closing = False
        self.token: int | None = None
        self._may_hold_lease = False
        """True after a round was cancelled: its transaction may have taken the lease, or may still
        be running in a thread.
        """
        self.senders: dict[int, PartitionSender] = {}
        self._by_subject: dict[str, list[PartitionSender]] = {}
        """The same senders, by subject."""
        self._settled = SettledBatches()
        self._halted_keys: set[SubjectKey] = set()
        self._confirmed_limits: set[str] = set()
        """Subjects whose limit was fetched again after a row that exceeds it was found."""
        self._limit_checks: dict[str, asyncio.Task[None]] = {}
        self._routing_tasks: dict[str, asyncio.Task[None]] = {}
        self.fault: BaseException | None = None
        """The exception, caused by a bug, that ended one of the tasks. Sending then stops, and the
        lease expires.
        """
        self._begin_session()
        self._task = start_task(self._run(), name="outbox")
        self._task.add_done_callback(self.on_task_done)

    def _begin_session(self) -> None:
        """Allocate a new producer id, because other processes may send the batches recorded under
        the old one.
        """
        self._producer_id = self._draw_identity(63) | 1
        self._epochs = itertools.count()

    def _new_session(self) -> SendSession:
        return SendSession(self._producer_id, next(self._epochs))

    def wake(self) -> None:
        """Start the next round now."""
        self._wake.set()

    def on_task_done(self, task: asyncio.Task[None]) -> None:
        """See `SenderOwner.on_task_done`."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.critical("an outbox has stopped sending; close it and open it again", exc_info=error)
        if self.fault is None:
            self.fault = error
            self._waiters.fail_all(stopped_error(error).copy(Fate.UNKNOWN))
        self.wake()

    # ── rounds ────────────────────────────────────────────────────────────────────────────────────
    async def _run(self) -> None:
        try:
            await self._run_rounds()
        except asyncio.CancelledError:
            # Only the shutdown of the event loop cancels this task. Without a release, the next
            # process would have to wait for the lease to expire.
            await self._release()
            raise

    async def _run_rounds(self) -> None:
        pauses = self._settings.backoff.pauses(self._rng)
        self.wake()
        while not self._closing and self.fault is None:
            try:
                if await self._wait_until_due():
                    await self._run_round()
                pauses.reset()
            except (KeylaneError, TokenChangedError) as error:
                log.info(
                    "the outbox will read its rows again: %s", getattr(error, "message", error)
                )
                await self._reset()
                await self._wait_for_wake(pauses.next_pause_ms())
                self.wake()

    async def _wait_until_due(self) -> bool:
        """Wait until a round may be due. Return False if there is nothing to do."""
        settings = self._settings
        if await self._wait_for_wake(
            settings.rescan_ms
            if self.token is None
            else min(settings.rescan_ms, settings.lease_ms // 3)
        ):
            return not self._closing and self.fault is None
        return self.token is not None or await self._database.run(
            rows.has_unsettled_rows, self._tables
        )

    async def _wait_for_wake(self, wait_ms: int) -> bool:
        """Wait for `wake`. Return False if it is not called within `wait_ms`."""
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True

    async def _run_round(self) -> None:
        settled, self._settled = self._settled, SettledBatches()
        round_input = RoundInput(
            owner=self._owner,
            token=self.token,
            settled=settled,
            sending=any(sender.batches for sender in self.senders.values()),
            tables=self._capacity_tables(),
            halted_keys=self._halted_keys,
            limits=self._size_limits(),
        )
        self._confirmed_limits.clear()
        try:
            outcome = await self._database.run(run_round, self._tables, self._settings, round_input)
        except asyncio.CancelledError:
            self._may_hold_lease = True
            raise
        self._waiters.settle(settled, outcome.refused)
        self._apply_outcome(outcome)
        await self._close_idle_senders()
        if self.token is None and len(self._routes.states) > CACHED_SUBJECTS_MAX:
            await self._close_senders()
            self._routes.states.clear()
        elif len(self._routes.states) > 2 * CACHED_SUBJECTS_MAX:
            await self._evict_idle_subjects()

    def _apply_outcome(self, outcome: RoundOutcome) -> None:
        self.token = outcome.token
        self._halted_keys = outcome.halted_keys
        if outcome.inherited:
            for partition_id, batches in groupby(
                outcome.recorded, key=lambda batch: batch.partition_id
            ):
                inherited_batches = list(batches)
                self._get_or_create_sender(inherited_batches[0].subject, partition_id).inherit(
                    inherited_batches
                )
        else:
            for batch in outcome.recorded:
                if not self._get_or_create_sender(batch.subject, batch.partition_id).enqueue(batch):
                    self._settled.returned.append(batch)
                    self.wake()
        recorded_subjects = {batch.subject for batch in outcome.recorded}
        for subject in recorded_subjects:
            self._routes.mark_used(subject)
        for subject in outcome.unknown | recorded_subjects:
            self._start_routing(subject)
        for subject in outcome.unconfirmed:
            self._start_once(self._limit_checks, self._refresh_limit, subject)
        for row_id, reason in outcome.refused.items():
            log.error(
                "row %d was refused, and stays unsent until it is redriven: %s", row_id, reason
            )
        if outcome.more or outcome.inherited:
            self.wake()

    def _capacity_tables(self) -> dict[str, CapacityTable]:
        capacities = {
            partition_id: capacity
            for partition_id, sender in self.senders.items()
            if (capacity := sender.capacity()) is not None
        }
        return {
            subject: capacity_table(
                state.partition_ids if self._are_ranges_known(subject) else (),
                capacities,
                [
                    (sender.partition.range_start, sender.partition.range_end)
                    for sender in self._senders_of(subject)
                    if sender.partition is not None and sender.batches and not sender.listed
                ],
            )
            for subject, state in self._routes.states.items()
        }

    def _size_limits(self) -> dict[str, SizeLimit]:
        """Return the size limits below MESSAGE_BYTES_MAX, by subject."""
        lowest_limits: dict[str, int] = {}
        for subject, state in self._routes.states.items():
            reported_limits = [
                each.limit_bytes for each in self._senders_of(subject) if each.listed
            ]
            route_limit = (
                MESSAGE_BYTES_MAX if state.route is None else state.route.message_bytes_max
            )
            lowest_limits[subject] = min([route_limit, *reported_limits])
        return {
            subject: SizeLimit(limit, subject in self._confirmed_limits)
            for subject, limit in lowest_limits.items()
            if limit < MESSAGE_BYTES_MAX
        }

    async def _refresh_limit(self, subject: str) -> None:
        """Fetch the limit again before rows are refused, because it may have been raised."""
        for attempt in itertools.count(1):
            state = await self.refresh_route(subject)
            if not state.problem:
                break
            await self._wait_for_route(subject, state, attempt)
            if self.token is None:
                return
        self._confirmed_limits.add(subject)
        self.wake()

    async def _wait_for_route(self, subject: str, state: RouteState, attempt: int) -> None:
        level = logging.WARNING if attempt == WARN_AT else logging.DEBUG
        log.log(level, "rows of %s wait: %s", subject, state.problem)
        pause_ms = state.pause_ms(attempt, self._settings.backoff, self._rng)
        await asyncio.sleep(pause_ms / 1000)

    def _are_ranges_known(self, subject: str) -> bool:
        """Return True if the ranges of all partitions with unsettled batches are known."""
        return all(
            sender.partition is not None for sender in self._senders_of(subject) if sender.batches
        )

    async def _reset(self) -> None:
        """Discard everything read from the tables; the next holder of the lease resends the
        unsettled batches.
        """
        self.token = None
        await self._close_senders()
        self._settled = SettledBatches()  # the senders may have added to it
        self._halted_keys = set()
        self._begin_session()
        for subject, state in self._routes.states.items():
            self._apply_route(subject, state)

    async def _close_senders(self) -> None:
        senders, self.senders, self._by_subject = list(self.senders.values()), {}, {}
        for sender in senders:
            await sender.close()

    # ── senders ───────────────────────────────────────────────────────────────────────────────────
    def _senders_of(self, subject: str) -> list[PartitionSender]:
        return self._by_subject.get(subject, [])

    def _get_or_create_sender(self, subject: str, partition_id: int) -> PartitionSender:
        sender = self.senders.get(partition_id)
        if sender is None:
            sender = self.senders[partition_id] = PartitionSender(
                subject,
                partition_id,
                self,
                broker_at=self._broker_at,
                settings=self._settings,
                rng=self._rng,
                new_session=self._new_session,
            )
            self._by_subject.setdefault(subject, []).append(sender)
        return sender

    async def _close_idle_senders(self) -> None:
        """Close senders without batches whose partitions are not open in the route."""
        for partition_id, sender in list(self.senders.items()):
            state = self._routes.states.get(sender.subject)
            if (
                state is not None
                and state.route is not None
                and not (sender.listed or sender.batches)
            ):
                del self.senders[partition_id]
                self._by_subject[sender.subject].remove(sender)
                await sender.close()

    async def _evict_idle_subjects(self) -> None:
        """Evict the subjects that have been idle for the longest time from the cache."""
        busy = {sender.subject for sender in self.senders.values() if sender.batches}
        busy |= {*self._routing_tasks, *self._limit_checks}
        idle = [subject for subject in self._routes.states if subject not in busy]
        evicted: list[PartitionSender] = []
        for subject in idle[: len(self._routes.states) - CACHED_SUBJECTS_MAX]:
            del self._routes.states[subject]
            evicted += self._by_subject.pop(subject, [])
        for sender in evicted:
            del self.senders[sender.partition_id]
        for sender in evicted:
            await sender.close()

    def on_stored(self, batch: OutboxBatch) -> None:
        """See `SenderOwner.on_stored`."""
        self._settled.stored.append(batch)
        self.wake()

    def return_batches(
        self, subject: str, returned: list[OutboxBatch], failed: list[OutboxBatch], reason: str
    ) -> None:
        """See `SenderOwner.return_batches`."""
        self._settled.returned += returned
        self._settled.failed |= dict.fromkeys(failed, reason)
        self._start_routing(subject)
        self.wake()

    # ── routes ────────────────────────────────────────────────────────────────────────────────────
    async def refresh_route(self, subject: str) -> RouteState:
        """See `SenderOwner.refresh_route`."""
        unsettled = [sender.partition_id for sender in self._senders_of(subject) if sender.batches]
        state = await self._routes.fetch(subject, unsettled)
        self._apply_route(subject, state)
        self.wake()
        return state

    def _apply_route(self, subject: str, state: RouteState) -> None:
        """Pass a route to the subject's senders, and create missing senders for open partitions."""
        for partition_id in state.open:
            self._get_or_create_sender(subject, partition_id)
        for sender in self._senders_of(subject):
            sender.listed = sender.partition_id in state.open
            sender.gone = state.gone.get(sender.partition_id)
            partition = state.open.get(sender.partition_id) or state.closed.get(sender.partition_id)
            sender.partition = partition or sender.partition

    def _start_routing(self, subject: str) -> None:
        """Start fetching the subject's route until its rows can be sent, unless that is already in
        progress.
        """
        if not self._is_routed(subject):
            self._start_once(self._routing_tasks, self._refresh_until_routed, subject)

    def _start_once(
        self,
        tasks: dict[str, asyncio.Task[None]],
        work: Callable[[str], Coroutine[Any, Any, None]],
        subject: str,
    ) -> None:
        """Start `work` for a subject, unless `tasks` already contains a task for it."""
        if subject not in tasks:
            task = tasks[subject] = start_task(work(subject), name=f"outbox {subject}")
            task.add_done_callback(lambda _: tasks.pop(subject, None))
            task.add_done_callback(self.on_task_done)

    def _is_routed(self, subject: str) -> bool:
        state = self._routes.states.get(subject)
        senders = self._senders_of(subject)
        return (
            state is not None
            and state.route is not None
            and state.open.keys() <= {sender.partition_id for sender in senders}
            and not any(sender.listed and sender.sealed for sender in senders)
        )

    async def _refresh_until_routed(self, subject: str) -> None:
        for attempt in itertools.count(1):
            state = await self.refresh_route(subject)
            if self._is_routed(subject):
                return
            await self._wait_for_route(subject, state, attempt)
            if self.token is None:  # another process sends
                self._routes.states.pop(subject, None)
                return

    @property
    def problems(self) -> dict[str, str]:
        """The reasons why rows are waiting, by subject."""
        routes = {
            subject: self._routes.states[subject].problem
            for subject in (*self._routing_tasks, *self._limit_checks)
            if subject in self._routes.states
        }
        senders = {
            sender.subject: sender.problem for sender in self.senders.values() if sender.batches
        }
        return {subject: reason for subject, reason in (routes | senders).items() if reason}

    # ── the end ───────────────────────────────────────────────────────────────────────────────────
    async def close(self) -> None:
        """Finish the current transaction and release the lease. Other processes settle the
        remaining batches.
        """
        self._closing = True
        self.wake()
        await asyncio.gather(self._task, return_exceptions=True)
        tasks = [*self._routing_tasks.values(), *self._limit_checks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._release()

    async def _release(self) -> None:
        """Stop the senders, and release the lease."""
        await self._close_senders()
        if self.token is not None or self._may_hold_lease:
            try:
                await self._database.run(release, self._tables, owner=self._owner)
            except KeylaneError as error:
                log.info(
                    "the outbox could not release its lease, which will expire: %s",
                    error.message,
                )
            self.token = None
            self._may_hold_lease = False


def stopped_error(fault: BaseException) -> InternalError:
    """Return the error for an outbox that a bug has stopped."""
    error = InternalError(
        f"the outbox has stopped sending because of a bug in keylane: {fault!r:.200}; its rows "
        "stay in the table, and any outbox that is opened on it sends them",
    )
    error.__cause__ = fault
    return error
