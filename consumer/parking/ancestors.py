"""Adopts the parked messages of a partition's parents, and notifies ancestors whose messages are no
longer needed.

    begin ─▶ AdoptParked, page by page ─▶ Adopt ─▶ the last page: adopted
    no message of an ancestor is parked ─▶ ReleaseParked ─▶ the ancestor is notified

Invariants
    A child pulls nothing before it has adopted the parked messages of its range from each parent.
    Messages are given up only if the metaserver reports that they are gone: a broker that does not
    have an ancestor may run on an older copy of its data folder. A parent that was lost after the
    grant is given up only under a later grant, which names the messages to adopt from its
    ancestors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from ...protocol.control import Grant
from ...protocol.errors import (
    FencedError,
    KeylaneError,
    UnreachableError,
)
from ...protocol.frames import Acquired, AdoptParked, ParkedToAdopt, ReleaseParked
from ...protocol.operations import SubjectHistory
from ...protocol.parked import Adopt, AncestorNotified, decode_adopted
from ...protocol.routing import Partition, PartitionState
from .context import ParkContext
from .park_sender import ParkSender

log = logging.getLogger("keylane.consumer")


class Ancestors:
    """
    Tracks the ancestors that keep parked messages for one partition.

    Args:
        refresh: lists the parked keys, and updates `unneeded_ancestors`.
    """

    def __init__(
        self, context: ParkContext, sender: ParkSender, refresh: Callable[[], Awaitable[object]]
    ) -> None:
        self.unneeded_ancestors: tuple[int, ...] = ()
        """The ancestors that keep messages for the group, of which none is parked any more."""
        self._context = context
        self._sender = sender
        self._refresh = refresh
        self._called: set[int] = set()
        """The parents that were called at the address given in the grant."""
        self._lost: set[int] = set()
        """The parents whose loss was accepted."""
        self._adopted = False
        self._notify_task: asyncio.Task[None] | None = None

    async def adopt_all(self, answer: Acquired) -> int:
        """Adopt the parked messages of all parents that have not been adopted yet. Return the
        broker's version.
        """
        version = answer.parked_version
        grant, adopted_under = self._context.grant, dict(answer.adopted_under)
        tokens = grant.parked_tokens or (0,) * len(grant.parked_parents)
        parts = grant.parked_ranges or ((),) * len(grant.parked_parents)
        for parent, token, ranges in zip(grant.parked_parents, tokens, parts, strict=True):
            parent_id = int(parent.partition_id)
            # A parent that was reset since then may have parked messages again, under tokens above
            # that of the last adoption.
            if parent_id not in answer.adopted or token > adopted_under.get(parent_id, token):
                version = await self._adopt(parent, ranges)
        self._adopted = True
        return version

    def update_grant(self, grant: Grant) -> None:
        """Update the ancestors from a newer grant of the same lease, unless all have been
        adopted.
        """
        if not self._adopted:
            self._context.grant = grant

    async def _adopt(self, parent: Partition, ranges: Sequence[tuple[int, int]] = ()) -> int:
        """Adopt the messages that an ancestor has parked for `ranges` of logical partitions; ()
        means those of this partition.
        """
        context = self._context
        parent_id, address = int(parent.partition_id), parent.address
        if address is None or parent_id in self._called:
            address = await self._address_of(parent_id)
        self._called.add(parent_id)
        if address is None:
            if parent_id in self._lost and parent.state is not PartitionState.EXPIRED:
                raise UnreachableError(
                    f"parent {parent_id} was lost after the grant: the next grant says what to "
                    f"adopt in its place"
                )
            log.warning(
                "%s: messages parked at parent partition %d were removed by "
                "retention, and are given up",
                context.log_name,
                parent_id,
            )
            return await self._sender.send_now([Adopt(parent_id, (), True)])
        broker, partition = context.broker_at(address), context.grant.partition
        pending = list(ranges) or [(partition.range_start, partition.range_end)]
        version, first_row, message_count = 0, 0, 0
        while pending:
            request = AdoptParked(parent_id, context.lease[1], *pending[0], first_row)
            answer, payload = await broker.call(request)
            assert isinstance(answer, ParkedToAdopt)
            keys = tuple(decode_adopted(payload))
            message_count += sum(end - start for key in keys for _, start, end in key.rows)
            first_row = answer.following or 0
            if answer.following is None:
                pending.pop(0)
            adopt = Adopt(parent_id, keys, not pending, answer.sources)
            version = await self._sender.send_now([adopt])
        if message_count:
            log.info(
                "%s adopts %d parked messages of parent partition %d",
                context.log_name,
                message_count,
                parent_id,
            )
        return version

    async def _address_of(self, partition_id: int) -> str | None:
        """
        Return the current address of a partition's broker, or None if its messages are gone.

        Raises:
            UnreachableError: the broker is down.
            KeylaneError: no metaserver replied.
        """
        return self._find_address(partition_id, await self._context.owner.history())

    def _find_address(self, partition_id: int, history: SubjectHistory) -> str | None:
        """Return the same as `_address_of`, given the subject's history."""
        for past in history.partitions:
            if past.partition.partition_id != partition_id:
                continue
            if past.is_gone:
                if past.lost:
                    self._lost.add(partition_id)
                return None
            if past.partition.address:
                return past.partition.address
            raise UnreachableError(
                f"the broker of partition {partition_id}, which has parked messages of the "
                f"group, is down"
            )
        return None

    def notify_unneeded_ancestors(self) -> None:
        """Start to notify ancestors that none of their messages is parked any more; the next call
        retries after failures.
        """
        if self._context.grant.partition.parents and self._notify_task is None:
            self._notify_task = self._context.spawn(self._notify, "release")

    async def _notify(self) -> None:
        context = self._context
        partition = context.grant.partition
        try:
            await self._refresh()
            for source in self.unneeded_ancestors:
                history = await context.owner.history()
                address = self._find_address(source, history)
                if address is not None:
                    _, group, _, token = context.lease
                    request = ReleaseParked(
                        source,
                        group,
                        partition.range_start,
                        partition.range_end,
                        token,
                        inherits_loose(history, source, int(partition.partition_id)),
                    )
                    try:
                        await context.broker_at(address).call(request)
                    except FencedError as error:  # the lease of this partition is not affected
                        log.info(
                            "%s: cannot release parked messages of partition %d: %s",
                            context.log_name,
                            source,
                            error.message,
                        )
                        continue
                await self._sender.send_now([AncestorNotified(source)])
        except FencedError:
            raise
        except KeylaneError as error:
            log.info("%s: cannot handle parked messages: %s", context.log_name, error.message)
        finally:
            self._notify_task = None


def inherits_loose(history: SubjectHistory, ancestor_id: int, partition_id: int) -> bool:
    """
    Return True if loose and displaced messages that are parked on an ancestor pass to this
    partition.

    Each time a partition is replaced, they pass to the child that contains its first logical
    partition, which need not contain that of the ancestor. Through a partition that was lost they
    may have passed or not, so nobody inherits them for certain, and the ancestor keeps them.
    """
    passed = [
        past.partition for past in history.partitions if past.partition.partition_id == ancestor_id
    ]
    while passed:
        parent = passed.pop()
        for past in history.partitions:
            child = past.partition
            is_child = parent.partition_id in child.parents
            if is_child and child.range_start <= parent.range_start < child.range_end:
                if child.partition_id == partition_id:
                    return True
                if not past.lost:
                    passed.append(child)
    return False
