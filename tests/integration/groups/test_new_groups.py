"""The first join of a group: two commits, and its brokers told between them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from keylane.metaserver.cluster import announcements
from keylane.metaserver.running import running_metaserver
from keylane.metaserver.settings import MetaserverSettings
from keylane.metaserver.sql.group_write import GroupCommitWriter
from keylane.protocol import endpoints
from keylane.protocol.control import CreateSubject, Heartbeat, Join
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.brokers.hosting_broker import HostingBroker

SESSION = "a" * 16
PARTITIONS = 4


class JoinedSubject:
    """A metaserver, and a broker with one subject."""

    def __init__(self, meta: MetaClient, broker: HostingBroker) -> None:
        self.meta = meta
        self.broker = broker

    async def granted(self, session: str) -> int:
        """The number of partitions that a session is granted when its join is answered."""
        joined = await self.meta.call(endpoints.JOIN, Join(subject="s", group="g", session=session))
        assert joined.grants == await self.meta.call(
            endpoints.HEARTBEAT, Heartbeat(session=session)
        )
        return len(joined.grants.grants)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[JoinedSubject]:
    settings = MetaserverSettings(
        data=tmp_path, port=0, poll_ms=60_000, expire_ms=600_000, broker_ttl_ms=600_000
    )
    async with AsyncExitStack() as stack:
        network = HttpNetwork()
        stack.push_async_callback(network.close)
        running = await stack.enter_async_context(running_metaserver(settings))
        meta = MetaClient(network, [running.address])
        broker = HostingBroker("a")
        await broker.start()
        stack.push_async_callback(broker.stop)
        await broker.report(meta)
        await meta.create_subject(CreateSubject(subject="s", partitions=PARTITIONS))
        yield JoinedSubject(meta, broker)


async def test_first_join_of_a_group_takes_two_commits(
    cluster: JoinedSubject, monkeypatch: pytest.MonkeyPatch
):
    """One makes the session and its group, one notes what brokers have answered and grants."""
    written: list[str] = []
    submit = GroupCommitWriter.submit

    async def noted(self: Any, work: Any, *, durable: bool, urgent: bool = False) -> Any:
        answer = await submit(self, work, durable=durable, urgent=urgent)
        if durable and not urgent:
            written.append(type(answer).__name__)
        return answer

    monkeypatch.setattr(GroupCommitWriter, "submit", noted)
    assert await cluster.granted(SESSION) == PARTITIONS
    assert written == ["dict", "_FirstGrants"]
    assert cluster.broker.known == {key: {"g"} for key in cluster.broker.hosted}


async def test_first_join_grants_nothing_that_its_broker_refuses_to_know(cluster: JoinedSubject):
    """The join is answered all the same, by a settlement of its own."""
    cluster.broker.deaf = True
    assert await cluster.granted(SESSION) == 0
    assert cluster.broker.known == {}


@pytest.mark.parametrize("page", [1, 2, 3, PARTITIONS, PARTITIONS + 1])
async def test_first_join_is_granted_every_page_of_partitions(
    cluster: JoinedSubject, monkeypatch: pytest.MonkeyPatch, page: int
):
    """Whatever the number of partitions that brokers are told of at once, all are told before the
    answer.
    """
    monkeypatch.setattr(announcements, "PARTITIONS_MAX", page)
    assert await cluster.granted(SESSION) == PARTITIONS
    assert cluster.broker.known == {key: {"g"} for key in cluster.broker.hosted}
