"""A consumer asks the cluster about a broker that it does not reach, tells the metaserver, and
tries the broker again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from keylane.consumer.group.reachability import BrokerReachability
from keylane.protocol.errors import FencedError, KeylaneError, NotSentError
from keylane.protocol.frames import ListParked, Request

TTL_MS = 20_000
ADDRESS = "127.0.0.1:8000"


def _client(since_ms: int | None) -> Any:
    """A partition of the broker without a connection since then; None: it has one."""
    failures = SimpleNamespace(no_connection_since_ms=since_ms)
    tenure = SimpleNamespace(is_acquired=since_ms is None)
    return SimpleNamespace(
        calls=SimpleNamespace(broker_group="g0", failures=failures),
        state=SimpleNamespace(tenure=tenure),
    )


class OneBroker:
    """Membership, connections and clock of a consumer with one broker group, "g0"."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.session = "a" * 16
        self.member = SimpleNamespace(name="consumer", group="g")
        self.address: str | None = ADDRESS
        self.answer: KeylaneError = NotSentError("no way")
        self.unanswered: KeylaneError | None = None
        self.nudges = 0
        self.calls: list[Request] = []
        self.meanwhile: Callable[[], None] = lambda: None
        """What happens while the broker is asked."""
        self.places = BrokerReachability(
            cast(Any, self), cast(Any, self), cast(Any, self), ttl_ms=TTL_MS
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
        self.meanwhile()
        raise self.answer

    async def look(self, *, after_ms: int, failing: bool) -> tuple[str, ...]:
        """One look at the consumer's partition there, which fails, or which others have; what is
        told then.
        """
        self.now_ms += after_ms
        client = _client(0)
        self.places.check([cast(Any, client)] if failing else [])
        await asyncio.sleep(0.01)
        return self.places.unreached


async def test_broker_is_told_until_it_answers() -> None:
    consumer = OneBroker()
    assert await consumer.look(after_ms=TTL_MS - 1, failing=True) == ()
    assert await consumer.look(after_ms=1, failing=True) == ("g0",)
    assert consumer.nudges == 1
    assert [type(call) for call in consumer.calls] == [ListParked]
    assert await consumer.look(after_ms=TTL_MS, failing=False) == ("g0",)
    assert [type(call) for call in consumer.calls] == [ListParked] * 2
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
    assert consumer.calls == []
    assert await consumer.look(after_ms=1, failing=True) == ("g0",)
    consumer.calls.clear()
    consumer.address = None  # it went down as well
    assert await consumer.look(after_ms=TTL_MS, failing=False) == ()
    assert consumer.calls == []


async def test_broker_is_asked_about_again_when_no_metaserver_answers() -> None:
    consumer = OneBroker()
    consumer.unanswered = NotSentError("no metaserver")
    assert await consumer.look(after_ms=TTL_MS, failing=True) == ()
    consumer.unanswered = None
    assert await consumer.look(after_ms=0, failing=True) == ("g0",)


async def test_broker_is_not_told_when_it_answers_before_its_partition_has_tried_again() -> None:
    """A broker that was restarted: the cluster hears of it while the partitions still pause after
    their last try.
    """
    consumer = OneBroker()
    consumer.answer = FencedError()
    assert await consumer.look(after_ms=TTL_MS, failing=True) == ()
    consumer.answer = NotSentError("no way")
    assert await consumer.look(after_ms=TTL_MS - 1, failing=True) == ()
    assert await consumer.look(after_ms=1, failing=True) == ("g0",)


def reaches(consumer: OneBroker) -> None:
    """A partition of the consumer gets at the broker."""
    client = _client(None)
    consumer.places.check([cast(Any, client)])


async def test_broker_is_not_told_when_a_partition_gets_there_while_it_is_asked() -> None:
    consumer = OneBroker()
    consumer.meanwhile = lambda: reaches(consumer)
    assert await consumer.look(after_ms=TTL_MS, failing=True) == ()
    assert consumer.nudges == 0


async def test_log_says_it_when_a_partition_gets_at_a_broker_that_was_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    consumer = OneBroker()
    assert await consumer.look(after_ms=TTL_MS, failing=True) == ("g0",)
    caplog.clear()
    reaches(consumer)
    assert caplog.messages == ["consumer accepts partitions of broker group g0 again"]
    assert consumer.places.unreached == ()


async def test_log_says_seldom_that_no_metaserver_answers(caplog: pytest.LogCaptureFixture) -> None:
    """It asks at each look, which is each second."""
    consumer = OneBroker()
    consumer.unanswered = NotSentError("no metaserver")
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            await consumer.look(after_ms=TTL_MS, failing=True)
    about = "consumer cannot look up brokers that it does not reach: no metaserver"
    assert caplog.messages[0] == about
    assert all(line.startswith(about) for line in caplog.messages)
    assert len(caplog.messages) < 5


async def test_log_does_not_say_that_partitions_are_taken_when_the_broker_went_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    consumer = OneBroker()
    await consumer.look(after_ms=TTL_MS, failing=True)
    caplog.clear()
    consumer.address = None
    assert await consumer.look(after_ms=TTL_MS, failing=False) == ()
    (said,) = caplog.messages
    assert said.startswith("consumer waits for broker group g0")
