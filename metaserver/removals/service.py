"""Deletes subjects and consumer groups: asks brokers to drop partitions and forget groups, then
completes the deletions. Does network I/O and runs SQL.

    delete ─▶ marked and journaled ─▶ request to every broker ─▶ stored; at the end, rows deleted
                                          ▲        │ a broker is silent, or this process ends
                                          └────────┘ a periodic task of any metaserver retries

Every step is idempotent: repeating it has no effect, neither at brokers nor in SQL.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from ...protocol import endpoints
from ...protocol.control import (
    DeleteGroup,
    DeleteSubject,
    DropPartition,
    GroupDeletion,
    SubjectDeletion,
)
from ...protocol.errors import KeylaneError, PartitionUnknownError
from ...protocol.ids import Subject
from ...protocol.progress import ForgetGroup
from ...protocol.routing import PartitionState
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from ..catalogue.service import HOSTED_AT_ONCE_MAX, Catalogue
from ..cluster.removals import (
    WHOLE_PARTITION,
    PendingRemoval,
    Removal,
    complete_removals,
    pending_removals,
)
from ..groups.service import GroupService
from ..sql.database import Database
from .begin import (
    BegunDeletion,
    begin_group_deletion,
    begin_subject_deletion,
    group_deletion,
    subject_deletion,
)

log = logging.getLogger("keylane.metaserver")
D = TypeVar("D", SubjectDeletion, GroupDeletion)

CALL_TIMEOUT_MS = 2_000
REMOVALS_MAX = 1_024
"""Maximum number of removals in one batch; the next batch starts after them, even if they could not
be carried out.
"""
RETRY_PAUSE_S = 1.0
"""Pause, in seconds, after a run in which a broker refused a request or was silent."""


class RemovalService:
    """
    Deletes the subjects and groups of one database.

    Args:
        after_step: called with the name of each finished step: marked, asked (brokers have done
            their part, but this has not been recorded in SQL yet), removed.
    """

    def __init__(
        self,
        database: Database,
        network: Network,
        *,
        catalogue: Catalogue,
        groups: GroupService,
        after_step: Callable[[str], None] = lambda _step: None,
    ) -> None:
        self._database = database
        self._network = network
        self._catalogue = catalogue
        self._groups = groups
        self._after_step = after_step
        self._slots = asyncio.Semaphore(HOSTED_AT_ONCE_MAX)
        self._problems: dict[tuple[int, int], str] = {}
        """Maps (subject id, group id) to the reason why a broker did not do its part in the last
        run.
        """
        self._next_run_s = 0.0
        """Earliest time of the next run, in seconds on the event loop's clock. It gives a broker
        that refused a request a pause.
        """

    async def delete_subject(self, name: str, request: DeleteSubject) -> SubjectDeletion:
        """
        Delete a subject. Return the progress after one request to every broker.

        Raises:
            InvalidRequestError, SubjectUnknownError, BusyError: nothing was changed.
        """
        deletion = await self._database.write(begin_subject_deletion, name, request)
        self._catalogue.wake_route_waiters([Subject(name)])
        await self._end_sessions_and_ask(deletion, "its subject was deleted")
        view = await self._database.read(subject_deletion, name, deletion.subject_id)
        return self._add_problem(view, deletion)

    async def delete_group(self, subject: str, group: str, request: DeleteGroup) -> GroupDeletion:
        """
        Delete a consumer group. Return the progress after one request to every broker.

        Raises:
            InvalidRequestError, SubjectUnknownError, SubjectDeletedError, GroupUnknownError,
            BusyError: nothing was changed.
        """
        deletion = await self._database.write(begin_group_deletion, subject, group, request)
        await self._end_sessions_and_ask(deletion, "its group was deleted")
        view = await self._database.read(group_deletion, subject, group, deletion)
        return self._add_problem(view, deletion)

    async def _end_sessions_and_ask(self, deletion: BegunDeletion, why: str) -> None:
        """End the sessions of a deletion, giving the reason `why`, and ask brokers once for all
        removals.
        """
        self._after_step("marked")
        self._groups.end_sessions(deletion.ended_sessions, why=why)
        await self._ask_brokers()

    def _add_problem(self, view: D, deletion: BegunDeletion) -> D:
        """Add to the view the reason why a broker has not done its part."""
        key = deletion.subject_id, deletion.group_id
        return replace(view, problem=self._problems.get(key, "") if view.left else "")

    async def run_once(self) -> None:
        """Ask brokers to carry out the pending removals, unless it is too early to retry. Raises
        StorageError.
        """
        if asyncio.get_running_loop().time() >= self._next_run_s:
            await self._ask_brokers()

    async def _ask_brokers(self) -> None:
        """Ask brokers to carry out all pending removals and record those that are done."""
        self._problems.clear()
        last_key: Removal = (0, 0)
        while pending_batch := await self._database.read(
            pending_removals, limit=REMOVALS_MAX, after=last_key
        ):
            tokens = await asyncio.gather(
                *(self._send_removal(removal) for removal in pending_batch)
            )
            tokens_by_key = {
                removal.key: token
                for removal, token in zip(pending_batch, tokens, strict=True)
                if token is not None
            }
            if tokens_by_key:
                self._after_step("asked")
                deleted_names = await self._database.write(complete_removals, tokens_by_key)
                self._after_step("removed")
                self._catalogue.wake_route_waiters(map(Subject, deleted_names))
            last_key = pending_batch[-1].key
        self._next_run_s = asyncio.get_running_loop().time() + (
            RETRY_PAUSE_S if self._problems else 0
        )

    async def _send_removal(self, removal: PendingRemoval) -> int | None:
        """Ask a broker to drop a partition or forget a group. Return the highest token that the
        broker now refuses, or None if it has not done its part.
        """
        if removal.is_obsolete:
            return removal.token
        key = removal.subject_id, removal.group_id
        if removal.address is None:
            self._problems.setdefault(key, f"broker group {removal.broker_group!r} is silent")
            return None
        broker = BrokerClient(self._network, removal.address, timeout_ms=CALL_TIMEOUT_MS)
        async with self._slots:
            try:
                if removal.group_id == WHOLE_PARTITION:
                    drop_request = DropPartition(subject=removal.subject, last_id=removal.last_id)
                    await broker.control(
                        endpoints.DROP_PARTITION, drop_request, id=removal.partition_id
                    )
                    return 0
                forget_request = ForgetGroup(group=removal.group, token=removal.token)
                return (
                    await broker.control(
                        endpoints.FORGET_GROUP, forget_request, id=removal.partition_id
                    )
                ).token
            except KeylaneError as error:
                is_absent = isinstance(error, PartitionUnknownError)
                if is_absent and removal.state is not PartitionState.PLANNED:
                    return removal.token  # without the partition, it stores nothing about the group
                problem = (
                    f"partition {removal.partition_id} on {removal.broker_group!r}: {error.message}"
                )
                log.debug("%s", problem)
                self._problems.setdefault(key, problem)
                return None
