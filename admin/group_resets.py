"""Resets the cursors of a consumer group. Does network I/O.

A shift is first converted to absolute cursors, because a retried shift would move the cursors
twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ..protocol.errors import Reason, UnfinishedError
from ..protocol.progress import GroupReset, ResetGroup, ResetTo
from ..protocol.reading.instants import check_not_ahead, check_unit
from ..rpc.environment import environment_of
from .arguments import check_position_keyword, convert_argument, convert_mapping


async def reset_group(
    call: Callable[[ResetGroup], Awaitable[GroupReset]], fields: Mapping[str, Any]
) -> GroupReset:
    """
    Set the cursors of a consumer group.

    Args:
        call: a function that sends the request to the metaserver.
        fields: the fields of ResetGroup, not yet validated.

    Raises:
        InvalidRequestError: a field is invalid.
        UnfinishedError: only some cursors are set; after a shift, the error text contains the
            cursors that finish it.
        Any error that `call` raises.
    """
    check_position_keyword(
        "to", fields["to"], offset="offset", time="at_ms", shift="shift", cursors="cursors"
    )
    check_unit("at_ms", fields["at_ms"])
    check_not_ahead(fields["at_ms"], now_ms=environment_of(None).clock.wall_ms())
    if fields["cursors"] is not None:
        fields = {**fields, "cursors": convert_mapping("cursors", fields["cursors"])}
    if fields["to"] != ResetTo.SHIFT or fields["dry_run"]:
        return await call(convert_argument(ResetGroup, dict(fields)))
    plan = await call(convert_argument(ResetGroup, {**fields, "dry_run": True}))
    cursors = {view.partition_id: view.cursor for view in plan.cursors}
    try:
        return await call(
            ResetGroup(
                to=ResetTo.CURSORS,
                cursors=cursors,
                queue=fields["queue"],
                partition_id=fields["partition_id"],
                live=fields["live"],
            )
        )
    except UnfinishedError as error:
        raise UnfinishedError(
            Reason.RESET_UNFINISHED,
            f"{error.message}; to finish it: reset_group(…, 'cursors', cursors={cursors})",
            **error.details,
        ) from error
