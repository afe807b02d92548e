"""The admin client, with one method for each administrative call."""

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
from ..protocol.access.quota import (
    NO_QUOTA,
    Quota,
    check_quota,
    check_sessions,
    check_shared_limits,
)
from ..protocol.access.rights import ANY, Rights
from ..protocol.address import parse_addresses
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
from ..protocol.copies import CopySet, ForgetCopy, HandedOver, HandOver, PromoteCopy, SetCopies
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
    StaleRouteError,
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
from ..protocol.message import check_message_size, encode_key, pack_properties
from ..protocol.operations import (
    ROUTE_FINAL,
    BalancePlan,
    Cordon,
    HideSubject,
    OperationKind,
    OperationList,
    OperationView,
    Publication,
    PublishSubject,
    Reshape,
    SetBalance,
    SetSubject,
    SubjectHistory,
)
from ..protocol.parked import ChangeParkedKey, ParkKey, ParkState
from ..protocol.progress import CanceledReset, GroupReset, ResetTo
from ..protocol.reading.instants import GroupStartOption
from ..protocol.reprocess.holds import HoldView, SetHold
from ..protocol.routing import ConsumeStrategy, OrderStrategy, Partition, PartitionState
from ..protocol.scheduled.receipt import CancelOutcome, ScheduledPage
from ..protocol.settings import check_no_call_problems, flag_problems, is_within, range_problems
from ..protocol.verification import Verification
from ..protocol.why import Explanation
from ..rpc.client import BrokerClient, MetaClient
from ..rpc.connections import Connections, clean_up, gather_limited
from ..rpc.environment import environment_of
from ..rpc.loop_binding import LoopBoundClient
from ..rpc.race import survives_cancel
from . import views
from .arguments import (
    build_change_grant,
    build_group_start,
    build_principal_query,
    convert_argument,
    convert_mapping,
    to_epoch_ms,
)
from .group_resets import reset_group
from .parked_reading import (
    ParkedReader,
    ParkedRow,
    apply_edit,
    find_unchanged_properties,
    narrow_view,
    replace_content,
    select_rows,
    split_by_error,
)
from .parked_views import (
    KeySelector,
    ParkedFilter,
    ParkedKeyView,
    ParkedMessage,
    ParkedPage,
    Row,
    find_oldest_view,
    select_views_being_adopted,
    split_rows,
    to_parked_view,
)
from .undrained import UndrainedPartition, undrained_partitions
from .views import (
    BrokerList,
    GroupDescription,
    PartitionReport,
    ScheduledMessages,
    SubjectChange,
    SubjectDescription,
    is_scheduled_id,
)
from .why.asking import ask_why

T = TypeVar("T")
POLL_MS = 100
LISTING_PASSES_MAX = 3
"""Maximum number of passes over the pages of a partition. They are read again if a key may have
been freed between two pages.
"""
PARKED_PAGE_KEYS = 1_000
"""Maximum number of parked keys per page."""
ADOPTION_TIMEOUT_S = 1.0
"""How long, in seconds, a search is repeated while children adopt some of the messages that it
found.
"""
ADOPTION_PAUSE_S = 0.05
PAGED_MIN = 16
"""From this many partitions of one broker on, their statuses are read by the page."""
HOSTED_MAX = 20_000
"""The largest number of partitions of each broker that `list_hosted` returns."""
PROBE_MS = 300
"""How long it is tried to connect to a silent broker, in milliseconds."""
PROBED_MAX = 64
"""The largest number of silent brokers that are tried, all at the same time."""
REDRIVE_CONCURRENCY = 64
"""Maximum number of keys that are redriven concurrently; a broker syncs them to disk together."""


