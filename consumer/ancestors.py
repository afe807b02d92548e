"""Adopts the parked messages of a partition's parents.

Acquired ─▶ AdoptParked, page by page ─▶ Adopt ─▶ the last page: adopted

Invariants
    A child pulls nothing before it has adopted the parked messages of its range from each parent.
    Messages are given up only if the metaserver reports that they are gone: a broker that does not
    have an ancestor may run on an older copy of its data folder. A parent that was lost after the
    grant is given up only under a later grant, which names the messages to adopt from its
    ancestors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from ..protocol.control import Grant
from ..protocol.errors import UnreachableError
from ..protocol.frames import Acquired, AdoptParked, ParkedToAdopt
from ..protocol.operations import SubjectHistory
from ..protocol.parked import Adopt, RequestedChange, decode_adopted
from ..protocol.routing import Partition, PartitionState
from ..rpc.client import BrokerClient
from .shell_owner import ShellOwner

log = logging.getLogger("keylane.consumer")


class AdoptingContext(Protocol):
    """What adopting needs of the reads of a partition."""

    grant: Grant

    @property
    def lease(self) -> tuple[int, str, str, int]:
        """The partition id, group, session and token, as in requests."""
        ...

    @property
    def log_name(self) -> str:
        """The subject, partition and group, for log lines."""
        ...

    @property
    def owner(self) -> ShellOwner:
        """The consumer, which asks the metaserver."""
        ...

    def broker_at(self, address: str) -> BrokerClient:
        """Return the client of a broker."""
        ...

    async def send_now(self, changes: Iterable[RequestedChange]) -> int:
        """Have the broker store changes, and return its version. Raises KeylaneError."""
        ...


class Ancestors:
    """
    The parents whose parked messages one partition adopts.

    Args:
        context: what knows the lease, and calls brokers.
    """

    def __init__(self, context: AdoptingContext) -> None:
        self._context = context
        self._called: set[int] = set()
        """The parents that were called at the address given in the grant."""
        self._lost: set[int] = set()
        """The parents whose loss was accepted."""
        self._adopted = False

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
            address = await self.address_of(parent_id)
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
            return await self._context.send_now([Adopt(parent_id, (), True)])
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
            version = await self._context.send_now([adopt])
        if message_count:
            log.info(
                "%s adopts %d parked messages of parent partition %d",
                context.log_name,
                message_count,
                parent_id,
            )
        return version

    async def address_of(self, partition_id: int) -> str | None:
        """
        Return the current address of a partition's broker, or None if its messages are gone.

        Raises:
            UnreachableError: the broker is down.
            KeylaneError: no metaserver replied.
        """
        return self.find_address(partition_id, await self._context.owner.history())

    def find_address(self, partition_id: int, history: SubjectHistory) -> str | None:
        """Return the same as `address_of`, given the subject's history."""
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
