"""SchedulingCalls about scheduled messages: what is refused before anything is kept, and what a
repeat is.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from keylane.broker.scheduled.records import Place, ScheduledForSubject, ScheduledMessageRecord
from keylane.broker.scheduled.schedule_index import ScheduledEntry
from keylane.broker.scheduling import LATE_MS_MAX, Scheduling
from keylane.protocol.batch import encode_batch
from keylane.protocol.errors import (
    BrokerReadOnlyError,
    CorruptBatchError,
    InvalidRequestError,
    MessageTooLargeError,
    NotSentError,
    Reason,
    SubjectDeletedError,
    SubjectUnknownError,
)
from keylane.protocol.frames import CancelScheduled, Schedule, Scheduled, ScheduledCanceled
from keylane.protocol.http.posted import CONTENT_TYPE, IDEMPOTENCY_KEY, JSON, KEY_HEADER
from keylane.protocol.limits import MESSAGE_BYTES_MAX
from keylane.protocol.message import pack_properties
from keylane.protocol.routing import OrderStrategy, Route
from keylane.protocol.scheduled.receipt import CancelOutcome
from sim.machines.clock import ManualClock
from support.raising import raises

NOW_MS = 1_800_000_000_000
ID = bytes(range(16))


class TrustedFolder:
    set_aside = ""
    has_reported = accepted = True
    awaits_copies = False


def limited(message_bytes_max: int) -> Route:
    """A route that says what its subject takes."""
    return Route(
        subject="s",
        version=1,
        order_strategy=OrderStrategy.STRICT,
        partitions=(),
        message_bytes_max=message_bytes_max,
    )


class KnownSubjects:
    known = newest = limited(MESSAGE_BYTES_MAX)
    silent = False

    def __init__(self) -> None:
        self.deleted: set[int] = set()
        self.asked: list[tuple[str, int]] = []

    async def route_to_send(self, _subject: str) -> Route:
        return self.known

    async def fetch_or_create_route(self, subject: str) -> Route:
        if subject == "unknown":
            raise SubjectUnknownError(subject=subject)
        if self.silent:
            raise NotSentError("no metaserver answers")
        return self.newest

    async def fetch_route(self, subject: str, *, subject_id: int) -> Route:
        self.asked.append((subject, subject_id))
        if subject_id in self.deleted:
            raise SubjectDeletedError(subject=subject)
        return await self.fetch_or_create_route(subject)


class BelievedCalendar:
    """One that is believed whatever the machine's is."""

    def __init__(self) -> None:
        self.now_ms = NOW_MS
        self.ahead_ms = 0
        """How far the machine's is set forward, which is not believed yet."""

    def reported_ms(self) -> int:
        return self.now_ms

    def trusted_and_wall_ms(self) -> tuple[int, int]:
        return self.now_ms, self.now_ms + self.ahead_ms


class RecordedMessages:
    """Records what is to be kept and canceled."""

    def __init__(self, calendar: BelievedCalendar) -> None:
        self.calendar = calendar
        self.kept: list[ScheduledMessageRecord] = []
        self.canceled: list[bytes] = []
        self.entries: list[ScheduledEntry] = []

    def knows_all(self, scheduled_ids: list[bytes]) -> bool:
        return {each.scheduled_id for each in self.kept}.issuperset(scheduled_ids)

    def subject_of(self, scheduled_id: bytes) -> str | None:
        return {each.scheduled_id: each.subject for each in self.kept}.get(scheduled_id)

    async def schedule(self, messages: list[ScheduledMessageRecord]) -> list[bool]:
        known = {each.scheduled_id for each in self.kept}
        self.kept += messages
        return [each.scheduled_id in known for each in messages]

    async def list_soonest(
        self, limit: int, subject: str | None
    ) -> tuple[int, list[ScheduledEntry]]:
        return len(self.entries), self.entries[:limit]

    async def cancel(self, scheduled_id: bytes) -> CancelOutcome:
        self.canceled.append(scheduled_id)
        return CancelOutcome.CANCELED


