"""Creations that take longer than a call waits: they go on, once, and repeats wait for them."""

from __future__ import annotations

import asyncio

import pytest

from keylane import Admin
from keylane.broker.control import BrokerControl
from keylane.errors import Reason
from keylane.metaserver.catalogue import service
from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject
from keylane.protocol.errors import Fate, OverloadedError
from keylane.rpc import client
from keylane.testing import VirtualCluster, run
from support.raising import raises

COUNT = 100


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ids that brokers were asked to host, each for a second, eight at a time."""
    ids: list[int] = []
    real = BrokerControl.host

    async def host(self, body, params):
        ids.append(body.partition.partition_id)
        await asyncio.sleep(1)
        return await real(self, body, params)

    monkeypatch.setattr(BrokerControl, "host", host)
    monkeypatch.setattr(service, "HOSTED_AT_ONCE_MAX", 8)
    return ids


def test_creation_is_waited_for_when_it_takes_longer_than_a_call(hosted: list[int]):
    """Each partition is hosted once, however many wait."""

    async def story(cluster: VirtualCluster) -> None:
        async with Admin(cluster.address) as admin, Admin(cluster.address) as other:
            first, second = await asyncio.gather(
                *(each.create_subject("big", partitions=COUNT) for each in (admin, other))
            )
            assert first == second
            assert len(first.route.partitions) == COUNT
            assert await admin.create_subject("big", partitions=COUNT) == first

    run(story)
    assert sorted(hosted) == sorted(set(hosted))
    assert len(hosted) == COUNT


def test_call_says_how_far_a_creation_is_when_it_has_not_ended(hosted: list[int]):
    """Its fate is not known as done or not done, and it goes on without the caller."""

    async def story(cluster: VirtualCluster) -> None:
        async with Admin(cluster.address) as admin:
            ask = CreateSubject(subject="big", partitions=COUNT)
            with raises(Reason.CREATION_UNFINISHED, match="'big' is being created") as unfinished:
                await admin._metaserver_client.call(
                    endpoints.CREATE_SUBJECT, ask, timeout_ms=15_000
                )
            error = unfinished.value
            assert error.fate is Fate.UNKNOWN
            assert error.partitions == COUNT
            assert 0 < (error.partitions_hosted or 0) < COUNT
            await asyncio.sleep(30)
            assert len((await admin.describe_subject("big")).partitions) == COUNT

    run(story)
    assert len(hosted) == COUNT


def test_creation_is_not_waited_for_when_no_broker_takes_a_partition_for_long(
    hosted: list[int], monkeypatch: pytest.MonkeyPatch
):
    """The error says that the metaserver goes on."""
    monkeypatch.setattr(client, "CREATION_STALLED_S", 12.0)

    async def host(_self, body, _params):
        hosted.append(body.partition.partition_id)
        await asyncio.sleep(4)
        raise OverloadedError("the disk is busy")

    monkeypatch.setattr(BrokerControl, "host", host)

    async def story(cluster: VirtualCluster) -> None:
        async with Admin(cluster.address) as admin:
            with raises(Reason.CREATION_UNFINISHED, match="0 of 100 partitions"):
                await admin.create_subject("big", partitions=COUNT)

    run(story)
