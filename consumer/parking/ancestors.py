"""Takes over what the parents of a partition have parked, and notifies ancestors when none of their
messages is needed.

    begin ─▶ TakeParked, by pages ─▶ Adopt ─▶ the last page: adopted
    nothing of an ancestor is parked ─▶ LeaveParked ─▶ the ancestor is notified

Invariants
    A child pulls nothing before it has adopted what each of its parents has parked of its range.
    Messages are given up only if the metaserver reports them gone: a broker that lacks an ancestor
    may run on an older copy of its data folder. A parent that was lost since the grant is given up
    only by a later grant, which names what is taken over from its own ancestors.
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
from ...protocol.frames import Acquired, LeaveParked, ParkedTaken, TakeParked
from ...protocol.parked import Adopt, AncestorTold, decode_adopted
from ...protocol.routing import Partition, PartitionState
from .context import ParkContext
from .park_sender import ParkSender

log = logging.getLogger("keylane.consumer")


class Ancestors:
    """
    The ancestors of one partition that keep parked messages for it.

    Args:
        refresh: fetches what is parked, and finds the ancestors that keep messages although none of
            these is parked here (`unneeded`).
    """

    def __init__(
        self, context: ParkContext, sender: ParkSender, refresh: Callable[[], Awaitable[object]]
    ) -> None:
        self.unneeded: tuple[int, ...] = ()
        """The ancestors that keep messages for the group although none of these is parked here."""
        self._context = context
        self._sender = sender
        self._refresh = refresh
        self._asked: set[int] = set()
        """The parents that were asked at the address in the grant."""
        self._lost: set[int] = set()
        """The parents whose loss was accepted, according to the metaserver."""
        self._adopted = False
        self._telling: asyncio.Task[None] | None = None

    async def adopt_all(self, answer: Acquired) -> int:
        """Take over the parked messages of parents that are not taken over yet, and return the
        broker's version.
        """
        version = answer.parked_version
        grant, under = self._context.grant, dict(answer.adopted_under)
        tokens = grant.parked_tokens or (0,) * len(grant.parked_parents)
        parts = grant.parked_ranges or ((),) * len(grant.parked_parents)
        for parent, token, ranges in zip(grant.parked_parents, tokens, parts, strict=True):
            parent_id = int(parent.partition_id)
            # A parent that was reset alone since then has parked messages again, under tokens above
            # that of the last take-over.
            if parent_id not in answer.adopted or token > under.get(parent_id, token):
                version = await self._adopt(parent, ranges)
        self._adopted = True
        return version

    def regranted(self, grant: Grant) -> None:
        """Take the ancestors from the same lease's latest grant, unless all was taken over."""
        if not self._adopted:
            self._context.grant = grant

    async def _adopt(self, parent: Partition, ranges: Sequence[tuple[int, int]] = ()) -> int:
        """Take over the messages that an ancestor has parked for these ranges of logical
        partitions; () means the partition's own.
        """
        context = self._context
        parent_id, address = int(parent.partition_id), parent.address
        if address is None or parent_id in self._asked:
            address = await self._address_of(parent_id)
        self._asked.add(parent_id)
        if address is None:
            if parent_id in self._lost and parent.state is not PartitionState.EXPIRED:
                raise UnreachableError(
                    f"parent {parent_id} is lost since the grant: the next one says what is taken "
                    f"over in its place"
                )
            log.warning(
                "%s: messages parked at parent partition %d were removed by "
                "retention, and are given up",
                context.log_name,
                parent_id,
            )
            return await self._sender.send_now([Adopt(parent_id, (), True)])
        broker, partition = context.broker_at(address), context.grant.partition
        left = list(ranges) or [(partition.range_start, partition.range_end)]
        version, first, taken = 0, 0, 0
        while left:
            ask = TakeParked(parent_id, context.who[1], *left[0], first)
            answer, payload = await broker.call(ask)
            assert isinstance(answer, ParkedTaken)
            keys = tuple(decode_adopted(payload))
            taken += sum(end - start for key in keys for _, start, end in key.rows)
            first = answer.following or 0
            if answer.following is None:
                left.pop(0)
            adopt = Adopt(parent_id, keys, not left, answer.sources)
            version = await self._sender.send_now([adopt])
        if taken:
            log.info(
                "%s takes over %d parked messages of parent partition %d",
                context.log_name,
                taken,
                parent_id,
            )
        return version

    async def _address_of(self, partition_id: int) -> str | None:
        """
        Return the address of a partition's broker, which may have changed since the grant; None if
        its messages are gone.

        Raises:
            UnreachableError: its broker is away.
            KeylaneError: no metaserver reports where it is.
        """
        history = await self._context.owner.history()
        for part in history.partitions:
            if part.partition.partition_id != partition_id:
                continue
            if part.is_gone:
                if part.lost:
                    self._lost.add(partition_id)
                return None
            if part.partition.address:
                return part.partition.address
            raise UnreachableError(
                f"the broker of partition {partition_id} is away, and has parked "
                f"messages of the group"
            )
        return None

    def tell(self) -> None:
        """Begin to notify ancestors that none of their messages is parked any more; failures are
        tried again at the next call.
        """
        if self._context.grant.partition.parents and self._telling is None:
            self._telling = self._context.spawn(self._tell, "leave")

    async def _tell(self) -> None:
        context = self._context
        partition = context.grant.partition
        try:
            await self._refresh()
            for source in self.unneeded:
                address = await self._address_of(source)
                if address is not None:
                    _, group, _, token = context.who
                    ask = LeaveParked(
                        source, group, partition.range_start, partition.range_end, token
                    )
                    try:
                        await context.broker_at(address).call(ask)
                    except FencedError as error:  # this partition is not affected
                        log.info(
                            "%s: cannot take over parked messages of partition %d: %s",
                            context.log_name,
                            source,
                            error.message,
                        )
                        continue
                await self._sender.send_now([AncestorTold(source)])
        except FencedError:
            raise
        except KeylaneError as error:
            log.info("%s: cannot handle parked messages: %s", context.log_name, error.message)
        finally:
            self._telling = None
