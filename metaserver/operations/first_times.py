"""Tells the brokers of child partitions when their parents were sealed, so that no message of a
child has an earlier time.

    SEAL: each parent's broker has sealed, and reports the time
      ─▶ the brokers of its children on other broker groups get the time
      ─▶ the round ends: the database has the seal, and perhaps the route changes

Invariants
    Correctness does not depend on it, so no operation waits for it longer than SEND_MS:
    see docs/decisions/0102.
    A seal not yet stored in the database is requested again, and its time is sent again.
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

SEND_MS = 5_000
"""How long the broker of a child is asked, which has hosted it a moment ago."""

Send = Callable[[Partition, int], Awaitable[object]]
"""Tells the broker of a child from when on it has its times, in milliseconds since 1970."""


def first_times(
    children: Sequence[Partition], parents: Collection[Partition], ended_ms: Mapping[int, int]
) -> list[tuple[Partition, int]]:
    """
    Return the children whose brokers need a time, each with the latest end of a parent on another
    broker.

    A broker knows the ends of the parents that it hosts itself.

    Args:
        ended_ms: parent id → time of its end, in milliseconds since 1970, if its broker has
            reported it.
    """
    elsewhere = {int(parent.partition_id): parent.broker_group for parent in parents}
    times = []
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
            times.append((child, from_ms))
    return times


async def send_first_times(
    times: Sequence[tuple[Partition, int]], send: Send, pauses: Callable[[], Pauses]
) -> bool:
    """Tell them all at once, each for TELL_MS at most; False: one begins by its own calendar, and
    the log says so.
    """
    sends = (_send(child, from_ms, send, pauses()) for child, from_ms in times)
    return all(await asyncio.gather(*sends))


async def _send(child: Partition, from_ms: int, send: Send, pauses: Pauses) -> bool:
    why = "it is silent"
    try:
        async with asyncio.timeout(SEND_MS / 1000):
            while child.address is not None:
                try:
                    await send(child, from_ms)
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
        "partition %d starts with the clock of broker group %r, which could not be sent the "
        "times of its parents: %s",
        child.partition_id,
        child.broker_group,
        why,
    )
    return False
