"""Heartbeats of several sessions in one call: renewed together, answered when one of them has
news.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from keylane import Consumer, Message
from keylane.consumer.settings import ConsumerSettings
from keylane.protocol import endpoints
from keylane.protocol.control import (
    CreateSubject,
    Heartbeat,
    Join,
    Leave,
)
from keylane.protocol.http.at_once import HeartbeatAnswers, Heartbeats
from keylane.protocol.http.endpoint import Endpoint
from keylane.rpc.client import MetaClient
from support.brokers.hosting_broker import MetaAndBroker, running_house
from support.cluster import Cluster, eventually

SESSIONS = tuple(letter * 32 for letter in "abc")
WAIT_MS = 20_000


@pytest.fixture
async def house(tmp_path: Path, database: dict[str, str]) -> AsyncIterator[MetaAndBroker]:
    async with running_house(tmp_path, broker_ttl_ms=600_000, **database) as running:
        await running[0].create_subject(CreateSubject(subject="s", partitions=4))
        yield running


async def joined(house: MetaAndBroker) -> dict[str, int]:
    """Session → the version of its grants; each of a group of its own."""
    versions = {}
    for session in SESSIONS:
        ask = Join(subject="s", group=f"g{session[0]}", session=session, client="c", ttl_ms=60_000)
        grants = (await house[0].call(endpoints.JOIN, ask)).grants
        assert grants is not None
        versions[session] = grants.version
    return versions


async def answers(
    house: MetaAndBroker, versions: dict[str, int], wait_ms: int = WAIT_MS
) -> HeartbeatAnswers:
    asks = tuple(
        Heartbeat(session=session, known_version=version, wait_ms=wait_ms)
        for session, version in versions.items()
    )
    return await house[0].call(
        endpoints.HEARTBEATS, Heartbeats(heartbeats=asks), wait_ms=wait_ms, timeout_ms=9_000
    )


async def test_sessions_without_news_are_renewed_and_not_named(house: MetaAndBroker):
    """The grants are those that the joins brought."""
    versions = await joined(house)
    assert (await answers(house, versions, wait_ms=50)).news == ()


async def test_news_of_one_session_end_the_wait_of_all(house: MetaAndBroker):
    """Another member of its group takes a share; the other sessions go on."""
    versions = await joined(house)
    waiting = asyncio.create_task(answers(house, versions))
    await asyncio.sleep(0.2)
    second = Join(subject="s", group="gb", session="d" * 32, client="c", ttl_ms=60_000)
    async with asyncio.timeout(15):
        await house[0].call(endpoints.JOIN, second)
        (news,) = (await waiting).news
    assert news.session == SESSIONS[1]
    assert news.grants is not None
    assert news.grants.version > versions[news.session]
    assert len(news.grants.grants) == 2


async def test_session_with_older_grants_ends_the_wait_of_all(house: MetaAndBroker):
    versions = await joined(house)
    versions[SESSIONS[2]] -= 1
    async with asyncio.timeout(15):
        (news,) = (await answers(house, versions)).news
    assert (news.session, news.grants is not None) == (SESSIONS[2], True)


async def test_session_that_has_ended_is_told_and_others_are_renewed(house: MetaAndBroker):
    versions = await joined(house)
    await house[0].call(endpoints.LEAVE, Leave(session=SESSIONS[0]))
    async with asyncio.timeout(15):
        (news,) = (await answers(house, versions)).news
    assert news.session == SESSIONS[0]
    assert news.error is not None
    assert news.error.name == "SessionUnknownError"


async def test_consumers_of_a_program_keep_their_sessions_by_shared_calls(
    shared_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """They keep all partitions for longer than the ttl, and give them up to a consumer that
    comes.
    """
    await shared_cluster.create("shared-calls", partitions=4)
    asked: list[int] = []
    note_shared_calls(monkeypatch, asked)

    async def handle(_message: Message) -> None: ...

    def member(number: int) -> Consumer[bytes]:
        return Consumer(
            shared_cluster.meta,
            subject="shared-calls",
            group=f"g{number}",
            handler=handle,
            settings=ConsumerSettings(ttl_ms=2_000),
        )

    async with AsyncExitStack() as stack:
        consumers = [await stack.enter_async_context(member(number)) for number in range(5)]
        granted = [partitions_of(consumer) for consumer in consumers]
        await asyncio.sleep(3)
        await eventually(lambda: 5 in asked)
        assert [partitions_of(consumer) for consumer in consumers] == granted
        assert all(len(each) == 4 for each in granted)
        other = await stack.enter_async_context(member(0))
        await eventually(lambda: len(other.assignment) == len(consumers[0].assignment) == 2)
        assert len(consumers[1].assignment) == 4


def partitions_of(consumer: Consumer[bytes]) -> list[int]:
    return [assigned.partition_id for assigned in consumer.assignment]


def note_shared_calls(monkeypatch: pytest.MonkeyPatch, asked: list[int]) -> None:
    """Note how many heartbeats each shared call of this process has."""
    real = MetaClient.call

    async def noted(
        self: MetaClient, endpoint: Endpoint[Any], body: object = None, **more: Any
    ) -> Any:
        if isinstance(body, Heartbeats):
            asked.append(len(body.heartbeats))
        return await real(self, endpoint, body, **more)

    monkeypatch.setattr(MetaClient, "call", noted)
