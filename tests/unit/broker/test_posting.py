"""Posted messages and scripted brokers: which partition is asked, when again, and what the caller
is told.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from keylane.broker.posting import MessagePosting
from keylane.protocol.batch import check_batch
from keylane.protocol.control import PartlyPosted, Posted
from keylane.protocol.errors import (
    BrokerReadOnlyError,
    Fate,
    InvalidRequestError,
    KeylaneError,
    MessageTooLargeError,
    NotSentError,
    OutcomeUnknownError,
    OverloadedError,
    PartitionUnknownError,
    Reason,
    SequenceGapError,
    StaleRouteError,
    SubjectDeletedError,
)
from keylane.protocol.frames import Append, Appended
from keylane.protocol.http.posted import ASKED, PostedMessage
from keylane.protocol.routing import OrderStrategy, Partition, PartitionState, Route
from keylane.rpc.server import Reply
from sim.machines.clock import ManualClock
from support.raising import raises

OPEN, SEALED = PartitionState.OPEN, PartitionState.SEALED
LOW, HIGH = "k0", "k1"
"""Keys of the lower and of the upper half of the logical partitions."""


def partition(number: int, start: int, end: int, state: PartitionState = OPEN) -> Partition:
    return Partition(
        partition_id=number,
        name=f"s.p{number}",
        queue=number,
        range_start=start,
        range_end=end,
        broker_group=f"g{number}",
        state=state,
        address=f"127.0.0.1:{number}",
    )


def route(version: int, *partitions: Partition) -> Route:
    return Route(
        subject="s", version=version, order_strategy=OrderStrategy.STRICT, partitions=partitions
    )


HALVES = route(1, partition(1, 0, 512), partition(2, 512, 1024))
SPLIT = route(2, partition(1, 0, 512, SEALED), partition(2, 512, 1024), partition(3, 0, 512))


class ScriptedPeers:
    """Answers with a script by partition: an error, or an Appended; the last entry stays."""

    def __init__(self, *routes: Route, clock: ManualClock) -> None:
        self._routes = list(routes)
        self._clock = clock
        self.scripts: dict[int, list[Any]] = {}
        self.calls: list[tuple[int, int]] = []
        """Partition and count of each batch."""
        self.sequences: dict[int, int] = {}
        """Sequence of the last batch, by partition."""
        self.deleted: set[int] = set()
        """Ids of deleted subjects."""
        self.asked: list[tuple[int, int]] = []
        """Known version and wait of each question for a route."""

    async def route_to_send(self, _subject: str) -> Route:
        return self._routes[0]

    async def route_by_id(self, _subject: str, _subject_id: int) -> Route:
        return self._routes[0]

    async def fetch_route(
        self, subject: str, *, known_version: int = -1, wait_ms: int = 0, subject_id: int = 0
    ) -> Route:
        if subject_id in self.deleted:
            raise SubjectDeletedError(subject=subject)
        self.asked.append((known_version, wait_ms))
        if len(self._routes) > 1:
            self._routes.pop(0)
        else:
            self._clock.advance(wait_ms)
        return self._routes[0]

    def is_local(self, partition: Partition) -> bool:
        return partition.broker_group == "g1"

    async def call(self, partition: Partition, request: Append, payload: bytes) -> Any:
        header = check_batch(payload)
        assert header.partition_id == request.partition_id == partition.partition_id
        self.calls.append((partition.partition_id, header.count))
        self.sequences[partition.partition_id] = header.sequence
        script = self.scripts.get(partition.partition_id, [Appended(0, "fsync", False)])
        answer = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(answer, KeylaneError):
            raise answer
        return answer, b""


Post = Callable[..., Any]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def posting(peers: ScriptedPeers, clock: ManualClock) -> Post:
    posting = MessagePosting(peers, clock=clock, rng=random.Random(1))  # type: ignore[arg-type]

    async def post(*keys: str, idempotency_key: str | None = None) -> Posted | Reply:
        body = json.dumps([{"key": key or None, "value": "v"} for key in keys]).encode()
        params = {"subject": "s", "Content-Type": "application/json"}
        if idempotency_key is not None:
            params["Idempotency-Key"] = idempotency_key
        return await posting.post(body, params)

    return post


async def test_messages_of_a_partition_are_one_batch(clock):
    peers = ScriptedPeers(HALVES, clock=clock)
    peers.scripts[2] = [Appended(40, "fsync", False)]
    answer = await posting(peers, clock)(LOW, HIGH, LOW, HIGH)
    assert sorted(peers.calls) == [(1, 2), (2, 2)]
    assert [(each.partition_id, each.offset) for each in answer.receipts] == [
        (1, 0),
        (2, 40),
        (1, 1),
        (2, 41),
    ]


async def test_message_over_the_limit_is_refused_by_the_newest_route(clock):
    """A route that is out of date refuses nothing; the newest refuses all, before anything is
    sent.
    """
    low = structs.replace(HALVES, message_bytes_max=2)
    peers = ScriptedPeers(low, HALVES, clock=clock)
    assert len((await posting(peers, clock)(LOW, HIGH)).receipts) == 2
    peers = ScriptedPeers(low, low, clock=clock)
    with pytest.raises(
        MessageTooLargeError, match="message 0: the message is too large: 3 bytes"
    ) as raised:
        await posting(peers, clock)(LOW, HIGH)
    assert raised.value.limit_bytes == 2
    assert peers.calls == []


async def test_message_is_named_when_its_broker_knows_a_lower_limit_first(clock):
    """The broker names no message of the request; the newest route, asked then, has the limit."""
    peers = ScriptedPeers(HALVES, structs.replace(HALVES, message_bytes_max=2), clock=clock)
    peers.scripts = {number: [MessageTooLargeError(limit_bytes=2)] for number in (1, 2)}
    with pytest.raises(MessageTooLargeError, match="message 0: the message is too large: 3 bytes"):
        await posting(peers, clock)(LOW, HIGH)
    assert sorted(peers.calls) == [(1, 1), (2, 1)]


async def test_message_that_may_be_stored_is_not_sent_again_beside_one_over_the_limit(clock):
    peers = ScriptedPeers(HALVES, clock=clock)
    peers.scripts = {1: [MessageTooLargeError(limit_bytes=2)], 2: [OutcomeUnknownError()]}
    with pytest.raises(OutcomeUnknownError):
        await posting(peers, clock)(LOW, HIGH)
    assert sorted(peers.calls) == [(1, 1), (2, 1)]


async def test_repeat_is_answered_when_its_messages_are_over_a_lower_limit(clock):
    """With an idempotency key the sealed partitions are asked first: what they stored before the
    switch stays stored.
    """
    halves = (partition(1, 0, 1024, SEALED), partition(2, 0, 1024))
    low = structs.replace(route(2, *halves), message_bytes_max=2)
    peers = ScriptedPeers(low, low, clock=clock)
    peers.scripts[1] = [Appended(7, "fsync", True)]
    answer = await posting(peers, clock)(LOW, idempotency_key="again")
    assert [each.offset for each in answer.receipts] == [7]
    peers.scripts[1] = [SequenceGapError()]
    with pytest.raises(MessageTooLargeError):
        await posting(peers, clock)(LOW, idempotency_key="new")


async def test_newer_route_is_waited_for_when_the_partition_is_sealed(clock):
    peers = ScriptedPeers(HALVES, SPLIT, clock=clock)
    peers.scripts[1] = [StaleRouteError()]
    answer = await posting(peers, clock)(LOW, HIGH)
    assert sorted(peers.calls) == [(1, 1), (2, 1), (3, 1)], "what is stored is not sent again"
    assert peers.asked == [(1, 10_000)]
    assert [each.partition_id for each in answer.receipts] == [3, 2]


@pytest.mark.parametrize("error", [StaleRouteError(), PartitionUnknownError()])
async def test_request_fails_when_no_newer_route_comes(clock, error):
    peers = ScriptedPeers(HALVES, clock=clock)
    peers.scripts[1] = [error]
    with pytest.raises(type(error)):
        await posting(peers, clock)(LOW)
    assert clock.boot_ms() >= 10_000


async def test_silent_broker_is_asked_again_only_by_another_route(clock):
    """It may have moved; a route that is the same ends the request at once."""
    peers = ScriptedPeers(HALVES, clock=clock)
    peers.scripts[1] = [NotSentError("silent")]
    before = clock.boot_ms()
    with pytest.raises(NotSentError):
        await posting(peers, clock)(LOW)
    assert (peers.asked, clock.boot_ms()) == ([(-1, 0)], before)
    peers = ScriptedPeers(HALVES, SPLIT, clock=clock)
    peers.scripts[1] = [NotSentError("silent")]
    answer = await posting(peers, clock)(LOW)
    assert answer.receipts[0].partition_id == 3


@pytest.mark.parametrize(
    ("error", "status", "fate"),
    [
        (OutcomeUnknownError(), 504, Fate.UNKNOWN),
        (NotSentError(), 503, Fate.UNKNOWN),
        (BrokerReadOnlyError(), 503, Fate.UNKNOWN),
        (InvalidRequestError(Reason.IDEMPOTENCY_KEY_REUSED), 422, Fate.UNKNOWN),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_request_that_is_stored_in_part_says_which_part(clock, error, status, fate):
    peers = ScriptedPeers(HALVES, clock=clock)
    peers.scripts[2] = [error]
    answer = await posting(peers, clock)(LOW, HIGH)
    assert isinstance(answer, Reply)
    assert answer.status == status
    assert isinstance(answer.body, PartlyPosted)
    assert (answer.body.name, answer.body.fate) == ("DeliveryError", fate)
    assert [receipt and receipt.partition_id for receipt in answer.body.receipts] == [1, None]
    assert len(peers.calls) == 2, "an unknown outcome is not tried again"


async def test_unknown_outcome_is_told_before_a_refusal(clock):
    """The caller must not think that nothing was done."""
    peers = ScriptedPeers(HALVES, clock=clock)
    peers.scripts[1], peers.scripts[2] = [OverloadedError()], [OutcomeUnknownError()]
    with pytest.raises(OutcomeUnknownError):
        await posting(peers, clock)(LOW, HIGH)


async def test_sealed_partitions_are_asked_first_with_an_idempotency_key(clock):
    """What a sealed partition has is not stored again; it is asked for its whole range, as it was
    sent before.
    """
    peers = ScriptedPeers(SPLIT, clock=clock)
    peers.scripts[1] = [Appended(7, "fsync", True)]
    answer = await posting(peers, clock)(LOW, HIGH, LOW, idempotency_key="id")
    assert peers.calls == [(1, 2), (2, 1)]
    assert [(each.partition_id, each.offset, each.duplicate) for each in answer.receipts] == [
        (1, 7, True),
        (2, 0, False),
        (1, 8, True),
    ]
    peers = ScriptedPeers(SPLIT, clock=clock)
    peers.scripts[1] = [SequenceGapError()]
    answer = await posting(peers, clock)(LOW, idempotency_key="id")
    assert peers.sequences == {1: ASKED, 3: 0}
    assert peers.calls == [(1, 1), (3, 1)]
    assert answer.receipts[0].partition_id == 3


async def test_request_fails_while_a_sealed_partition_cannot_be_asked(clock):
    """It may have what the key's first request stored."""
    peers = ScriptedPeers(SPLIT, clock=clock)
    peers.scripts[1] = [NotSentError("silent")]
    with pytest.raises(NotSentError):
        await posting(peers, clock)(LOW, HIGH, idempotency_key="id")
    assert peers.calls == [(1, 1)]


