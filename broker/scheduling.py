"""Answers calls about later deliveries: frames of producers, and plain HTTP.

    POST /v1/subjects/{subject}/scheduled?deliver_at=…      receipts, each with the id of a message
    POST /v1/scheduled/{id}/cancel                          canceled, delivered, or dropped
    GET  /v1/scheduled?subject=…                            the next messages that are delivered

The scheduler keeps the messages and delivers them.

Invariant
    A repeated request for messages that the broker has is answered like the first one, even if they
    would be refused now: a refusal says that nothing is kept, and the sender would send them again
    under other ids.
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
    shown,
)
from ..protocol.scheduled.receipt import (
    CanceledScheduled,
    ScheduledList,
    ScheduledPage,
    ScheduledReceipt,
    ScheduledView,
)
from ..rpc.plane.prompt import Handled
from ..rpc.server import ControlRoute, Params, check_params, whole_number
from .peers import Peers
from .scheduled.records import Waits, waits_for
from .scheduled.schedule_index import ScheduledEntry
from .scheduled.scheduler import Scheduler
from .standing import Standing, check_standing
from .store.store import DURABLE

ID_BYTES = 16
LISTED_DEFAULT = 100
ASKED_AT_ONCE_MAX = 16
"""The number of subjects of listed messages about which a metaserver is asked at the same time."""
LATE_MS_MAX = 60_000
"""The time in milliseconds by which a time in a frame may have passed: the producer has checked it
by its own calendar, and may have tried for a while.
"""


class Scheduling:
    """Answers calls about scheduled messages from a scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        peers: Peers,
        *,
        broker_group: str,
        clock: Clock,
        draw: Callable[[int], int],
        standing: Standing,
        check_writable: Callable[[], None],
    ) -> None:
        """
        Args:
            draw: draws a random number of the given length in bits, for ids.
            check_writable: raises BrokerReadOnlyError while the broker accepts no messages.
        """
        self._scheduler = scheduler
        self._peers = peers
        self._broker_group = broker_group
        self._clock = clock
        self._draw = draw
        self._standing = standing
        self._check_writable = check_writable

    def routes(self) -> list[ControlRoute]:
        """Return the routes of the HTTP calls."""
        return [
            ControlRoute(SCHEDULE_MESSAGES, self.post),
            ControlRoute(CANCEL_SCHEDULED, self.post_cancel),
            ControlRoute(SCHEDULED, self.soonest),
        ]

    # ── frames ────────────────────────────────────────────────────────────────────────────────────
    async def schedule(self, request: Schedule, payload: memoryview) -> Handled:
        """
        Keep the message in the payload until its time, durably.

        Raises:
            InvalidRequestError, MessageTooLargeError, OverloadedError,
            SubjectUnknownError, BrokerReadOnlyError: it is not kept.
        """
        subject = check_name("subject", request.subject)
        _check_id(request.scheduled_id)
        known = self._scheduler.knows_all([request.scheduled_id])
        if not known:
            self._check_time(request.deliver_at_ms)
        header = check_batch(payload)
        check_lengths(payload, header)
        if header.count != 1 or header.length != len(payload):
            raise InvalidRequestError("a scheduled message is a batch of one message")
        try:
            cut = columns(payload, header)
        except UnpackError as error:
            error.hint = SENDER_HINT
            raise
        key, value, packed = (
            cut.blob[edges[0] : edges[1]]
            for edges in (cut.key_edges, cut.value_edges, cut.property_edges)
        )
        if key:
            raise InvalidRequestError(Reason.DELIVER_AT_KEY)
        check_message_size(0, len(value), len(packed))
        message = Waits(
            request.scheduled_id, request.deliver_at_ms, subject, cut.sent_at_ns[0], value, packed
        )
        await (self._scheduler.schedule([message]) if known else self._keep(subject, [message]))
        return Scheduled(self._broker_group, DURABLE), b""

    async def cancel(self, request: CancelScheduled, _payload: memoryview) -> Handled:
        """Cancel a message, so that it is never delivered, unless it already is, or raise
        NotFoundError.
        """
        _check_id(request.scheduled_id)
        outcome = await self._scheduler.cancel(request.scheduled_id)
        return ScheduledCanceled(outcome.value), b""

    def _check_time(self, deliver_at_ms: int) -> None:
        # While a calendar that was set forward is not trusted, a time that is right by either
        # calendar is accepted.
        now_ms, latest_ms = self._scheduler.calendar.both_ms()
        if not now_ms - LATE_MS_MAX <= deliver_at_ms <= latest_ms + AHEAD_MS_MAX + LATE_MS_MAX:
            raise InvalidRequestError(
                Reason.DELIVER_AT,
                f"deliver_at is {shown(deliver_at_ms)}, and by the broker's calendar it is "
                f"{shown(now_ms)}",
                deliver_at_ms=deliver_at_ms,
                now_ms=now_ms,
            )

    async def _keep(self, subject: str, messages: list[Waits]) -> list[bool]:
        """Keep messages. Return for each of them whether it was already kept."""
        self._check_writable()
        try:
            route = await self._peers.newest_route(subject)  # the subject exists
            subject_id = route.subject_id
        except UnreachableError:  # the known route may be of an earlier subject of the name
            route = await self._peers.route_to_send(subject)
            subject_id = 0
        posted = [PostedMessage(b"", each.value, each.packed_properties) for each in messages]
        check_sizes(posted, route.message_bytes_max)
        return await self._scheduler.schedule([waits_for(each, subject_id) for each in messages])

    # ── plain HTTP ────────────────────────────────────────────────────────────────────────────────
    async def post(self, body: bytes, params: Params) -> ScheduledList:
        """
        Keep the messages of a request until `deliver_at`, durably: all or none.

        Raises:
            KeylaneError: none is kept, or its fate is UNKNOWN.
        """
        check_params(SCHEDULE_MESSAGES, params)
        await check_standing(self._standing)
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
        ids = self._ids(subject, posted, deliver_at_ms, params.get(IDEMPOTENCY_KEY))
        sent_at_ns = self._clock.wall_ns()
        messages = [
            Waits(
                number, deliver_at_ms, subject, sent_at_ns, message.value, message.packed_properties
            )
            for number, message in zip(ids, posted, strict=True)
        ]
        if self._scheduler.knows_all(ids):
            known = await self._scheduler.schedule(messages)
        else:
            now_ms, latest_ms = self._scheduler.calendar.both_ms()
            check_deliver_at(deliver_at_ms, now_ms=now_ms, latest_ms=latest_ms)
            known = await self._keep(subject, messages)
        return ScheduledList(
            receipts=[
                ScheduledReceipt(
                    scheduled_id=number.hex(),
                    subject=subject,
                    broker_group=self._broker_group,
                    deliver_at_ms=deliver_at_ms,
                    durable=DURABLE,
                    duplicate=duplicate,
                )
                for number, duplicate in zip(ids, known, strict=True)
            ]
        )

    def _ids(
        self, subject: str, messages: list[PostedMessage], deliver_at_ms: int, key: str | None
    ) -> list[bytes]:
        """Return the ids of messages. A repeated request with the same subject, idempotency key,
        messages and time gets the same ids.
        """
        if key is None:
            return [self._draw(8 * ID_BYTES).to_bytes(ID_BYTES) for _ in messages]
        # Keys belong to a subject: a caller who sends to another one may choose the same key,
        # messages and time.
        named = f"{subject} {keyed_producer(key, messages)} {deliver_at_ms}"
        return _derived_ids(named, len(messages))

    async def soonest(self, _body: object, params: Params) -> ScheduledPage:
        """Return the next `limit` messages by their times, of all subjects or of one."""
        check_params(SCHEDULED, params)
        limit = whole_number(params, "limit", LISTED_DEFAULT, low=1, high=SCHEDULED_LISTED_MAX)
        now_ms = self._scheduler.calendar.reported_ms()
        count, entries = await self._scheduler.soonest(limit, params.get("subject"))
        drops = await self._drops(entries)
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
                    drop=drops.get(each.scheduled_id, ""),
                )
                for each in entries
            ],
        )

    async def _drops(self, entries: Sequence[ScheduledEntry]) -> dict[bytes, str]:
        """Return why messages will be dropped, by their ids. The metaserver is asked once for each
        subject, as long as it answers.
        """
        slots, silent = asyncio.Semaphore(ASKED_AT_ONCE_MAX), asyncio.Event()

        async def ask(subject: str, subject_id: int) -> Route | KeylaneError:
            async with slots:
                if silent.is_set():
                    return NotSentError("no metaserver answers")
                try:
                    return await self._peers.new_route(subject, subject_id=subject_id)
                except KeylaneError as error:
                    if isinstance(error, UnreachableError):
                        silent.set()
                    return error

        subjects = list({(each.subject, each.subject_id) for each in entries})
        answers = await asyncio.gather(*(ask(*each) for each in subjects))
        told = dict(zip(subjects, answers, strict=True))
        return {
            each.scheduled_id: why
            for each in entries
            if (why := _why_dropped(each, told[each.subject, each.subject_id]))
        }

    async def post_cancel(self, _body: object, params: Params) -> CanceledScheduled:
        """Cancel a message, so that it is never delivered, unless it already is, or raise
        NotFoundError.
        """
        await check_standing(self._standing)
        try:
            number = bytes.fromhex(params["id"])
        except ValueError:
            number = b""
        _check_id(number)
        return CanceledScheduled(outcome=await self._scheduler.cancel(number))


def _derived_ids(named: str, count: int) -> list[bytes]:
    """Return the ids of `count` messages of a request. The same request always gets the same
    ids.
    """
    return [
        blake2b(f"{named} {number}".encode(), digest_size=ID_BYTES).digest()
        for number in range(count)
    ]


def _why_dropped(entry: ScheduledEntry, told: Route | KeylaneError) -> str:
    """Return why a message will be dropped at its time, by what is known of its subject; "" if it
    will not be.
    """
    if isinstance(told, KeylaneError):
        return "its subject is deleted" if isinstance(told, SubjectDeletedError) else ""
    if entry.message_bytes > told.message_bytes_max:
        return message_too_large(entry.message_bytes, told.message_bytes_max).message
    return ""


def _check_id(scheduled_id: bytes) -> None:
    if len(scheduled_id) != ID_BYTES:
        raise InvalidRequestError(
            f"the id of a scheduled message has {ID_BYTES} bytes, {2 * ID_BYTES} hexadecimal digits"
        )
