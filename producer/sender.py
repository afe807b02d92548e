"""Dispatches the messages of a subject to executors according to its route, and holds messages
without a partition.

    send() ─▶ table[logical partition] ─▶ executor
    held: batches of messages without a partition

Invariants
    The messages of a key are in one executor at a time, in the order of their `send` calls. When
    messages leave a partition, older ones are sent first. Newer ones are held until there is a
    newer route and the old partition has acked or refused all of its messages. A None in the table
    means that messages are held; when the entry gets an executor, they are released, oldest first.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeGuard

from ..protocol import endpoints
from ..protocol.clock import Clock
from ..protocol.control import WaitingProducer
from ..protocol.errors import (
    ClosedError,
    Fate,
    KeylaneError,
    Reason,
    RetryRule,
    SubjectDeletedError,
)
from ..protocol.limits import LOGICAL_PARTITIONS, MESSAGE_BYTES_MAX, PULL_WAIT_MS_MAX
from ..protocol.log_filter import LogFilter
from ..protocol.routing import OrderStrategy, Partition, Route, logical_partition, route_table
from ..protocol.text import counted
from ..rpc.client import BrokerClient, MetaClient
from ..rpc.environment import process_name
from ..rpc.race import Race, start_task
from .executor import Executor
from .executor_state import ExecutorEvent, MessageGroup
from .failure import Step
from .flight import SendScheduler
from .halts import HaltedKeys
from .held import HeldMessages
from .identity import Identity
from .outgoing_batch import REORDERED, OutgoingBatch
from .placing import Destination, QueueStarts
from .send_budget import SendBudget
from .send_future import BatchFuture, SendFuture
from .settings import ProducerSettings
from .trying.tries import retry_until_done, to_keylane_error
from .waiting import NO_PARTITION, OLDER_ROUTE, WaitCause, oldest_age_ms, route_cause

log = logging.getLogger("keylane.producer")
CLIENT_TYPE = "producer"
_OLDER_ROUTE = "older"
"""The key, in the failure log, of routes that are older than the current one."""
URGENT_WAIT_MS = 500
WAITS_TOLD_MAX = 3
"""The largest number of broker groups for which a producer says that it waits."""
WAIT_REASON_CHARS_MAX = 160
EXPIRY_INTERVAL_MS_MIN, EXPIRY_INTERVAL_MS_MAX = 10, 1_000
NO_EXECUTORS: list[Executor | None] = [None] * LOGICAL_PARTITIONS
EXPIRY_SHARE = 10
"""A message is given up late by at most 1/EXPIRY_SHARE of its timeout."""
CLOSED = "the producer was closed before this message was acked"
CLOSED_HINT = (
    "Send it again, unless its fate is unknown: it may be stored. Await `send` before the "
    "producer closes."
)


class SubjectSender:
    """Dispatches the messages of one subject, and owns its executors and its held messages."""

    def __init__(
        self,
        subject: str,
        *,
        order_strategy: OrderStrategy | None,
        meta: MetaClient,
        broker_at: Callable[[str], BrokerClient],
        identity: Identity,
        settings: ProducerSettings,
        clock: Clock,
        rng: random.Random,
        budget: SendBudget,
        send_scheduler: SendScheduler,
        on_abort: Callable[[SubjectSender], None],
    ) -> None:
        self.subject = subject
        self.table: list[Executor | None] = [None] * LOGICAL_PARTITIONS
        """The executor for messages with a key, by logical partition; None where messages are
        held.
        """
        self.keyless_table = self.table
        """The table for messages without a key, in which available executors stand in for
        unavailable ones.
        """
        self.message_bytes_max = MESSAGE_BYTES_MAX
        """The size limit of a message (key, value and properties), in bytes, from the current
        route.
        """
        self.plain_table = self.table
        """The table that `send` uses for plain messages; all entries are None while `send` must
        check each message.
        """
        self._careful = False
        self._order_strategy = order_strategy
        self._meta = meta
        self._broker_at = broker_at
        self._identity = identity
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._budget = budget
        self._send_scheduler = send_scheduler
        self._on_abort = on_abort
        self._route: Route | None = None
        self._failure_log = LogFilter()
        self._executors: dict[int, Executor] = {}
        self._epochs = itertools.count()
        self.held_messages = HeldMessages(
            subject,
            settings=settings,
            clock=clock,
            budget=budget,
            broker_cause=self._refusing_broker_cause,
        )
        self._halted_keys = HaltedKeys(subject, clock, budget)
        self.queue_starts = QueueStarts(subject)
        self._partition_ids: list[int] = []
        self._primary_table: list[Executor | None] = [None] * LOGICAL_PARTITIONS
        self._fallbacks: dict[int, Executor] = {}
        """By partition id, the executor that receives a partition's messages until the partition's
        own broker has recovered.
        """
        self._refresh_requested = asyncio.Event()
        self._route_known = asyncio.Event()
        self._refusal: KeylaneError | None = None
        self._closing = False
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._expiry_interval_ms = EXPIRY_INTERVAL_MS_MAX
        """The interval between searches for overdue messages, in milliseconds."""
        self._pauses = settings.backoff.pauses(rng)
        retries = retry_until_done(
            self._follow_next_route, self._handle_failure, self._pauses, self._to_keylane_error
        )
        self._task = start_task(retries, name=f"route {subject}")
        # A `finally` in the task is not enough: a task cancelled before its first step never runs.
        self._task.add_done_callback(self._warn_if_unclosed)

    @property
    def careful(self) -> bool:
        """True while messages are sent to partitions other than their own, or a key is halted;
        `send` must then call `check`.
        """
        return self._careful

    @careful.setter
    def careful(self, careful: bool) -> None:
        self._careful = careful
        self._update_plain_table()

    def _update_plain_table(self) -> None:
        """Set `plain_table`, which is empty while `send` must check each message."""
        self.plain_table = (
            NO_EXECUTORS if self._careful or self.keyless_table is not self.table else self.table
        )

    # ── sending ───────────────────────────────────────────────────────────────────────────────────
    def hold(
        self,
        key: bytes,
        value: bytes,
        packed_properties: bytes,
        sent_at_ns: int,
        timeout_ms: int,
        destination: Destination | None,
    ) -> SendFuture:
        """
        Hold a message that currently has no partition.

        Args:
            destination: the destination that the sender chose; None: the key decides.

        Raises:
            KeyHaltedError: the key is halted; nothing was queued.
        """
        if key:
            self._halted_keys.check(key)
        batch, index = self.held_messages.add(key, value, packed_properties, sent_at_ns)
        if destination is not None:
            batch.set_destination(index, destination)
        if timeout_ms:
            self.annotate(batch, index, reordered=False, timeout_ms=timeout_ms)
        return BatchFuture(batch, index)

    async def wait_for_route(self) -> None:
        """
        Wait for the first route.

        Raises:
            KeylaneError: the metaserver refused the request for the route.
        """
        await self._route_known.wait()
        self.raise_if_stopped()

    def raise_if_stopped(self) -> None:
        """Raise the KeylaneError that stopped this sender, if there is one."""
        if self._refusal is not None:
            raise self._refusal.copy(Fate.NOT_DONE)

    def is_reordered(self, executor: Executor, key: bytes, logical_id: int) -> bool:
        """
        Return True if sending a message of this logical partition to `executor` would reorder it.

        Raises:
            KeyHaltedError: the key is halted; nothing was queued.
        """
        if not key:
            return False
        self._halted_keys.check(key)
        return executor is not self._primary_table[logical_id]

    def annotate(
        self, batch: OutgoingBatch, index: int, *, reordered: bool, timeout_ms: int
    ) -> None:
        """Mark a queued message as reordered, and set its timeout (0: none)."""
        if reordered:
            batch.mark(index, REORDERED)
        if timeout_ms:
            batch.set_deadline(index, self._clock.boot_ms() + timeout_ms, timeout_ms)
            self._schedule_expiry(timeout_ms)

    def _schedule_expiry(self, timeout_ms: int) -> None:
        """Make sure that the search for overdue messages runs often enough for this timeout."""
        interval_ms = min(
            EXPIRY_INTERVAL_MS_MAX, max(EXPIRY_INTERVAL_MS_MIN, timeout_ms // EXPIRY_SHARE)
        )
        if self._expiry_timer is None or interval_ms < self._expiry_interval_ms:
            self._expiry_interval_ms = interval_ms
            if self._expiry_timer is not None:
                self._expiry_timer.cancel()
            self._expiry_timer = asyncio.get_running_loop().call_later(
                interval_ms / 1000, self._expire_overdue
            )

    def _expire_overdue(self) -> None:
        """Give up overdue messages, and halt their keys."""
        self._expiry_timer = asyncio.get_running_loop().call_later(
            self._expiry_interval_ms / 1000, self._expire_overdue
        )
        executors = self.executors
        waiting = [
            (batch, executor.wait_reason) for executor in executors for batch in executor.batches
        ]
        waiting += [
            (batch, self.held_messages.cause.reason) for batch in self.held_messages.batches
        ]
        if not self._halted_keys.expire_overdue(waiting):
            return
        withdraw = self._halted_keys.withdraw
        wait_reason = self.held_messages.cause.reason
        remaining_batches = [
            withdraw(batch, wait_reason=wait_reason)
            for batch in self.held_messages.batches
            if len(batch)
        ]
        self.held_messages.replace(batch for batch in remaining_batches if batch is not None)
        self.careful = True
        for executor in executors:
            executor.replace_unsent(partial(withdraw, wait_reason=executor.wait_reason))

    def resume(self, key: bytes) -> None:
        """Allow messages of a halted key again."""
        self._halted_keys.resume(key)
        self._reassign_messages()

    @property
    def executors(self) -> list[Executor]:
        """The executors, sorted by partition id."""
        return [self._executors[key] for key in sorted(self._executors)]

    def queue_open_batches(self) -> None:
        """Close the open batches, which are then sent."""
        for executor in self._executors.values():
            executor.queue_open_batch()

    # ── the route ─────────────────────────────────────────────────────────────────────────────────
    def _warn_if_unclosed(self, _task: asyncio.Task[None]) -> None:
        """Log how many messages are lost, if the event loop ended before the producer was
        closed.
        """
        batches = [batch for executor in self.executors for batch in executor.batches]
        unsent_count = len(self.held_messages) + sum(map(len, batches))
        if unsent_count and not self._closing:
            log.warning(
                "a producer of %s was never closed: %s not acked and given up; use: "
                "async with Producer(...), or await producer.close()",
                self.subject,
                counted(unsent_count, "message was", "messages were"),
            )

    async def _follow_next_route(self) -> bool:
        """Fetch and apply the next route. After a final refusal, give up all messages and return
        True, which ends the loop.
        """
        if self._refusal is not None:
            await self._abort(self._refusal)
            return True
        if self._apply_route(await self._fetch_route()):
            await self._locate_unlisted_brokers()
            if failures := self._failure_log.end_failures(
                self._clock.boot_ms(), None, _OLDER_ROUTE
            ):
                log.info("route of %s is updated again, after %s", self.subject, failures)
            self._pauses.reset()
            self.held_messages.report(NO_PARTITION)
        else:
            self.held_messages.report(OLDER_ROUTE)
            await asyncio.sleep(self._pauses.next_pause_ms() / 1000)
        return False

    def _to_keylane_error(self, raised: Exception) -> KeylaneError:
        """Convert the exception of a failed attempt. An unexpected one is logged and becomes an
        InternalError.
        """
        return to_keylane_error(
            raised, f"route of {self.subject}", self._failure_log, self._clock.boot_ms()
        )

    async def _handle_failure(self, raised: Exception) -> bool:
        """Record why there is no newer route. If the refusal is final, return True to retry without
        a pause.
        """
        error = self._to_keylane_error(raised)
        if error is raised:
            if error.retry is RetryRule.NEVER and (self._route is None or _is_final(error)):
                self._refusal = error
                return True
            if line := self._failure_log.count_failure(error.message, self._clock.boot_ms()):
                log.info("route of %s: %s", self.subject, line)
        self.held_messages.report(route_cause(error))
        return False

    async def _fetch_route(self) -> Route:
        """
        Wait up to PULL_WAIT_MS_MAX for a newer route, and return the current route if there is
        none.

        While a broker is missing, the calls are short, so that a new call soon follows the next
        failure.
        """
        current_route = self._route
        urgent = self._refresh_requested.is_set() or self._is_broker_missing()
        self._refresh_requested.clear()
        if current_route is None:
            return await self._meta.route_to_send(
                self.subject, wait_ms=URGENT_WAIT_MS, order_strategy=self._order_strategy
            )
        fetch_newer = partial(
            self._meta.route,
            self.subject,
            known_version=current_route.version,
            order_strategy=self._order_strategy,
            subject_id=current_route.subject_id,
        )
        if not urgent:
            async with Race() as race:
                call = race.start(fetch_newer(wait_ms=PULL_WAIT_MS_MAX))
                race.start(self._refresh_requested.wait())
                await race.first()
                if call.done():
                    return call.result()
            # The current route is not applied again: messages that a broker has refused would be
            # sent to it at once.
            self._refresh_requested.clear()
        return await fetch_newer(wait_ms=URGENT_WAIT_MS, waiting=self._waiting_for_brokers())

    def _refusing_broker_cause(self) -> WaitCause:
        """Return the error cause of an open partition whose broker refuses messages, or
        NO_PARTITION if there is none.
        """
        for executor in self.executors:
            state = executor.state
            if state.refuses and not state.closed and executor.wait_reason:
                return executor.cause
        return NO_PARTITION

    def _waiting_for_brokers(self) -> list[WaitingProducer]:
        """Return what messages wait for which brokers, for operators."""
        waiting: dict[str, WaitingProducer] = {}
        for executor in self._executors.values():
            batches, broker_group = executor.batches, executor.partition.broker_group
            if not (batches and executor.wait_reason):
                continue
            other = waiting.get(broker_group)
            if other is None and len(waiting) == WAITS_TOLD_MAX:
                break
            waiting[broker_group] = WaitingProducer(
                client=process_name(),
                broker_group=broker_group,
                messages=sum(map(len, batches)) + (0 if other is None else other.messages),
                waiting_ms=max(
                    oldest_age_ms(batches, self._clock), 0 if other is None else other.waiting_ms
                ),
                reason=executor.wait_reason[:WAIT_REASON_CHARS_MAX],
            )
        return list(waiting.values())

    def _is_broker_missing(self) -> bool:
        """Return True if a range has no partition, or if the broker of a partition is failing."""
        return None in self._primary_table or not all(map(_is_available, self._executors.values()))

    async def _abort(self, error: KeylaneError) -> None:
        self._on_abort(self)
        await self._give_up_all(error)
        self._executors.clear()

    def _apply_route(self, route: Route) -> bool:
        """Apply a route to the executors. If it is older than the current one, ignore it and return
        False.
        """
        if self._route is not None and route.version < self._route.version:
            text = (
                f"ignoring version {route.version} of the metaserver, which is older than "
                f"{self._route.version}: its database was restored from a copy, or rebuilt. The "
                "producer continues with its own version until the metaserver has a newer one; "
                "a restart makes it use the metaserver's"
            )
            if line := self._failure_log.count_failure(text, self._clock.boot_ms(), _OLDER_ROUTE):
                log.warning("route of %s: %s", self.subject, line)
            return False
        self._route = route
        self.message_bytes_max = route.message_bytes_max
        self.queue_starts.follow(route)
        self._route_known.set()
        open_ids = {partition.partition_id for partition in route.open_partitions()}
        self._partition_ids = [partition.partition_id for partition in route_table(route)]
        for partition in route.open_partitions():
            if partition.partition_id not in self._executors:
                self._executors[partition.partition_id] = self._create_executor(partition, route)
        self._follow_brokers(route.partitions)
        listed_ids = {partition.partition_id for partition in route.partitions}
        for partition_id, executor in list(self._executors.items()):
            if partition_id in open_ids:
                executor.apply_event(ExecutorEvent.OPEN_IN_ROUTE)
                continue
            is_listed = partition_id in listed_ids
            executor.apply_event(
                ExecutorEvent.CLOSED_IN_ROUTE if is_listed else ExecutorEvent.NOT_IN_ROUTE
            )
            if executor.idle:
                self._close_executor(executor)
        self._reassign_messages()
        return True

    async def _locate_unlisted_brokers(self) -> None:
        """
        Fetch the addresses of unavailable brokers whose partitions the route no longer lists.

        Only they know whether a batch that was sent to them is stored.
        """
        states = [executor.state for executor in self._executors.values()]
        if any(state.unlisted and not state.available for state in states):
            await self.fetch_history()

    async def fetch_history(self) -> set[str]:
        """
        Fetch the lost partitions and the current broker addresses from the metaserver, and update
        the executors accordingly.

        Returns:
            The names of the silent broker groups.

        Raises:
            KeylaneError: the call failed.
        """
        history = await self._meta.call(endpoints.HISTORY, subject=self.subject)
        for entry in history.partitions:
            executor = self._executors.get(entry.partition.partition_id)
            if executor is not None and entry.lost:
                executor.apply_event(ExecutorEvent.LOSS_ACCEPTED)
        self._follow_brokers(entry.partition for entry in history.partitions)
        return {
            entry.partition.broker_group
            for entry in history.partitions
            if not entry.partition.address
        }

    def _follow_brokers(self, partitions: Iterable[Partition]) -> None:
        """Update the broker addresses of all executors, including those of closed partitions."""
        addresses = {
            partition.broker_group: partition.address
            for partition in partitions
            if partition.address
        }
        for executor in self._executors.values():
            address = addresses.get(executor.partition.broker_group)
            if address is not None and address != executor.partition.address:
                executor.follow_broker(address, self._broker_at(address))

    def _close_executor(self, executor: Executor) -> None:
        """Close the executor of a closed partition, which has no messages left."""
        if self._executors.pop(executor.partition.partition_id, None) is not None:
            start_task(executor.close())

    def on_emptied(self, executor: Executor) -> None:
        """Close an executor without messages, and release the newer messages of its range."""
        self._close_executor(executor)
        self._reassign_messages()

    def _create_executor(self, partition: Partition, route: Route) -> Executor:
        address = partition.address
        group = MessageGroup(CLIENT_TYPE, self.subject, partition.name, partition.broker_group)
        return Executor(
            group,
            partition,
            None if address is None else self._broker_at(address),
            self,
            may_reroute_keys=route.may_reroute_keys,
            static=route.static,
            identity=self._identity,
            settings=self._settings,
            clock=self._clock,
            rng=self._rng,
            budget=self._budget,
            epochs=self._epochs,
            send_scheduler=self._send_scheduler,
        )

    # ── leaving a partition ───────────────────────────────────────────────────────────────────────
    def on_availability_changed(self) -> None:
        """Request a newer route, and move messages without a key away from unavailable
        executors.
        """
        self._refresh_requested.set()
        self._reassign_messages()

    def _reassign_messages(self) -> None:
        self._update_tables()
        self._release_held()
        self._move_unbound()

    def _update_tables(self) -> None:
        """
        Set the executor of each logical partition in the tables.

        Messages are held (None) while their partition is sealed or has refused them and there is no
        newer route, and while an earlier partition of their range still has messages. A range whose
        messages were rerouted (BEST_TRIED) uses its fallback until its own partition has recovered.
        """
        route = self._route
        if route is None:
            self.careful = bool(self._halted_keys.keys)
            return
        usable_executors = {
            partition_id: executor
            for partition_id, executor in self._executors.items()
            if executor.state.in_use
        }
        self._primary_table = [
            usable_executors.get(partition_id) for partition_id in self._partition_ids
        ]
        candidates = self._fallback_candidates()
        self._update_fallbacks(usable_executors, candidates)
        self.careful = bool(self._fallbacks or self._halted_keys.keys)
        target_by_id: dict[int, Executor | None] = {}
        for partition_id, primary in usable_executors.items():
            fallback = self._fallbacks.get(partition_id, primary)
            target_by_id[partition_id] = (
                None if primary.state.refuses or fallback.state.refuses else fallback
            )
        table = [target_by_id.get(partition_id) for partition_id in self._partition_ids]
        for executor in self._executors.values():
            if executor.state.closed:
                start, end = executor.partition.range_start, executor.partition.range_end
                table[start:end] = [None] * (end - start)
        self.table = self.keyless_table = table
        if candidates and not all(map(_is_available, target_by_id.values())):
            self.keyless_table = [
                executor if _is_available(executor) else candidates[logical_id % len(candidates)]
                for logical_id, executor in enumerate(table)
            ]
        self._update_plain_table()

    def _update_fallbacks(
        self, usable_executors: dict[int, Executor], candidates: list[Executor]
    ) -> None:
        """Drop fallbacks that are no longer needed, and replace those that are unusable."""
        for partition_id, fallback in list(self._fallbacks.items()):
            primary = usable_executors.get(partition_id)
            if primary is None or primary.state.available:
                del self._fallbacks[partition_id]
            elif (
                not fallback.state.in_use
                or fallback.state.closed
                or (fallback.idle and not fallback.state.available)
            ):
                # The fallback has no older messages of this range.
                del self._fallbacks[partition_id]
                if candidates:
                    self._fallbacks[partition_id] = self._rng.choice(candidates)

    def _move_unbound(self) -> None:
        """Move unsent messages that have neither a key nor a destination from unavailable executors
        to others.
        """
        candidates = self._fallback_candidates()
        if not candidates:
            return

        def move_unbound(batch: OutgoingBatch) -> OutgoingBatch | None:
            if not batch.has_unbound:
                return batch
            unbound, others = batch.split(batch.is_unbound)
            self._budget.replace(batch, unbound, others)
            if unbound is not None:
                self._rng.choice(candidates).queue_batches([unbound])
            return others

        for executor in self.executors:
            if not executor.state.available:
                executor.replace_unsent(move_unbound)

    def _fallback_candidates(self) -> list[Executor]:
        """Return the executors that may take over messages of other executors, sorted by partition
        id.
        """
        return [executor for executor in self.executors if executor.state.can_take_over]

    def has_alternative(self, executor: Executor) -> bool:
        """Return True if batches of `executor` can be rerouted under BEST_TRIED."""
        return bool(self._fallback_candidates_for(executor))

    def _fallback_candidates_for(self, executor: Executor) -> list[Executor]:
        """Return the executors to which batches of `executor` may be rerouted under BEST_TRIED."""
        return [candidate for candidate in self._fallback_candidates() if candidate is not executor]

    def reassign_batches(
        self, executor: Executor, batches: list[OutgoingBatch], step: Step
    ) -> None:
        """Reroute batches that left their partition to another executor, or hold them until there
        is a newer route.
        """
        if step is Step.REROUTE:
            fallback = self._rng.choice(self._fallback_candidates_for(executor))
            for partition_id, current in self._fallbacks.items():
                if current is executor:
                    self._fallbacks[partition_id] = fallback
            self._fallbacks[executor.partition.partition_id] = fallback
            for batch in batches:
                batch.mark_reordered()
            fallback.queue_batches(batches)
            self._reassign_messages()
            return
        # Newer messages of the range wait after these until there is a newer route.
        self.held_messages.prepend(batches)
        self._refresh_requested.set()
        self._reassign_messages()

    def _release_held(self) -> None:
        """Pass held messages to their executors, oldest first; those without an executor stay
        held.
        """
        batches = self.held_messages.remove_sendable(self.queue_starts, self.message_bytes_max)
        receivers: dict[int, Executor] = {}
        last_held_batch: OutgoingBatch | None = None
        for batch in batches:
            self._budget.release(batch)
            for index, key in enumerate(batch.keys):
                if batch.expired_count and batch.is_withdrawn(index):
                    continue
                size = len(batch.values[index])
                destination = batch.destination_of(index)
                if destination is not None:
                    logical_id = self.queue_starts.logical_partition(destination)
                else:
                    logical_id = logical_partition(key) if key else self._rng.getrandbits(10)
                executor = (self.keyless_table if batch.is_unbound(index) else self.table)[
                    logical_id
                ]
                if executor is None:
                    last_held_batch = self.held_messages.append_again(last_held_batch, batch, index)
                    continue
                if id(executor) not in receivers or self.held_messages.is_full(executor.open, size):
                    receivers[id(executor)] = executor
                    executor.queue_open_batch()
                executor.open.adopt(batch, index)
                if key and executor is not self._primary_table[logical_id]:
                    executor.open.mark(len(executor.open) - 1, REORDERED)
        for executor in receivers.values():
            executor.queue_open_batch()

    async def close(self) -> None:
        """Stop all executors, and give up the unsettled messages."""
        self._closing = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        error = ClosedError(CLOSED)
        error.hint = CLOSED_HINT
        await self._give_up_all(error)

    async def _give_up_all(self, error: KeylaneError) -> None:
        self._refusal = error
        self._route_known.set()
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
        unsettled_batches: list[OutgoingBatch] = []
        try:
            for executor in self.executors:
                unsettled_batches += await executor.close()
        finally:
            self.held_messages.prepend(unsettled_batches)
        self.held_messages.give_up(error)


def _is_available(executor: Executor | None) -> TypeGuard[Executor]:
    return executor is not None and executor.state.available


def _is_final(error: KeylaneError) -> bool:
    """Return True if a refused request for a known subject's route is final: the subject was
    deleted, or its order strategy was changed.
    """
    return isinstance(error, SubjectDeletedError) or error.reason is Reason.ORDER_STRATEGY