async def test_messages_without_a_key_go_where_they_are_stored_soonest(clock):
    """To this broker, else to one that is available; with an idempotency key always to the same
    partition.
    """
    peers = ScriptedPeers(HALVES, clock=clock)
    for _ in range(10):
        await posting(peers, clock)("", "")
    assert peers.calls == [(1, 2)] * 10
    away = route(1, partition(2, 0, 512), partition(3, 512, 1024))
    peers = ScriptedPeers(away, clock=clock)
    for _ in range(10):
        await posting(peers, clock)("", idempotency_key="id")
    assert len(set(peers.calls)) == 1


async def test_subject_without_an_open_partition_is_told(clock):
    peers = ScriptedPeers(route(1, partition(1, 0, 1024, SEALED)), clock=clock)
    for key in (LOW, ""):
        with raises(Reason.NO_PARTITION):
            await posting(peers, clock)(key)


async def test_fault_of_ours_is_no_refusal(clock):
    peers = ScriptedPeers(HALVES, clock=clock)
    peers.call = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        await posting(peers, clock)(LOW)


async def test_due_message_is_stored_in_its_own_subject_only(clock):
    """A route that is out of date leads to partitions that are gone; the newest says that the
    subject was deleted.
    """
    own = structs.replace(HALVES, subject_id=7)
    peers = ScriptedPeers(own, clock=clock)
    peers.scripts[1] = [PartitionUnknownError(), Appended(0, "fsync", False)]
    posting = MessagePosting(peers, clock=clock, rng=random.Random(1))  # type: ignore[arg-type]

    async def store() -> None:
        message = PostedMessage(b"", b"v", b"")
        await posting.store(
            "s", [message], sent_at_ns=[1], key="d", logical_partition=3, subject_id=7, tried=True
        )

    peers.deleted = {7}
    with pytest.raises(SubjectDeletedError):
        await store()
    peers.deleted.clear()
    await store()
    assert peers.calls == [(1, 1), (1, 1)]
    assert await posting.choose_logical_partition("s", 7) in range(1024)


async def test_due_message_waits_for_no_sealed_partition_when_no_earlier_try_may_have_stored_it(
    clock,
):
    """Its broker may be away for hours, as one that was evacuated; a repeat has to ask it."""
    peers = ScriptedPeers(SPLIT, clock=clock)
    peers.scripts[1] = [NotSentError("silent")]
    posting = MessagePosting(peers, clock=clock, rng=random.Random(1))  # type: ignore[arg-type]

    async def store(*, tried: bool) -> None:
        message = PostedMessage(b"", b"v", b"")
        await posting.store(
            "s", [message], sent_at_ns=[1], key="d", logical_partition=3, subject_id=0, tried=tried
        )

    await store(tried=False)
    assert peers.calls == [(3, 1)]
    with pytest.raises(NotSentError):
        await store(tried=True)
    assert peers.calls == [(3, 1), (1, 1)]
