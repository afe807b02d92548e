"""A consumer asks the cluster about a broker that it does not reach, tells the metaserver, and tries the broker again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from keylane.consumer.places import BrokerPlaces
from keylane.protocol.errors import FencedError, KeylaneError, NotSentError
from keylane.protocol.frames import ListParked, Request

TTL_MS = 20_000
ADDRESS = "127.0.0.1:8000"


class OneBroker:
    """Membership, connections and clock of a consumer with one broker group, "g0"."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.session = "a" * 16
        self.address: str | None = ADDRESS
        self.answer: KeylaneError = NotSentError("no way")
        self.unanswered: KeylaneError | None = None
        self.nudges = 0
        self.calls: list[Request] = []
        self.places = BrokerPlaces(
            "consumer",
            "g",
            membership=cast(Any, self),
            connections=cast(Any, self),
            clock=cast(Any, self),
            ttl_ms=TTL_MS,
        )

    def boot_ms(self) -> int:
        return self.now_ms

    def nudge(self) -> None:
        self.nudges += 1

    async def partitions_by_broker(self) -> dict[str, Any]:
        if self.unanswered is not None:
            raise self.unanswered
        return {"g0": SimpleNamespace(partition_id=1, address=self.address)}

    def broker_at(self, address: str) -> Any:
        assert address == ADDRESS
        return self

    async def call(self, request: Request) -> None:
        self.calls.append(request)
        raise self.answer

    async def look(self, *, after_ms: int, failing: bool) -> tuple[str, ...]:
        """One look at the consumer's partition there, which fails, or which others have; what is told then."""
        self.now_ms += after_ms
        client = SimpleNamespace(broker_group="g0", no_connection_since_ms=0, has_connection=False)
        self.places.look([cast(Any, client)] if failing else [])
        await asyncio.sleep(0.01)
        return self.places.unreached


async def test_broker_is_told_until_it_answers() -> None:
    consumer = OneBroker()
    assert await consumer.look(after_ms=TTL_MS - 1, failing=True) == ()
    assert await consumer.look(after_ms=1, failing=True) == ("g0",)
    assert (consumer.nudges, consumer.calls) == (1, []), "its partition tries by itself"
    assert await consumer.look(after_ms=TTL_MS, failing=False) == ("g0",)
    assert [type(call) for call in consumer.calls] == [ListParked]
    consumer.answer = FencedError()
    assert await consumer.look(after_ms=TTL_MS - 1, failing=False) == ("g0",)
    assert await consumer.look(after_ms=1, failing=False) == ()
    assert consumer.nudges == 2


async def test_broker_is_not_told_when_the_cluster_does_not_hear_of_it() -> None:
    consumer = OneBroker()
    consumer.address = None
    assert await consumer.look(after_ms=TTL_MS, failing=True) == ()
    consumer.address = ADDRESS
    assert await consumer.look(after_ms=TTL_MS - 1, failing=True) == ()
    assert await consumer.look(after_ms=1, failing=True) == ("g0",)
    consumer.address = None  # it went down as well
    assert await consumer.look(after_ms=TTL_MS, failing=False) == ()
    assert consumer.calls == []


async def test_broker_is_asked_about_again_when_no_metaserver_answers() -> None:
    consumer = OneBroker()
    consumer.unanswered = NotSentError("no metaserver")
    assert await consumer.look(after_ms=TTL_MS, failing=True) == ()
    consumer.unanswered = None
    assert await consumer.look(after_ms=0, failing=True) == ("g0",)
