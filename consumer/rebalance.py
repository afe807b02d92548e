"""Notifies a program of the partitions that its consumer is granted, hands over and loses.

    granted ─▶ on_assigned, awaited before the first pull
    wanted elsewhere, or closing ─▶ on_revoked, awaited before the hand-over
    fenced, or past its lease ────▶ on_lost

A call-back that fails is logged: the hand-over continues. One that takes longer than the limit is
cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import Any

from ..protocol.errors import HandlerTypeError, Reason
from ..rpc.race import start_task
from .pulling.pull_client import PullClient
from .settings import PartitionsCallback

log = logging.getLogger("keylane.consumer")

"""A call-back, called with ids of partitions; an awaitable that it returns is awaited."""


class Rebalance:
    """
    The call-backs of one consumer.

    Args:
        limit_ms: milliseconds that a call-back may take.
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
        self._granted: list[PullClient] = []
        self._telling: dict[int, asyncio.Task[None]] = {}
        """The task that reports the grant, by partition."""

    def assigned(self, client: PullClient) -> None:
        """Report that a partition was granted, with others that are granted at this moment; nothing
        is pulled before that.
        """
        if self._on_assigned is None:
            return
        partition_id = client.partition_id
        client.gate.hold("on_assigned")
        if not self._granted:
            task = start_task(self._tell_granted(), name="on_assigned")
        else:
            task = self._telling[self._granted[-1].partition_id]
        self._granted.append(client)
        self._telling[partition_id] = task

    async def _tell_granted(self) -> None:
        granted = self._granted
        self._granted = []
        try:
            partition_ids = sorted(client.partition_id for client in granted)
            await self._call("on_assigned", self._on_assigned, partition_ids)
        finally:
            for client in granted:
                del self._telling[client.partition_id]
                client.gate.let_go("on_assigned")

    async def ends(self, partition_id: int, *, lost: bool) -> None:
        """Report that a partition is handed over, or `lost`, once the call-back for its grant has
        returned.
        """
        telling = self._telling.get(partition_id)
        if telling is not None:
            await asyncio.wait([telling])
        if lost:
            await self._call("on_lost", self._on_lost, [partition_id])
        else:
            await self._call("on_revoked", self._on_revoked, [partition_id])

    async def _call(
        self, name: str, call: PartitionsCallback | None, partition_ids: list[int]
    ) -> None:
        if call is None:
            return
        # This is a task of its own: a call-back that cancels its task must not end the hand-over.
        calling = start_task(self._called(name, call, partition_ids), name=name)
        try:
            await asyncio.wait([calling])
        except asyncio.CancelledError:
            calling.cancel()
            raise

    async def _called(self, name: str, call: PartitionsCallback, partition_ids: list[int]) -> None:
        try:
            async with asyncio.timeout(self._limit_ms / 1000):
                result: Any = call(partition_ids)
                if inspect.isawaitable(result):
                    await result
        except TimeoutError:
            log.warning(
                "%s: %s of partitions %s took longer than handover_ms, %d ms, or timed out itself",
                self._name,
                name,
                partition_ids,
                self._limit_ms,
                exc_info=True,
            )
        except (Exception, asyncio.CancelledError):
            log.exception("%s: %s of partitions %s failed", self._name, name, partition_ids)


def check_callbacks(**calls: object) -> None:
    """Raise HandlerTypeError if one of `calls` is neither None nor a function of partition ids."""
    for name, call in calls.items():
        if call is None:
            continue
        if not callable(call) or isinstance(call, type):
            raise HandlerTypeError(
                Reason.CALLBACK_TYPE,
                f"{name} is a function of a list of partition ids, not {call!r:.60}",
            )
        try:
            inspect.signature(call, follow_wrapped=False).bind([])
        except TypeError as error:
            said = f"{name} {call!r:.60} cannot be called with a list of partition ids: {error}"
            raise HandlerTypeError(Reason.CALLBACK_TYPE, said) from None
        except ValueError:
            continue  # a builtin does not declare its arguments
