"""Calls the user's rebalance callbacks.

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
from typing import Any

from ...protocol.errors import HandlerTypeError, Reason
from ...rpc.race import start_task
from ..session_shell import SessionShell
from ..settings import PartitionsCallback

log = logging.getLogger("keylane.consumer")


class Rebalance:
    """
    Calls the rebalance callbacks of one consumer.

    Args:
        limit_ms: how many milliseconds a callback may take.
        name: the name of the consumer, for log lines.
    """

    def __init__(
        self,
        *,
        limit_ms: int,
        name: str = "consumer",
        on_assigned: PartitionsCallback | None = None,
        on_revoked: PartitionsCallback | None = None,
        on_lost: PartitionsCallback | None = None,
    ) -> None:
        self._limit_ms = limit_ms
        self._name = name
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._on_lost = on_lost
        self._pending_clients: list[SessionShell] = []
        self._assigned_tasks: dict[int, asyncio.Task[None]] = {}
        """The task that calls `on_assigned`, by partition."""

    def notify_assigned(self, client: SessionShell) -> None:
        """Schedule `on_assigned` for a granted partition, in one call with others that are granted
        now. Nothing is pulled from the partition until the callback returns.
        """
        if self._on_assigned is None:
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
            await self._call_in_task("on_assigned", self._on_assigned, partition_ids)
        finally:
            for client in clients:
                del self._assigned_tasks[client.partition_id]
                client.gate.remove("on_assigned")

    async def notify_ended(self, partition_id: int, *, lost: bool) -> None:
        """Call `on_revoked`, or `on_lost` if the lease was lost, once `on_assigned` has returned
        for the partition.
        """
        task = self._assigned_tasks.get(partition_id)
        if task is not None:
            await asyncio.wait([task])
        if lost:
            await self._call_in_task("on_lost", self._on_lost, [partition_id])
        else:
            await self._call_in_task("on_revoked", self._on_revoked, [partition_id])

    async def _call_in_task(
        self, name: str, callback: PartitionsCallback | None, partition_ids: list[int]
    ) -> None:
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
            async with asyncio.timeout(self._limit_ms / 1000):
                result: Any = callback(partition_ids)
                if inspect.isawaitable(result):
                    await result
        except TimeoutError:
            log.warning(
                "%s: %s for partitions %s took longer than handover_ms, %d ms, or timed out itself",
                self._name,
                name,
                partition_ids,
                self._limit_ms,
                exc_info=True,
            )
        except (Exception, asyncio.CancelledError):
            log.exception("%s: %s for partitions %s failed", self._name, name, partition_ids)


def check_callbacks(**callbacks: object) -> None:
    """Raise HandlerTypeError if a callback is neither None nor callable with a list of partition
    ids.
    """
    for name, callback in callbacks.items():
        if callback is None:
            continue
        if not callable(callback) or isinstance(callback, type):
            raise HandlerTypeError(
                Reason.CALLBACK_TYPE,
                f"{name} must be a function of a list of partition ids, not {callback!r:.60}",
            )
        try:
            inspect.signature(callback, follow_wrapped=False).bind([])
        except TypeError as error:
            text = f"{name} {callback!r:.60} cannot be called with a list of partition ids: {error}"
            raise HandlerTypeError(Reason.CALLBACK_TYPE, text) from None
        except ValueError:
            continue  # a builtin does not declare its arguments
