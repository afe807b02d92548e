"""The failure policy of a group, stored at the metaserver, reaches consumers while they run."""

from __future__ import annotations

import asyncio
import logging

import pytest

from keylane import Admin, Consumer, ConsumerSettings, FailurePolicy, Message, Producer
from keylane.errors import GroupUnknownError, InvalidRequestError, Reason
from keylane.protocol.backoff import Backoff
from support.cluster import Cluster, eventually
from support.raising import raises

FAST = Backoff(first_ms=5, max_ms=5)


class FailingForBad:
    """Fails for the key `bad`; remembers what it handled, and its tries of `bad`."""

    def __init__(self) -> None:
        self.handled: list[bytes] = []
        self.attempts: list[int] = []

    async def __call__(self, message: Message) -> None:
        if message.key == b"bad":
            self.attempts.append(message.attempt)
            raise ValueError("cannot take it")
        self.handled.append(message.value)


async def parked_keys(admin: Admin, subject: str) -> list[bytes | None]:
    return [view.key async for view in admin.parked(subject, "g")]


async def once_parked(admin: Admin, subject: str) -> list[bytes | None]:
    """The keys that are parked, as soon as there are any."""
    async with asyncio.timeout(20):
        while not (keys := await parked_keys(admin, subject)):
            await asyncio.sleep(0.01)
    return keys


async def test_stored_policy_is_followed_by_running_consumers(
    shared_cluster: Cluster, caplog: pytest.LogCaptureFixture
):
    """A key that blocks is parked once the operator says so; a policy that is forgotten leaves the
    code's.
    """
    await shared_cluster.create("policy-live", partitions=1)
    handler = FailingForBad()
    settings = ConsumerSettings(handler_backoff=FAST)
    consumer = Consumer(
        shared_cluster.meta, subject="policy-live", group="g", handler=handler, settings=settings
    )
    async with Producer(shared_cluster.meta) as producer, Admin(shared_cluster.meta) as admin:
        with pytest.raises(GroupUnknownError):
            await admin.set_group("policy-live", "g", on_failure="park")
        with caplog.at_level(logging.INFO, "keylane.consumer"):
            async with consumer:
                await producer.send("policy-live", b"poison", key=b"bad")
                await eventually(lambda: len(handler.attempts) > 20)
                assert await parked_keys(admin, "policy-live") == []
                stored = await admin.set_group(
                    *("policy-live", "g"),
                    on_failure="park",
                    tries_max=5,
                    backoff_first_ms=1,
                    backoff_max_ms=2,
                )
                assert (stored.policy.on_failure, stored.policy.tries_max) == ("park", 5)
                assert stored == await admin.group_settings("policy-live", "g")
                await producer.send("policy-live", b"good", key=b"good")
                await eventually(lambda: handler.handled == [b"good"])
                assert await once_parked(admin, "policy-live") == [b"bad"]
                described = await admin.describe_group("policy-live", "g")
                assert described.settings == stored
                forgotten = await admin.set_group("policy-live", "g", forget=True)
                assert forgotten.policy.on_failure is None
                await eventually(lambda: "its own code applies" in caplog.text)
    assert "follows the group's stored policy, on_failure=park, tries_max=5" in caplog.text


async def test_stored_policy_counts_more_than_the_code(
    shared_cluster: Cluster, caplog: pytest.LogCaptureFixture
):
    """A consumer whose code says another one is not refused: it follows the stored one, and its log
    names both.
    """
    await shared_cluster.create("policy-code", partitions=1)
    handler = FailingForBad()
    async with Admin(shared_cluster.meta) as admin, Producer(shared_cluster.meta) as producer:
        await admin.create_group("policy-code", "g")
        await admin.set_group("policy-code", "g", on_failure=FailurePolicy.PARK, tries_max=2)
        consumer = Consumer(
            shared_cluster.meta,
            subject="policy-code",
            group="g",
            handler=handler,
            on_failure="dead",
            settings=ConsumerSettings(handler_backoff=FAST),
        )
        async with consumer:
            await producer.send("policy-code", b"poison", key=b"bad")
            await producer.send("policy-code", b"later", key=b"bad")
            await producer.send("policy-code", b"good", key=b"good")
            await eventually(lambda: handler.handled == [b"good"])
            assert await once_parked(admin, "policy-code") == [b"bad"]
    assert handler.attempts == [1, 2]
    assert "follows the group's stored policy, on_failure=park, tries_max=2" in caplog.text
    assert "instead of its own code, on_failure=dead" in caplog.text


async def test_policy_that_cannot_work_is_refused(shared_cluster: Cluster):
    """Half a back-off, a back-off that falls, a word that is no policy: nothing is stored."""
    await shared_cluster.create("policy-refused", partitions=1)
    async with Admin(shared_cluster.meta) as admin:
        before = await admin.create_group("policy-refused", "g")
        with raises(Reason.POLICY_INVALID, match="go together"):
            await admin.set_group("policy-refused", "g", backoff_first_ms=5)
        with raises(Reason.POLICY_INVALID, match=r"backoff_first_ms \(5\)"):
            await admin.set_group("policy-refused", "g", backoff_first_ms=5, backoff_max_ms=4)
        with pytest.raises(InvalidRequestError):
            await admin.set_group("policy-refused", "g", on_failure="sometimes")
        with pytest.raises(InvalidRequestError):
            await admin.set_group("policy-refused", "g", tries_max=0)
        assert await admin.group_settings("policy-refused", "g") == before
