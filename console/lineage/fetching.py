"""The calls that find out what the picture of a subject shows."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from ...admin import Admin, OperationState
from ...rpc.environment import environment_of
from .facts import LineageFacts

GROUPS_DRAWN_MAX = 6
"""The largest number of consumer groups whose progress is drawn."""
ENDED = frozenset({OperationState.DONE, OperationState.CANCELED})


async def fetch_lineage(
    admin: Admin, subject: str, groups: Collection[str] = (), *, within_s: float | None = None
) -> LineageFacts:
    """
    Ask the metaserver and the brokers. A broker that does not answer leaves a `problem` on its
    partitions.

    Args:
        groups: the consumer groups to draw; empty means the first GROUPS_DRAWN_MAX by name.
        within_s: how long to wait for each broker, in seconds; None: the timeout of a call.

    Raises:
        SubjectUnknownError, GroupUnknownError
    """
    for group in groups:
        await admin.group_settings(subject, group)  # raises if there is no such group
    # The history comes last: no partition of the description is missing in it.
    description, operations, all_groups = await asyncio.gather(
        admin.describe_subject(subject, holds=False, within_s=within_s),
        admin.list_operations(subject),
        admin.list_groups(subject),
    )
    names = [each.group for each in all_groups]
    drawn = tuple(dict.fromkeys(groups or names))[:GROUPS_DRAWN_MAX]
    return LineageFacts(
        history=await admin.history(subject),
        description=description,
        groups=drawn,
        groups_omitted=len(set(names).difference(drawn)),
        operations=tuple(each for each in reversed(operations) if each.state not in ENDED),
        now_ms=environment_of(None).clock.wall_ms(),
    )
