"""Answers requests about scheduled messages: frames from producers, and plain HTTP.

    POST /v1/subjects/{subject}/scheduled?deliver_at=…      receipts, each with the id of a message
    POST /v1/scheduled/{id}/cancel                          canceled, delivered, or dropped
    GET  /v1/scheduled?subject=…                            the messages that are delivered next

The scheduler keeps the messages and delivers them.

Invariant
    A repeated request for messages that the broker already has is answered like the first one, even
    if a new request would be refused: after a refusal, the sender would send the messages again
    under new ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from hashlib import blake2b

from ..protocol.batch import SENDER_HINT, check_batch, check_lengths, columns
from ..protocol.clock import Clock
from ..protocol.endpoints import CANCEL_SCHEDULED, SCHEDULE_MESSAGES, SCHEDULED
from ..protocol.errors import (
    InvalidRequestError,
    KeylaneError,
    NotSentError,
    Reason,
    SubjectDeletedError,
    UnpackError,
    UnreachableError,
)
from ..protocol.frames import CancelScheduled, Schedule, Scheduled, ScheduledCanceled
from ..protocol.http.posted import (
    IDEMPOTENCY_KEY,
    PostedMessage,
    check_sizes,
    keyed_producer,
    posted_messages,
)
from ..protocol.ids import check_name
from ..protocol.limits import SCHEDULED_LISTED_MAX
from ..protocol.message import check_message_size, message_too_large
from ..protocol.routing import Route
from ..protocol.scheduled.deliver_at import (
    AHEAD_MS_MAX,
    check_deliver_at,
    read_instant_ms,
)
from ..protocol.scheduled.receipt import (
    CanceledScheduled,
    ScheduledList,
    ScheduledPage,
    ScheduledReceipt,
    ScheduledView,
)
from ..protocol.text import format_time
from ..rpc.plane.prompt import Handled
from ..rpc.server import ControlRoute, Params, check_params, whole_number
from .folder_ownership import FolderOwnership, check_copied, check_folder_ownership
from .peers import Peers
from .scheduled.records import ScheduledMessageRecord, bind_to_subject
from .scheduled.schedule_index import ScheduledEntry
from .scheduled.scheduler import Scheduler
from .store.store import DURABLE

ID_BYTES = 16
LISTED_DEFAULT = 100
CONCURRENT_FETCHES_MAX = 16
"""The maximum number of concurrent route requests for the subjects of listed messages."""
LATE_MS_MAX = 60_000
"""How far in the past the time in a frame may be, in milliseconds. The producer has checked it
against its own clock, and may have retried since then.
"""


class Scheduling:
    """Answers requests about the messages of a scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        peers: Peers,
        *,
        broker_group: str,
        clock: Clock,
        random_bits: Callable[[int], int],
        folder_ownership: FolderOwnership,
        check_writable: Callable[[], None],
    ) -> None:
        """
        Args:
            random_bits: returns a random number with the given number of bits, for ids.
            check_writable: raises BrokerReadOnlyError while the broker does not accept messages.
        """
        self._scheduler = scheduler
        self._peers = peers
        self._broker_group = broker_group
        self._clock = clock
        self._random_bits = random_bits
        self._folder_ownership = folder_ownership
        self._check_writable = check_writable

    def routes(self) -> list[ControlRoute]:
        """Return the routes of the HTTP calls."""
        return [
            ControlRoute(SCHEDULE_MESSAGES, self.post),
            ControlRoute(CANCEL_SCHEDULED, self.post_cancel),
            ControlRoute(SCHEDULED, self.list_soonest),
        ]

    # ── frames ────────────────────────────────────────────────────────────────────────────────────
    async def schedule(self, request: Schedule, payload: memoryview) -> Handled:
        """
        Store the message in the payload durably until its delivery time.

        Raises:
            InvalidRequestError, MessageTooLargeError, OverloadedError,
            SubjectUnknownError, BrokerReadOnlyError: the message was not stored.
        """
        subject = check_name("subject", request.subject)
        _check_id(request.scheduled_id)
        is_repeat = self._scheduler.knows_all([request.scheduled_id])
        if not is_repeat:
            self._check_time(request.deliver_at_ms)
        header = check_batch(payload)
        check_lengths(payload, header)
        if header.count != 1 or header.length != len(payload):
            raise InvalidRequestError("a scheduled message is a batch of one message")
        try:
            batch = columns(payload, header)
        except UnpackError as error:
            error.hint = SENDER_HINT
            raise
        key, value, packed_properties = (
            batch.blob[edges[0] : edges[1]]
            for edges in (batch.key_edges, batch.value_edges, batch.property_edges)
        )
        if key:
            raise InvalidRequestError(Reason.DELIVER_AT_KEY)
        check_message_size(0, len(value), len(packed_properties))
        message = ScheduledMessageRecord(
            request.scheduled_id,
            request.deliver_at_ms,
            subject,
            batch.sent_at_ns[0],
            value,
            packed_properties,
        )
        await (self._scheduler.schedule([message]) if is_repeat else self._add(subject, [message]))
        return Scheduled(self._broker_group, DURABLE), b""

    async def cancel(self, request: CancelScheduled, _payload: memoryview) -> Handled:
        """Cancel a message unless it has already been delivered. Raises NotFoundError."""
        _check_id(request.scheduled_id)
        outcome = await self._scheduler.cancel(request.scheduled_id)
        return ScheduledCanceled(outcome.value), b""

    def _check_time(self, deliver_at_ms: int) -> None:
        # While the wall clock is not trusted, accept times that are valid by either clock.
        now_ms, latest_ms = self._scheduler.calendar.trusted_and_wall_ms()
        if not now_ms - LATE_MS_MAX <= deliver_at_ms <= latest_ms + AHEAD_MS_MAX + LATE_MS_MAX:
            raise InvalidRequestError(
                Reason.DELIVER_AT,
                f"deliver_at is {format_time(deliver_at_ms)}, but the broker's calendar says "
                f"{format_time(now_ms)}",
                deliver_at_ms=deliver_at_ms,
                now_ms=now_ms,
            )

    async def _add(self, subject: str, messages: list[ScheduledMessageRecord]) -> list[bool]:
        """Add new messages to the scheduler. For each message, return whether it was already
        there.
        """
        self._check_writable()
        try:
            route = await self._peers.fetch_or_create_route(subject)  # the subject exists now
            subject_id = route.subject_id
        except UnreachableError:  # the cached route may belong to an earlier subject with this name
            route = await self._peers.route_to_send(subject)
            subject_id = 0
        posted_messages = [
            PostedMessage(b"", each.value, each.packed_properties) for each in messages
        ]
        check_sizes(posted_messages, route.message_bytes_max)
        return await self._scheduler.schedule(
            [bind_to_subject(each, subject_id) for each in messages]
        )

    # ── plain HTTP ────────────────────────────────────────────────────────────────────────────────
    async def post(self, body: bytes, params: Params) -> ScheduledList:
        """
        Store the messages of a request, all or none, durably until `deliver_at`.

        Raises:
            KeylaneError: no message was stored, or the fate is UNKNOWN.
        """
        check_params(SCHEDULE_MESSAGES, params)
        await check_folder_ownership(self._folder_ownership)
        subject = check_name("subject", params["subject"])
        if "deliver_at" not in params:
            raise InvalidRequestError(
                Reason.DELIVER_AT,
                "the time is missing: …/scheduled?deliver_at=2030-01-31T08:00:00Z",
            )
        deliver_at_ms = read_instant_ms(params["deliver_at"])
        posted = posted_messages(body, params)
        if any(message.key for message in posted):
            raise InvalidRequestError(Reason.DELIVER_AT_KEY)
        ids = self._assign_ids(subject, posted, deliver_at_ms, params.get(IDEMPOTENCY_KEY))
        sent_at_ns = self._clock.wall_ns()
        messages = [
            ScheduledMessageRecord(
                scheduled_id,
                deliver_at_ms,
                subject,
                sent_at_ns,
                message.value,
                message.packed_properties,
            )
            for scheduled_id, message in zip(ids, posted, strict=True)
        ]
        if self._scheduler.knows_all(ids):
            duplicates = await self._scheduler.schedule(messages)
        else:
            now_ms, latest_ms = self._scheduler.calendar.trusted_and_wall_ms()
            check_deliver_at(deliver_at_ms, now_ms=now_ms, latest_ms=latest_ms)
            duplicates = await self._add(subject, messages)
        return ScheduledList(
            receipts=[
                ScheduledReceipt(
                    scheduled_id=scheduled_id.hex(),
                    subject=subject,
                    broker_group=self._broker_group,
                    deliver_at_ms=deliver_at_ms,
                    durable=DURABLE,
                    duplicate=duplicate,
                )
                for scheduled_id, duplicate in zip(ids, duplicates, strict=True)
            ]
        )

    def _assign_ids(
        self, subject: str, messages: list[PostedMessage], deliver_at_ms: int, key: str | None
    ) -> list[bytes]:
        """Return ids for the messages. With an idempotency key, they are the same for every repeat
        of the request; otherwise they are random.
        """
        if key is None:
            return [self._random_bits(8 * ID_BYTES).to_bytes(ID_BYTES) for _ in messages]
        # Another subject may receive a request with the same key, messages and time.
        request_key = f"{subject} {keyed_producer(key, messages)} {deliver_at_ms}"
        return _derived_ids(request_key, len(messages))

    async def list_soonest(self, _body: object, params: Params) -> ScheduledPage:
        """Return the next `limit` messages by delivery time, for all subjects or for one."""
        await check_copied(self._folder_ownership)
        check_params(SCHEDULED, params)
        limit = whole_number(params, "limit", LISTED_DEFAULT, low=1, high=SCHEDULED_LISTED_MAX)
        now_ms = self._scheduler.calendar.reported_ms()
        count, entries = await self._scheduler.list_soonest(limit, params.get("subject"))
        drop_reasons = await self._drop_reasons(entries)
        return ScheduledPage(
            broker_group=self._broker_group,
            count=count,
            messages=[
                ScheduledView(
                    scheduled_id=each.scheduled_id.hex(),
                    subject=each.subject,
                    broker_group=self._broker_group,
                    deliver_at_ms=each.deliver_at_ms,
                    size_bytes=each.size,
                    due=each.deliver_at_ms <= now_ms,
                    drop=drop_reasons.get(each.scheduled_id, ""),
                )
                for each in entries
            ],
        )

    async def _drop_reasons(self, entries: Sequence[ScheduledEntry]) -> dict[bytes, str]:
        """Return a dict that maps the ids of messages that will be dropped to the reasons. Fetches
        one route per subject, and stops when the metaserver is unreachable.
        """
        slots, unreachable = asyncio.Semaphore(CONCURRENT_FETCHES_MAX), asyncio.Event()

        async def fetch(subject: str, subject_id: int) -> Route | KeylaneError:
            async with slots:
                if unreachable.is_set():
                    return NotSentError("no metaserver answers")
                try:
                    return await self._peers.fetch_route(subject, subject_id=subject_id)
                except KeylaneError as error:
                    if isinstance(error, UnreachableError):
                        unreachable.set()
                    return error

        subjects = list({(each.subject, each.subject_id) for each in entries})
        results = await asyncio.gather(*(fetch(*each) for each in subjects))
        routes = dict(zip(subjects, results, strict=True))
        return {
            each.scheduled_id: reason
            for each in entries
            if (reason := _drop_reason(each, routes[each.subject, each.subject_id]))
        }

    async def post_cancel(self, _body: object, params: Params) -> CanceledScheduled:
        """Cancel a message unless it has already been delivered. Raises NotFoundError."""
        await check_folder_ownership(self._folder_ownership)
        try:
            scheduled_id = bytes.fromhex(params["id"])
        except ValueError:
            scheduled_id = b""
        _check_id(scheduled_id)
        return CanceledScheduled(outcome=await self._scheduler.cancel(scheduled_id))


def _derived_ids(request_key: str, count: int) -> list[bytes]:
    """Return `count` ids that depend only on `request_key`."""
    return [
        blake2b(f"{request_key} {number}".encode(), digest_size=ID_BYTES).digest()
        for number in range(count)
    ]


def _drop_reason(entry: ScheduledEntry, route: Route | KeylaneError) -> str:
    """Return the reason why a message will be dropped at its delivery time, or "" if it will be
    delivered. `route` is the route of its subject, or the error that was returned instead.
    """
    if isinstance(route, KeylaneError):
        return "its subject is deleted" if isinstance(route, SubjectDeletedError) else ""
    if entry.message_bytes > route.message_bytes_max:
        return message_too_large(entry.message_bytes, route.message_bytes_max).message
    return ""


def _check_id(scheduled_id: bytes) -> None:
    if len(scheduled_id) != ID_BYTES:
        raise InvalidRequestError(
            f"the id of a scheduled message must have {ID_BYTES} bytes, "
            f"{2 * ID_BYTES} hexadecimal digits"
        )
