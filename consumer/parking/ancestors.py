"""Takes over what the parents of a partition have parked, and tells ancestors when nothing of
theirs is needed.

    begin ─▶ TakeParked, by pages ─▶ Adopt ─▶ the last page: adopted      nothing parked of an ancestor ─▶ LeaveParked ─▶ told

Invariants
    A child pulls nothing before it has adopted what each of its parents has parked of its range.
    Given up is what the metaserver says is gone: a broker that lacks an ancestor may stand on an
    older copy of its data folder. A parent that is lost since the grant is given up by a later
    grant alone, which says what is taken over from behind it.
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
    The ancestors of one partition, as far as they keep parked messages for it.

    Args:
        refresh: learns what is parked, and which ancestors keep messages though none of them is
            parked here: `unneeded`.
    """

    def __init__(
        self, context: ParkContext, sender: ParkSender, refresh: Callable[[], Awaitable[object]]
    ) -> None:
        self.unneeded: tuple[int, ...] = ()
        """Ancestors that keep messages for the group though none of them is parked here."""
        self._context = context
        self._sender = sender
        self._refresh = refresh
        self._asked: set[int] = set()
        """Parents that were asked at the address in the grant."""
        self._lost: set[int] = set()
        """Those whose loss was accepted, as the metaserver says."""
        self._adopted = False
        self._telling: asyncio.Task[None] | None = None

    async def adopt_all(self, answer: Acquired) -> int:
        """Take over what parents have parked that is not taken over yet; returns the broker's
        version.
        """
        version = answer.parked_version
        grant, under = self._context.grant, dict(answer.adopted_under)
        tokens = grant.parked_tokens or (0,) * len(grant.parked_parents)
        parts = grant.parked_ranges or ((),) * len(grant.parked_parents)
        for parent, token, ranges in zip(grant.parked_parents, tokens, parts, strict=True):
            parent_id = int(parent.partition_id)
            # A parent that was reset alone since has parked anew, under tokens above that of the
            # last taking over.
            if parent_id not in answer.adopted or token > under.get(parent_id, token):
                version = await self._adopt(parent, ranges)
        self._adopted = True
        return version

    def regranted(self, grant: Grant) -> None:
        """Take what the same lease says now of ancestors, unless all was taken over."""
        if not self._adopted:
            self._context.grant = grant

    async def _adopt(self, parent: Partition, ranges: Sequence[tuple[int, int]] = ()) -> int:
        """Take over what an ancestor has parked of these ranges of logical partitions; () of the
        partition's.
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
        The address of a partition's broker, which may have changed since the grant; None: its
        messages are gone.

        Raises:
            UnreachableError: its broker is away.
            KeylaneError: no metaserver says where it is.
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
        """Begin to tell ancestors that nothing of them is parked any more; what fails is tried at
        the next call.
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
                    except FencedError as error:  # this partition is not concerned
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
