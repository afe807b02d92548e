"""Hands partitions over, and calls the user's callbacks about them.

    granted ─▶ on_assigned, awaited before the first pull
    withdrawn, or closing ─▶ on_revoked, awaited before the hand-over
    fenced, or lease lapsed ─▶ on_lost

An error in a callback is logged, and the hand-over continues. A callback that exceeds the time
limit is cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
from typing import Any

from ...protocol.control import Grant
from ...rpc.race import start_task
from ..dispatch.loop import LoopDispatch
from ..dispatch.workers import WorkerPool
from ..session_shell import SessionShell
from ..settings import ConsumerSettings, PartitionsCallback
from .broadcast import Broadcast
from .membership import Membership

log = logging.getLogger("keylane.consumer")


class Callbacks:
    """
    Calls the rebalance callbacks of one consumer.

    Args:
        name: the name of the consumer, for log lines.
        settings: the callbacks, and how long each may take: `handover_ms`.
    """

    def __init__(self, name: str, settings: ConsumerSettings) -> None:
        self._name = name
        self._settings = settings
        self._pending_clients: list[SessionShell] = []
        self._assigned_tasks: dict[int, asyncio.Task[None]] = {}
        """The task that calls `on_assigned`, by partition."""

    def notify_assigned(self, client: SessionShell) -> None:
        """Schedule `on_assigned` for a granted partition, in one call with others that are granted
        now. Nothing is pulled from the partition until the callback returns.
        """
        if self._settings.on_assigned is None:
            return
        partition_id = client.partition_id
        client.gate.add("on_assigned")
        if not self._pending_clients:
            task = start_task(self._call_on_assigned(), name="on_assigned")
        else:
            task = self._assigned_tasks[self._pending_clients[-1].partition_id]
        self._pending_clients.append(client)
        self._assigned_tasks[partition_id] = task

    async def _call_on_assigned(self) -> None:
        clients = self._pending_clients
        self._pending_clients = []
        try:
            partition_ids = sorted(client.partition_id for client in clients)
            await self._call_in_task("on_assigned", partition_ids)
        finally:
            for client in clients:
                del self._assigned_tasks[client.partition_id]
                client.gate.remove("on_assigned")

    async def notify_ended(self, partition_id: int, *, is_lost: bool) -> None:
        """Call `on_revoked`, or `on_lost` if the lease was lost, once `on_assigned` has returned
        for the partition.
        """
        task = self._assigned_tasks.get(partition_id)
        if task is not None:
            await asyncio.wait([task])
        await self._call_in_task("on_lost" if is_lost else "on_revoked", [partition_id])

    async def _call_in_task(self, name: str, partition_ids: list[int]) -> None:
        callback: PartitionsCallback | None = getattr(self._settings, name)
        if callback is None:
            return
        # A separate task, because a callback that cancels its own task must not end the hand-over.
        task = start_task(self._call_logging_errors(name, callback, partition_ids), name=name)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            raise

    async def _call_logging_errors(
        self, name: str, callback: PartitionsCallback, partition_ids: list[int]
    ) -> None:
        try:
            async with asyncio.timeout(self._settings.handover_ms / 1000):
                result: Any = callback(partition_ids)
                if inspect.isawaitable(result):
                    await result
        except TimeoutError:
            log.warning(
                "%s: %s for partitions %s took longer than handover_ms, %d ms, or timed out itself",
                self._name,
                name,
                partition_ids,
                self._settings.handover_ms,
                exc_info=True,
            )
        except (Exception, asyncio.CancelledError):
            log.exception("%s: %s for partitions %s failed", self._name, name, partition_ids)


class HandOvers:
    """Hands over the partitions of one consumer, and reports their releases."""

    def __init__(
        self,
        callbacks: Callbacks,
        membership: Membership | Broadcast,
        dispatcher: WorkerPool | LoopDispatch,
        settings: ConsumerSettings,
        rng: random.Random,
    ) -> None:
        self.callbacks = callbacks
        self._membership = membership
        self._dispatcher = dispatcher
        self._settings = settings
        self._rng = rng
        self.reports: set[asyncio.Task[None]] = set()
        """The reports in flight of partitions that were handed over earlier."""
        self._leave_task: asyncio.Task[None] | None = None

    async def hand_over(self, client: SessionShell, *, is_lost: bool) -> None:
        """Hand over the partition of a stopped client."""
        if by_hand := isinstance(self._dispatcher, LoopDispatch):
            # The user may still ack messages in hand.
            await self.callbacks.notify_ended(client.partition_id, is_lost=is_lost)
        await self._dispatcher.quiesce(client)
        if not by_hand:
            await self.callbacks.notify_ended(client.partition_id, is_lost=is_lost)
        await client.hand_over(flush_ms=self._settings.call_timeout_ms)
        if self._leave_task is not None:
            await asyncio.wait([self._leave_task])
        tenure = client.state.tenure
        if tenure.fence is not None:
            # Usually a newer owner has the partition; otherwise it is granted again above the
            # fence. The pause keeps that from happening often.
            await asyncio.sleep(self._settings.backoff.wait_ms(1, self._rng) / 1000)
        # Other sessions may hold a token that is neither single-use nor fenced.
        releases = self._membership.releases
        if releases is not None and (client.token_is_single_use or tenure.fence is not None):
            session, token = tenure.lease.session, tenure.lease.token
            await releases.report(session, client.partition_id, token, fence=tenure.fence or 0)

    def report_again(self, grant: Grant) -> None:
        """Report a release again: the metaserver still grants the token, so it cannot have received
        the report.
        """
        partition_id, releases = int(grant.partition.partition_id), self._membership.releases
        if releases is None:
            return
        report = releases.report(self._membership.session, partition_id, grant.token)
        task = start_task(report, name=f"release {partition_id}")
        self.reports.add(task)
        task.add_done_callback(self.reports.discard)

    def announce_leave(self) -> None:
        """Tell the metaserver that all partitions are being handed over, before any report."""
        self._leave_task = start_task(self._membership.announce_leave(), name="announce leave")
