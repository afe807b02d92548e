"""Tells the brokers of children where the times of their parents end, so that no child begins
earlier.

    SEAL: each parent's broker has sealed, and says the time ─▶ the brokers of its children on other
        broker groups are told
      ─▶ the round ends: SQL has the seal, and perhaps the route changes

Invariants
    Correctness does not rest on it, so no operation waits for it longer than TELL_MS:
    see docs/decisions/0102.
    A seal that SQL does not have yet is asked for again, and its time is told again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from ...protocol.backoff import Pauses
from ...protocol.errors import (
    InvalidRequestError,
    KeylaneError,
    OverloadedError,
    Reason,
    UnreachableError,
)
from ...protocol.routing import Partition

log = logging.getLogger("keylane.metaserver")

TELL_MS = 5_000
"""How long the broker of a child is asked, which has hosted it a moment ago."""

Tell = Callable[[Partition, int], Awaitable[object]]
"""Tells the broker of a child from when on it has its times, in milliseconds since 1970."""


def first_times(
    children: Sequence[Partition], parents: Collection[Partition], ended_ms: Mapping[int, int]
) -> list[tuple[Partition, int]]:
    """
    The children whose brokers are to be told, each with the greatest time at which a parent on
    another broker ended.

    A broker knows by itself when the parents ended that it has.

    Args:
        ended_ms: by id of each parent whose broker has said it.
    """
    elsewhere = {int(parent.partition_id): parent.broker_group for parent in parents}
    told = []
    for child in children:
        from_ms = max(
            (
                ended_ms.get(parent, 0)
                for parent in map(int, child.parents)
                if elsewhere.get(parent, child.broker_group) != child.broker_group
            ),
            default=0,
        )
        if from_ms:
            told.append((child, from_ms))
    return told


async def tell_first_times(
    told: Sequence[tuple[Partition, int]], tell: Tell, pauses: Callable[[], Pauses]
) -> bool:
    """Tell them all at once, each for TELL_MS at most; False: one begins by its own calendar, and
    the log says so.
    """
    tells = (_tell(child, from_ms, tell, pauses()) for child, from_ms in told)
    return all(await asyncio.gather(*tells))


async def _tell(child: Partition, from_ms: int, tell: Tell, pauses: Pauses) -> bool:
    why = "it is silent"
    try:
        async with asyncio.timeout(TELL_MS / 1000):
            while child.address is not None:
                try:
                    await tell(child, from_ms)
                    return True
                except InvalidRequestError as error:
                    if error.reason is not Reason.PARTITION_IN_USE:
                        raise
                    # open: another driver has told it; dropped or sealed: it takes no message any
                    # more
                    return True
                except (UnreachableError, OverloadedError) as error:
                    why = error.message
                await asyncio.sleep(pauses.next_ms() / 1000)
    except TimeoutError:
        pass
    except KeylaneError as error:
        why = error.message
    log.warning(
        "partition %d starts with the clock of broker group %r, because that could not be given "
        "the times of its parents: %s",
        child.partition_id,
        child.broker_group,
        why,
    )
    return False