class SchedulingCalls:
    """The calls of a broker at NOW_MS."""

    def __init__(self) -> None:
        self.calendar = BelievedCalendar()
        self.messages = RecordedMessages(self.calendar)
        self.read_only = False
        self._drawn = 0
        self.subjects = KnownSubjects()
        clock = ManualClock()
        clock.wall_ms = self.calendar.reported_ms
        self.scheduling = Scheduling(
            self.messages,
            self.subjects,
            broker_group="g1",
            clock=clock,
            random_bits=self._draw,
            folder_ownership=TrustedFolder(),
            check_writable=self._check,
        )

    def _draw(self, _bits: int) -> int:
        self._drawn += 1
        return self._drawn

    def _check(self) -> None:
        if self.read_only:
            raise BrokerReadOnlyError("the disk is full")

    async def frame(
        self, *, at_ms: int = NOW_MS + 1, subject: str = "s", number: bytes = ID, **batch: Any
    ) -> object:
        payload = batch.pop("payload", None) or one(**batch)
        answer, _ = await self.scheduling.schedule(
            Schedule(subject, at_ms, number), memoryview(payload)
        )
        return answer

    async def post(self, body: bytes, **params: str) -> list[str]:
        given = {"subject": "s", "deliver_at": f"{NOW_MS + 1}"} | params
        answer = await self.scheduling.post(body, given)
        return [receipt.scheduled_id for receipt in answer.receipts]


def one(*, key: bytes = b"", value: bytes = b"v", properties: bytes = b"", count: int = 1) -> bytes:
    return encode_batch(
        partition_id=0,
        sent_at_ns=[17] * count,
        keys=[key] * count,
        values=[value] * count,
        properties=[properties] * count,
        producer_id=0,
        producer_epoch=0,
        sequence=0,
    )


async def test_frame_is_kept_with_its_message():
    calls = SchedulingCalls()
    packed = pack_properties({"kind": "reminder"})
    assert await calls.frame(value=b"later", properties=packed) == Scheduled("g1", "fsync")
    assert calls.messages.kept == [
        ScheduledMessageRecord(ID, NOW_MS + 1, "s", 17, b"later", packed)
    ]


async def test_message_over_the_limit_of_its_subject_is_refused_by_the_newest_route():
    """The known route may be out of date, and counts only while no metaserver answers."""
    calls = SchedulingCalls()
    calls.subjects.known = limited(1_024)
    await calls.frame(value=bytes(1_025))
    calls.subjects.newest = limited(2_048)
    with pytest.raises(MessageTooLargeError):
        await calls.frame(value=bytes(2_049), number=bytes(16))
    with pytest.raises(MessageTooLargeError, match=r"too large: 2049 bytes .* at most 2048"):
        await calls.post(bytes(2_049))
    calls.subjects.silent = True
    with pytest.raises(MessageTooLargeError):
        await calls.frame(value=bytes(1_025), number=bytes(16))
    assert len(calls.messages.kept) == 1


async def test_message_is_kept_for_the_subject_that_has_the_name_now():
    """While no metaserver answers it is kept for whichever has the name at its time."""
    calls = SchedulingCalls()
    calls.subjects.newest = structs.replace(limited(MESSAGE_BYTES_MAX), subject_id=7)
    await calls.frame()
    calls.subjects.silent = True
    await calls.frame()
    bound, unbound = calls.messages.kept
    assert isinstance(bound, ScheduledForSubject)
    assert bound.subject_id == 7
    assert type(unbound) is ScheduledMessageRecord


async def test_next_messages_are_listed_by_their_times():
    calls = SchedulingCalls()
    calls.messages.entries = [
        ScheduledEntry(ID, NOW_MS + 5, "s", 100, Place(0, 1), NOW_MS + 5),
        ScheduledEntry(ID, NOW_MS, "s", 100, Place(0, 1), NOW_MS),
    ]
    page = await calls.scheduling.list_soonest(None, {"subject": "s", "limit": "2"})
    assert [(each.deliver_at_ms - NOW_MS, each.due) for each in page.messages] == [
        (5, False),
        (0, True),
    ]
    assert (page.count, page.broker_group, page.messages[0].scheduled_id) == (2, "g1", ID.hex())
    for params in ({"limit": "0"}, {"limit": "1001"}, {"sbuject": "s"}):
        with pytest.raises(InvalidRequestError):
            await calls.scheduling.list_soonest(None, params)


