"""The operator's switch: a group, or one client of it, gets nothing until it is resumed, through
restarts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from support.cluster import ALERT, Cluster, eventually
from support.consumer_options import consumer_options
from support.postgres import Postgres

SETTINGS = ConsumerSettings(ttl_ms=3_000)


def consumer_of(cluster: Cluster, subject: str, name: str, seen: list[Message], **more) -> Consumer:
    return Consumer(
        cluster.addresses,
        **consumer_options(
            subject=subject,
            group="g",
            handler=seen.append,
            settings=replace(SETTINGS, name=name),
            **more,
        ),
    )


@pytest.mark.parametrize("strategy", ["exclusive", "shared"])
async def test_suspended_group_gets_nothing_until_it_is_resumed(
    shared_cluster: Cluster, caplog: pytest.LogCaptureFixture, strategy: str
):
    """Its members stay, hand everything over and say why they wait; one that joins later waits
    too.
    """
    subject = f"switch-{strategy}"
    await shared_cluster.create(subject, partitions=2)
    seen: list[Message] = []
    first = consumer_of(shared_cluster, subject, "first", seen, consume_strategy=strategy)
    second = consumer_of(shared_cluster, subject, "second", seen, consume_strategy=strategy)
    async with Admin(shared_cluster.meta) as admin, Producer(shared_cluster.meta) as producer:
        async with first:
            await eventually(lambda: len(first.assignment) == 2)
            assert first.waiting_for == ""
            assert (await admin.suspend_group(subject, "g")).suspended
            await eventually(lambda: first.assignment == [])
            await producer.send(subject, b"meanwhile", key=b"k")
            async with second:
                await eventually(lambda: second.waiting_for)
                assert second.waiting_for == first.waiting_for
                assert f"keylane group resume {subject} g" in first.waiting_for
                described = await admin.describe_group(subject, "g")
                assert (described.sessions, described.settings.suspended) == (2, True)
                assert seen == []
                await admin.resume_group(subject, "g")
                await eventually(lambda: seen)
                await eventually(lambda: not (first.waiting_for or second.waiting_for))
    assert "an operator has suspended the group" in caplog.text


async def test_suspended_client_leaves_its_share_to_others(shared_cluster: Cluster):
    """By its name, before it is there as well; its own switch is another one, and both have to be
    on.
    """
    await shared_cluster.create("switch-client", partitions=4)
    seen: list[Message] = []
    sick = consumer_of(shared_cluster, "switch-client", "sick", seen)
    well = consumer_of(shared_cluster, "switch-client", "well", seen)
    async with Admin(shared_cluster.meta) as admin:
        await admin.create_group("switch-client", "g")
        stored = await admin.suspend_group("switch-client", "g", client="sick")
        assert (stored.suspended, stored.suspended_clients) == (False, ("sick",))
        async with sick, well:
            await eventually(lambda: len(well.assignment) == 4)
            await eventually(lambda: "--client sick" in sick.waiting_for)
            await sick.suspend()
            assert sick.waiting_for.startswith("resume(): its own code")
            await admin.resume_group("switch-client", "g", client="sick")
            await eventually(lambda: "operator" not in sick.waiting_for)
            assert sick.assignment == []
            await sick.resume()
            await eventually(lambda: len(sick.assignment) == 2)
            await sick.suspend()
            await admin.suspend_group("switch-client", "g", client="sick")
            await sick.resume()
            await eventually(lambda: "operator" in sick.waiting_for)
            assert (sick.assignment, len(well.assignment)) == ([], 4)


@pytest.fixture(params=["sqlite", "postgresql"])
def mortal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster whose metaserver the test kills; on PostgreSQL there are two."""
    settings, metas = ALERT, 1
    if request.param == "postgresql":
        postgres: Postgres = request.getfixturevalue("postgres")
        settings += f"database_url = {json.dumps(postgres.url())}\n"
        metas = 2
    with Cluster(tmp_path, 1, meta_settings=settings, metas=metas) as cluster:
        yield cluster


async def test_switch_survives_restarts(mortal: Cluster):
    """Of the metaserver and of the consumer; on PostgreSQL the switch is thrown at another
    metaserver than the member's.
    """
    await mortal.create("s", partitions=2)
    seen: list[Message] = []
    consumer = consumer_of(mortal, "s", "c", seen)
    async with Admin(mortal.addresses[-1]) as admin:
        async with consumer:
            await eventually(lambda: len(consumer.assignment) == 2)
            await admin.suspend_group("s", "g")
            await eventually(lambda: consumer.assignment == [])
            for program in mortal.metas:
                program.kill()
                program.restart()
            async with Producer(mortal.meta) as producer:
                await producer.send("s", b"1", key=b"k")
        async with consumer:
            await eventually(lambda: consumer.waiting_for)
            assert consumer.assignment == []
            assert seen == []
            await admin.resume_group("s", "g")
            await eventually(lambda: seen)
