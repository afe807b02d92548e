"""Moves the cursors of a consumer group along with a stream, for lag monitoring and retention.
Performs network I/O.

    Spark requests the batch after `start`  ─▶  the sink has committed everything before `start`
                                            ─▶  set the cursors of the group

Spark stores the progress, and the group follows it. The cursors are set in the same way as by an
operator (`keylane group reset`), which takes no locks, and is refused for a group with live
consumers.

Invariants
    A cursor never passes the progress that the sink has committed, and never moves back.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping

from ...protocol import endpoints
from ...protocol.clock import Clock
from ...protocol.errors import KeylaneError, RetryRule
from ...protocol.progress import ResetGroup, ResetTo
from ...rpc.client import MetaClient
from .batches import finished_partitions
from .lineage import View
from .offset import StreamOffset

log = logging.getLogger("keylane.spark")

COMMIT_MS = 1_000
"""The minimum time in milliseconds between two updates, unless the stream is idle."""


def committed_cursors(view: View, offset: StreamOffset) -> dict[int, int]:
    """Return the first message that a stream at this offset has not read, by partition id. Removed
    partitions are omitted.
    """
    if offset.initial:
        return {}
    ends = {
        partition_id: view.end_of(partition_id)
        for partition_id in finished_partitions(view, offset)
    }
    cursors = dict(offset.offsets) | {
        partition_id: end for partition_id, end in ends.items() if end is not None
    }
    return {
        partition_id: cursor
        for partition_id, cursor in sorted(cursors.items())
        if partition_id in view.lineage.branches and not view.lineage.branches[partition_id].is_gone
    }


class GroupProgress:
    """Updates a group's cursors in the subjects of a stream."""

    def __init__(self, meta: MetaClient, group: str, clock: Clock) -> None:
        self._meta = meta
        self._group = group
        self._clock = clock
        self._cursors: dict[int, int] | None = None
        """The known cursors, by partition id; None before `load`."""
        self._updated_at_ms = 0

    async def load(self, view: View, offset: StreamOffset) -> None:
        """
        Fetch the cursors of the group unless they are already known.

        Raises:
            GroupUnknownError: the group does not exist.
            KeylaneError: the metaserver or a broker does not respond.
        """
        if self._cursors is not None:
            return
        known_cursors: dict[int, int] = {}
        for subject, cursors in _group_by_subject(view, {**offset.offsets}).items():
            request = ResetGroup(to=ResetTo.CURSORS, cursors=cursors, dry_run=True)
            reply = await self._meta.call(
                endpoints.RESET_GROUP, request, subject=subject, group=self._group
            )
            known_cursors |= {each.partition_id: each.before or 0 for each in reply.cursors}
        self._cursors = known_cursors

    async def update(self, view: View, offset: StreamOffset, *, idle: bool) -> None:
        """
        Set the cursors of the group, at most once per COMMIT_MS unless the stream is `idle`.

        If a server does not respond, or the group has consumers, this logs a warning, and the next
        call tries again.

        Raises:
            KeylaneError: the group or the subject was deleted.
        """
        assert self._cursors is not None
        now_ms = self._clock.boot_ms()
        advanced = {
            partition_id: cursor
            for partition_id, cursor in committed_cursors(view, offset).items()
            if cursor > self._cursors.get(partition_id, 0)
        }
        if not advanced or (not idle and now_ms - self._updated_at_ms < COMMIT_MS):
            return
        self._updated_at_ms = now_ms
        for subject, cursors in _group_by_subject(view, advanced).items():
            try:
                await self._meta.call(
                    endpoints.RESET_GROUP,
                    ResetGroup(to=ResetTo.CURSORS, cursors=cursors),
                    subject=subject,
                    group=self._group,
                )
            except KeylaneError as error:
                if error.retry is RetryRule.NEVER:
                    raise
                log.warning(
                    "commitGroup: cannot set group %s of %s: %s",
                    self._group,
                    subject,
                    error.message,
                )
            else:
                self._cursors |= cursors


def _group_by_subject(view: View, cursors: Mapping[int, int]) -> dict[str, dict[int, int]]:
    """Group the cursors of readable partitions by subject."""
    cursors_of: dict[str, dict[int, int]] = defaultdict(dict)
    for partition_id, cursor in cursors.items():
        branch = view.lineage.branches.get(partition_id)
        if branch is not None and not branch.is_gone:
            cursors_of[branch.subject][partition_id] = cursor
    return dict(cursors_of)