async def test_frame_with_a_key_is_refused():
    calls = SchedulingCalls()
    with raises(Reason.DELIVER_AT_KEY):
        await calls.frame(key=b"k")
    assert calls.messages.kept == []


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        ({"at_ms": NOW_MS - LATE_MS_MAX - 1}, Reason.DELIVER_AT),
        ({"at_ms": NOW_MS + 367 * 86_400_000}, Reason.DELIVER_AT),
        ({"subject": "../etc"}, Reason.NAME_INVALID),
        ({"subject": "unknown"}, SubjectUnknownError),
        ({"number": b"short"}, InvalidRequestError),
        ({"count": 2}, InvalidRequestError),
        ({"payload": one() + b"more"}, InvalidRequestError),
        ({"payload": b"no batch"}, CorruptBatchError),
        ({"payload": one()[:-1] + b"x"}, CorruptBatchError),
        ({"value": bytes(1 << 20), "properties": b"x"}, MessageTooLargeError),
    ],
)
async def test_bad_frame_is_refused_and_nothing_is_kept(frame, error):
    calls = SchedulingCalls()
    with raises(error):
        await calls.frame(**frame)
    assert calls.messages.kept == []


async def test_frame_that_is_a_little_late_is_kept():
    """Its producer has checked the time before it tried."""
    calls = SchedulingCalls()
    await calls.frame(at_ms=NOW_MS - LATE_MS_MAX)
    assert len(calls.messages.kept) == 1


async def test_time_is_taken_by_either_calendar_when_one_is_not_believed():
    """A broker that began with a calendar of years ago, which was set right then, refused what all
    others take.
    """
    calls = SchedulingCalls()
    calls.calendar.ahead_ms = ahead_ms = 3 * 366 * 86_400_000
    await calls.frame(at_ms=NOW_MS + ahead_ms + 1)
    await calls.frame(at_ms=NOW_MS + 1)
    assert len(await calls.post(b"v", deliver_at=f"{NOW_MS + ahead_ms + 1}")) == 1
    assert len(await calls.post(b"v", deliver_at=f"{NOW_MS + 1}")) == 1
    for at_ms in (NOW_MS - LATE_MS_MAX - 1, NOW_MS + ahead_ms + 367 * 86_400_000):
        with raises(Reason.DELIVER_AT):
            await calls.frame(at_ms=at_ms, number=bytes(16))
        with raises(Reason.DELIVER_AT):
            await calls.post(b"v", deliver_at=f"{at_ms}")


async def test_broker_that_takes_no_messages_keeps_none():
    calls = SchedulingCalls()
    calls.read_only = True
    with pytest.raises(BrokerReadOnlyError):
        await calls.frame()


async def test_posted_body_is_kept_with_an_id_for_each_message():
    calls = SchedulingCalls()
    body = b'[{"value": "a", "properties": {"n": "1"}}, {"value": {"b": 2}}]'
    receipts = await calls.post(body, **{CONTENT_TYPE: JSON})
    assert receipts == [f"{number:032x}" for number in (1, 2)]
    assert [(each.value, each.deliver_at_ms) for each in calls.messages.kept] == [
        (b"a", NOW_MS + 1),
        (b'{"b":2}', NOW_MS + 1),
    ]


async def test_repeated_post_with_an_idempotency_key_has_the_same_ids():
    """Other messages, another subject, time and key have other ids."""
    calls = SchedulingCalls()
    first = await calls.post(b"v", **{IDEMPOTENCY_KEY: "k"})
    assert await calls.post(b"v", **{IDEMPOTENCY_KEY: "k"}) == first
    others = [
        await calls.post(b"w", **{IDEMPOTENCY_KEY: "k"}),
        await calls.post(b"v", **{IDEMPOTENCY_KEY: "l"}),
        await calls.post(b"v", subject="t", **{IDEMPOTENCY_KEY: "k"}),
        await calls.post(b"v", deliver_at=f"{NOW_MS + 2}", **{IDEMPOTENCY_KEY: "k"}),
    ]
    assert first not in others


async def test_same_key_for_two_subjects_keeps_a_message_for_each():
    """A receipt of one that only the other has would be an ack of a message that never comes."""
    calls = SchedulingCalls()
    first = await calls.post(b"v", **{IDEMPOTENCY_KEY: "k"})
    assert await calls.post(b"v", subject="t", **{IDEMPOTENCY_KEY: "k"}) != first


async def test_repeated_post_is_a_duplicate_when_its_time_has_passed():
    """A refusal says that nothing is kept, so its sender would send the message again for another
    time.
    """
    calls = SchedulingCalls()
    given = {"subject": "s", "deliver_at": f"{NOW_MS + 1}", IDEMPOTENCY_KEY: "k"}
    await calls.scheduling.post(b"v", given)
    calls.calendar.now_ms, calls.read_only = NOW_MS + 2 * LATE_MS_MAX, True
    answer = await calls.scheduling.post(b"v", given)
    assert [receipt.duplicate for receipt in answer.receipts] == [True]
    with raises(Reason.DELIVER_AT, match="has passed"):
        await calls.scheduling.post(b"w", given)