class Admin(LoopBoundClient):
    """Administers a cluster.

        async with Admin("127.0.0.1:7000") as admin:
            await admin.create_subject("orders", partitions=4)
            operation = await admin.resize("orders", 6)
            await admin.wait(operation)

    Entering the block opens no connections unless `wait_s` is set; each call connects to the
    servers that it needs. An admin client can only be used in the process and event loop that
    opened it.

    In addition to the errors documented for each method, every call may raise:
        InvalidRequestError: an argument is invalid; nothing was done.
        NotSentError: no metaserver was reached; nothing was done.
        OutcomeUnknownError: no reply arrived; the call may have taken effect.
        ForeignServerError: the server at the address is not a keylane server.
        ClosedError, UsageError: the client is closed, or was opened in another process or event
            loop.

    Access-control calls require the `administer` right on `*`. They raise InvalidRequestError if
    the metaserver has no access control.
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
        Create an admin client; `async with` opens it.

        Args:
            meta: `host:port` of a metaserver; for several, an iterable or a comma-separated string.
            call_timeout_ms: timeout of a call, in milliseconds; calls that involve brokers have a
                longer one.
            wait_s: how long, in seconds, to wait for a metaserver that is still starting when the
                client is opened; with 0, opening contacts no metaserver.
            tls: the certificate authority of the servers; None uses the environment variable
                KEYLANE_TLS_CA, or no TLS if it is not set.
            token: the access token; None reads it from the file named by KEYLANE_TOKEN_FILE or from
                KEYLANE_TOKEN, and uses no token if neither is set.

        Raises:
            ConfigError: `meta` contains no address, or a time is out of range.
        """
        self._addresses = parse_addresses(meta)
        self._timeout_ms = call_timeout_ms
        self._connections = Connections(
            None, timeout_ms=call_timeout_ms, what="admin", wait_s=wait_s, tls=tls, token=token
        )

    def __repr__(self) -> str:
        return f"<Admin at {', '.join(self._addresses)}, {self._connections.loop_binding.state}>"

    async def __aenter__(self) -> Self:
        network = self._connections.open()
        self._metaserver = MetaClient(network, self._addresses, timeout_ms=self._timeout_ms)
        await self._connections.wait_for(self._metaserver)
        return self

    async def close(self) -> None:
        """Close all connections. Raises UsageError if the client was opened in another event
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
        Create a subject. Repeating the call with the same settings has no effect.

        Args:
            partitions: number of physical partitions, 1 to 1024, spread over the available broker
                groups.
            order_strategy: "strict" or "best_tried"; determines what producers do while a partition
                does not respond.
            retention: determines when old messages may be removed.
            static: make the partitions logic queues, whose number changes only by `grow_subject`.
            message_bytes_max: maximum size of a message, including key, value and properties; 1 KiB
                to 1 MiB.

        Raises:
            UnavailableError: no broker group is available.
            BusyError: an earlier creation of the subject is unfinished.
            ConflictError: the subject exists with other settings, or an earlier creation of it
                cannot be finished.
        """
        body = convert_argument(
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
        return await self._metaserver_client.create_subject(body)

    async def list_subjects(self, *, hidden: bool = False) -> list[SubjectSummary]:
        """List the subjects by name, including hidden ones if `hidden` is set."""
        check_no_call_problems(flag_problems(hidden=hidden))
        subjects = (await self._metaserver_client.call(endpoints.SUBJECTS)).subjects
        return [subject for subject in subjects if hidden or not subject.hidden_for]

    async def describe_subject(
        self,
        subject: str,
        *,
        holds: bool = True,
        sizes: bool = False,
        within_s: float | None = None,
    ) -> SubjectDescription:
        """
        Return a subject's settings, and each partition with its broker, state and offsets.

        The call succeeds even if a broker does not respond; `problem` is then set on its
        partitions.

        Args:
            holds: False leaves out the holds, which takes one call for many partitions.
            sizes: True also asks about how many bytes each partition stores.
            within_s: how long to wait for each broker, in seconds; None: the timeout of a call.

        Raises:
            SubjectUnknownError
        """
        check_no_call_problems(flag_problems(holds=holds, sizes=sizes))
        view = await self._metaserver_client.call(
            endpoints.SUBJECT, subject=check_name("subject", subject)
        )
        statuses = await self._fetch_statuses(
            view.route.partitions,
            within_s=within_s,
            by_page=not (holds or sizes),
            with_size=sizes,
        )
        return views.describe_subject(view, statuses)

    async def list_hosted(
        self, *, within_s: float | None = None
    ) -> dict[str, list[PartitionReport] | str]:
        """
        Return a dict that maps each available broker group to the partitions that it hosts, of
        every subject, by id; or to the reason why they are unknown.

        Args:
            within_s: how long to wait for each page of a broker, in seconds; None: the timeout of
                a call.

        Raises:
            AccessDeniedError: the caller has no right on every subject.
        """

        async def fetch(broker: BrokerView) -> list[PartitionReport] | str:
            client = self._connections.broker_at(broker.address)
            found: list[PartitionReport] = []
            after: int | None = -1
            try:
                while after is not None and len(found) < HOSTED_MAX:
                    async with asyncio.timeout(within_s):
                        page = await client.control(endpoints.PARTITIONS, query={"after": after})
                    found += map(views.to_report, page.partitions)
                    after = page.more_after
            except TimeoutError:
                return _late(broker.broker_group, within_s)
            except AccessDeniedError:
                raise  # every broker refuses alike
            except KeylaneError as error:
                return error.message
            return found

        available = [each for each in (await self.list_brokers()).brokers if each.available]
        found = await gather_limited(fetch, available)
        return {each.broker_group: result for each, result in zip(available, found, strict=True)}

    async def history(self, subject: str) -> SubjectHistory:
        """
        Return every partition that a subject has ever had, oldest first; their `parents` give the
        lineage.

        Raises:
            SubjectUnknownError
        """
        return await self._metaserver_client.call(
            endpoints.HISTORY, subject=check_name("subject", subject)
        )

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
        Change those settings of a subject that are not None. Repeating the call has no effect.

        Every open partition is sealed, and a new one with the new settings continues it. Once the
        operation is done (see `wait`), no producer uses the old settings. Stored messages keep the
        retention under which they were stored, and remain even if they exceed a lowered
        `message_bytes_max`.

        Raises:
            SubjectUnknownError, UnavailableError
            BusyError: another operation on the subject has not changed the route yet.
        """
        check_name("subject", subject)
        new_values = {
            "order_strategy": order_strategy,
            "retention": retention,
            "message_bytes_max": message_bytes_max,
        }
        body = convert_argument(SetSubject, {"dry_run": dry_run, **new_values})
        view = await self._metaserver_client.call(endpoints.SUBJECT, subject=subject)
        (operation,) = (
            await self._metaserver_client.call(endpoints.SET_SUBJECT, body, subject=subject)
        ).operations
        return views.compare_settings(view, new_values, operation)

    async def delete_subject(
        self, subject: str, *, force: bool = False, subject_id: int = 0
    ) -> SubjectDeletion:
        """
        Delete a subject with its messages and consumer groups.

        To follow the progress, repeat the call with the `subject_id` of the result. A broker that
        is down drops its partitions when it returns; until then the name cannot be reused.

        Args:
            force: delete the subject even if it has live consumers.
            subject_id: delete the subject only if it has this id; 0 deletes whichever subject has
                the name.

        Raises:
            SubjectUnknownError
            BusyError: the subject has live consumers, or its partitions are being changed.
        """
        check_name("subject", subject)
        body = convert_argument(DeleteSubject, {"force": force, "subject_id": subject_id})
        return await self._metaserver_client.call(endpoints.DELETE_SUBJECT, body, subject=subject)

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
        Create a hidden subject, to be published in `subject`. Repeating the call has no effect.

        It is written and read under its own name, cannot have consumer groups, and is not listed by
        `list_subjects` by default.

        Args:
            partitions: number of partitions if `subject` does not exist; 0 means that it must
                exist. An existing `subject` determines the ranges and settings of the hidden one,
                and `static` and `message_bytes_max` are ignored.
            cut: also seal the open partitions of `subject`, and open new ones that continue both
                them and those of the hidden subject, which can then replace everything stored
                before the cut. The call returns before the cut is done.

        Raises:
            SubjectUnknownError, SubjectDeletedError, UnavailableError
            PublishError: `hidden` is another subject or was already published; or `cut` is set, and
                the partitions of `subject` have changed since the hidden subject was created.
            BusyError: the partitions of `subject` are being changed.
        """
        check_name("subject", subject)
        fields = {
            "partitions": partitions,
            "static": static,
            "message_bytes_max": message_bytes_max,
            "cut": cut,
        }
        body = convert_argument(HideSubject, {"hidden": hidden, **fields})
        return await self._metaserver_client.hide_subject(subject, body)

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
        Publish a hidden subject in `subject` with a single route change. Repeating the call only
        reports the progress.

        The messages stored in `subject` are kept, and precede those of the hidden subject. If the
        caller is cancelled while waiting, the publication continues.

        Args:
            replace: delete the messages stored in `subject`; the hidden subject takes over its
                name.
            starts: with `replace`, maps each consumer group to a dict that maps each partition id
                of the hidden subject to the offset of the first message that the group has not
                handled.
            ends: with `replace`, maps each partition id of `subject` before the cut to the end
                offset of the messages from which the hidden subject was made. None skips the check
                for later messages, which would be deleted.
            subject_id: publish the hidden subject only if it has this id; 0 publishes whichever
                subject has the name.
            revisions: with `starts`, maps each consumer group to its `revision` from
                `describe_group`, read before its cursors. None skips the check for resets since
                then.
            wait: return only after the route has changed.

        Raises:
            SubjectUnknownError, SubjectDeletedError
            PublishError: nothing was changed, because the partitions of `subject` have changed
                since the hidden subject was created, the replaced subject has messages after
                `ends`, a group of the replaced subject has no start, or a group was reset or had a
                consumer since its `revisions` were read.
            BusyError: the partitions of `subject` are being changed, or a group of the replaced
                subject has live consumers.
        """
        check_name("subject", hidden)
        check_no_call_problems(flag_problems(wait=wait))
        group_starts = {
            group: convert_mapping(f"starts of {group!r:.60}", offsets)
            for group, offsets in convert_mapping(
                "starts", {} if starts is None else starts
            ).items()
        }
        end_offsets = None if ends is None else convert_mapping("ends", ends)
        group_revisions = convert_mapping("revisions", {} if revisions is None else revisions)
        body = convert_argument(
            PublishSubject,
            {"target": subject, "replace": replace, "starts": group_starts, "ends": end_offsets}
            | {"subject_id": subject_id, "revisions": group_revisions},
        )
        publication = await self._metaserver_client.call(
            endpoints.PUBLISH_SUBJECT, body, subject=hidden
        )
        while wait and publication.state not in ROUTE_FINAL:
            await asyncio.sleep(POLL_MS / 1000)
            publication = await self._metaserver_client.call(
                endpoints.PUBLISH_SUBJECT, body, subject=hidden
            )
        return publication

    # ── consumer groups ───────────────────────────────────────────────────────────────────────────
    async def create_group(
        self,
        subject: str,
        group: str,
        *,
        start: StartAt | GroupStartOption = StartAt.EARLIEST,
        at_ms: int | None = None,
        cursors: Mapping[int, int] | None = None,
        consume_strategy: ConsumeStrategy | str = ConsumeStrategy.EXCLUSIVE,
    ) -> GroupSettings:
        """
        Create a consumer group and fix where it starts. Repeating the call has no effect.

        Every message sent after the call returns is delivered to the group. Partitions opened
        later, for example by a resize, are read from their first message.

        Args:
            start: "earliest", "latest", "time" or "cursors"; or a datetime with a time zone, a
                negative timedelta, a time ago such as "-1h", or an ISO 8601 time with a zone, in
                the past.
            at_ms: a time in milliseconds since 1970. With "time", the group starts at the first
                message stored at or after it. With "cursors", it is the time at which the cursors
                were read, which distinguishes a repeated call from one with a different start.
            cursors: with "cursors", maps each partition id to the offset of the first message to
                read; other partitions are read from their first message.
            consume_strategy: "exclusive" or "shared".

        Raises:
            SubjectUnknownError
            ConfigError: `start` is something else.
            InvalidRequestError: `at_ms` is in the future, or an argument does not go with `start`.
            OffsetOutOfRangeError: some messages after a cursor have been removed.
            ConflictError: the group exists with another start or strategy.
            GroupDeletedError: a group of this name is being deleted.
            NotSentError: a broker cannot say where its partitions end, and nothing was created. A
                group that starts at the earliest message is created all the same.
            UnfinishedError: the group was created, but a broker does not know it yet, or has not
                stored its start. Until then, that broker removes messages without regard to the
                group; repeat the call to wait for it.
            OverloadedError: the subject has the maximum number of groups.
        """
        now_ms = environment_of(None).clock.wall_ms()
        fields = {
            "start": build_group_start(start, at_ms, cursors, now_ms=now_ms),
            "strategy": consume_strategy,
        }
        body = convert_argument(CreateGroup, fields, strategy="consume_strategy")
        return await self._call_group(endpoints.CREATE_GROUP, subject, group, body)

    async def list_groups(self, subject: str) -> list[GroupSummary]:
        """
        List the consumer groups of a subject by name.

        Raises:
            SubjectUnknownError
        """
        return (
            await self._metaserver_client.call(
                endpoints.GROUPS, subject=check_name("subject", subject)
            )
        ).summaries

    async def describe_group(
        self, subject: str, group: str, *, within_s: float | None = None
    ) -> GroupDescription:
        """
        Return a consumer group's owner, token, cursor and lag on each partition.

        The call succeeds even if a broker does not respond; `problem` is then set on its
        partitions.

        Args:
            within_s: how long to wait for each broker, in seconds; None: the timeout of a call.

        Raises:
            SubjectUnknownError, GroupUnknownError
        """
        view = await self._call_group(endpoints.GROUP, subject, group)
        partitions = [owner.partition for owner in view.owners]
        statuses = await self._fetch_statuses(partitions, within_s=within_s, by_page=True)
        return views.describe_group(view, statuses)

    async def why(self, subject: str, group: str, *, key: bytes | str | None = None) -> Explanation:
        """
        Explain why messages do not arrive at a consumer group: the causes that the metaserver and
        the brokers know of, the most likely one first, each with the next step.

        A server that does not answer within 0.6 s is named in `unknown`.

        Args:
            key: an order key; with it, only what concerns this key is looked at.

        Raises:
            SubjectUnknownError, GroupUnknownError
        """
        return await ask_why(
            check_name("subject", subject),
            check_name("consumer group", group),
            None if key is None else encode_key(key),
            meta=self._metaserver_client,
            broker_at=self._connections.broker_at,
            now_ms=environment_of(None).clock.wall_ms,
        )

    async def lag(self, subject: str, group: str) -> int:
        """
        Count the stored messages, over all partitions, that a consumer group has not acked.

        Raises:
            SubjectUnknownError, GroupUnknownError
            UnreachableError: the lag is unknown, because a broker does not respond.
        """
        view = await self._call_group(endpoints.GROUP, subject, group)
        statuses = await gather_limited(
            self._fetch_status, [owner.partition for owner in view.owners]
        )
        description = views.describe_group(
            view, {status.partition_id: status for status in statuses}
        )
        assert description.lag is not None
        return description.lag

    async def group_settings(self, subject: str, group: str) -> GroupSettings:
        """
        Return the stored settings of a consumer group: its start, its failure policy, and which of
        its consumers are suspended.

        Raises:
            SubjectUnknownError, GroupUnknownError
        """
        return await self._call_group(endpoints.GROUP_SETTINGS, subject, group)

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
        Change the stored failure policy of a consumer group; running consumers apply it within one
        heartbeat.

        Stored fields override the settings in the consumers' code.

        Args:
            on_failure: what happens to a message that has failed `tries_max` times: "block", "park"
                or "dead".
            on_full: what happens to a key that should be parked when the group cannot park any
                more:
                "block" or "dead".
            tries_max: maximum number of tries, 1 to 1_000_000.
            backoff_first_ms: delay after the first try, in milliseconds; requires `backoff_max_ms`.
            backoff_max_ms: maximum delay between two tries, in milliseconds.
            forget: delete all stored fields of the policy first.

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
        return await self._call_group(
            endpoints.SET_GROUP, subject, group, convert_argument(SetGroup, fields)
        )

    async def suspend_group(
        self, subject: str, group: str, *, client: str | None = None
    ) -> GroupSettings:
        """
        Suspend a consumer group: its consumers release their partitions, and get none until
        `resume_group` is called. Repeating the call has no effect.

        The consumers stay open. The suspension is stored, and also applies to consumers that start
        later.

        Args:
            client: suspend only the consumers with this name, including later ones; the other
                consumers take over their partitions. None suspends the whole group.

        Raises:
            SubjectUnknownError, GroupUnknownError
            OverloadedError: too many clients are suspended by name.
        """
        return await self._set_suspended(subject, group, client, suspended=True)

    async def resume_group(
        self, subject: str, group: str, *, client: str | None = None
    ) -> GroupSettings:
        """
        Undo `suspend_group` with the same `client`; without a `client`, clients suspended by name
        stay suspended.

        A consumer suspended by its own code stays suspended until that code resumes it.

        Raises:
            SubjectUnknownError, GroupUnknownError
        """
        return await self._set_suspended(subject, group, client, suspended=False)

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
            offset: the position for "offset": a logic offset with `queue`, or an offset in the
                partition with `partition_id`.
            at_ms: the position for "time", in milliseconds since 1970; the cursor moves to the
                first message stored at or after it.
            queue: reset only this logic queue of a static subject.
            partition_id: reset only this partition; its parents and children keep their cursors.
            shift: the number of messages to move forward for "shift", or back if negative, in each
                queue, or in each partition that is not both sealed and fully acked; cursors stay
                within the stored messages.
            cursors: for "cursors", maps each partition id to its new offset; other partitions keep
                their cursors.
            dry_run: return the current and the new cursors without changing anything; allowed while
                the group has consumers.
            live: have the group's consumers hand over their partitions and continue at the new
                cursors; running handlers have `handover_ms` to finish.

        Raises:
            SubjectUnknownError, GroupUnknownError, NotFoundError, PartitionUnknownError
            ConflictError: `queue` was given for a subject without queues, or `cancel_reset` was
                called; nothing was changed.
            InvalidRequestError: `partition_id` was given for a subject with queues, `at_ms` is in
                the future, or the arguments contradict each other.
            BusyError: the group has live consumers, or had some a moment ago.
            OffsetOutOfRangeError: there is no stored message at `offset`.
            UnfinishedError: some cursors are set; repeat the call to set the rest. A repeated
                "shift" would count from the new cursors, so the error text contains the "cursors"
                to pass instead.
        """
        return await reset_group(
            partial(self._call_group, endpoints.RESET_GROUP, subject, group),
            {"to": to, "offset": offset, "at_ms": at_ms, "shift": shift, "cursors": cursors}
            | {"queue": queue, "partition_id": partition_id, "dry_run": dry_run, "live": live},
        )

    async def cancel_reset(self, subject: str, group: str) -> CanceledReset:
        """
        Cancel a `live` reset that is waiting for the group's consumers to hand over; they continue
        where they were.

        Returns:
            The cursors that the reset would have set; a repeated call returns the same.

        Raises:
            SubjectUnknownError, GroupUnknownError
            ConflictError: there is no such reset, it is done, or it can no longer be canceled
                because some cursors may already be set.
        """
        return await self._call_group(endpoints.CANCEL_RESET, subject, group)

    async def switch_group(
        self, subject: str, group: str, consume_strategy: ConsumeStrategy | str
    ) -> GroupView:
        """
        Change the consume strategy of a consumer group: "exclusive" or "shared".

        Running consumers fail with an error; consumers started with the new strategy continue.

        Raises:
            SubjectUnknownError, GroupUnknownError
        """
        body = convert_argument(
            SwitchGroup, {"strategy": consume_strategy}, strategy="consume_strategy"
        )
        return await self._call_group(endpoints.SWITCH_GROUP, subject, group, body)

    async def delete_group(
        self, subject: str, group: str, *, force: bool = False, group_id: int = 0
    ) -> GroupDeletion:
        """
        Delete a consumer group.

        To follow the progress, repeat the call with the `group_id` of the result. A broker that is
        down deletes the group's progress when it returns; until then no consumer can join. A later
        group with this name starts at the first message that is still stored.

        Args:
            force: delete the group even if it has live consumers, which fail with
                GroupDeletedError.
            group_id: delete the group only if it has this id; 0 deletes whichever group has the
                name.

        Raises:
            SubjectUnknownError, GroupUnknownError
            BusyError: the group has live consumers, or its cursors are being set.
        """
        body = convert_argument(DeleteGroup, {"force": force, "group_id": group_id})
        return await self._call_group(endpoints.DELETE_GROUP, subject, group, body)

    # ── partitions ────────────────────────────────────────────────────────────────────────────────
    async def resize(
        self, subject: str, partitions: int, *, dry_run: bool = False
    ) -> OperationView:
        """
        Change the number of open partitions of a subject while it is in use.

        Args:
            partitions: the new number, 1 to 1024.
            dry_run: only plan the operation.

        Returns:
            The operation, which continues in the background; see `wait`. Its `operation_id` is 0
                with `dry_run`, or if there is nothing to change.

        Raises:
            SubjectUnknownError, UnavailableError
            BusyError: another operation on the subject has not changed the route yet.
            ConflictError: the subject has logic queues; see `grow_subject`.
        """
        check_name("subject", subject)
        return await self._begin_operation(
            OperationKind.RESIZE, dry_run, subject=subject, partitions=partitions
        )

    async def grow_subject(
        self, subject: str, count: int = 0, *, queues: Sequence[int] = (), dry_run: bool = False
    ) -> OperationView:
        """
        Add logic queues to a static subject while it is in use. See `resize` for the result and the
        errors.

        A queue that is split keeps its number, its logic offsets and the first half of its range;
        the second half becomes a new queue that starts at logic offset 0.

        Args:
            count: the new number of queues, up to 1024; the queues with the widest ranges are
                split.
            queues: the numbers of the queues to split in half, instead of `count`.

        Raises:
            NotFoundError: the subject has no such queue.
            ConflictError: the subject has no logic queues; see `resize`.
        """
        check_name("subject", subject)
        return await self._begin_operation(
            OperationKind.GROW, dry_run, subject=subject, partitions=count, queues=queues
        )

    async def split(self, partition_id: int, *, dry_run: bool = False) -> OperationView:
        """
        Split an open partition in the middle of its range. See `resize` for the result and the
        errors.

        Raises:
            PartitionUnknownError: no open partition has this id.
        """
        return await self._begin_operation(
            OperationKind.SPLIT, dry_run, partition_ids=[partition_id]
        )

    async def merge(self, partition_ids: Sequence[int], *, dry_run: bool = False) -> OperationView:
        """
        Merge open partitions with adjacent ranges. See `resize` for the result and the errors.

        Raises:
            PartitionUnknownError: no open partition has one of these ids.
        """
        return await self._begin_operation(
            OperationKind.MERGE, dry_run, partition_ids=partition_ids
        )

    async def move(
        self, partition_ids: Sequence[int], *, to: str, dry_run: bool = False
    ) -> OperationView:
        """
        Move open partitions of one subject to the broker group `to`. See `resize` for the result
        and the errors.

        Raises:
            PartitionUnknownError: no open partition has one of these ids.
            NotFoundError: `to` has never sent a report.
            ConflictError: `to` is cordoned, so it gets no new partitions.
        """
        check_name("broker group", to)
        return await self._begin_operation(
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
        Move all open partitions of a broker group, of every subject, to other broker groups.

        The broker group is cordoned, and stays cordoned even if the evacuation is canceled: see
        `uncordon`.

        Args:
            without_source: continue even though the broker is silent; strict and static subjects
                still wait until it returns.
            accept_loss: declare the silent broker's disk lost, so that strict and static subjects
                continue too.

        Returns:
            `operations` contains one operation per subject, to `wait` for; `busy` lists the
            subjects whose partitions were not moved, with the reason.

        Raises:
            NotFoundError, UnavailableError
        """
        check_name("broker group", broker_group)
        body = convert_argument(
            Reshape,
            {
                "kind": OperationKind.EVACUATE,
                "broker_group": broker_group,
                "without_source": without_source,
                "accept_loss": accept_loss,
                "dry_run": dry_run,
            },
        )
        return await self._metaserver_client.call(endpoints.RESHAPE, body)

    async def plan_balance(self, *, exclude: Sequence[str] = ()) -> BalancePlan:
        """
        Return the moves of partitions that balance the broker groups: each of them has as many
        partitions as the others, of each subject and of all, and stores about as many bytes a
        second. Changes nothing; `move` does a move.

        Args:
            exclude: broker groups that neither get nor give partitions.

        Raises:
            NotFoundError: an excluded broker group has never sent a report.
        """
        for name in exclude:
            check_name("broker group", name)
        return await self._metaserver_client.call(
            endpoints.BALANCE, query={"exclude": ",".join(exclude) or None}
        )

    async def stop_balance(self, *, stopped: bool = True) -> BalancePlan:
        """Stop the metaservers that balance by themselves, or let them continue with
        `stopped=False`. Return the plan at that time.
        """
        body = convert_argument(SetBalance, {"stopped": stopped})
        return await self._metaserver_client.call(endpoints.SET_BALANCE, body)

    async def list_operations(self, subject: str) -> list[OperationView]:
        """
        List the latest operations of a subject, newest first, each with the reason why it is
        waiting, if any.

        Raises:
            SubjectUnknownError
        """
        return (
            await self._metaserver_client.call(
                endpoints.OPERATIONS, subject=check_name("subject", subject)
            )
        ).operations

    async def list_waiting_operations(self) -> list[OperationView]:
        """
        List the latest operations of all subjects that wait, newest first, each with the reason.

        Raises:
            AccessDeniedError: the caller has no right on every subject.
        """
        return (await self._metaserver_client.call(endpoints.WAITING_OPERATIONS)).operations

    @survives_cancel
    async def follow(self, operation: OperationView) -> AsyncGenerator[OperationView, None]:
        """
        Yield an operation now and after each change, until it has changed the route or is canceled.

        Raises:
            InvalidRequestError: `operation` was not returned by `resize`, `move` or a similar call.
            NotFoundError: the metaserver does not list the operation, because its database was
                replaced or restored.
            UnreachableError: no metaserver responds; the operation continues, and can be followed
                again.
        """
        if not isinstance(operation, OperationView):
            raise InvalidRequestError(f"follow takes one operation, not {operation!r:.80}")
        view = operation
        yield view
        while view.operation_id and view.state not in ROUTE_FINAL:
            await asyncio.sleep(POLL_MS / 1000)
            latest = await self.list_operations(view.subject)
            operations = {operation.operation_id: operation for operation in latest}
            if view.operation_id not in operations:
                raise NotFoundError(
                    Reason.OPERATION_UNKNOWN,
                    f"operation {view.operation_id} of subject {view.subject} is not listed",
                )
            if operations[view.operation_id] != view:
                view = operations[view.operation_id]
                yield view

    async def wait(self, operation: OperationView) -> OperationView:
        """
        Wait until an operation has changed the route (state DONE or FENCE) or is canceled
        (CANCELED) and return it.

        Return immediately for a dry run, or if there is nothing to change.

        Raises:
            InvalidRequestError, NotFoundError, UnreachableError: see `follow`.
        """
        async for latest in self.follow(operation):
            operation = latest
        return operation

    async def cancel(self, operation_id: int) -> OperationView:
        """
        Cancel an operation that has not started sealing. Repeating the call has no effect.

        Raises:
            NotFoundError
            ConflictError: the operation has started sealing, and can only be completed.
        """
        check_no_call_problems(
            range_problems({"operation_id": operation_id}, {"operation_id": (1, MAX_I64)})
        )
        return await self._metaserver_client.call(endpoints.CANCEL_OPERATION, id=operation_id)

    async def undrained(self, subject: str) -> list[UndrainedPartition]:
        """
        Return the sealed partitions of a subject that some consumer group has not fully acked.

        A group gets no messages from the children of a sealed partition until it has acked or
        parked all of its messages. Parked messages that fail again while being redriven count as
        unacked. The call succeeds even if a broker does not respond; `problem` is then set on its
        partitions.

        Raises:
            SubjectUnknownError
        """
        route = (
            await self._metaserver_client.call(
                endpoints.SUBJECT, subject=check_name("subject", subject)
            )
        ).route
        sealed_partitions = [
            each for each in route.partitions if each.state is PartitionState.SEALED
        ]
        return undrained_partitions(
            sealed_partitions, await self._fetch_statuses(sealed_partitions)
        )

    async def hold(
        self, subject: str, from_offsets: Mapping[int, int], *, job: str, ttl_ms: int
    ) -> dict[int, tuple[HoldView, ...]]:
        """
        Protect messages from retention on behalf of a job, or renew an existing hold. A hold
        expires unless it is renewed.

        Args:
            from_offsets: maps each partition id to the offset of the first message to keep; all
                later messages are kept too.
            job: name of the holder; a later hold of the same job on a partition replaces this one.
            ttl_ms: time in milliseconds until the hold expires, up to 86_400_000; 0 ends it
                immediately.

        Returns:
            A dict that maps each partition id to all holds on the partition.

        Raises:
            SubjectUnknownError, PartitionUnknownError
            OffsetOutOfRangeError: messages from the offset on have been removed; holds on the other
                partitions may have been set.
            OverloadedError: 16 jobs hold the partition.
        """
        bodies = {
            partition_id: convert_argument(
                SetHold, {"job": check_name("job", job), "from_offset": start, "ttl_ms": ttl_ms}
            )
            for partition_id, start in convert_mapping("from_offsets", from_offsets).items()
        }
        route = await self._metaserver_client.route(check_name("subject", subject))
        partitions = {int(partition.partition_id): partition for partition in route.partitions}
        unknown_ids = sorted(bodies.keys() - partitions.keys())
        if unknown_ids:
            raise PartitionUnknownError(
                f"subject {subject} has no partition {unknown_ids[0]}", partition_id=unknown_ids[0]
            )
        holds = await gather_limited(
            lambda partition_id: self._set_hold(partitions[partition_id], bodies[partition_id]),
            bodies,
        )
        return dict(zip(bodies, holds, strict=True))

    async def release_hold(self, subject: str, job: str) -> None:
        """
        End the holds of a job on every partition of a subject. Repeating the call has no effect.

        Raises:
            SubjectUnknownError
        """
        body = convert_argument(SetHold, {"job": check_name("job", job), "ttl_ms": 0})
        route = await self._metaserver_client.route(check_name("subject", subject))
        await gather_limited(lambda partition: self._set_hold(partition, body), route.partitions)

    # ── parked messages ───────────────────────────────────────────────────────────────────────────
    @survives_cancel
    async def parked(
        self,
        subject: str,
        group: str,
        *,
        key: bytes | str | EllipsisType | None = ...,
        dead: bool | None = None,
        partition_id: int | None = None,
        older_than_ms: int | None = None,
        error: str | None = None,
        retrying: bool = False,
        by_error: bool = False,
    ) -> AsyncGenerator[ParkedKeyView, None]:
        """
        Yield the keys that a consumer group has parked. A key may briefly appear on two partitions.
        While a child has not adopted the keys of a sealed partition, these are yielded with
        `ParkedKeyView.being_adopted`. Iterate with `async for`; the call itself is not awaited.

        Args:
            key: an order key, as bytes or text; b"" for messages without a key, including dead
                letters; None for dead letters of any key; `...` for all of these.
            dead: True selects only dead letters; with a key, all dead letters are read to find
                those of this key. False selects everything except dead letters.
            older_than_ms: minimum time since parking, in milliseconds; dead letters of any key and
                messages without a key are checked one by one.
            error: a substring of the type or text of the last failure; checked in the same way.
            retrying: include messages that are waiting to be retried; see `ParkedKeyView.tries`.
            by_error: split dead letters of any key, messages without a key, and messages that are
                waiting to be retried into one view per failure type and text, sorted by number of
                messages in descending order.

        Raises:
            SubjectUnknownError, GroupUnknownError
            PartitionUnknownError: the subject has no partition `partition_id`.
            UnreachableError: a broker does not respond, so its parked keys are unknown.
        """
        check_no_call_problems(flag_problems(retrying=retrying, by_error=by_error))
        key_filter = _build_filter(key, dead=dead, older_than_ms=older_than_ms, error=error)
        async for view in self._iter_parked_keys(
            subject,
            group,
            key_filter,
            partition_id,
            retrying=retrying,
            by_error=by_error,
        ):
            yield view

    async def parked_page(
        self, subject: str, group: str, partition_id: int, *, first: int = 0, count: int = 100
    ) -> ParkedPage:
        """
        Return some of the keys that a consumer group has parked on a partition, and of the messages
        that wait to be retried, in the broker's order. It reads no more than these, however many
        are parked. If keys are freed between two pages, the second one leaves out as many others.

        Args:
            first: how many keys to pass over.
            count: the largest number of keys to return, 1 to 1,000.

        Raises:
            SubjectUnknownError, GroupUnknownError
            PartitionUnknownError: the subject has no partition `partition_id`.
            UnreachableError: the broker does not respond.
        """
        if not is_within(first, 0, MAX_I64) or not is_within(count, 1, PARKED_PAGE_KEYS):
            raise InvalidRequestError(
                f"`first` is 0 or more, and `count` 1 to {PARKED_PAGE_KEYS}, not {first!r:.40} and "
                f"{count!r:.40}"
            )
        (partition,) = await self._fetch_partitions(subject, group, partition_id)
        return await self._fetch_parked_page(
            subject, partition, group, first=first, count=count, key=..., retrying=True
        )

    @survives_cancel
    async def parked_messages(
        self,
        subject: str,
        group: str,
        key: bytes | str | EllipsisType | None = ...,
        *,
        dead: bool | None = None,
        partition_id: int | None = None,
        older_than_ms: int | None = None,
        error: str | None = None,
        first: int | None = None,
    ) -> AsyncGenerator[ParkedMessage, None]:
        """
        Yield the parked messages of all selected keys, as read from the brokers that store them.
        The messages of each key are yielded oldest first.

        Args:
            key, dead, partition_id, older_than_ms, error: see `parked`.
            first: maximum number of messages per key and partition, oldest first; None selects all.

        Raises:
            NotFoundError: no messages of this key are parked.
            Any error of `parked`.
        """
        limit = _convert_limit(first)
        key_filter = _build_filter(key, dead=dead, older_than_ms=older_than_ms, error=error)
        for view in await self._find_views(subject, group, key_filter, partition_id):
            remaining_count = limit
            # A key that is no longer parked when it is read is skipped.
            with contextlib.suppress(NotFoundError):
                async for parked_message in self._read_messages(subject, group, view, key_filter):
                    if not remaining_count:
                        break
                    remaining_count -= 1
                    yield parked_message

    async def redrive(
        self,
        subject: str,
        group: str,
        *,
        key: bytes | str | EllipsisType | None = ...,
        dead: bool | None = None,
        all: bool = False,  # noqa: A002 - reads well at the call site: redrive(all=True)
        partition_id: int | None = None,
        older_than_ms: int | None = None,
        error: str | None = None,
    ) -> list[ParkedKeyView]:
        """
        Have the messages of parked keys handled again, oldest first. Repeating the call is
        harmless.

        Args:
            key, dead, partition_id, older_than_ms, error: see `parked`.
            all: select every parked key; required if no other argument selects keys.

        Returns:
            The keys that are now being redriven, as they were before the call.

        Raises:
            NotFoundError: no messages of `key` are parked.
            StaleRouteError: a partition was sealed, and its children adopt, or have adopted, these
                messages; others may be redriven. Repeat the call.
            Any error of `parked`.
        """
        check_no_call_problems(flag_problems(all=all))
        if not (all or _is_selective(key, dead, partition_id, older_than_ms, error)):
            raise InvalidRequestError("select the keys to redrive, or pass all=True")
        if key is not ...:
            await self._find_views(subject, group, _build_filter(key, dead=dead), partition_id)
        key_filter = _build_filter(key, dead=dead, older_than_ms=older_than_ms, error=error)
        selected_views = await self._collect_views(subject, group, key_filter, partition_id)
        views = [view for view in selected_views if view.state is not ParkState.REDRIVING]
        views.sort(key=lambda view: view.being_adopted)  # these are refused, so they come last
        partitions = await self._fetch_partitions_by_id(subject, group)

        async def redrive_view(view: ParkedKeyView) -> ParkedKeyView | None:
            broker = self._broker_client(partitions[view.partition_id])
            return await self._redrive(broker, subject, group, view, key_filter)

        redriven_views: list[ParkedKeyView] = []
        for start in range(0, len(views), REDRIVE_CONCURRENCY):
            batch = islice(views, start, start + REDRIVE_CONCURRENCY)
            redriven_views += filter(None, await asyncio.gather(*map(redrive_view, batch)))
        return redriven_views

    async def skip(
        self,
        subject: str,
        group: str,
        partition_id: int | None = None,
        key: bytes | str | EllipsisType | None = ...,
        *,
        dead: bool | None = None,
        older_than_ms: int | None = None,
        error: str | None = None,
        first: int | None = None,
    ) -> int:
        """
        Skip parked messages: no consumer will get them, but they remain stored until retention
        removes them.

        Args:
            partition_id: see `parked`; None selects all partitions.
            key, dead, older_than_ms, error: see `parked`; at least one of them, or `partition_id`,
                is required.
            first: maximum number of messages per key and partition, oldest first; None selects all
                that are parked now.

        Returns:
            The number of skipped messages.

        Raises:
            NotFoundError, StaleRouteError
            BusyError: messages of a key are being redriven, so a consumer may already have them;
                those of other keys may be skipped.
            Any error of `parked`.
        """
        if not _is_selective(key, dead, partition_id, older_than_ms, error):
            raise InvalidRequestError("select the keys to skip")
        limit, skipped_count = _convert_limit(first), 0
        key_filter = _build_filter(key, dead=dead, older_than_ms=older_than_ms, error=error)
        for view in await self._find_views(subject, group, key_filter, partition_id):
            (partition,) = await self._fetch_partitions(subject, group, view.partition_id)
            broker = self._broker_client(partition)
            remaining_count, rows = limit, list[Row]()
            for row in await self._select_rows(subject, group, view, key_filter):
                if remaining_count > 0:
                    rows.append((row.source, row.start, min(row.end, row.start + remaining_count)))
                remaining_count -= min(row.messages, remaining_count)
            for chunk in split_rows(rows):
                body = ChangeParkedKey(group=group, key_hex=_key_hex(view.key), skip=chunk)
                await broker.control(endpoints.CHANGE_PARKED, body, id=view.partition_id)
            skipped_count += limit - remaining_count
        return skipped_count

    async def parked_message(
        self,
        subject: str,
        group: str,
        partition_id: int | None = None,
        offset: int | None = None,
        *,
        key: bytes | str | None = None,
        dead: bool | None = None,
    ) -> ParkedMessage:
        """
        Return a parked message or dead letter as consumers will get it.

        Args:
            partition_id, offset, key, dead: see `edit_parked`.

        Raises:
            NotFoundError, ConflictError: see `edit_parked`.
            Any error of `parked`.
        """
        location = await self._locate_message(
            subject, group, partition_id, offset, key=key, dead=dead
        )
        return (await self._find_parked_message(subject, group, *location))[0]

    async def edit_parked(
        self,
        subject: str,
        group: str,
        partition_id: int | None = None,
        offset: int | None = None,
        *,
        key: bytes | str | None = None,
        dead: bool | None = None,
        value: bytes | None = None,
        properties: Mapping[str, str | bytes] | None = None,
    ) -> ParkedMessage:
        """
        Replace the value or the properties of a parked message or dead letter, but not its key.

        Consumers get the edited message, whose property "keylane.edited" contains the time of the
        edit. The original stays in the log.

        Args:
            partition_id, offset: the position of the message, as returned by `parked_messages`.
            key: selects the oldest parked message of this order key, instead of `offset`; this is
                the message that fails. If both a partition and its child have parked the key, the
                parent has the oldest message. With `partition_id`, selects the oldest message
                parked on this partition.
            dead: only with a key; see `parked`.
            value: the new value; None keeps the old one.
            properties: the new properties, which replace all old ones; None keeps those.

        Returns:
            The message as consumers will get it.

        Raises:
            NotFoundError: the message is not parked or no longer stored, or no messages of `key`
                are parked.
            ConflictError: the key is parked on partitions that do not descend from one another:
                pass `partition_id`.
            BusyError: messages with its key are being handled.
            MessageTooLargeError: the edited message would exceed the subject's maximum size.
            OverloadedError: the group has too many edited messages.
            StaleRouteError: the partition was sealed, and its children adopt, or have adopted, the
                message; repeat the call.
            Any error of `parked`.
        """
        if value is None and properties is None:
            raise InvalidRequestError("pass the new value, the new properties, or both")
        if not (value is None or isinstance(value, bytes)):
            raise InvalidRequestError(f"a value is bytes, not {value!r:.80}")
        if properties is not None:  # invalid ones are refused before any request
            pack_properties(properties, kept=properties)
        source_id, offset = await self._locate_message(
            subject, group, partition_id, offset, key=key, dead=dead
        )
        parked_message, view = await self._find_parked_message(subject, group, source_id, offset)
        message = parked_message.message
        assert message is not None
        value = message.value if value is None else value
        packed_properties = message.packed_properties
        if properties is not None:
            packed_properties = pack_properties(
                properties, kept=find_unchanged_properties(properties, message)
            )
        limit = (
            await self._metaserver_client.call(endpoints.SUBJECT, subject=subject)
        ).message_bytes_max
        check_message_size(len(message.key), len(value), len(packed_properties), limit)
        (holding_partition,) = await self._fetch_partitions(subject, group, view.partition_id)
        request = EditParked(
            view.partition_id, group, view.key, source_id, offset, packed_properties
        )
        response, _ = await self._broker_client(holding_partition).call(request, value)
        assert isinstance(response, ParkedEdited)
        return replace_content(parked_message, value, response.properties or b"")

    # ── scheduled messages ────────────────────────────────────────────────────────────────────────
    async def list_scheduled(
        self, *, subject: str | None = None, broker: str | None = None, limit: int = 100
    ) -> ScheduledMessages:
        """
        List the scheduled messages that are due next, of one subject or all.

        The call succeeds even if a broker does not respond; `problems` then lists it.

        Args:
            broker: asks only the broker at this address, without a metaserver; None asks all
                available brokers.
            limit: maximum number of messages to return, 1 to 1,000.

        Raises:
            InvalidRequestError: `limit` is out of range.
            ConfigError: `broker` is not a single address.
            AccessDeniedError, UnauthenticatedError: the caller may not see these messages.
        """
        if subject is not None:
            check_name("subject", subject)
        if not is_within(limit, 1, SCHEDULED_LISTED_MAX):
            raise InvalidRequestError(f"limit is 1 to {SCHEDULED_LISTED_MAX}, not {limit!r:.40}")
        addresses, problems = await self._list_broker_addresses(broker)

        async def fetch_page(address: str) -> ScheduledPage | KeylaneError:
            try:
                client = self._connections.broker_at(address)
                return await client.control(
                    endpoints.SCHEDULED, query={"subject": subject, "limit": limit}
                )
            except (AccessDeniedError, UnauthenticatedError, ConfigError):
                raise  # every broker refuses alike, and an empty list would mislead
            except KeylaneError as error:
                return error

        pages = []
        results = await asyncio.gather(*map(fetch_page, addresses))
        for address, result in zip(addresses, results, strict=True):
            if isinstance(result, ScheduledPage):
                pages.append(result)
            else:
                problems[address] = result.message
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
        Cancel the delivery of a scheduled message durably. Repeating the call is harmless.

        Args:
            scheduled_id: the id in its receipt: 32 hexadecimal digits.
            broker: see `list_scheduled`.

        Raises:
            InvalidRequestError: `scheduled_id` is not an id.
            NotFoundError: no broker that was asked still has the message.
            BusyError: the message is being delivered to its subject, which does not respond; repeat
                the call.
            ConfigError: `broker` is not a single address.
            KeylaneError: no broker has the message, and asking at least one of them failed; the
                last such error is raised.
        """
        if not isinstance(scheduled_id, str) or not is_scheduled_id(scheduled_id):
            raise InvalidRequestError(
                f"the id of a scheduled message has 32 hexadecimal digits, not {scheduled_id!r:.80}"
            )
        addresses, problems = await self._list_broker_addresses(broker)
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
        Create an access token. Its text is available only in the result; the server stores just a
        hash.

        Args:
            principal: the owner of the token; it is created with its first token or right.
            label: a note for people, for example the program that uses the token.
            begins, ends: the period of validity, with time zones; by default, from now on and
                without an end.

        Raises:
            InvalidRequestError: the token would end before it begins, or in the past.
            OverloadedError: there are too many tokens or principals.
        """
        fields = {
            "principal": check_name("principal", principal),
            "label": label,
            "begins_at_ms": to_epoch_ms("begins", begins),
            "ends_at_ms": to_epoch_ms("ends", ends),
        }
        return await self._metaserver_client.call(
            endpoints.CREATE_TOKEN, convert_argument(CreateToken, fields)
        )

    async def list_tokens(self, principal: str | None = None) -> TokenList:
        """List the tokens of one principal, or of all, by id, including revoked and expired
        ones.
        """
        return await self._metaserver_client.call(
            endpoints.TOKENS, query=build_principal_query(principal)
        )

    async def revoke_token(self, token_id: int) -> TokenView:
        """
        Revoke a token. Within seconds, brokers refuse the capabilities issued for it. Repeating the
        call has no effect.

        Raises:
            NotFoundError
        """
        return await self._metaserver_client.call(endpoints.REVOKE_TOKEN, id=token_id)

    async def grant(
        self, principal: str, right: Rights | str, *, subject: str = ANY, group: str = ANY
    ) -> None:
        """
        Grant a right. Repeating the call has no effect.

        Args:
            right: "produce", "consume", "read", "administer" or "cluster".
            subject, group: a name, or a prefix of names followed by `*`.

        Raises:
            OverloadedError: the principal has the maximum number of rights.
        """
        await self._metaserver_client.call(
            endpoints.GRANT, build_change_grant(principal, right, subject, group)
        )

    async def revoke_grant(
        self, principal: str, right: Rights | str, *, subject: str = ANY, group: str = ANY
    ) -> None:
        """Revoke exactly this right, with these patterns. Repeating the call has no effect."""
        await self._metaserver_client.call(
            endpoints.REVOKE_GRANT, build_change_grant(principal, right, subject, group)
        )

    async def list_grants(self, principal: str | None = None) -> GrantList:
        """List the rights of one principal, or of all."""
        return await self._metaserver_client.call(
            endpoints.GRANTS, query=build_principal_query(principal)
        )

    async def check_access(
        self, principal: str, right: Rights | str, *, subject: str = "", group: str = ""
    ) -> Decision:
        """Check whether a principal has a right on a subject and group, and through which grant. An
        empty name means all subjects or groups.
        """
        fields = {"principal": principal, "right": right, "subject": subject, "group": group}
        return await self._metaserver_client.call(
            endpoints.CHECK_ACCESS, convert_argument(CheckAccess, fields)
        )

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
        Set the limits of a principal on each server, or of each subject that matches a pattern.
        They replace all earlier limits.

        The error of a caller that exceeds a rate limit says how long to wait. Connections beyond
        `connections` are refused. A limit of 0 means no limit.

        Args:
            name: a principal, or `*` for all principals without a quota of their own; with
                kind="subject", a subject or a pattern.
            bytes_per_s: bytes of messages sent and received per second; for a subject, bytes stored
                by each broker.
            requests_per_s: requests per second.
            connections: concurrent connections.
            subjects: with kind="subject", the number of subjects that may match a pattern.
            scheduled_bytes: with kind="subject", bytes of scheduled messages on each broker, summed
                over all subjects that match the pattern.
            sessions: concurrent consumers of a principal, across all groups.
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
        body = convert_argument(SetQuota, {"kind": kind, "name": name, "quota": limits, **counts})
        check_shared_limits(name, subjects, scheduled_bytes, of_subjects=kind == "subject")
        check_sessions(sessions, of_subjects=kind == "subject")
        if limits != NO_QUOTA or not any(counts.values()):
            check_quota(limits)
        await self._metaserver_client.call(endpoints.SET_QUOTA, body)

    async def unset_quota(self, name: str, *, kind: QuotaKind = "principal") -> None:
        """Remove the limits of a principal or of subjects. Repeating the call has no effect."""
        await self._metaserver_client.call(
            endpoints.UNSET_QUOTA, convert_argument(UnsetQuota, {"kind": kind, "name": name})
        )

    async def list_quotas(self) -> QuotaList:
        """List the limits of all principals and subjects."""
        return await self._metaserver_client.call(endpoints.QUOTAS)

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
        List the audited calls on subjects, groups, rights and messages, newest first, whether they
        were done or refused.

        Args:
            outcome: "done" or "refused".
            since: the earliest time, with a time zone.
            before: the `before` of the previous page, which selects the next older events; None
                selects the newest page.
            limit: maximum number of events per page, 1 to 500.
        """
        query = {
            "who": who,
            "subject": subject,
            "outcome": outcome,
            "since_ms": to_epoch_ms("since", since),
            "before": before,
            "limit": limit,
        }
        return await self._metaserver_client.call(endpoints.AUDIT, query=query)

    # ── brokers ───────────────────────────────────────────────────────────────────────────────────
    async def list_brokers(self) -> BrokerList:
        """List every broker group that has ever sent a report, and the brokers that are refused."""
        details = (await self._metaserver_client.health()).details
        return BrokerList(
            brokers=msgspec.convert(details.get("brokers", []), list[BrokerView]),
            refused=msgspec.convert(details.get("refused", []), list[RefusedBroker]),
        )

    async def find_hanging(self, brokers: BrokerList) -> frozenset[str]:
        """
        Return those silent broker groups at whose address something still accepts connections, as
        a process does that hangs. It takes 0.3 s at most; of more than 64 silent ones, the others
        are not looked at.
        """

        async def accepts(broker: BrokerView) -> bool:
            client = self._connections.broker_at(broker.address)
            return await client.is_accepting(timeout_ms=PROBE_MS)

        silent = [each for each in brokers.brokers if not each.available][:PROBED_MAX]
        found = await gather_limited(accepts, silent)
        return frozenset(
            each.broker_group for each, is_so in zip(silent, found, strict=True) if is_so
        )

    async def cordon(self, broker_group: str) -> BrokerView:
        """
        Cordon a broker group: it keeps its partitions but gets no new ones.

        Raises:
            NotFoundError
        """
        return await self._set_cordon(broker_group, cordoned=True)

    async def uncordon(self, broker_group: str) -> BrokerView:
        """
        Allow new partitions on a broker group again.

        Raises:
            NotFoundError
        """
        return await self._set_cordon(broker_group, cordoned=False)

    async def accept_folder(
        self, broker_group: str, *, address: str = "", dry_run: bool = False
    ) -> RefusedBroker:
        """
        Allow a broker to serve even though its data folder is older than the broker group's last
        report. Messages missing from the folder are lost.

        Args:
            address: the broker's address, if several brokers of the group are refused.
            dry_run: only return the folder that would be accepted.

        Raises:
            NotFoundError
        """
        check_name("broker group", broker_group)
        body = convert_argument(AcceptFolder, {"address": address, "dry_run": dry_run})
        return await self._metaserver_client.call(endpoints.ACCEPT_FOLDER, body, group=broker_group)

    async def copies(self, broker_group: str) -> CopySet:
        """
        Return how many data folders a broker group is to have, and which copies acks wait for.

        Raises:
            NotFoundError
        """
        check_name("broker group", broker_group)
        return await self._metaserver_client.call(endpoints.COPY_SET, group=broker_group)

    async def set_copies(
        self,
        broker_group: str,
        wanted: int,
        *,
        least: int | None = None,
        may_share_machine: bool | None = None,
        end_quarantine: bool = False,
    ) -> CopySet:
        """
        Set how many data folders a broker group is to have.

        Followers whose log is complete join until there are that many; from then on, each ack waits
        for them.

        Args:
            wanted: 1 to 5, with the broker's own folder. With 1, acks wait for no copy.
            least: how many of them must have a message before it is acked, 1 to `wanted`; None: 2
                of three and more, otherwise 1. While fewer have everything, nothing is acked.
            may_share_machine: True lets copies join that are on a machine with the broker or with
                each other; False lets them leave. By default it stays as it is: False, until it is
                set.
            end_quarantine: the metaservers' database fell back, and no copy has taken the broker's
                place unnoticed. Acks wait for no copy until each has joined again.

        Raises:
            NotFoundError
            InvalidRequestError: `least` is above `wanted`.
        """
        check_name("broker group", broker_group)
        values = {
            "wanted": wanted,
            "least": least,
            "may_share_machine": may_share_machine,
            "end_quarantine": end_quarantine,
        }
        body = convert_argument(SetCopies, values)
        return await self._metaserver_client.call(endpoints.SET_COPIES, body, group=broker_group)

    async def forget_copy(self, broker_group: str, copy_id: str) -> CopySet:
        """
        Let acks wait no more for a copy that is gone for good. One whose follower runs joins again.

        Raises:
            NotFoundError: there is no such broker group, or acks do not wait for the copy.
            ConflictError: it is the last one that acks wait for, or nothing would be acked without
                it.
        """
        check_name("broker group", broker_group)
        body = convert_argument(ForgetCopy, {"copy_id": copy_id})
        return await self._metaserver_client.call(endpoints.FORGET_COPY, body, group=broker_group)

    async def promote_copy(
        self, broker_group: str, copy_id: str, *, broker_id: str, log_end: int, lose: bool = False
    ) -> CopySet:
        """
        Let a copy take the place of the data folder of a broker that is gone for good; its own
        folder must be promoted as well. `keylane broker promote` does both.

        Args:
            broker_id: the id of the data folder that it is a copy of.
            log_end: the end of the copy's log, in bytes.
            lose: promote it even if it lacks acked messages, which are lost.

        Raises:
            NotFoundError
            FolderRefusedError: it is a copy of another folder than the group's.
            ConflictError: the broker reports itself; acks did not wait for the copy, or it has less
                than was durable.
        """
        check_name("broker group", broker_group)
        fields = {"copy_id": copy_id, "broker_id": broker_id, "log_end": log_end, "lose": lose}
        body = convert_argument(PromoteCopy, fields)
        return await self._metaserver_client.call(endpoints.PROMOTE_COPY, body, group=broker_group)

    async def hand_over(self, broker_group: str, *, copy_id: str = "") -> HandedOver:
        """
        Let a copy take the place of a broker that serves, which becomes a copy then. Clients wait
        meanwhile, and see no error.

        Args:
            copy_id: the copy; "": the one of the set that the broker has heard last.

        Raises:
            NotFoundError: there is no such broker group, or no such copy.
            ConflictError: there is no copy that could take the place, or not this one.
            BusyError: the broker hands over already, or an operation changes its partitions.
            UnavailableError: the copy has not taken the place within 3 s; the broker continues.
        """
        check_name("broker group", broker_group)
        body = convert_argument(HandOver, {"copy_id": copy_id})
        return await self._metaserver_client.call(endpoints.HAND_OVER, body, group=broker_group)

    async def broker_health(self, address: str) -> Health:
        """
        Return whether the broker at `address` accepts writes and, if not, why. Works without a
        metaserver.

        Raises:
            ConfigError: `address` is not a single address.
            InvalidRequestError: the server at `address` is a metaserver.
        """
        return await self._connections.broker_at(self._parse_broker_address(address)).health()

    # ── the cluster ───────────────────────────────────────────────────────────────────────────────
    async def health(self) -> Health:
        """
        Return whether the metaserver is ready and, if not, why.

        Raises:
            InvalidRequestError: the server is a broker.
        """
        return await self._metaserver_client.health()

    async def verify(self) -> Verification:
        """Compare the metaserver's database with the brokers and return each check with its
        violations.
        """
        return await self._metaserver_client.call(endpoints.VERIFY)

    async def describe_cluster(self) -> ClusterView:
        """
        Return the cluster's name, its version, and the version of each member.

        Raises:
            StorageError: the metaserver is not ready, and its database has not responded yet.
            ForeignServerError: the response is not from a metaserver.
        """
        health = await self._metaserver_client.health()
        if not health.ready and "cluster" not in health.details:
            raise StorageError(f"the metaserver is not ready: {health.reason}")
        try:
            return msgspec.convert(health.details["cluster"], ClusterView)
        except (KeyError, msgspec.ValidationError) as error:
            raise ForeignServerError("the metaserver does not report versions") from error

    # ── internal: calls ───────────────────────────────────────────────────────────────────────────
    @property
    def _metaserver_client(self) -> MetaClient:
        self._connections.loop_binding.check()
        return self._metaserver

    def _broker_client(self, partition: Partition) -> BrokerClient:
        if partition.address is None:
            raise NotSentError.of_group(partition.broker_group)
        return self._connections.broker_at(partition.address)

    async def _call_group(
        self, endpoint: Endpoint[T], subject: str, group: str, body: object = None
    ) -> T:
        """Call a metaserver endpoint of one consumer group."""
        check_name("subject", subject)
        check_name("consumer group", group)
        return await self._metaserver_client.call(endpoint, body, subject=subject, group=group)

    async def _set_cordon(self, broker_group: str, *, cordoned: bool) -> BrokerView:
        check_name("broker group", broker_group)
        return await self._metaserver_client.call(
            endpoints.CORDON, Cordon(cordoned=cordoned), group=broker_group
        )

    async def _begin_operation(
        self, kind: OperationKind, dry_run: bool, **fields: object
    ) -> OperationView:
        body = convert_argument(Reshape, {"kind": kind, "dry_run": dry_run, **fields})
        (operation,) = (await self._metaserver_client.call(endpoints.RESHAPE, body)).operations
        return operation

    async def _set_suspended(
        self, subject: str, group: str, client: str | None, *, suspended: bool
    ) -> GroupSettings:
        body = convert_argument(SuspendGroup, {"suspended": suspended, "client": client})
        return await self._call_group(endpoints.SUSPEND_GROUP, subject, group, body)

    async def _fetch_status(
        self, partition: Partition, *, with_size: bool = False
    ) -> PartitionStatus:
        """Fetch a partition's status. Raises NotSentError and any error of its broker."""
        broker = self._broker_client(partition)
        query = {"size": 1 if with_size else None}
        return await broker.control(endpoints.PARTITION, query=query, id=partition.partition_id)

    async def _fetch_statuses(
        self,
        partitions: Iterable[Partition],
        *,
        within_s: float | None = None,
        by_page: bool = False,
        with_size: bool = False,
    ) -> dict[int, PartitionStatus | str]:
        """
        Return a dict that maps each partition id to its status, or to the reason why it is unknown.

        Args:
            within_s: a broker that does not answer in this time is not asked again.
            by_page: read the partitions of a broker that has many of them by the page, without
                their holds.
            with_size: also ask about how many bytes a partition stores.
        """
        slow = set[str]()
        statuses: dict[int, PartitionStatus | str] = {}

        async def fetch_or_problem(partition: Partition) -> tuple[int, PartitionStatus | str]:
            broker_group = partition.broker_group
            if broker_group in slow:
                return partition.partition_id, _late(broker_group, within_s)
            try:
                async with asyncio.timeout(within_s):
                    status = await self._fetch_status(partition, with_size=with_size)
                    return partition.partition_id, status
            except TimeoutError:
                slow.add(broker_group)
                return partition.partition_id, _late(broker_group, within_s)
            except KeylaneError as error:
                return partition.partition_id, error.message

        async def fetch_pages(broker_partitions: list[Partition]) -> None:
            """Fetch what the pages of a broker list; others are asked for one by one."""
            ids = {int(each.partition_id) for each in broker_partitions}
            after: int | None = min(ids) - 1
            try:
                broker = self._broker_client(broker_partitions[0])
                for _ in range(len(ids) // PAGED_MIN):
                    if after is None or after >= max(ids):
                        break
                    async with asyncio.timeout(within_s):
                        page = await broker.control(endpoints.PARTITIONS, query={"after": after})
                    statuses.update(
                        (each.partition_id, each)
                        for each in page.partitions
                        if each.partition_id in ids
                    )
                    after = page.more_after
            except TimeoutError:
                slow.add(broker_partitions[0].broker_group)
            except KeylaneError:
                return  # such as a caller that may only see some subjects

        partitions = list(partitions)
        if by_page:
            by_broker: dict[str, list[Partition]] = {}
            for partition in partitions:
                by_broker.setdefault(partition.broker_group, []).append(partition)
            many = [each for each in by_broker.values() if len(each) >= PAGED_MIN]
            await gather_limited(fetch_pages, many)
        left = [each for each in partitions if each.partition_id not in statuses]
        return statuses | dict(await gather_limited(fetch_or_problem, left))

    async def _set_hold(self, partition: Partition, body: SetHold) -> tuple[HoldView, ...]:
        broker = self._broker_client(partition)
        return (await broker.control(endpoints.HOLD, body, id=partition.partition_id)).holds

    def _parse_broker_address(self, text: str) -> str:
        """Return the address of one broker. Raises ConfigError, ClosedError, UsageError."""
        self._connections.loop_binding.check()
        addresses = parse_addresses(text)
        if len(addresses) > 1:
            raise ConfigError(f"give the address of one broker, not {text!r:.80}")
        return addresses[0]

    async def _list_broker_addresses(
        self, broker: str | None
    ) -> tuple[Sequence[str], dict[str, str]]:
        """Return the addresses of the brokers to ask, and a dict that maps each broker group that
        is not asked to the reason.
        """
        if broker is not None:
            return [self._parse_broker_address(broker)], {}
        brokers = (await self._metaserver_client.health()).details.get("brokers", [])
        problems = {
            each["broker_group"]: "the broker is silent"
            for each in brokers
            if not each["available"]
        }
        return [each["address"] for each in brokers if each["available"]], problems

    # ── internal: parked messages ─────────────────────────────────────────────────────────────────
    async def _iter_parked_keys(
        self,
        subject: str,
        group: str,
        key_filter: ParkedFilter,
        partition_id: int | None,
        *,
        retrying: bool = False,
        by_error: bool = False,
    ) -> AsyncIterator[ParkedKeyView]:
        """Yield the keys for `parked`."""
        partitions = await self._fetch_partitions(subject, group, partition_id)
        # A parent comes before its children, so a key that passes to a child is not missed.
        for partition in sorted(partitions, key=lambda each: each.partition_id):
            for view in await self._fetch_parked(
                subject, partition, group, key_filter.key, retrying=retrying
            ):
                if not key_filter.matches(view):
                    continue
                if not (key_filter.selects_partially(view) or (by_error and view.is_loose)):
                    yield view
                    continue
                rows = await self._select_rows(subject, group, view, key_filter)
                if rows:
                    for each in (
                        split_by_error(view, rows) if by_error else [narrow_view(view, rows)]
                    ):
                        yield each

    async def _redrive(
        self,
        broker: BrokerClient,
        subject: str,
        group: str,
        view: ParkedKeyView,
        key_filter: ParkedFilter,
    ) -> ParkedKeyView | None:
        """Redrive the selected messages of a key. Return None if they have since been skipped, or
        redriven and handled.
        """
        bodies = [ChangeParkedKey(group=group, key_hex=_key_hex(view.key))]
        if key_filter.selects_partially(view):
            rows = await self._select_rows(subject, group, view, key_filter)
            bodies = [
                ChangeParkedKey(group=group, key_hex=_key_hex(view.key), retry=chunk)
                for chunk in split_rows([row[:3] for row in rows])
            ]
        try:
            for body in bodies:
                await broker.control(endpoints.CHANGE_PARKED, body, id=view.partition_id)
        except NotFoundError:
            return None
        return view

    async def _locate_message(
        self,
        subject: str,
        group: str,
        partition_id: int | None,
        offset: int | None,
        *,
        key: bytes | str | None,
        dead: bool | None,
    ) -> tuple[int, int]:
        """Return the partition id and offset of a message that is selected by them or by its
        key.
        """
        check_no_call_problems([] if dead is None else flag_problems(dead=dead))
        if key is None:
            if partition_id is None or offset is None:
                raise InvalidRequestError(
                    "name a message by its partition and its offset, or its key"
                )
            return partition_id, offset
        if offset is not None or not key:
            raise InvalidRequestError(
                "pass an offset or a key, not both"
                if key
                else "messages without a key have no order: name one by its "
                "partition and its offset"
            )
        views = await self._find_views(subject, group, _build_filter(key, dead=dead), partition_id)
        partitions = await self._fetch_partitions(subject, group, None)
        parents = {int(each.partition_id): [*map(int, each.parents)] for each in partitions}
        oldest_view = find_oldest_view(views, parents)
        return oldest_view.first_source, oldest_view.first_offset

    async def _fetch_partitions(
        self, subject: str, group: str, partition_id: int | None
    ) -> Sequence[Partition]:
        """Return all partitions of the subject that have data, or only the one with the given
        id.
        """
        partitions = [
            owner.partition
            for owner in (await self._call_group(endpoints.GROUP, subject, group)).owners
        ]
        if partition_id is None:
            return partitions
        if not is_within(partition_id, 1, MAX_I64):
            raise InvalidRequestError(f"not a partition id: {partition_id!r:.40}")
        matching = [each for each in partitions if each.partition_id == partition_id]
        if not matching:
            raise PartitionUnknownError(
                f"subject {subject!r} has no partition {partition_id}", partition_id=partition_id
            )
        return matching

    async def _fetch_partitions_by_id(self, subject: str, group: str) -> dict[int, Partition]:
        return {
            each.partition_id: each for each in await self._fetch_partitions(subject, group, None)
        }

    async def _find_broker(
        self,
        subject: str,
        group: str,
        view: ParkedKeyView,
        partitions_by_id: Mapping[int, Partition],
    ) -> BrokerClient:
        """Return the broker of a view. Asks the metaserver if the partition was opened after
        `partitions_by_id` was fetched.
        """
        partition = partitions_by_id.get(view.partition_id)
        if partition is None:
            (partition,) = await self._fetch_partitions(subject, group, view.partition_id)
        return self._broker_client(partition)

    async def _fetch_parked(
        self,
        subject: str,
        partition: Partition,
        group: str,
        key: KeySelector,
        *,
        retrying: bool = False,
    ) -> list[ParkedKeyView]:
        """Fetch the keys that a group has parked on a partition, without those that children have
        adopted. If a key is named, others may be left out.
        """
        views_by_key: dict[tuple[ParkKey, int | None], ParkedKeyView] = {}
        for _ in range(LISTING_PASSES_MAX):
            known_keys, pages = len(views_by_key), 0
            first: int | None = 0
            while first is not None:
                page = await self._fetch_parked_page(
                    subject,
                    partition,
                    group,
                    first=first,
                    count=PARKED_PAGE_KEYS,
                    key=key,
                    retrying=retrying,
                )
                views_by_key.update(((view.key, view.tries), view) for view in page.keys)
                pages, first = pages + 1, page.following
            if pages == 1 or len(views_by_key) == known_keys:
                break  # otherwise a key freed between two pages may have hidden another
        return list(views_by_key.values())

    async def _fetch_parked_page(
        self,
        subject: str,
        partition: Partition,
        group: str,
        *,
        first: int,
        count: int,
        key: KeySelector,
        retrying: bool,
    ) -> ParkedPage:
        """Fetch a page of the keys that a group has parked on a partition, without those that
        children have adopted.
        """
        broker, partition_id = self._broker_client(partition), partition.partition_id
        query = {
            "group": group,
            "first": first,
            "count": count,
            "retrying": 1 if retrying else None,
        }
        named = {} if isinstance(key, EllipsisType) else {"key": (key or b"").hex()}
        try:
            page = await broker.control(endpoints.PARKED, query=query | named, id=partition_id)
        except GroupUnknownError:  # the group has not read this partition yet
            return ParkedPage(keys=())
        except InvalidRequestError:
            if not named:
                raise
            # The broker is older than `key`.
            page = await broker.control(endpoints.PARKED, query=query, id=partition_id)
        found = [to_parked_view(partition_id, view) for view in page.keys]
        following = first + len(found) if page.more else None
        if page.frozen and found:
            waiting_children = await self._find_waiting_children(subject, group, partition_id)
            if not waiting_children:
                return ParkedPage(keys=())
            found = select_views_being_adopted(found, partition, waiting_children)
        return ParkedPage(keys=tuple(found), following=following)

    async def _find_waiting_children(
        self, subject: str, group: str, parent_id: int
    ) -> list[Partition]:
        """Return the children that have not adopted all parked messages of their parent yet."""
        waiting_children = []
        for child in await self._fetch_partitions(subject, group, None):
            if parent_id not in child.parents:
                continue
            adopted: list[int] | None = []
            with contextlib.suppress(GroupUnknownError):  # the group has not read this child yet
                page = await self._broker_client(child).control(
                    endpoints.PARKED, query={"group": group, "count": 1}, id=child.partition_id
                )
                adopted = page.adopted
            if adopted is not None and parent_id not in adopted:
                waiting_children.append(child)
        return waiting_children

    async def _find_parked_message(
        self, subject: str, group: str, partition_id: int, offset: int
    ) -> tuple[ParkedMessage, ParkedKeyView]:
        """Return a parked message with its edit, if any, and the view of the key under which it is
        parked. Raises NotFoundError.
        """
        if not is_within(offset, 0, MAX_I64):
            raise InvalidRequestError(f"not an offset: {offset!r:.40}")
        await self._fetch_partitions(subject, group, partition_id)
        partitions_by_id = await self._fetch_partitions_by_id(subject, group)
        parked_message = await ParkedReader(subject, partitions_by_id, self._broker_client).read(
            partition_id, offset
        )
        message = parked_message.message
        for key in () if message is None else dict.fromkeys((message.key, None)):
            async for view in self.parked(subject, group, key=key):
                broker = await self._find_broker(subject, group, view, partitions_by_id)
                with contextlib.suppress(NotFoundError):
                    return await apply_edit(broker, group, view, parked_message), view
        problem = (
            await self._describe_adopted(subject, group, partition_id, offset)
            or parked_message.problem
            or "it is not parked"
        )
        raise NotFoundError(
            Reason.PARKED_MESSAGE_UNKNOWN,
            f"offset {offset} of partition {partition_id}: {problem}",
            partition_id=partition_id,
            offset=offset,
        )

    async def _describe_adopted(
        self, subject: str, group: str, partition_id: int, offset: int
    ) -> str:
        """Return a sentence that tells how messages that a partition took over from parents are
        named, with one of them; "" if it took over none.
        """
        example = ""
        async for view in self.parked(subject, group, partition_id=partition_id):
            if view.first_offset < 0 or view.first_source == partition_id:
                continue
            if view.first_offset == offset or not example:
                example = f"offset {view.first_offset} of partition {view.first_source}"
            if view.first_offset == offset:
                break
        return example and (
            "messages that it took over from a partition before it are named by the partition and "
            f"the offset where they are stored, such as {example}"
        )

    async def _find_views(
        self, subject: str, group: str, key_filter: ParkedFilter, partition_id: int | None
    ) -> list[ParkedKeyView]:
        """Return the views of the selected keys. Raises NotFoundError."""
        if views := await self._collect_views(subject, group, key_filter, partition_id):
            return views
        selection = (
            "these keys"
            if isinstance(key_filter.key, EllipsisType)
            else _describe_key(key_filter.key)
        )
        error = NotFoundError(
            Reason.PARKED_KEY_UNKNOWN, f"{selection} of group {group!r}: nothing is parked"
        )
        error.hint = error.hint.replace("SUBJECT GROUP", f"{subject} {group}")
        raise error

    async def _collect_views(
        self, subject: str, group: str, key_filter: ParkedFilter, partition_id: int | None
    ) -> list[ParkedKeyView]:
        """Return the views of the selected keys. Waits a moment for children that adopt some."""
        deadline_s = asyncio.get_running_loop().time() + ADOPTION_TIMEOUT_S
        while True:
            found_views = self._iter_parked_keys(subject, group, key_filter, partition_id)
            views = [view async for view in found_views]
            is_adoption_seen = any(view.being_adopted for view in views)
            if not is_adoption_seen or asyncio.get_running_loop().time() >= deadline_s:
                return views
            await asyncio.sleep(ADOPTION_PAUSE_S)

    async def _read_messages(
        self, subject: str, group: str, view: ParkedKeyView, key_filter: ParkedFilter
    ) -> AsyncIterator[ParkedMessage]:
        """Yield the selected messages of a view."""
        broker, reader = await self._open_reader(subject, group, view)
        async for row in select_rows(broker, reader, group, view, key_filter):
            for offset in range(row.start, row.end):
                parked_message = await reader.read(row.source, offset)
                if (row.source, offset) in row.edited_offsets:
                    try:
                        parked_message = await apply_edit(broker, group, view, parked_message)
                    except NotFoundError:
                        continue  # no longer parked
                    except StaleRouteError as error:  # only the child will tell its edit
                        parked_message = replace(
                            parked_message, message=None, problem=error.message
                        )
                yield replace(
                    parked_message, failure=row.failure, since_ms=row.since_ms, next_ms=row.next_ms
                )

    async def _select_rows(
        self, subject: str, group: str, view: ParkedKeyView, key_filter: ParkedFilter
    ) -> list[ParkedRow]:
        """Return the rows of the selected messages of a view."""
        broker, reader = await self._open_reader(subject, group, view)
        return [row async for row in select_rows(broker, reader, group, view, key_filter)]

    async def _open_reader(
        self, subject: str, group: str, view: ParkedKeyView
    ) -> tuple[BrokerClient, ParkedReader]:
        """Return the broker of a view, and a reader for its messages."""
        partitions_by_id = await self._fetch_partitions_by_id(subject, group)
        broker = await self._find_broker(subject, group, view, partitions_by_id)
        return broker, ParkedReader(subject, partitions_by_id, self._broker_client)


def _convert_limit(first: int | None) -> int:
    if first is not None and not is_within(first, 1, MAX_I64):
        raise InvalidRequestError(f"first must be a number from 1 on, not {first!r:.40}")
    return MAX_I64 if first is None else first


def _key_hex(key: bytes | None) -> str | None:
    return None if key is None else key.hex()


def _describe_key(key: ParkKey) -> str:
    if not key:
        return "dead letters" if key is None else "messages without a key"
    return f"key {key if isinstance(key, int) else key.decode(errors='backslashreplace')!s:.80}"


def _build_filter(
    key: KeySelector | str,
    *,
    dead: bool | None = None,
    older_than_ms: int | None = None,
    error: str | None = None,
) -> ParkedFilter:
    now_ms = environment_of(None).clock.wall_ms()
    if isinstance(key, str):
        key = encode_key(key)
    return ParkedFilter(key, dead=dead, older_than_ms=older_than_ms, error=error, now_ms=now_ms)


def _is_selective(key: KeySelector | str, *others: object) -> bool:
    """Return True if at least one argument selects keys."""
    return key is not ... or any(value is not None for value in others)


def _late(broker_group: str, within_s: float | None) -> str:
    return (
        f"broker group {broker_group} has not answered within {within_s} s: what it knows is "
        "missing here"
    )
