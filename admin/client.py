"""The admin client: one method for each administration call of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import islice
from types import EllipsisType
from typing import Self, TypeVar

import msgspec
from msgspec.structs import replace

from ..protocol import endpoints
from ..protocol.access.quota import NO_QUOTA, Quota, check_quota, check_sessions, check_together
from ..protocol.access.rights import ANY, Rights
from ..protocol.address import addresses_of
from ..protocol.control import (
    AcceptFolder,
    BrokerView,
    CreateSubject,
    DeleteGroup,
    DeleteSubject,
    GroupDeletion,
    GroupSummary,
    GroupView,
    Health,
    PartitionStatus,
    RefusedBroker,
    Retention,
    SubjectDeletion,
    SubjectSummary,
    SubjectView,
    SwitchGroup,
)
from ..protocol.errors import (
    AccessDeniedError,
    ConfigError,
    ForeignServerError,
    GroupUnknownError,
    InvalidRequestError,
    KeylaneError,
    NotFoundError,
    NotSentError,
    PartitionUnknownError,
    Reason,
    StorageError,
    UnauthenticatedError,
)
from ..protocol.frames import EditParked, ParkedEdited
from ..protocol.groups import (
    CreateGroup,
    FailurePolicy,
    FullPolicy,
    GroupSettings,
    SetGroup,
    StartAt,
    SuspendGroup,
)
from ..protocol.http.access import (
    AuditPage,
    CheckAccess,
    CreateToken,
    Decision,
    GrantList,
    MadeToken,
    QuotaKind,
    QuotaList,
    SetQuota,
    TokenList,
    TokenView,
    UnsetQuota,
)
from ..protocol.http.endpoint import Endpoint
from ..protocol.http.tls_settings import TlsSettings
from ..protocol.ids import MAX_I64, check_name
from ..protocol.limits import MESSAGE_BYTES_MAX, SCHEDULED_LISTED_MAX
from ..protocol.membership.views import ClusterView
from ..protocol.message import check_message_size, pack_properties
from ..protocol.operations import (
    ROUTE_FINAL,
    Cordon,
    HideSubject,
    OperationKind,
    OperationList,
    OperationView,
    Publication,
    PublishSubject,
    Reshape,
    SetSubject,
    SubjectHistory,
)
from ..protocol.parked import ChangeParkedKey, ParkKey, ParkState
from ..protocol.progress import CanceledReset, GroupReset, ResetTo
from ..protocol.reading.instants import check_unit
from ..protocol.reprocess.holds import HoldView, SetHold
from ..protocol.routing import ConsumeStrategy, OrderStrategy, Partition, PartitionState
from ..protocol.scheduled.receipt import CancelOutcome, ScheduledPage
from ..protocol.settings import flag_problems, is_within, range_problems, refuse_call
from ..protocol.verification import Verification
from ..rpc.client import BrokerClient, MetaClient
from ..rpc.connections import Connections, clean_up, in_turns
from ..rpc.environment import environment_of
from ..rpc.home import LoopBoundClient
from ..rpc.race import survives_cancel
from . import views
from .arguments import check_where, checked, grant_change, instant_ms, mapping_of, principal_query
from .group_resets import reset_group
from .parked_reading import (
    ParkedReader,
    ParkedRow,
    chosen_rows,
    edited,
    kept_properties,
    view_of_rows,
    views_by_error,
    with_edit,
)
from .parked_views import (
    AnyKey,
    ParkedKeyView,
    ParkedMessage,
    Row,
    WantedKeys,
    chunks,
    first_in_lineage,
    view_of,
)
from .undrained import UndrainedPartition, undrained_partitions
from .views import (
    BrokerList,
    GroupDescription,
    ScheduledMessages,
    SubjectChange,
    SubjectDescription,
    is_scheduled_id,
)

T = TypeVar("T")
POLL_MS = 100
PASSES_MAX = 3
"""Most passes over the pages of a partition, which are read again if keys may have been freed
between two pages.
"""
PARKED_PAGE = 1_000
"""Number of parked keys in a page."""
ADOPTION_S = 1.0
"""Time, in seconds, for which a search is repeated while a sealed partition has handed its parked
messages on and its children do not have them yet.
"""
ADOPTION_PAUSE_S = 0.05
TOGETHER = 64
"""Number of keys that are redriven at once; a broker makes them durable together."""


class Admin(LoopBoundClient):
    """Administers a cluster.

        async with Admin("127.0.0.1:7000") as admin:
            await admin.create_subject("orders", partitions=4)
            operation = await admin.resize("orders", 6)
            await admin.wait(operation)

    Entering the block opens no connection unless `wait_s` is set; each call connects to the servers
    that it needs. An admin works only in the event loop and the process in which it was opened.

    Besides the errors that a method names, each call raises
        InvalidRequestError: an argument is invalid; nothing was done.
        NotSentError: no metaserver was reached; nothing was done.
        OutcomeUnknownError: no answer came; a call that changes something may have done so.
        ForeignServerError: the server at the address is not a keylane server.
        ClosedError, UsageError: the admin is closed, or was opened in another
            process or event loop.

    Calls about access need the right administer on `*`, and raise InvalidRequestError if the
    metaserver has no access control.
    """

    def __init__(
        self,
        meta: str | Iterable[str],
        *,
        call_timeout_ms: int = 5_000,
        wait_s: float = 0,
        tls: TlsSettings | None = None,
        token: str | None = None,
    ) -> None:
        """
        Make an admin; `async with` opens it.

        Args:
            meta: `host:port` of a metaserver; for several an iterable of texts, or one text with
                commas.
            call_timeout_ms: time limit of one call, in milliseconds; calls that work at the brokers
                have a longer one.
            wait_s: time, in seconds, for which opening waits for a metaserver that is still
                starting; 0: opening contacts none.
            tls: the certificate authority of the servers; None: KEYLANE_TLS_CA of the environment,
                or no TLS.
            token: the access token; None: from the file that KEYLANE_TOKEN_FILE names, from
                KEYLANE_TOKEN, or none.

        Raises:
            ConfigError: `meta` names no address, or a time is out of its range.
        """
        self._addresses = addresses_of(meta)
        self._timeout_ms = call_timeout_ms
        self._connections = Connections(
            None, timeout_ms=call_timeout_ms, what="admin", wait_s=wait_s, tls=tls, token=token
        )

    def __repr__(self) -> str:
        return f"<Admin at {', '.join(self._addresses)}, {self._connections.home.state}>"

    async def __aenter__(self) -> Self:
        network = self._connections.open()
        self._metaserver = MetaClient(network, self._addresses, timeout_ms=self._timeout_ms)
        await self._connections.wait_for(self._metaserver)
        return self

    async def close(self) -> None:
        """Close every connection. Raises UsageError: the admin was opened in another event
        loop.
        """
        await clean_up(self._connections.close)

    # ── subjects ──────────────────────────────────────────────────────────────────────────────────
    async def create_subject(
        self,
        subject: str,
        *,
        partitions: int = 2,
        order_strategy: OrderStrategy | str = OrderStrategy.STRICT,
        retention: Retention | str = Retention.ACKED,
        static: bool = False,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> SubjectView:
        """
        Create a subject; a repeat with the same settings changes nothing.

        Args:
            partitions: number of physical partitions, 1 to 1024, spread over the available broker
                groups.
            order_strategy: "strict" or "best_tried": what producers do while a partition does not
                answer.
            retention: condition for the removal of an old message.
            static: make the partitions logic queues, whose number changes only by `grow_subject`.
            message_bytes_max: largest size of one message, with key, value and properties; 1 KiB to
                1 MiB.

        Raises:
            ConflictError: the subject exists with other settings.
            UnavailableError: no broker group is available.
            BusyError, ConflictError: an earlier creation of it is not finished, or
                cannot be.
        """
        body = checked(
            CreateSubject,
            {
                "subject": check_name("subject", subject),
                "partitions": partitions,
                "order_strategy": order_strategy,
                "retention": retention,
                "static": static,
                "message_bytes_max": message_bytes_max,
            },
        )
        return await self._meta.create_subject(body)

    async def list_subjects(self, *, hidden: bool = False) -> list[SubjectSummary]:
        """List the subjects by name, with the hidden ones if `hidden` is set."""
        refuse_call(flag_problems(hidden=hidden))
        listed = (await self._meta.call(endpoints.SUBJECTS)).subjects
        return [each for each in listed if hidden or not each.hidden_for]

    async def describe_subject(self, subject: str) -> SubjectDescription:
        """
        Return a subject's settings, and each partition with its broker, state and offsets.

        A broker that does not answer is no error: its partitions have a `problem`.

        Raises:
            SubjectUnknownError
        """
        view = await self._meta.call(endpoints.SUBJECT, subject=check_name("subject", subject))
        return views.describe_subject(view, await self._statuses(view.route.partitions))

    async def history(self, subject: str) -> SubjectHistory:
        """
        Return every partition that a subject ever had, the oldest first; `parents` give the
        lineage.

        Raises:
            SubjectUnknownError
        """
        return await self._meta.call(endpoints.HISTORY, subject=check_name("subject", subject))

    async def set_subject(
        self,
        subject: str,
        *,
        order_strategy: OrderStrategy | str | None = None,
        retention: Retention | str | None = None,
        message_bytes_max: int | None = None,
        dry_run: bool = False,
    ) -> SubjectChange:
        """
        Change settings of a subject; those that are None stay. A repeat with the same settings
        changes nothing.

        Every open partition is sealed, and a new one with the new settings continues it. Once the
        operation is done (see `wait`), no producer uses the old settings. Stored messages keep the
        retention that they were stored under, and stay if they are larger than a lower
        `message_bytes_max`.

        Raises:
            SubjectUnknownError, UnavailableError
            BusyError: another operation on the subject has not changed the route yet.
        """
        check_name("subject", subject)
        asked = {
            "order_strategy": order_strategy,
            "retention": retention,
            "message_bytes_max": message_bytes_max,
        }
        body = checked(SetSubject, {"dry_run": dry_run, **asked})
        view = await self._meta.call(endpoints.SUBJECT, subject=subject)
        (operation,) = (
            await self._meta.call(endpoints.SET_SUBJECT, body, subject=subject)
        ).operations
        return views.subject_change(view, asked, operation)

    async def delete_subject(
        self, subject: str, *, force: bool = False, subject_id: int = 0
    ) -> SubjectDeletion:
        """
        Delete a subject with its messages and consumer groups.

        The same call with the `subject_id` of the answer reports the progress. A broker that is
        down drops its partitions when it returns; until then the name cannot be used again.

        Args:
            force: delete the subject even if it has live consumers.
            subject_id: the id of the subject: another one of its name is not deleted. 0: the one
                that has the name.

        Raises:
            SubjectUnknownError
            BusyError: it has live consumers.
            BusyError: its partitions are being changed.
        """
        check_name("subject", subject)
        body = checked(DeleteSubject, {"force": force, "subject_id": subject_id})
        return await self._meta.call(endpoints.DELETE_SUBJECT, body, subject=subject)

    async def hide_subject(
        self,
        subject: str,
        hidden: str,
        *,
        partitions: int = 0,
        static: bool = False,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        cut: bool = False,
    ) -> SubjectView:
        """
        Make a hidden subject, to be published in `subject`; a repeat changes nothing.

        Messages are sent to it and read by its name. It has no consumer groups, and `list_subjects`
        omits it by default.

        Args:
            partitions: number of partitions if `subject` does not exist; 0: it must exist. `static`
                and `message_bytes_max` are used in that case only: if `subject` exists, the hidden
                subject has its ranges and settings.
            cut: also seal the open partitions of `subject`, and let new ones continue both them and
                those of the hidden subject, which can then replace everything stored before. The
                call returns before the cut is done.

        Raises:
            SubjectUnknownError, SubjectDeletedError, UnavailableError
            PublishError: `hidden` exists and is another subject, or was published.
            BusyError: the partitions of `subject` are being changed.
            PublishError: `cut` is set, and they have changed since the hidden subject was
                made.
        """
        check_name("subject", subject)
        fields = {
            "partitions": partitions,
            "static": static,
            "message_bytes_max": message_bytes_max,
            "cut": cut,
        }
        body = checked(HideSubject, {"hidden": hidden, **fields})
        return await self._meta.hide_subject(subject, body)

    async def publish_subject(
        self,
        hidden: str,
        subject: str,
        *,
        replace: bool = False,
        starts: Mapping[str, Mapping[int, int]] | None = None,
        ends: Mapping[int, int] | None = None,
        subject_id: int = 0,
        revisions: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> Publication:
        """
        Publish a hidden subject in `subject` with one change of its route; a repeat changes nothing
        and reports the progress.

        The messages stored in `subject` stay, before those of the hidden subject. If the caller is
        cancelled while it waits, the publication continues.

        Args:
            replace: delete the messages stored in `subject`: the hidden subject takes its name.
            starts: with `replace`: consumer group → partition id of the hidden subject → offset of
                the first message that the group has not handled.
            ends: with `replace`: partition id of `subject`, before the cut → end offset of the
                messages that the hidden subject was made from. None: deleted messages are not
                compared.
            subject_id: the id of the hidden subject: another one of its name is refused. 0: the one
                that has the name.
            revisions: with `starts`: consumer group → `revision` of `describe_group`, read before
                its cursors. None: a reset since then is not noticed.
            wait: return only when the route has changed.

        Raises:
            SubjectUnknownError, SubjectDeletedError, PublishError
            PublishError: the partitions of `subject` have changed since the hidden subject
                was made.
            BusyError: they are being changed.
            PublishError, BusyError: a consumer group of the replaced subject has no
                start, or has live consumers.
            PublishError: a group was reset, or had a consumer, since its `revisions` were
                read; nothing was changed.
            PublishError: the replaced subject has messages after `ends`; nothing was changed.
        """
        check_name("subject", hidden)
        refuse_call(flag_problems(wait=wait))
        placed = {
            group: mapping_of(f"starts of {group!r:.60}", offsets)
            for group, offsets in mapping_of("starts", {} if starts is None else starts).items()
        }
        known = None if ends is None else mapping_of("ends", ends)
        seen = mapping_of("revisions", {} if revisions is None else revisions)
        body = checked(
            PublishSubject,
            {"target": subject, "replace": replace, "starts": placed, "ends": known}
            | {"subject_id": subject_id, "revisions": seen},
        )
        answer = await self._meta.call(endpoints.PUBLISH_SUBJECT, body, subject=hidden)
        while wait and answer.state not in ROUTE_FINAL:
            await asyncio.sleep(POLL_MS / 1000)
            answer = await self._meta.call(endpoints.PUBLISH_SUBJECT, body, subject=hidden)
        return answer

    # ── consumer groups ───────────────────────────────────────────────────────────────────────────
    async def create_group(
        self,
        subject: str,
        group: str,
        *,
        start: StartAt | str = StartAt.EARLIEST,
        at_ms: int | None = None,
        cursors: Mapping[int, int] | None = None,
        consume_strategy: ConsumeStrategy | str = ConsumeStrategy.EXCLUSIVE,
    ) -> GroupSettings:
        """
        Make a consumer group, and fix where it begins; a repeat changes nothing.

        Every message stored after this call's answer is delivered to the group. Partitions that are
        opened later, for example by a resize, are read from their first message.

        Args:
            start: "earliest", "latest", "time" or "cursors".
            at_ms: milliseconds since 1970. For "time": the group begins at the first message stored
                at or after it. For "cursors": the time when the cursors were read, which tells a
                repeat from another start.
            cursors: for "cursors": partition id → offset of the first message to read; a partition
                that is not named is read from its first message.
            consume_strategy: "exclusive" or "shared".

        Raises:
            SubjectUnknownError
            OffsetOutOfRangeError: messages after a cursor are gone.
            ConflictError: the group exists with another start or strategy.
            GroupDeletedError: a group of this name is being deleted.
            UnfinishedError: the group was made, but a broker has not stored its start
                yet.
            OverloadedError: the subject has the maximum number of groups.
        """
        check_where("start", start, time="at_ms", cursors="cursors")
        check_unit("at_ms", at_ms)
        fields = {
            "start": {
                "at": start,
                "at_ms": at_ms,
                "cursors": None if cursors is None else mapping_of("cursors", cursors),
            },
            "strategy": consume_strategy,
        }
        body = checked(CreateGroup, fields, strategy="consume_strategy")
        return await self._of_group(endpoints.CREATE_GROUP, subject, group, body)

    async def list_groups(self, subject: str) -> list[GroupSummary]:
        """
        List the consumer groups of a subject by name.

        Raises:
            SubjectUnknownError
        """
        return (
            await self._meta.call(endpoints.GROUPS, subject=check_name("subject", subject))
        ).summaries

    async def describe_group(self, subject: str, group: str) -> GroupDescription:
        """
        Return a consumer group's owner, token, cursor and lag on each partition.

        A broker that does not answer is no error: its partitions have a `problem`.

        Raises:
            SubjectUnknownError, GroupUnknownError
        """
        view = await self._of_group(endpoints.GROUP, subject, group)
        partitions = [owner.partition for owner in view.owners]
        return views.describe_group(view, await self._statuses(partitions))

    async def lag(self, subject: str, group: str) -> int:
        """
        Count the messages, over all partitions, that are stored and that a consumer group has not
        acked.

        Raises:
            SubjectUnknownError, GroupUnknownError
            UnreachableError: a broker does not answer, so that the lag is unknown.
        """
        view = await self._of_group(endpoints.GROUP, subject, group)
        owned = [owner.partition for owner in view.owners]
        statuses = await in_turns(self._status, owned)
        described = views.describe_group(view, {status.partition_id: status for status in statuses})
        assert described.lag is not None
        return described.lag

    async def group_settings(self, subject: str, group: str) -> GroupSettings:
        """
        Return the stored settings of a consumer group: its start, its failure policy, and what an
        operator has suspended.

        Raises:
            SubjectUnknownError, GroupUnknownError
        """
        return await self._of_group(endpoints.GROUP_SETTINGS, subject, group)

    async def set_group(
        self,
        subject: str,
        group: str,
        *,
        on_failure: FailurePolicy | str | None = None,
        on_full: FullPolicy | str | None = None,
        tries_max: int | None = None,
        backoff_first_ms: int | None = None,
        backoff_max_ms: int | None = None,
        forget: bool = False,
    ) -> GroupSettings:
        """
        Change the stored failure policy of a consumer group; its running consumers apply it within
        a heartbeat.

        A stored field overrides the code of the consumers; fields that are not stored are as their
        code says.

        Args:
            on_failure: "block", "park" or "dead": what happens to a message that has failed
                `tries_max` times.
            on_full: "block" or "dead": what happens to a key that should be parked when no more can
                be parked.
            tries_max: number of tries, 1 to 1_000_000.
            backoff_first_ms: the pause after the first try, in milliseconds; requires
                `backoff_max_ms`.
            backoff_max_ms: the longest pause between two tries, in milliseconds.
            forget: first delete every stored field of the policy.

        Raises:
            SubjectUnknownError, GroupUnknownError
            InvalidRequestError: the fields contradict each other; nothing was changed.
        """
        fields = {"on_failure": on_failure, "on_full": on_full, "tries_max": tries_max}
        fields |= {
            "forget": forget,
            "backoff_first_ms": backoff_first_ms,
            "backoff_max_ms": backoff_max_ms,
        }
        return await self._of_group(endpoints.SET_GROUP, subject, group, checked(SetGroup, fields))

    async def suspend_group(
        self, subject: str, group: str, *, client: str | None = None
    ) -> GroupSettings:
        """
        Suspend a consumer group: it hands over its partitions, and gets none until `resume_group`.
        A repeat changes nothing.

        Its consumers stay open. The switch is stored, and applies to consumers that start later.

        Args:
            client: suspend only the consumers of this name, even if none is there now; others take
                over their partitions. None: the whole group.

        Raises:
            SubjectUnknownError, GroupUnknownError
            OverloadedError: too many clients are suspended by name.
        """
        return await self._switch(subject, group, client, suspended=True)

    async def resume_group(
        self, subject: str, group: str, *, client: str | None = None
    ) -> GroupSettings:
        """
        End what `suspend_group` with the same `client` began; without a `client`, clients that were
        suspended by name stay so.

        A consumer that its own code has suspended gets nothing until that code resumes it.

        Raises:
            SubjectUnknownError, GroupUnknownError
        """
        return await self._switch(subject, group, client, suspended=False)

    async def reset_group(
        self,
        subject: str,
        group: str,
        to: ResetTo | str,
        *,
        offset: int | None = None,
        at_ms: int | None = None,
        queue: int | None = None,
        partition_id: int | None = None,
        shift: int | None = None,
        cursors: Mapping[int, int] | None = None,
        dry_run: bool = False,
        live: bool = False,
    ) -> GroupReset:
        """
        Set the cursors of a consumer group; it must have no live consumers unless `live` is set.

        Args:
            to: "earliest", "latest", "offset", "time", "shift" or "cursors".
            offset: for "offset": a logic offset with `queue`, an offset of the partition with
                `partition_id`.
            at_ms: for "time": milliseconds since 1970; the cursor becomes the first message stored
                at or after it.
            queue: reset only this logic queue of a static subject.
            partition_id: reset only this partition; its parents and children keep their cursors.
            shift: for "shift": number of messages to move forward, or back if negative, in each
                queue, or in each partition that the group has not acked to a sealed end; no further
                than the stored messages reach.
            cursors: for "cursors": partition id → offset; other partitions keep their cursors.
            dry_run: return the present and the new cursors, and change nothing; allowed while the
                group has consumers.
            live: the group's consumers hand everything over, and continue at the new cursors; a
                handler has `handover_ms` to end.

        Raises:
            SubjectUnknownError, GroupUnknownError, NotFoundError, PartitionUnknownError
            ConflictError: `queue` for a subject without queues.
            InvalidRequestError: `partition_id` for a subject with queues, or arguments that
                contradict each other.
            BusyError: it has live consumers, or had some until a moment ago.
            OffsetOutOfRangeError: `offset` is not stored.
            UnfinishedError: some cursors are set; the same call again sets the rest. After a
                "shift" another shift would count from the new cursors: the text has the "cursors"
                that set the rest.
            ConflictError: `cancel_reset` was called; nothing was changed.
        """
        return await reset_group(
            partial(self._of_group, endpoints.RESET_GROUP, subject, group),
            {"to": to, "offset": offset, "at_ms": at_ms, "shift": shift, "cursors": cursors}
            | {"queue": queue, "partition_id": partition_id, "dry_run": dry_run, "live": live},
        )

    async def cancel_reset(self, subject: str, group: str) -> CanceledReset:
        """
        Cancel a `live` reset that waits for the group's consumers to hand over; they continue where
        they were.

        Returns:
            The cursors that the reset would have set; a repeat returns the same.

        Raises:
            SubjectUnknownError, GroupUnknownError
            ConflictError: cursors may be set already, so that the reset continues by itself; or
                it is done, or there is none.
        """
        return await self._of_group(endpoints.CANCEL_RESET, subject, group)

    async def switch_group(
        self, subject: str, group: str, consume_strategy: ConsumeStrategy | str
    ) -> GroupView:
        """
        Change the consume strategy of a consumer group: "exclusive" or "shared".

        Its running consumers end with an error; consumers that start with the new strategy
        continue.

        Raises:
            SubjectUnknownError, GroupUnknownError
        """
        body = checked(SwitchGroup, {"strategy": consume_strategy}, strategy="consume_strategy")
        return await self._of_group(endpoints.SWITCH_GROUP, subject, group, body)

    async def delete_group(
        self, subject: str, group: str, *, force: bool = False, group_id: int = 0
    ) -> GroupDeletion:
        """
        Delete a consumer group; the same call with the `group_id` of the answer reports the
        progress.

        A broker that is down deletes the group's progress when it returns; until then no consumer
        can join. A later group of this name begins at the first message that is still stored.

        Args:
            force: delete the group even if it has live consumers, which end with GroupDeletedError.
            group_id: the id of the group: another one of its name is not deleted. 0: the one that
                has the name.

        Raises:
            SubjectUnknownError, GroupUnknownError
            BusyError: it has live consumers, or its cursors are being set.
        """
        body = checked(DeleteGroup, {"force": force, "group_id": group_id})
        return await self._of_group(endpoints.DELETE_GROUP, subject, group, body)

    # ── partitions ────────────────────────────────────────────────────────────────────────────────
    async def resize(
        self, subject: str, partitions: int, *, dry_run: bool = False
    ) -> OperationView:
        """
        Change the number of open partitions of a subject while messages flow.

        Args:
            partitions: the new number, 1 to 1024.
            dry_run: only plan the operation.

        Returns:
            The operation, which continues by itself: see `wait`. With `dry_run`, and if there is
                nothing to change, its `operation_id` is 0.

        Raises:
            SubjectUnknownError, UnavailableError
            BusyError: another operation on the subject has not changed the route yet.
            ConflictError: the subject has logic queues; see `grow_subject`.
        """
        check_name("subject", subject)
        return await self._change(
            OperationKind.RESIZE, dry_run, subject=subject, partitions=partitions
        )

    async def grow_subject(
        self, subject: str, count: int = 0, *, queues: Sequence[int] = (), dry_run: bool = False
    ) -> OperationView:
        """
        Give a static subject more logic queues while messages flow; returns and raises as `resize`.

        A queue that is cut keeps its number, its logic offsets and the first half of its range; the
        second half becomes a new queue that begins at logic offset 0.

        Args:
            count: the new number of queues, up to 1024; the widest queues are cut.
            queues: instead of `count`: the numbers of the queues to cut in the middle.

        Raises:
            NotFoundError: the subject has no such queue.
            ConflictError: the subject has no logic queues; see `resize`.
        """
        check_name("subject", subject)
        return await self._change(
            OperationKind.GROW, dry_run, subject=subject, partitions=count, queues=queues
        )

    async def split(self, partition_id: int, *, dry_run: bool = False) -> OperationView:
        """
        Cut an open partition in the middle of its range; returns and raises as `resize`.

        Raises:
            PartitionUnknownError: no open partition has this id.
        """
        return await self._change(OperationKind.SPLIT, dry_run, partition_ids=[partition_id])

    async def merge(self, partition_ids: Sequence[int], *, dry_run: bool = False) -> OperationView:
        """
        Merge open partitions with adjacent ranges; returns and raises as `resize`.

        Raises:
            PartitionUnknownError: no open partition has one of these ids.
        """
        return await self._change(OperationKind.MERGE, dry_run, partition_ids=partition_ids)

    async def move(
        self, partition_ids: Sequence[int], *, to: str, dry_run: bool = False
    ) -> OperationView:
        """
        Continue open partitions of one subject on the broker group `to`; returns and raises as
        `resize`.

        Raises:
            PartitionUnknownError: no open partition has one of these ids.
            NotFoundError: `to` has never reported itself.
            ConflictError: `to` is cordoned, and gets no new partitions.
        """
        check_name("broker group", to)
        return await self._change(
            OperationKind.MOVE, dry_run, partition_ids=partition_ids, broker_group=to
        )

    async def evacuate(
        self,
        broker_group: str,
        *,
        without_source: bool = False,
        accept_loss: bool = False,
        dry_run: bool = False,
    ) -> OperationList:
        """
        Continue all open partitions of a broker group, of every subject, on other broker groups.

        The broker group is cordoned from then on, also if the evacuation is canceled: see
        `uncordon`.

        Args:
            without_source: continue although the broker is silent; strict and static subjects still
                wait for its return.
            accept_loss: give up the silent broker's disk as lost: strict and static subjects
                continue too.

        Returns:
            `operations` has one for each subject, to `wait` for; `busy` names the subjects of which
            partitions stay there, with the reason.

        Raises:
            NotFoundError, UnavailableError
        """
        check_name("broker group", broker_group)
        body = checked(
            Reshape,
            {
                "kind": OperationKind.EVACUATE,
                "broker_group": broker_group,
                "without_source": without_source,
                "accept_loss": accept_loss,
                "dry_run": dry_run,
            },
        )
        return await self._meta.call(endpoints.RESHAPE, body)

    async def list_operations(self, subject: str) -> list[OperationView]:
        """
        List the latest operations of a subject, the newest first, each with the reason why it
        waits.

        Raises:
            SubjectUnknownError
        """
        return (
            await self._meta.call(endpoints.OPERATIONS, subject=check_name("subject", subject))
        ).operations

    @survives_cancel
    async def follow(self, operation: OperationView) -> AsyncGenerator[OperationView, None]:
        """
        Yield an operation now and after each change, until it has changed the route or is canceled.

        Raises:
            InvalidRequestError: `operation` is not an operation that `resize`, `move` or a similar
                call returned.
            NotFoundError: the metaserver does not list it, because its database is another
                or an older one.
            UnreachableError: no metaserver answers; the operation continues, and can be followed
                again.
        """
        if not isinstance(operation, OperationView):
            raise InvalidRequestError(f"follow takes one operation, not {operation!r:.80}")
        view = operation
        yield view
        while view.operation_id and view.state not in ROUTE_FINAL:
            await asyncio.sleep(POLL_MS / 1000)
            latest = await self.list_operations(view.subject)
            listed = {operation.operation_id: operation for operation in latest}
            if view.operation_id not in listed:
                raise NotFoundError(
                    Reason.OPERATION_UNKNOWN,
                    f"operation {view.operation_id} of subject {view.subject} is not listed",
                )
            if listed[view.operation_id] != view:
                view = listed[view.operation_id]
                yield view

    async def wait(self, operation: OperationView) -> OperationView:
        """
        Wait until an operation has changed the route (state DONE or FENCE) or is canceled
        (CANCELED), and return it.

        A plan, or an operation that has nothing to do, is returned at once.

        Raises:
            InvalidRequestError, NotFoundError, UnreachableError: as `follow`.
        """
        async for latest in self.follow(operation):
            operation = latest
        return operation

    async def cancel(self, operation_id: int) -> OperationView:
        """
        Cancel an operation that has not begun to seal; a repeat changes nothing.

        Raises:
            NotFoundError
            ConflictError: it has begun to seal, and can only be completed.
        """
        refuse_call(range_problems({"operation_id": operation_id}, {"operation_id": (1, MAX_I64)}))
        return await self._meta.call(endpoints.CANCEL_OPERATION, id=operation_id)

    async def undrained(self, subject: str) -> list[UndrainedPartition]:
        """
        Return the sealed partitions of a subject that a consumer group has not acked to the end.

        Parked messages that fail again while they are redriven count as not acked.

        A group gets no message of the children of a sealed partition before it has acked or parked
        all messages of that partition. A broker that does not answer is no error: its partitions
        have a `problem`.

        Raises:
            SubjectUnknownError
        """
        route = (
            await self._meta.call(endpoints.SUBJECT, subject=check_name("subject", subject))
        ).route
        sealed = [part for part in route.partitions if part.state is PartitionState.SEALED]
        return undrained_partitions(sealed, await self._statuses(sealed))

    async def hold(
        self, subject: str, from_offsets: Mapping[int, int], *, job: str, ttl_ms: int
    ) -> dict[int, tuple[HoldView, ...]]:
        """
        Protect messages from retention for a job, or renew the hold; a hold that is not renewed
        expires by itself.

        Args:
            from_offsets: partition id → offset of the first message to keep; all later ones are
                kept too.
            job: name of the holder; a later hold of the same job on a partition replaces this one.
            ttl_ms: time until the hold expires unless it is renewed, in milliseconds, up to
                86_400_000; 0 ends it.

        Returns:
            Partition id → every hold on it.

        Raises:
            SubjectUnknownError, PartitionUnknownError
            OffsetOutOfRangeError: messages from the offset on are gone; the other partitions may be
                held.
            OverloadedError: 16 jobs hold the partition.
        """
        asked = {
            partition_id: checked(
                SetHold, {"job": check_name("job", job), "from_offset": start, "ttl_ms": ttl_ms}
            )
            for partition_id, start in mapping_of("from_offsets", from_offsets).items()
        }
        route = await self._meta.route(check_name("subject", subject))
        known = {int(partition.partition_id): partition for partition in route.partitions}
        strange = sorted(asked.keys() - known.keys())
        if strange:
            raise PartitionUnknownError(
                f"subject {subject} has no partition {strange[0]}", partition_id=strange[0]
            )
        held = await in_turns(
            lambda partition_id: self._hold(known[partition_id], asked[partition_id]), asked
        )
        return dict(zip(asked, held, strict=True))

    async def release_hold(self, subject: str, job: str) -> None:
        """
        End the holds of a job on every partition of a subject; a repeat changes nothing.

        Raises:
            SubjectUnknownError
        """
        body = checked(SetHold, {"job": check_name("job", job), "ttl_ms": 0})
        route = await self._meta.route(check_name("subject", subject))
        await in_turns(lambda partition: self._hold(partition, body), route.partitions)

    # ── parked messages ───────────────────────────────────────────────────────────────────────────
    @survives_cancel
    async def parked(
        self,
        subject: str,
        group: str,
        *,
        key: bytes | EllipsisType | None = ...,
        dead: bool | None = None,
        partition_id: int | None = None,
        older_than_ms: int | None = None,
        error: str | None = None,
        retrying: bool = False,
        by_error: bool = False,
    ) -> AsyncGenerator[ParkedKeyView, None]:
        """
        Yield the keys that a consumer group has parked; a key may be on two partitions for a
        moment.

        Args:
            key: an order key; b"": messages without a key, including dead letters; None: dead
                letters of any key; `...`: all of these.
            dead: True: only dead letters; with a key, dead letters of any key are read to find
                those of this key. False: everything but dead letters.
            older_than_ms: minimum time since parking, in milliseconds; dead letters of any key, and
                messages without a key, are each compared by themselves.
            error: a substring of the type or the text of the last failure, compared in the same
                way.
            retrying: include messages that wait for retry: see `ParkedKeyView.tries`.
            by_error: split dead letters of any key, messages without a key, and messages that wait
                for retry into one view for each type and text of failure, the most messages first.

        Raises:
            SubjectUnknownError, GroupUnknownError
            PartitionUnknownError: the subject has no partition `partition_id`.
            UnreachableError: a broker does not answer, so that its parked keys are not known.
        """
        refuse_call(flag_problems(retrying=retrying, by_error=by_error))
        wanted = _wanted(key, dead=dead, older_than_ms=older_than_ms, error=error)
        async for view in self._listed(
            subject,
            group,
            wanted,
            partition_id,
            retrying=retrying,
            by_error=by_error,
            passed_on=set(),
        ):
            yield view

    @survives_cancel
    async def parked_messages(
        self,
        subject: str,
        group: str,
        key: bytes | EllipsisType | None = ...,
        *,
        dead: bool | None = None,
        partition_id: int | None = None,
        older_than_ms: int | None = None,
        error: str | None = None,
        first: int | None = None,
    ) -> AsyncGenerator[ParkedMessage, None]:
        """
        Yield the parked messages of a key, or of all selected keys, the oldest of each first, read
        from the brokers that store them.

        Args:
            key, dead, partition_id, older_than_ms, error: as for `parked`.
            first: most messages of each key on a partition, from the oldest on; None: all.

        Raises:
            NotFoundError: nothing of this key is parked.
            The errors of `parked`.
        """
        most = _checked_count(first)
        wanted = _wanted(key, dead=dead, older_than_ms=older_than_ms, error=error)
        for view in await self._views(subject, group, wanted, partition_id):
            left = most
            # What ends while it is read is passed over, as if it had ended before the call.
            with contextlib.suppress(NotFoundError):
                async for read in self._messages_of(subject, group, view, wanted):
                    if not left:
                        break
                    left -= 1
                    yield read

    async def redrive(
        self,
        subject: str,
        group: str,
        *,
        key: bytes | EllipsisType | None = ...,
        dead: bool | None = None,
        all: bool = False,  # noqa: A002 - what the caller says: all of them
        partition_id: int | None = None,
        older_than_ms: int | None = None,
        error: str | None = None,
    ) -> list[ParkedKeyView]:
        """
        Have the messages of parked keys handled again, the oldest first; a repeat is harmless.

        Args:
            key, dead, partition_id, older_than_ms, error: as for `parked`.
            all: select every parked key; required if no other argument selects.

        Returns:
            The keys that are being redriven now, as they were before the call.

        Raises:
            NotFoundError: nothing of `key` is parked.
            StaleRouteError: a partition was sealed, and its children have these messages now: call
                again.
            The errors of `parked`.
        """
        refuse_call(flag_problems(all=all))
        selects = _selects(key, dead, partition_id, older_than_ms, error)
        if not (all or selects):
            raise InvalidRequestError("say which keys are redriven, or all=True")
        if key is not ...:
            await self._views(subject, group, _wanted(key, dead=dead), partition_id)
        wanted = _wanted(key, dead=dead, older_than_ms=older_than_ms, error=error)
        asked = self.parked(
            subject,
            group,
            key=key,
            dead=dead,
            partition_id=partition_id,
            older_than_ms=older_than_ms,
            error=error,
        )
        parked = [view async for view in asked if view.state is not ParkState.REDRIVING]
        partitions: dict[int, Partition] = {
            each.partition_id: each for each in await self._partitions(subject, group, None)
        }

        async def ask(view: ParkedKeyView) -> ParkedKeyView | None:
            broker = self._broker(partitions[view.partition_id])
            return await self._redrive(broker, subject, group, view, wanted)

        redriven: list[ParkedKeyView] = []
        for begin in range(0, len(parked), TOGETHER):
            some = islice(parked, begin, begin + TOGETHER)
            redriven += filter(None, await asyncio.gather(*map(ask, some)))
        return redriven

    async def skip(
        self,
        subject: str,
        group: str,
        partition_id: int | None = None,
        key: bytes | EllipsisType | None = ...,
        *,
        dead: bool | None = None,
        older_than_ms: int | None = None,
        error: str | None = None,
        first: int | None = None,
    ) -> int:
        """
        Never handle parked messages of a key: they stay stored until retention removes them, and no
        consumer gets them.

        Args:
            partition_id: as for `parked`; None: all partitions.
            key, dead, older_than_ms, error: as for `parked`; at least one of them, or
                `partition_id`, is required.
            first: most messages of each key on a partition, from the oldest on; None: all that are
                parked now.

        Returns:
            The number of skipped messages.

        Raises:
            NotFoundError, StaleRouteError
            The errors of `parked`.
        """
        if not _selects(key, dead, partition_id, older_than_ms, error):
            raise InvalidRequestError("say which keys are skipped")
        most, skipped = _checked_count(first), 0
        wanted = _wanted(key, dead=dead, older_than_ms=older_than_ms, error=error)
        for view in await self._views(subject, group, wanted, partition_id):
            (partition,) = await self._partitions(subject, group, view.partition_id)
            broker = self._broker(partition)
            left, rows = most, list[Row]()
            for row in await self._selected(subject, group, view, wanted):
                if left > 0:
                    rows.append((row.source, row.start, min(row.end, row.start + left)))
                left -= min(row.messages, left)
            for some in chunks(rows):
                body = ChangeParkedKey(group=group, key_hex=_hex(view.key), skip=some)
                await broker.control(endpoints.CHANGE_PARKED, body, id=view.partition_id)
            skipped += most - left
        return skipped

    async def parked_message(
        self,
        subject: str,
        group: str,
        partition_id: int | None = None,
        offset: int | None = None,
        *,
        key: bytes | None = None,
        dead: bool | None = None,
    ) -> ParkedMessage:
        """
        Return a parked message or dead letter as consumers will get it.

        Args:
            partition_id, offset, key, dead: as for `edit_parked`.

        Raises:
            NotFoundError: it is not parked, or no longer stored.
            NotFoundError, ConflictError: as for `edit_parked`.
            The errors of `parked`.
        """
        place = await self._place(subject, group, partition_id, offset, key=key, dead=dead)
        return (await self._one_parked(subject, group, *place))[0]

    async def edit_parked(
        self,
        subject: str,
        group: str,
        partition_id: int | None = None,
        offset: int | None = None,
        *,
        key: bytes | None = None,
        dead: bool | None = None,
        value: bytes | None = None,
        properties: Mapping[str, str | bytes] | None = None,
    ) -> ParkedMessage:
        """
        Replace the value or the properties of a parked message or a dead letter; its key stays.

        Consumers get the edited message, whose property "keylane.edited" has the time of the edit.
        The original stays in the log.

        Args:
            partition_id, offset: the place of the message, as `parked_messages` gives it.
            key: instead of a place: the oldest parked message of this order key, which is the one
                that fails. If both a partition and its child have parked the key, the parent has
                the oldest. With `partition_id`: the oldest one that this partition has parked.
            dead: with a key: as for `parked`.
            value: the new value; None: it stays.
            properties: the new properties, which replace all old ones; None: they stay.

        Returns:
            The message as consumers will get it.

        Raises:
            NotFoundError: it is not parked, or no longer stored.
            NotFoundError: nothing of `key` is parked.
            ConflictError: partitions that are not in one line of descent have it: give
                `partition_id`.
            BusyError: messages of its key are being handled.
            MessageTooLargeError: the edited message would be larger than the subject allows.
            OverloadedError: the group has too many edited messages.
            StaleRouteError: the partition was sealed, and its children have the message now: call
                again.
            The errors of `parked`.
        """
        if value is None and properties is None:
            raise InvalidRequestError("give the new value, the new properties, or both")
        if not (value is None or isinstance(value, bytes)):
            raise InvalidRequestError(f"a value is bytes, not {value!r:.80}")
        if properties is not None:  # wrong ones are refused before anything is asked
            pack_properties(properties, kept=properties)
        source, offset = await self._place(subject, group, partition_id, offset, key=key, dead=dead)
        read, view = await self._one_parked(subject, group, source, offset)
        message = read.message
        assert message is not None
        value = message.value if value is None else value
        packed = message.packed_properties
        if properties is not None:
            packed = pack_properties(properties, kept=kept_properties(properties, message))
        limit = (await self._meta.call(endpoints.SUBJECT, subject=subject)).message_bytes_max
        check_message_size(len(message.key), len(value), len(packed), limit)
        (holder,) = await self._partitions(subject, group, view.partition_id)
        ask = EditParked(view.partition_id, group, view.key, source, offset, packed)
        answer, _ = await self._broker(holder).call(ask, value)
        assert isinstance(answer, ParkedEdited)
        return edited(read, value, answer.properties or b"")

    # ── scheduled messages ────────────────────────────────────────────────────────────────────────
    async def list_scheduled(
        self, *, subject: str | None = None, broker: str | None = None, limit: int = 100
    ) -> ScheduledMessages:
        """
        List the scheduled messages that are delivered next, of all subjects or one.

        A broker that does not answer is no error: `problems` names it.

        Args:
            broker: the address of the only broker to ask, without a metaserver; None: all available
                brokers.
            limit: most messages in the answer, 1 to 1,000.

        Raises:
            InvalidRequestError: `limit` is out of its range.
            ConfigError: `broker` is not one address.
            AccessDeniedError, UnauthenticatedError: the caller may not see them.
        """
        if subject is not None:
            check_name("subject", subject)
        if not is_within(limit, 1, SCHEDULED_LISTED_MAX):
            raise InvalidRequestError(f"limit is 1 to {SCHEDULED_LISTED_MAX}, not {limit!r:.40}")
        addresses, problems = await self._brokers_to_ask(broker)

        async def ask(address: str) -> ScheduledPage | KeylaneError:
            try:
                client = self._connections.broker_at(address)
                return await client.control(
                    endpoints.SCHEDULED, query={"subject": subject, "limit": limit}
                )
            except (AccessDeniedError, UnauthenticatedError, ConfigError):
                raise  # every broker says the same, and 0 messages would be no answer
            except KeylaneError as error:
                return error

        pages = []
        answers = await asyncio.gather(*map(ask, addresses))
        for address, answer in zip(addresses, answers, strict=True):
            if isinstance(answer, ScheduledPage):
                pages.append(answer)
            else:
                problems[address] = answer.message
        messages = [message for page in pages for message in page.messages]
        return ScheduledMessages(
            count=sum(page.count for page in pages),
            messages=sorted(messages, key=lambda message: message.deliver_at_ms)[:limit],
            problems=problems,
        )

    async def cancel_scheduled(
        self, scheduled_id: str, *, broker: str | None = None
    ) -> CancelOutcome:
        """
        Cancel the delivery of a scheduled message, durably. A repeat is harmless.

        Args:
            scheduled_id: the id in its receipt: 32 hexadecimal digits.
            broker: as for `list_scheduled`.

        Raises:
            InvalidRequestError: `scheduled_id` is not an id.
            NotFoundError: no broker that was asked has the message, or has it any longer.
            BusyError: it is being delivered to its subject, which does not answer; call
                again.
            ConfigError: `broker` is not one address.
            KeylaneError: the last other error of a broker, if none has the message.
        """
        if not isinstance(scheduled_id, str) or not is_scheduled_id(scheduled_id):
            raise InvalidRequestError(
                f"the id of a scheduled message has 32 hexadecimal digits, not {scheduled_id!r:.80}"
            )
        addresses, problems = await self._brokers_to_ask(broker)
        failure: KeylaneError | None = None
        for address in addresses:
            try:
                client = self._connections.broker_at(address)
                return (await client.control(endpoints.CANCEL_SCHEDULED, id=scheduled_id)).outcome
            except NotFoundError:
                continue
            except KeylaneError as error:
                failure = error
        if failure is not None:
            raise failure
        text = f"no broker that was asked knows scheduled message {scheduled_id}"
        if problems:
            text += f"; not asked: {', '.join(problems)}"
        raise NotFoundError(Reason.SCHEDULED_UNKNOWN, text, scheduled_id=scheduled_id)

    # ── access ────────────────────────────────────────────────────────────────────────────────────
    async def create_token(
        self,
        principal: str,
        *,
        label: str = "",
        begins: datetime | None = None,
        ends: datetime | None = None,
    ) -> MadeToken:
        """
        Create an access token; the answer shows its text this once, because only a hash is stored.

        Args:
            principal: the owner of the token; a principal exists from its first token or right on.
            label: a note for people, for example the program that uses the token.
            begins, ends: the times between which it is valid, with a time zone; None: from now on,
                and for ever.

        Raises:
            InvalidRequestError: it would end before it begins, or before now.
            OverloadedError: there are too many tokens or principals.
        """
        fields = {
            "principal": check_name("principal", principal),
            "label": label,
            "begins_at_ms": instant_ms("begins", begins),
            "ends_at_ms": instant_ms("ends", ends),
        }
        return await self._meta.call(endpoints.CREATE_TOKEN, checked(CreateToken, fields))

    async def list_tokens(self, principal: str | None = None) -> TokenList:
        """List the tokens of a principal, or all, by id, including revoked and expired ones."""
        return await self._meta.call(endpoints.TOKENS, query=principal_query(principal))

    async def revoke_token(self, token_id: int) -> TokenView:
        """
        Revoke a token; within seconds brokers refuse the capabilities made with it. A repeat
        changes nothing.

        Raises:
            NotFoundError
        """
        return await self._meta.call(endpoints.REVOKE_TOKEN, id=token_id)

    async def grant(
        self, principal: str, right: Rights | str, *, subject: str = ANY, group: str = ANY
    ) -> None:
        """
        Grant a right; a repeat changes nothing.

        Args:
            right: "produce", "consume", "read", "administer" or "cluster".
            subject, group: a name, or a prefix of names followed by `*`.

        Raises:
            OverloadedError: the principal has the maximum number of rights.
        """
        await self._meta.call(endpoints.GRANT, grant_change(principal, right, subject, group))

    async def revoke_grant(
        self, principal: str, right: Rights | str, *, subject: str = ANY, group: str = ANY
    ) -> None:
        """Revoke exactly this right, with its patterns; a repeat changes nothing."""
        await self._meta.call(
            endpoints.REVOKE_GRANT, grant_change(principal, right, subject, group)
        )

    async def list_grants(self, principal: str | None = None) -> GrantList:
        """List the rights of a principal, or all."""
        return await self._meta.call(endpoints.GRANTS, query=principal_query(principal))

    async def check_access(
        self, principal: str, right: Rights | str, *, subject: str = "", group: str = ""
    ) -> Decision:
        """Check whether a principal has a right on a subject and group, and by which grant; an
        empty name stands for all of them.
        """
        fields = {"principal": principal, "right": right, "subject": subject, "group": group}
        return await self._meta.call(endpoints.CHECK_ACCESS, checked(CheckAccess, fields))

    async def set_quota(
        self,
        name: str,
        *,
        bytes_per_s: int = 0,
        requests_per_s: int = 0,
        connections: int = 0,
        subjects: int = 0,
        scheduled_bytes: int = 0,
        sessions: int = 0,
        kind: QuotaKind = "principal",
    ) -> None:
        """
        Set the limits of a principal at each server, or of each subject that matches a pattern;
        they replace earlier limits.

        A caller over a limit is asked to wait, with the time; a connection above `connections` is
        refused.

        Args:
            name: a principal, or `*` for all that have no quota of their own; with kind="subject" a
                subject or a pattern.
            bytes_per_s: bytes of messages sent and received per second, for a subject of messages
                stored at each broker; 0: no limit, here and below.
            requests_per_s: requests per second.
            connections: connections at a time.
            subjects: with kind="subject", the number of subjects that may match a pattern.
            scheduled_bytes: with kind="subject", bytes of scheduled messages at each broker, of all
                subjects of a pattern together.
            sessions: consumers of a principal at a time, in all groups together.
            kind: "principal" or "subject".

        Raises:
            OverloadedError: there are too many quotas.
        """
        quota = {
            "bytes_per_s": bytes_per_s,
            "requests_per_s": requests_per_s,
            "connections": connections,
        }
        counts = {"subjects": subjects, "scheduled_bytes": scheduled_bytes, "sessions": sessions}
        for limit, value in (quota | counts).items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidRequestError(f"{limit} must be a whole number, not {value!r:.40}")
        limits = Quota(**quota)
        body = checked(SetQuota, {"kind": kind, "name": name, "quota": limits, **counts})
        check_together(name, subjects, scheduled_bytes, of_subjects=kind == "subject")
        check_sessions(sessions, of_subjects=kind == "subject")
        if limits != NO_QUOTA or not any(counts.values()):
            check_quota(limits)
        await self._meta.call(endpoints.SET_QUOTA, body)

    async def unset_quota(self, name: str, *, kind: QuotaKind = "principal") -> None:
        """Remove the limits of a principal or of subjects; a repeat changes nothing."""
        await self._meta.call(
            endpoints.UNSET_QUOTA, checked(UnsetQuota, {"kind": kind, "name": name})
        )

    async def list_quotas(self) -> QuotaList:
        """List the limits of principals and subjects."""
        return await self._meta.call(endpoints.QUOTAS)

    async def list_audit(
        self,
        *,
        who: str | None = None,
        subject: str | None = None,
        outcome: str | None = None,
        since: datetime | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> AuditPage:
        """
        List the calls of principals on subjects, groups, rights and messages, done or refused, the
        newest first.

        Args:
            outcome: "done" or "refused".
            since: the earliest time, with a time zone.
            before: `before` of the page with the next newer events; None: the newest page.
            limit: most events in the page, 1 to 500.
        """
        query = {
            "who": who,
            "subject": subject,
            "outcome": outcome,
            "since_ms": instant_ms("since", since),
            "before": before,
            "limit": limit,
        }
        return await self._meta.call(endpoints.AUDIT, query=query)

    # ── brokers ───────────────────────────────────────────────────────────────────────────────────
    async def list_brokers(self) -> BrokerList:
        """List every broker group that ever reported itself, and the brokers that are refused."""
        details = (await self._meta.health()).details
        return BrokerList(
            brokers=msgspec.convert(details.get("brokers", []), list[BrokerView]),
            refused=msgspec.convert(details.get("refused", []), list[RefusedBroker]),
        )

    async def cordon(self, broker_group: str) -> BrokerView:
        """
        Cordon a broker group: it gets no new partitions, and keeps those that it has.

        Raises:
            NotFoundError
        """
        return await self._cordon(broker_group, cordoned=True)

    async def uncordon(self, broker_group: str) -> BrokerView:
        """
        Allow new partitions on a broker group again.

        Raises:
            NotFoundError
        """
        return await self._cordon(broker_group, cordoned=False)

    async def accept_folder(
        self, broker_group: str, *, address: str = "", dry_run: bool = False
    ) -> RefusedBroker:
        """
        Allow a broker to serve although its data folder is older than the broker group's last
        report; messages that the folder lacks are lost.

        Args:
            address: the broker, if several of the group are refused.
            dry_run: only return which folder would be accepted.

        Raises:
            NotFoundError
        """
        check_name("broker group", broker_group)
        body = checked(AcceptFolder, {"address": address, "dry_run": dry_run})
        return await self._meta.call(endpoints.ACCEPT_FOLDER, body, group=broker_group)

    async def broker_health(self, address: str) -> Health:
        """
        Return whether the broker at `address` accepts writes, and if not, why. No metaserver is
        asked.

        Raises:
            ConfigError: `address` is not one address.
            InvalidRequestError: the server there is a metaserver.
        """
        self._connections.home.check()
        addresses = addresses_of(address)
        if len(addresses) > 1:
            raise ConfigError(f"give the address of one broker, not {address!r:.80}")
        return await self._connections.broker_at(addresses[0]).health()

    # ── the cluster ───────────────────────────────────────────────────────────────────────────────
    async def health(self) -> Health:
        """
        Return whether the metaserver is ready, and if not, why.

        Raises:
            InvalidRequestError: the server there is a broker.
        """
        return await self._meta.health()

    async def verify(self) -> Verification:
        """Compare the metaserver's database with the brokers, and return each check with its
        violations.
        """
        return await self._meta.call(endpoints.VERIFY)

    async def describe_cluster(self) -> ClusterView:
        """
        Return the cluster's name, its version, and the version of each member.

        Raises:
            StorageError: the metaserver is not ready, and its database has not answered yet.
            ForeignServerError: the answer is not one of a metaserver.
        """
        health = await self._meta.health()
        if not health.ready and "cluster" not in health.details:
            raise StorageError(f"the metaserver is not ready: {health.reason}")
        try:
            return msgspec.convert(health.details["cluster"], ClusterView)
        except (KeyError, msgspec.ValidationError) as error:
            raise ForeignServerError("the metaserver does not report versions") from error

    # ── inside: calls ─────────────────────────────────────────────────────────────────────────────
    @property
    def _meta(self) -> MetaClient:
        self._connections.home.check()
        return self._metaserver

    def _broker(self, partition: Partition) -> BrokerClient:
        if partition.address is None:
            raise NotSentError.of_group(partition.broker_group)
        return self._connections.broker_at(partition.address)

    async def _of_group(
        self, endpoint: Endpoint[T], subject: str, group: str, body: object = None
    ) -> T:
        """Call the metaserver about one consumer group."""
        check_name("subject", subject)
        check_name("consumer group", group)
        return await self._meta.call(endpoint, body, subject=subject, group=group)

    async def _cordon(self, broker_group: str, *, cordoned: bool) -> BrokerView:
        check_name("broker group", broker_group)
        return await self._meta.call(
            endpoints.CORDON, Cordon(cordoned=cordoned), group=broker_group
        )

    async def _change(self, kind: OperationKind, dry_run: bool, **fields: object) -> OperationView:
        body = checked(Reshape, {"kind": kind, "dry_run": dry_run, **fields})
        (operation,) = (await self._meta.call(endpoints.RESHAPE, body)).operations
        return operation

    async def _switch(
        self, subject: str, group: str, client: str | None, *, suspended: bool
    ) -> GroupSettings:
        body = checked(SuspendGroup, {"suspended": suspended, "client": client})
        return await self._of_group(endpoints.SUSPEND_GROUP, subject, group, body)

    async def _status(self, partition: Partition) -> PartitionStatus:
        """Ask a partition's broker for its status. Raises NotSentError and the broker's errors."""
        broker = self._broker(partition)
        return await broker.control(endpoints.PARTITION, id=partition.partition_id)

    async def _statuses(self, partitions: Iterable[Partition]) -> dict[int, PartitionStatus | str]:
        """Return partition id → its status, or the reason why there is none."""

        async def ask(partition: Partition) -> tuple[int, PartitionStatus | str]:
            try:
                return partition.partition_id, await self._status(partition)
            except KeylaneError as error:
                return partition.partition_id, error.message

        return dict(await in_turns(ask, partitions))

    async def _hold(self, partition: Partition, body: SetHold) -> tuple[HoldView, ...]:
        broker = self._broker(partition)
        return (await broker.control(endpoints.HOLD, body, id=partition.partition_id)).holds

    async def _brokers_to_ask(self, broker: str | None) -> tuple[Sequence[str], dict[str, str]]:
        """Return the addresses of the brokers to ask, and broker group → reason why it is not
        asked.
        """
        if broker is not None:
            self._connections.home.check()
            addresses = addresses_of(broker)
            if len(addresses) > 1:
                raise ConfigError(f"give the address of one broker, not {broker!r:.80}")
            return addresses, {}
        brokers = (await self._meta.health()).details.get("brokers", [])
        silent = {
            each["broker_group"]: "the broker is silent"
            for each in brokers
            if not each["available"]
        }
        return [each["address"] for each in brokers if each["available"]], silent

    # ── inside: parked messages ───────────────────────────────────────────────────────────────────
    async def _listed(
        self,
        subject: str,
        group: str,
        wanted: WantedKeys,
        partition_id: int | None,
        *,
        passed_on: set[int],
        retrying: bool = False,
        by_error: bool = False,
    ) -> AsyncIterator[ParkedKeyView]:
        """Yield the keys of `parked`, and add to `passed_on` the sealed partitions whose children
        have adopted their parked messages, or are adopting them.
        """
        for partition in await self._partitions(subject, group, partition_id):
            views = await self._parked_on(partition, group, retrying=retrying)
            if views is None:
                passed_on.add(partition.partition_id)
            for view in views or ():
                if not wanted.matches(view):
                    continue
                if not (wanted.picks(view) or (by_error and view.is_loose)):
                    yield view
                    continue
                rows = await self._selected(subject, group, view, wanted)
                if rows:
                    for each in (
                        views_by_error(view, rows) if by_error else [view_of_rows(view, rows)]
                    ):
                        yield each

    async def _redrive(
        self,
        broker: BrokerClient,
        subject: str,
        group: str,
        view: ParkedKeyView,
        wanted: WantedKeys,
    ) -> ParkedKeyView | None:
        """Redrive the selected messages of a key; returns None if they were skipped, or redriven
        and handled, since.
        """
        bodies = [ChangeParkedKey(group=group, key_hex=_hex(view.key))]
        if wanted.picks(view):
            rows = await self._selected(subject, group, view, wanted)
            bodies = [
                ChangeParkedKey(group=group, key_hex=_hex(view.key), retry=some)
                for some in chunks([row[:3] for row in rows])
            ]
        try:
            for body in bodies:
                await broker.control(endpoints.CHANGE_PARKED, body, id=view.partition_id)
        except NotFoundError:
            return None
        return view

    async def _place(
        self,
        subject: str,
        group: str,
        partition_id: int | None,
        offset: int | None,
        *,
        key: bytes | None,
        dead: bool | None,
    ) -> tuple[int, int]:
        """Return the partition and the offset of a message that is named by them or by its key."""
        refuse_call([] if dead is None else flag_problems(dead=dead))
        if key is None:
            if partition_id is None or offset is None:
                raise InvalidRequestError(
                    "name a message by its partition and its offset, or its key"
                )
            return partition_id, offset
        if offset is not None or not key:
            raise InvalidRequestError(
                "give an offset or a key, not both"
                if key
                else "messages without a key have no order: name one by its "
                "partition and its offset"
            )
        views = await self._views(subject, group, _wanted(key, dead=dead), partition_id)
        partitions = await self._partitions(subject, group, None)
        parents = {int(each.partition_id): [*map(int, each.parents)] for each in partitions}
        first = first_in_lineage(views, parents)
        return first.first_source, first.first_offset

    async def _partitions(
        self, subject: str, group: str, partition_id: int | None
    ) -> Sequence[Partition]:
        """Return the partitions of a subject that have data, or one of them."""
        partitions = [
            owner.partition
            for owner in (await self._of_group(endpoints.GROUP, subject, group)).owners
        ]
        if partition_id is None:
            return partitions
        if not is_within(partition_id, 1, MAX_I64):
            raise InvalidRequestError(f"not a partition id: {partition_id!r:.40}")
        only = [each for each in partitions if each.partition_id == partition_id]
        if not only:
            raise PartitionUnknownError(
                f"subject {subject!r} has no partition {partition_id}", partition_id=partition_id
            )
        return only

    async def _broker_of(
        self, subject: str, group: str, view: ParkedKeyView, served: Mapping[int, Partition]
    ) -> BrokerClient:
        """Return the broker of a view; the metaserver is asked if the partition was opened after
        `served` was read.
        """
        partition = served.get(view.partition_id)
        if partition is None:
            (partition,) = await self._partitions(subject, group, view.partition_id)
        return self._broker(partition)

    async def _parked_on(
        self, partition: Partition, group: str, *, retrying: bool = False
    ) -> list[ParkedKeyView] | None:
        """Return what a group has parked on a partition; None if the children have adopted it, or
        are adopting it.
        """
        broker, number = self._broker(partition), partition.partition_id
        asked = {"group": group, "count": PARKED_PAGE, "retrying": 1 if retrying else None}
        views_by_key: dict[tuple[ParkKey, int | None], ParkedKeyView] = {}
        for _ in range(PASSES_MAX):
            known, pages, more = len(views_by_key), 0, True
            first = 0
            while more:
                try:
                    query = {**asked, "first": first}
                    page = await broker.control(endpoints.PARKED, query=query, id=number)
                except GroupUnknownError:  # it has not read this partition yet
                    return []
                if page.frozen:
                    return None
                views = [view_of(number, view) for view in page.keys]
                views_by_key.update(((view.key, view.tries), view) for view in views)
                first += len(views)
                pages, more = pages + 1, page.more
            if pages == 1 or len(views_by_key) == known:
                break  # no key was freed between two pages, so that another one was passed over
        return list(views_by_key.values())

    async def _one_parked(
        self, subject: str, group: str, partition_id: int, offset: int
    ) -> tuple[ParkedMessage, ParkedKeyView]:
        """Return a parked message with its edit, and the key under which it is parked. Raises
        NotFoundError.
        """
        if not is_within(offset, 0, MAX_I64):
            raise InvalidRequestError(f"not an offset: {offset!r:.40}")
        await self._partitions(subject, group, partition_id)
        served: dict[int, Partition] = {
            each.partition_id: each for each in await self._partitions(subject, group, None)
        }
        read = await ParkedReader(subject, served, self._broker).read(partition_id, offset)
        unknown = NotFoundError(
            Reason.PARKED_MESSAGE_UNKNOWN,
            f"offset {offset} of partition {partition_id}: {read.problem or 'it is not parked'}",
            partition_id=partition_id,
            offset=offset,
        )
        if read.message is None:
            raise unknown
        for key in dict.fromkeys((read.message.key, None)):
            async for view in self.parked(subject, group, key=key):
                broker = await self._broker_of(subject, group, view, served)
                with contextlib.suppress(NotFoundError):
                    return await with_edit(broker, group, view, read), view
        raise unknown

    async def _views(
        self, subject: str, group: str, wanted: WantedKeys, partition_id: int | None
    ) -> list[ParkedKeyView]:
        """Return the views of the selected keys. Raises NotFoundError."""
        until_s = asyncio.get_running_loop().time() + ADOPTION_S
        while True:
            passed_on: set[int] = set()
            views = self._listed(subject, group, wanted, partition_id, passed_on=passed_on)
            parked = [view async for view in views]
            if parked:
                return parked
            if not passed_on or asyncio.get_running_loop().time() >= until_s:
                break
            await asyncio.sleep(ADOPTION_PAUSE_S)
        what = "these keys" if isinstance(wanted.key, EllipsisType) else _named(wanted.key)
        raise NotFoundError(
            Reason.PARKED_KEY_UNKNOWN, f"{what} of group {group!r}: nothing is parked"
        )

    async def _messages_of(
        self, subject: str, group: str, view: ParkedKeyView, wanted: WantedKeys
    ) -> AsyncIterator[ParkedMessage]:
        """Yield the selected messages of a view."""
        broker, reader = await self._reader(subject, group, view)
        async for row in chosen_rows(broker, reader, group, view, wanted):
            for offset in range(row.start, row.end):
                read = await reader.read(row.source, offset)
                if (row.source, offset) in row.edited:
                    try:
                        read = await with_edit(broker, group, view, read)
                    except NotFoundError:
                        continue  # it has ended since
                yield replace(read, failure=row.failure, since_ms=row.since_ms, next_ms=row.next_ms)

    async def _selected(
        self, subject: str, group: str, view: ParkedKeyView, wanted: WantedKeys
    ) -> list[ParkedRow]:
        """Return the places of the selected messages of a view."""
        broker, reader = await self._reader(subject, group, view)
        return [row async for row in chosen_rows(broker, reader, group, view, wanted)]

    async def _reader(
        self, subject: str, group: str, view: ParkedKeyView
    ) -> tuple[BrokerClient, ParkedReader]:
        """Return the broker of a view, and a reader of its messages."""
        served: dict[int, Partition] = {
            partition.partition_id: partition
            for partition in await self._partitions(subject, group, None)
        }
        broker = await self._broker_of(subject, group, view, served)
        return broker, ParkedReader(subject, served, self._broker)


def _checked_count(first: int | None) -> int:
    if first is not None and not is_within(first, 1, MAX_I64):
        raise InvalidRequestError(f"first is a number from 1 on, not {first!r:.40}")
    return MAX_I64 if first is None else first


def _hex(key: bytes | None) -> str | None:
    return None if key is None else key.hex()


def _named(key: ParkKey) -> str:
    if not key:
        return "dead letters" if key is None else "messages without a key"
    return f"key {key if isinstance(key, int) else key.decode(errors='backslashreplace')!s:.80}"


def _wanted(
    key: AnyKey,
    *,
    dead: bool | None = None,
    older_than_ms: int | None = None,
    error: str | None = None,
) -> WantedKeys:
    now_ms = environment_of(None).clock.wall_ms()
    return WantedKeys(key, dead=dead, older_than_ms=older_than_ms, error=error, now_ms=now_ms)


def _selects(key: AnyKey, *others: object) -> bool:
    """True if anything says which keys."""
    return key is not ... or any(each is not None for each in others)