async def test_repeated_frame_is_kept_when_its_time_has_passed():
    calls = SchedulingCalls()
    first = await calls.frame()
    calls.calendar.now_ms, calls.read_only = NOW_MS + 2 * LATE_MS_MAX, True
    assert await calls.frame() == first
    with raises(Reason.DELIVER_AT):
        await calls.frame(number=bytes(16))


@pytest.mark.parametrize(
    ("params", "body", "error"),
    [
        ({"deliver_at": "soon"}, b"v", Reason.DELIVER_AT),
        ({"deliver_at": f"{NOW_MS}"}, b"v", Reason.DELIVER_AT),
        ({CONTENT_TYPE: JSON}, b'{"key": "k", "value": "v"}', Reason.DELIVER_AT_KEY),
        ({"key": "k"}, b"v", Reason.DELIVER_AT_KEY),
        ({KEY_HEADER: "k"}, b"v", Reason.DELIVER_AT_KEY),
        ({"delay": "1"}, b"v", InvalidRequestError),
        ({CONTENT_TYPE: JSON}, b"[]", InvalidRequestError),
        ({"subject": "unknown"}, b"v", SubjectUnknownError),
        ({IDEMPOTENCY_KEY: ""}, b"v", InvalidRequestError),
    ],
)
async def test_bad_post_is_refused_and_nothing_is_kept(params, body, error):
    calls = SchedulingCalls()
    with raises(error):
        await calls.post(body, **params)
    assert calls.messages.kept == []


async def test_post_without_a_time_is_refused():
    with raises(Reason.DELIVER_AT, match="missing"):
        await SchedulingCalls().scheduling.post(b"v", {"subject": "s"})


async def test_cancel_names_a_message():
    calls = SchedulingCalls()
    answer, _ = await calls.scheduling.cancel(CancelScheduled(ID), memoryview(b""))
    assert answer == ScheduledCanceled("canceled")
    posted = await calls.scheduling.post_cancel(None, {"id": ID.hex()})
    assert posted.outcome is CancelOutcome.CANCELED
    assert calls.messages.canceled == [ID, ID]
    for bad in ("", "zz", "00"):
        with pytest.raises(InvalidRequestError):
            await calls.scheduling.post_cancel(None, {"id": bad})


async def test_receipt_says_duplicate_when_a_post_is_repeated():
    """By its idempotency key; what has another key or time is a message of its own."""
    calls = SchedulingCalls()
    body = b'[{"value": "a"}, {"value": "b"}]'
    given = {"subject": "s", "deliver_at": f"{NOW_MS + 1}", CONTENT_TYPE: JSON}
    for params, duplicate in (
        (given, False),
        (given, False),
        (given | {IDEMPOTENCY_KEY: "k"}, False),
        (given | {IDEMPOTENCY_KEY: "k"}, True),
        (given | {IDEMPOTENCY_KEY: "k", "deliver_at": f"{NOW_MS + 2}"}, False),
    ):
        answer = await calls.scheduling.post(body, params)
        assert [each.duplicate for each in answer.receipts] == [duplicate] * 2


async def test_list_marks_messages_that_will_be_dropped():
    """Of a deleted subject, or over the limit that its subject has now; nothing is said while no
    metaserver answers.
    """
    calls = SchedulingCalls()
    calls.subjects.newest = limited(1_024)
    calls.subjects.deleted = {1}
    kept = [("s", 1, 10), ("s", 2, 1_024), ("s", 2, 1_025), ("unknown", 0, 10)]
    for number, (subject, subject_id, size) in enumerate(kept):
        waits = ScheduledMessageRecord(
            bytes([number]), NOW_MS + 1, subject, 17, bytes(size - 3), b"123"
        )
        calls.messages.entries.append(
            ScheduledEntry(
                waits.scheduled_id,
                waits.deliver_at_ms,
                subject,
                waits.size,
                Place(0, 0),
                waits.deliver_at_ms,
                subject_id=subject_id,
            )
        )
    listed = await calls.scheduling.list_soonest(None, {})
    deleted, fits, large, unknown = [each.drop for each in listed.messages]
    assert (deleted, fits, unknown) == ("its subject is deleted", "", "")
    assert "too large: 1025 bytes" in large
    assert sorted(calls.subjects.asked) == [("s", 1), ("s", 2), ("unknown", 0)]
    calls.subjects.silent = True
    assert [each.drop for each in (await calls.scheduling.list_soonest(None, {})).messages][2] == ""
