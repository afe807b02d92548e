"""The admin client: a method for each thing an operator asks of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from functools import partial
from typing import Self

import msgspec

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
    RefusedBroker,
    Retention,
    SubjectDeletion,
    SubjectSummary,
    SubjectView,
    SwitchGroup,
)
from ..protocol.errors import ConfigError, InvalidRequestError, OperationUnknownError
from ..protocol.http.tls_settings import TlsSettings
from ..protocol.ids import MAX_I64, check_name
from ..protocol.limits import MESSAGE_BYTES_MAX
from ..protocol.operations import (
    ROUTE_FINAL,
    OperationKind,
    OperationList,
    OperationView,
    Reshape,
    SetSubject,
    SubjectHistory,
)
from ..protocol.progress import GroupReset, ResetTo
from ..protocol.routing import ConsumeStrategy, OrderStrategy
from ..protocol.settings import flag_problems, range_problems, refuse_call
from ..protocol.verification import Verification
from ..rpc.client import MetaClient
from ..rpc.connections import Connections, clean_up, in_turns
from ..rpc.race import outlives_cancel
from . import views
from .access import AccessCalls
from .arguments import checked
from .group_resets import reset_group
from .groups import GroupCalls
from .holds import HoldCalls
from .members import MemberCalls
from .parked import ParkedCalls
from .publications import PublicationCalls
from .scheduled import ScheduledCalls
from .undrained import UndrainedCalls
from .views import BrokerList, GroupDescription, SubjectChange, SubjectDescription

POLL_MS = 100


class Admin(
    AccessCalls, GroupCalls, HoldCalls, MemberCalls, ParkedCalls, PublicationCalls, ScheduledCalls, UndrainedCalls
):  # fmt: skip
    """Administers a cluster.

        async with Admin("127.0.0.1:7000") as admin:
            await admin.create_subject("orders", partitions=4)
            operation = await admin.resize("orders", 6)
            await admin.wait(operation)

    Entering the block connects to nothing, unless it has a `wait_s`; each call connects to what it needs.  An admin
    works in the event loop and the process in which it was opened.

    Besides the errors that are named there, each call raises
        InvalidNameError, InvalidRequestError: an argument cannot be right; nothing was done.
        NotSentError: no metaserver was reached; nothing was done.
        OutcomeUnknownError: no answer came; a call that changes something may have done so.
        ForeignServerError: what answers at the address is no keylane server.
        ClosedError, ForkedError, OtherLoopError: the admin is not open, or not here.
    """

    def __init__(
        self, meta: str | Iterable[str], *, call_timeout_ms: int = 5_000, wait_s: float = 0, tls: TlsSettings | None = None,
        token: str | None = None,
    ) -> None:  # fmt: skip
        """
        Make an admin; `async with` opens it.

        Args:
            meta: `host:port` of a metaserver; of several, an iterable of texts or one text with commas.
            call_timeout_ms: time for one call, in milliseconds; calls that work at the brokers have longer.
            wait_s: seconds for which opening waits for a metaserver that is still starting; 0: it asks none.
            tls: the authority of the servers' certificates; None: KEYLANE_TLS_CA of the environment, or no TLS.
            token: of a cluster with access control; None: KEYLANE_TOKEN_FILE names its file, or KEYLANE_TOKEN has it.

        Raises:
            ConfigError: `meta` names no address, or a time is out of its range.
        """
        self._addresses = addresses_of(meta)
        self._timeout_ms = call_timeout_ms
        self._connections = Connections(None, timeout_ms=call_timeout_ms, what="admin", wait_s=wait_s, tls=tls, token=token)  # fmt: skip

    def __repr__(self) -> str:
        return f"<Admin at {', '.join(self._addresses)}, {self._connections.home.state}>"

    async def __aenter__(self) -> Self:
        network = self._connections.open()
        self._metaserver = MetaClient(network, self._addresses, timeout_ms=self._timeout_ms)
        await self._connections.wait_for(self._metaserver)
        return self

    async def close(self) -> None:
        """Close every connection.  Raises OtherLoopError: the admin was opened in another event loop."""
        await clean_up(self._connections.close)

    # ── subjects ──────────────────────────────────────────────────────────────────────────────────────
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
        Create a subject; again with the same settings changes nothing.

        Args:
            partitions: 1 to 1024 physical partitions, spread over the available broker groups.
            order_strategy: what producers do while a partition does not answer.
            retention: what an old message waits for before it is removed.
            static: the partitions are logic queues, whose number changes only by `grow_subject`.
            message_bytes_max: key, value and properties of one message; 1 KiB to 1 MiB.

        Raises:
            SubjectExistsError: it exists with other settings.
            NotEnoughBrokersError: no broker group is available.
            CreationRunningError, CreationFailedError: an earlier creation has not ended, or cannot end.
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
        """Every subject, by name; hidden ones only with `hidden`."""
        refuse_call(flag_problems(hidden=hidden))
        listed = (await self._meta.subjects()).subjects
        return [each for each in listed if hidden or not each.hidden_for]

    async def describe_subject(self, subject: str) -> SubjectDescription:
        """
        A subject's settings, and each partition with its broker, state and offsets.

        A broker that does not answer is no error: its partitions have a `problem`.

        Raises:
            SubjectUnknownError
        """
        view = await self._meta.subject(check_name("subject", subject))
        return views.describe_subject(view, await self._statuses(view.route.partitions))

    async def history(self, subject: str) -> SubjectHistory:
        """
        Every partition that a subject ever had, the oldest first; `parents` make the lineage.

        Raises:
            SubjectUnknownError
        """
        return await self._meta.history(check_name("subject", subject))

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
        Change the settings of a subject; those that are None stay, and the settings that it has already change nothing.

        Every open partition is sealed and continued by one with the new settings, so that no producer goes on under the
        old ones once the operation is done: see `wait`.  Messages that are stored keep the retention they were stored under,
        also those over a lower `message_bytes_max`.

        Raises:
            SubjectUnknownError, NotEnoughBrokersError
            OperationRunningError: another operation on the subject has not changed the route yet.
        """
        check_name("subject", subject)
        asked = {
            "order_strategy": order_strategy,
            "retention": retention,
            "message_bytes_max": message_bytes_max,
        }
        body = checked(SetSubject, {"dry_run": dry_run, **asked})
        view = await self._meta.subject(subject)
        (operation,) = (await self._meta.set_subject(subject, body)).operations
        return views.subject_change(view, asked, operation)

    async def delete_subject(
        self, subject: str, *, force: bool = False, subject_id: int = 0
    ) -> SubjectDeletion:
        """
        Delete a subject with its messages and consumer groups; the same call with the `subject_id` of the answer tells how
        far that is.  A broker that is down drops its partitions when it is back; until then the name is taken.

        Args:
            force: also if the subject has live consumers.

        Raises:
            SubjectUnknownError
            GroupBusyError: it has live consumers.
            OperationRunningError: its partitions are being changed.
        """
        check_name("subject", subject)
        body = checked(DeleteSubject, {"force": force, "subject_id": subject_id})
        return await self._meta.delete_subject(subject, body)

    # ── consumer groups ───────────────────────────────────────────────────────────────────────────────
    async def list_groups(self, subject: str) -> list[GroupSummary]:
        """
        The consumer groups of a subject, by name.

        Raises:
            SubjectUnknownError
        """
        return (await self._meta.groups(check_name("subject", subject))).summaries

    async def describe_group(self, subject: str, group: str) -> GroupDescription:
        """
        A consumer group's owner, token, cursor and lag on each partition.

        A broker that does not answer is no error: its partitions have a `problem`.

        Raises:
            SubjectUnknownError, GroupUnknownError
        """
        view = await self._group(subject, group)
        partitions = [owner.partition for owner in view.owners]
        return views.describe_group(view, await self._statuses(partitions))

    async def lag(self, subject: str, group: str) -> int:
        """
        How many messages are stored and not acked by a consumer group, over all partitions.

        Raises:
            SubjectUnknownError, GroupUnknownError
            UnreachableError: a broker does not answer, so that the lag is unknown.
        """
        view = await self._group(subject, group)
        owned = [owner.partition for owner in view.owners]
        statuses = await in_turns(self._status, owned)
        described = views.describe_group(view, {status.partition_id: status for status in statuses})
        assert described.lag is not None
        return described.lag

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
        Set the cursors of a consumer group that has no live consumers, or `live` of any.

        Args:
            to: "earliest", "latest", "offset", "time", "shift" or "cursors".
            offset: for "offset": a logic offset with `queue`, a physical one with `partition_id`.
            at_ms: for "time": milliseconds since 1970; the first message stored at or after it.
            queue: this logic queue of a static subject only.
            partition_id: this partition only; partitions before and behind it keep their cursors.
            shift: for "shift": messages forward, or back if below 0, in each queue, or each partition that the group has
                not acked to a sealed end; no further than what is stored.
            cursors: for "cursors": partition id → offset of the partition; others keep their cursors.
            dry_run: answer with the present and the new cursors, and change nothing; also while the group has consumers.
            live: its consumers hand everything over, and go on at the new cursors; a handler has `handover_ms` to end.

        Raises:
            SubjectUnknownError, GroupUnknownError, QueueUnknownError, PartitionUnknownError
            SubjectNotStaticError: `queue` for a subject without queues.
            InvalidRequestError: `partition_id` for a subject with queues; arguments that do not go together.
            GroupBusyError: it has live consumers, or had some until a moment ago.
            OffsetOutOfRangeError: `offset` is not stored.
            ResetUnfinishedError: some cursors are set; the same call again sets the rest.  After a "shift" another shift
                would count from the new cursors: the text has the "cursors" that set the rest.
            ResetCanceledError: `cancel_reset` was called; nothing was changed.
        """
        check_name("subject", subject)
        check_name("consumer group", group)
        return await reset_group(
            partial(self._meta.reset_group, subject, group),
            {"to": to, "offset": offset, "at_ms": at_ms, "shift": shift, "cursors": cursors}
            | {"queue": queue, "partition_id": partition_id, "dry_run": dry_run, "live": live},
        )

    async def delete_group(
        self, subject: str, group: str, *, force: bool = False, group_id: int = 0
    ) -> GroupDeletion:
        """
        Delete a consumer group; the same call with the `group_id` of the answer tells how far that is.

        A broker that is down forgets the group when it is back; until then no consumer can join.  A later group of this
        name begins at the first message that is still stored.

        Args:
            force: also if the group has live consumers, which end with GroupDeletedError.

        Raises:
            SubjectUnknownError, GroupUnknownError
            GroupBusyError: it has live consumers, or its progress is being set.
        """
        check_name("subject", subject)
        check_name("consumer group", group)
        body = checked(DeleteGroup, {"force": force, "group_id": group_id})
        return await self._meta.delete_group(subject, group, body)

    async def switch_group(
        self, subject: str, group: str, consume_strategy: ConsumeStrategy | str
    ) -> GroupView:
        """
        Change how a consumer group shares out messages: "exclusive" or "shared".

        Its consumers end with an error; those that are started with the new strategy continue.

        Raises:
            SubjectUnknownError, GroupUnknownError
        """
        check_name("subject", subject)
        check_name("consumer group", group)
        body = checked(SwitchGroup, {"strategy": consume_strategy}, strategy="consume_strategy")
        return await self._meta.switch_group(subject, group, body)

    # ── partitions ────────────────────────────────────────────────────────────────────────────────────
    async def resize(
        self, subject: str, partitions: int, *, dry_run: bool = False
    ) -> OperationView:
        """
        Change the number of open partitions of a subject to `partitions`, 1 to 1024, while messages flow.

        Returns:
            The operation, which continues by itself: see `wait`.  With `dry_run` its plan, of which nothing is done;
            then, and if there is nothing to change, `operation_id` is 0.

        Raises:
            SubjectUnknownError, NotEnoughBrokersError
            OperationRunningError: another operation on the subject has not changed the route yet.
            StaticSubjectError: the subject has logic queues; see `grow_subject`.
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

        A queue that is cut keeps its number, logic offsets and first half; the second half is a new queue, from offset 0.

        Args:
            count: the new number of queues, up to 1024; the widest queues are cut.
            queues: the numbers of the queues to cut in the middle, in place of `count`.

        Raises:
            QueueUnknownError: the subject has no such queue.
            SubjectNotStaticError: the subject has no logic queues; see `resize`.
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
        Join open partitions whose ranges are neighbours; returns and raises as `resize`.

        Raises:
            PartitionUnknownError: no open partition has one of these ids.
        """
        return await self._change(OperationKind.MERGE, dry_run, partition_ids=partition_ids)

    async def move(
        self, partition_ids: Sequence[int], *, to: str, dry_run: bool = False
    ) -> OperationView:
        """
        Continue open partitions of one subject on the broker group `to`; returns and raises as `resize`.

        Raises:
            PartitionUnknownError: no open partition has one of these ids.
            BrokerGroupUnknownError: `to` never reported itself.
            BrokerCordonedError: `to` gets no new partitions.
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

        The broker group is cordoned from then on, also if the evacuation is canceled: see `uncordon`.

        Args:
            without_source: although the broker is silent; strict and static subjects wait for its return.
            accept_loss: the silent broker's disk is lost for good: strict and static subjects continue too.

        Returns:
            In `operations` one for each subject, to `wait` for; `busy` names the subjects of which something stays
            there, and why.

        Raises:
            BrokerGroupUnknownError, NotEnoughBrokersError
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
        return await self._meta.reshape(body)

    async def list_operations(self, subject: str) -> list[OperationView]:
        """
        The latest operations of a subject, the newest first, each with what it waits for.

        Raises:
            SubjectUnknownError
        """
        return (await self._meta.operations(check_name("subject", subject))).operations

    @outlives_cancel
    async def follow(self, operation: OperationView) -> AsyncGenerator[OperationView, None]:
        """
        Yield an operation now and after each change, until the route has changed or the operation is canceled.

        Raises:
            InvalidRequestError: `operation` is not one operation as `resize`, `move` and the like return it.
            OperationUnknownError: the metaserver does not list it: its database is another, or older.
            UnreachableError: no metaserver answers; the operation continues, and may be followed again.
        """
        if not isinstance(operation, OperationView):
            raise InvalidRequestError(f"one operation is followed, not {operation!r:.80}")
        view = operation
        yield view
        while view.operation_id and view.state not in ROUTE_FINAL:
            await asyncio.sleep(POLL_MS / 1000)
            latest = await self.list_operations(view.subject)
            listed = {operation.operation_id: operation for operation in latest}
            if view.operation_id not in listed:
                raise OperationUnknownError(
                    f"operation {view.operation_id} of subject {view.subject} is not listed"
                )
            if listed[view.operation_id] != view:
                view = listed[view.operation_id]
                yield view

    async def wait(self, operation: OperationView) -> OperationView:
        """
        Wait until an operation has changed the route (state DONE or FENCE) or is canceled (CANCELED); returns it.

        A plan, and an operation that has nothing to do, are returned as they are.

        Raises:
            InvalidRequestError, OperationUnknownError, UnreachableError: as `follow`.
        """
        async for latest in self.follow(operation):
            operation = latest
        return operation

    async def cancel(self, operation_id: int) -> OperationView:
        """
        Cancel an operation that has not begun to seal; a repetition changes nothing.

        Raises:
            OperationUnknownError
            OperationForwardError: it has begun to seal, and can only be completed.
        """
        refuse_call(range_problems({"operation_id": operation_id}, {"operation_id": (1, MAX_I64)}))
        return await self._meta.cancel_operation(operation_id)

    # ── brokers ───────────────────────────────────────────────────────────────────────────────────────
    async def list_brokers(self) -> BrokerList:
        """Every broker group that ever reported itself, and the brokers that are refused."""
        details = (await self._meta.health()).details
        return BrokerList(
            brokers=msgspec.convert(details.get("brokers", []), list[BrokerView]),
            refused=msgspec.convert(details.get("refused", []), list[RefusedBroker]),
        )

    async def cordon(self, broker_group: str) -> BrokerView:
        """
        Keep a broker group from new partitions; those it has stay.

        Raises:
            BrokerGroupUnknownError
        """
        return await self._cordon(broker_group, cordoned=True)

    async def uncordon(self, broker_group: str) -> BrokerView:
        """
        Let a broker group have new partitions again.

        Raises:
            BrokerGroupUnknownError
        """
        return await self._cordon(broker_group, cordoned=False)

    async def accept_folder(
        self, broker_group: str, *, address: str = "", dry_run: bool = False
    ) -> RefusedBroker:
        """
        Let a broker serve although its data folder is behind the broker group's last report; what it lacks is lost.

        Args:
            address: which broker, if several of the group are refused.
            dry_run: only answer which folder would be accepted.

        Raises:
            BrokerGroupUnknownError
        """
        check_name("broker group", broker_group)
        body = checked(AcceptFolder, {"address": address, "dry_run": dry_run})
        return await self._meta.accept_folder(broker_group, body)

    async def broker_health(self, address: str) -> Health:
        """
        Whether the broker at `address` takes writes, and why not.  No metaserver is asked.

        Raises:
            ConfigError: `address` is not one address.
            InvalidRequestError: a metaserver answers there.
        """
        self._connections.home.check()
        addresses = addresses_of(address)
        if len(addresses) > 1:
            raise ConfigError(f"the health of one broker is asked for, not of {address!r:.80}")
        return await self._connections.broker_at(addresses[0]).health()

    # ── the cluster ───────────────────────────────────────────────────────────────────────────────────
    async def health(self) -> Health:
        """
        Whether the metaserver is ready, and why not.

        Raises:
            InvalidRequestError: a broker answers there.
        """
        return await self._meta.health()

    async def verify(self) -> Verification:
        """Compare the metaserver's database with the brokers; returns each check with its violations."""
        return await self._meta.verify()
