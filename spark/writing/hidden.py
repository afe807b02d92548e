"""Creates, publishes and deletes the hidden subject of a job, and counts its messages. Performs
network I/O.

Each call is retried for up to `timeoutMs`, because the metaserver may be restarting.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from ...protocol import endpoints
from ...protocol.access.capability import parse_capability
from ...protocol.access.rights import Rights, check_all_allowed
from ...protocol.clock import Clock, SystemClock
from ...protocol.control import DeleteSubject, PartitionStatus, SubjectView
from ...protocol.endpoints import CAPABILITY
from ...protocol.errors import (
    InvalidRequestError,
    KeylaneError,
    NotSentError,
    PublishError,
    Reason,
    RetryRule,
    RowsError,
    SubjectDeletedError,
    SubjectUnknownError,
)
from ...protocol.http.access import AskCapability
from ...protocol.operations import (
    ROUTE_FINAL,
    HideSubject,
    OperationState,
    Publication,
    PublishSubject,
)
from ...protocol.routing import PartitionState
from ...protocol.text import counted
from ...rpc.client import BrokerClient, MetaClient
from ...rpc.network import Network
from .job import WriteOptions, check_subject_id
from .retrying import retry_call

T = TypeVar("T")
POLL_S = 0.05
CUTS_MAX = 3


class HiddenSubject:
    """
    The hidden subject `name` of a job.

    Args:
        subject_id: the id of the created subject, which excludes a later subject with the same
            name; 0 if unknown.
        filled_by: the description of the job. A hidden subject of another job is refused.
    """

    def __init__(
        self,
        network: Network,
        options: WriteOptions,
        name: str,
        *,
        subject_id: int = 0,
        filled_by: str = "",
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.name = name
        self._subject_id = subject_id
        self._filled_by = filled_by
        self._network = network
        self._options = options
        self._meta = MetaClient(network, options.meta)
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()

    async def create(self, *, cut: bool = False) -> SubjectView:
        """
        Create the subject; idempotent.

        Args:
            cut: also start to cut the target; see `cut`.

        Raises:
            PublishError: the target's partitions have changed since the hidden subject was created,
                and can no longer be cut; or another job is filling the hidden subject.
            SubjectUnknownError: the target does not exist, and the options do not ask to create it.
            AccessDeniedError: the job lacks rights; the error lists all the rights that it needs.
            KeylaneError: the metaserver refuses, or does not answer.
        """
        await self._check_rights()
        request = HideSubject(
            hidden=self.name,
            partitions=self._options.partitions,
            cut=cut,
            filled_by=self._filled_by,
        )
        return await self._retry(lambda: self._meta.hide_subject(self._options.subject, request))

    async def _check_rights(self) -> None:
        """Check that the job has all rights that it needs, before any row is written."""
        try:
            capability = await self._retry(lambda: self._meta.call(CAPABILITY, AskCapability()))
        except InvalidRequestError as error:
            if error.reason is not Reason.ACCESS_OFF:
                raise
            return
        access, _, _ = parse_capability(capability.bearer)
        target = self._options.subject
        required = (
            (Rights.ADMINISTER, target),
            (Rights.ADMINISTER, self.name),
            (Rights.PRODUCE, target),
        )
        check_all_allowed(access.principal, access.grants, required)

    async def cut(self) -> tuple[SubjectView, frozenset[int]]:
        """
        Create the subject and cut the target: seal the target's partitions, and open new ones that
        follow both the sealed partitions and the hidden subject.

        If the target's partitions have changed since an empty hidden subject was created, the
        hidden subject is deleted and created again.

        Returns:
            The hidden subject, and the ids of the target's partitions that have data before the
            cut.

        Raises:
            NotSentError: the partitions were not sealed in time.
            The errors of `create`.
        """
        attempts_left, view = CUTS_MAX, None
        while view is None:
            attempts_left -= 1
            try:
                view = await self.create(cut=True)
            except PublishError as error:
                if (
                    error.reason is not Reason.PUBLISH_OUTDATED
                    or not attempts_left
                    or not await self._delete_empty()
                ):
                    raise
        parents = {parent for each in view.route.partitions for parent in each.parents}
        first_parent = min(each.partition_id for each in view.route.partitions)
        deadline_ms = self._clock.boot_ms() + self._options.timeout_ms
        while True:
            route = await self._retry(lambda: self._meta.route(self._options.subject))
            open_parents = [
                each
                for each in route.partitions
                if each.partition_id in parents and each.state is PartitionState.OPEN
            ]
            if not open_parents:
                older_ids = (int(each.partition_id) for each in route.partitions)
                return view, frozenset(each for each in older_ids if each < first_parent)
            if self._clock.boot_ms() >= deadline_ms:
                raise NotSentError(
                    f"partitions of {self._options.subject!r} are not sealed yet; `keylane "
                    "subject operations` shows why"
                )
            await asyncio.sleep(POLL_S)

    async def _delete_empty(self) -> bool:
        """Delete the subject if it is empty, or return False if it has messages."""
        try:
            route = await self._retry(lambda: self._meta.route(self.name))
            check_subject_id(route, self._subject_id)
            subject = HiddenSubject(
                self._network,
                self._options,
                self.name,
                subject_id=route.subject_id,
                clock=self._clock,
                rng=self._rng,
            )
            if any((await subject.count_messages()).values()):
                return False
            await subject.delete()
        except (SubjectUnknownError, SubjectDeletedError):
            pass  # it was deleted, and another subject may have the same name
        return True

    async def count_complete(self) -> dict[int, int]:
        """
        Return the result of `count_messages`, after checking that no messages were removed.

        Raises:
            RowsError: retention has removed messages, which can happen if the target's retention is
                TIME.
        """
        statuses = await self._fetch_statuses()
        for partition_id, status in statuses.items():
            check_not_removed(self.name, partition_id, status.first_offset)
        return _message_counts(statuses)

    async def count_messages(self) -> dict[int, int]:
        """
        Return the number of messages by partition id, including those that were removed.

        Raises:
            UnreachableError: a broker does not answer.
            SubjectUnknownError, SubjectDeletedError: the subject was deleted, or another one has
                the same name.
        """
        return _message_counts(await self._fetch_statuses())

    async def _fetch_statuses(self) -> dict[int, PartitionStatus]:
        async def fetch() -> dict[int, PartitionStatus]:
            route = await self._meta.route(self.name)
            check_subject_id(route, self._subject_id)
            statuses = {}
            for partition in route.partitions:
                if partition.address is None:
                    raise NotSentError(f"broker group {partition.broker_group} is not available")
                broker = BrokerClient(self._network, partition.address)
                try:
                    status = await broker.control(endpoints.PARTITION, id=partition.partition_id)
                finally:
                    await broker.close()
                statuses[int(partition.partition_id)] = status
            return statuses

        return await self._retry(fetch)

    async def continues_target(self) -> bool:
        """Return True if the hidden subject's partitions are children of the target's partitions,
        which is the case if the target exists.
        """
        route = await self._retry(lambda: self._meta.route(self.name))
        check_subject_id(route, self._subject_id)
        return any(partition.parents for partition in route.partitions)

    async def publish(self, *, replace: bool = False) -> Publication:
        """
        Publish the subject, and wait until the route has changed. Idempotent.

        Raises:
            PublishError: the metaserver did not respond in time, the target's partitions have
                changed, or the publication was canceled.
            SubjectDeletedError: another subject has the name, or was published under it.
            KeylaneError: the metaserver refuses; nothing is published.
        """
        request = PublishSubject(
            target=self._options.subject, replace=replace, subject_id=self._subject_id
        )
        deadline_ms = self._clock.boot_ms() + self._options.timeout_ms
        try:
            while True:
                reply = await self._retry(
                    lambda: self._meta.call(endpoints.PUBLISH_SUBJECT, request, subject=self.name)
                )
                if reply.state in ROUTE_FINAL:
                    break
                if self._clock.boot_ms() >= deadline_ms:
                    raise NotSentError(reply.problem or "its operation is not done yet")
                await asyncio.sleep(POLL_S)
        except KeylaneError as error:
            if error.retry is RetryRule.NEVER:
                raise
            raise PublishError(
                Reason.COMMIT_UNKNOWN,
                f"{self.name!r} may be published in {self._options.subject!r} or not: "
                f"{error.message}",
                subject=self.name,
                target=self._options.subject,
            ) from error
        if reply.state is OperationState.CANCELED:
            raise PublishError(
                Reason.PUBLISH_OUTDATED,
                f"the publication of {self.name!r} was canceled: its rows are not in "
                f"{self._options.subject!r}, write them again",
                subject=self.name,
                target=self._options.subject,
            )
        return reply

    async def delete(self) -> None:
        """Delete the subject, unless it was already published or deleted. Idempotent."""
        try:
            request = DeleteSubject(force=True, subject_id=self._subject_id)
            await self._retry(
                lambda: self._meta.call(endpoints.DELETE_SUBJECT, request, subject=self.name)
            )
        except (SubjectUnknownError, SubjectDeletedError):
            return

    async def abandon(self) -> None:
        """
        Delete the subject after its creation has failed, and ignore errors.

        Otherwise, the metaserver might still complete the creation.
        """
        with suppress(KeylaneError):
            await self._meta.call(
                endpoints.DELETE_SUBJECT, DeleteSubject(force=True), subject=self.name
            )

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        return await retry_call(
            call, timeout_ms=self._options.timeout_ms, clock=self._clock, rng=self._rng
        )


def check_not_removed(hidden_subject: str, partition_id: int, first_offset: int) -> None:
    """Raise RowsError if retention has removed rows from a partition of the hidden subject."""
    if first_offset:
        raise RowsError(
            Reason.ROWS_REMOVED,
            f"retention has removed {counted(first_offset, 'row')} of partition {partition_id} of "
            f"{hidden_subject!r} before their publication",
            subject=hidden_subject,
            partition_id=partition_id,
            rows=first_offset,
        )


def _message_counts(statuses: Mapping[int, PartitionStatus]) -> dict[int, int]:
    return {partition_id: status.next_offset for partition_id, status in statuses.items()}
