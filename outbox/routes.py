"""The routes of the subjects whose rows wait.

A route is asked for when it is needed: at the first row of a subject, and after a partition refused or did not answer.
A partition that was sealed meanwhile refuses, so an outdated route costs one call and no order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ..protocol.errors import KeylaneError
from ..protocol.routing import Partition, Route, route_table
from ..rpc.client import MetaClient

log = logging.getLogger("keylane.outbox")


@dataclass(slots=True)
class KnownRoute:
    """What is known of a subject's partitions."""

    route: Route | None = None
    open: dict[int, Partition] = field(default_factory=dict)
    partition_ids: Sequence[int] = ()
    """The open partition of each logical partition; empty while no route is known."""
    others: dict[int, Partition] = field(default_factory=dict)
    """Partitions with unsettled batches that are not open."""
    lost: set[int] = field(default_factory=set)
    """Partitions whose loss an operator has accepted."""
    problem: str = ""
    """Why the last question was not answered."""


class OutboxRoutes:
    """The routes of all subjects of one outbox."""

    def __init__(self, meta: MetaClient) -> None:
        self._meta = meta
        self.known: dict[str, KnownRoute] = {}
        self._asking: dict[str, asyncio.Task[KnownRoute]] = {}

    async def ask(self, subject: str, unsettled: Collection[int]) -> KnownRoute:
        """
        Ask for the newest route; calls for one subject at the same time share an answer.

        Args:
            unsettled: the partitions that have unsettled batches.  Of those that the route does not list any more the
                history is asked for.
        """
        task = self._asking.get(subject)
        if task is None:
            task = asyncio.create_task(self._ask(subject, unsettled), name=f"route {subject}")
            self._asking[subject] = task
            task.add_done_callback(lambda _: self._asking.pop(subject, None))
        return await asyncio.shield(task)

    async def _ask(self, subject: str, unsettled: Collection[int]) -> KnownRoute:
        known = self.known.setdefault(subject, KnownRoute())
        try:
            subject_id = 0 if known.route is None else known.route.subject_id
            route = await self._meta.route_to_send(subject, subject_id=subject_id)
            if known.route is not None and route.version < known.route.version:
                known.problem = "the metaserver's route is older than the one followed"
                return known
            partition_ids = [each.partition_id for each in route_table(route)]
            listed: dict[int, Partition] = {each.partition_id: each for each in route.partitions}
            if not listed.keys() >= set(unsettled):
                history = await self._meta.history(subject)
                listed |= {
                    each.partition.partition_id: each.partition for each in history.partitions
                }
                known.lost = {each.partition.partition_id for each in history.partitions if each.lost}  # fmt: skip
            known.route, known.partition_ids, known.problem = route, partition_ids, ""
            known.open = {each.partition_id: each for each in route.open_partitions()}
            known.others = {each: listed[each] for each in unsettled if each in listed}
        except KeylaneError as error:
            known.problem = error.message
            log.info("route of %s: %s", subject, error.message)
        return known

    async def close(self) -> None:
        """Cancel the questions under way."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
