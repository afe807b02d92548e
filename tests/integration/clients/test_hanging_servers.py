"""What `Admin.why` and the console say of servers that stand still (SIGSTOP) or are gone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from keylane import Admin, Consumer, Producer
from keylane.admin import Explanation
from keylane.console.trends import SAMPLE_S
from keylane.errors import UnreachableError
from keylane.protocol.routing import logical_partition
from support.cluster import Cluster, pause, resume
from support.postgres import Postgres

SUBJECT, GROUP = "orders", "billing"
TTL = "broker_heartbeat_ms = 500\nbroker_ttl_ms = 3000\n"
PAGE_S_MAX = 2.5
"""A page waits a second for a broker; the machine may be busy."""


@asynccontextmanager
async def used(cluster: Cluster) -> AsyncIterator[Admin]:
    """A subject on both brokers with 40 messages, and a consumer that has acked all."""

    async def accept(_message: object) -> None:
        return

    await cluster.create(SUBJECT, partitions=4)
    consumer = Consumer(cluster.addresses, subject=SUBJECT, group=GROUP, handler=accept)
    running = asyncio.create_task(consumer.run())
    async with Producer(cluster.addresses) as producer, Admin(cluster.addresses) as admin:
        for number in range(40):
            await producer.send(SUBJECT, b"%d" % number, key=f"k{number}")
        until = time.monotonic() + 60
        while await lag_of(admin):
            assert time.monotonic() < until
            await asyncio.sleep(0.1)
        try:
            yield admin
        finally:
            await consumer.close()
            await running


async def lag_of(admin: Admin) -> int:
    groups = await admin.list_groups(SUBJECT)
    return await admin.lag(SUBJECT, GROUP) if groups else 1


async def key_on(admin: Admin, broker_groups: Iterable[str]) -> str:
    partitions = (await admin.describe_subject(SUBJECT)).partitions
    return next(
        f"k{number}"
        for number in range(40)
        for each in partitions
        if each.range_start <= logical_partition(b"k%d" % number) < each.range_end
        and each.broker_group in broker_groups
    )


async def page_of(cluster: Cluster, path: str) -> tuple[str, float]:
    """A page of the console, and how many seconds it took."""
    began_s = time.monotonic()
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{cluster.meta}/console{path}") as answer,
    ):
        text = await answer.text()
        assert answer.status == 200, text
    return text, time.monotonic() - began_s


async def until_first(admin: Admin, code: str, key: str | None = None) -> Explanation:
    until = time.monotonic() + 60
    while (found := await admin.why(SUBJECT, GROUP, key=key)).causes[0].code != code:
        assert time.monotonic() < until, found
        await asyncio.sleep(0.2)
    return found


async def test_messages_page_shows_what_other_brokers_have_while_one_hangs(cluster: Cluster):
    async with used(cluster) as admin:
        hers, others = await key_on(admin, ["g2"]), await key_on(admin, ["g1"])
        await page_of(cluster, f"/subjects/{SUBJECT}/messages")
        pause(cluster.brokers[1].process.pid)
        try:
            for query, found in (
                ("", f">{others}<"),
                ("?start=earliest", f">{others}<"),
                (f"?key={hers}", "None was found at the brokers that have answered."),
            ):
                text, took_s = await page_of(cluster, f"/subjects/{SUBJECT}/messages{query}")
                assert found in text
                assert "broker group g2 has not answered within 1.0 s" in text
                assert took_s < PAGE_S_MAX
            text, took_s = await page_of(cluster, f"/subjects/{SUBJECT}/messages?key={others}")
            assert f">{others}<" in text
            assert "g2" not in text, "it has nothing of this key"
        finally:
            resume(cluster.brokers[1].process.pid)
        text, _ = await page_of(cluster, f"/subjects/{SUBJECT}/messages?key={hers}")
        assert f">{hers}<" in text


@pytest.mark.cluster(meta_settings=TTL)
async def test_why_says_to_end_a_broker_that_hangs_after_its_ttl_and_to_start_one_that_is_gone(
    cluster: Cluster,
):
    async with used(cluster) as admin:
        key = await key_on(admin, ["g2"])
        broker = cluster.brokers[1]
        pause(broker.process.pid)
        try:
            hangs = (await admin.why(SUBJECT, GROUP, key=key)).causes[0]
            assert hangs.code == "broker_hangs"
            [silent] = [
                each
                for each in (await until_first(admin, "broker_silent", key)).causes
                if each.code == "broker_silent"
            ]
            pages = [(await page_of(cluster, path))[0] for path in ("", "/brokers", "")]
        finally:
            resume(broker.process.pid)
        assert f"but something still accepts connections at {broker.address}" in silent.text
        assert silent.step == (
            f"end the process at {broker.address}, which hangs; then start the broker again"
        )
        for page in pages:
            assert page.count(silent.step) == page.count("g2 has been silent") == 1
            assert "start the broker at" not in page
        await until_first(admin, "all_acked", key)
        await asyncio.sleep(SAMPLE_S)  # the pages share what was asked so lately
        assert "has been silent" not in (await page_of(cluster, ""))[0]
        broker.kill()
        gone = (await admin.why(SUBJECT, GROUP, key=key)).causes[0]
        assert gone.code == "broker_gone"
        assert gone.step == f"start the broker at {broker.address} again; keylane broker list"
        silent = (await until_first(admin, "broker_silent", key)).causes[0]
        assert silent.step == f"start the broker at {broker.address} again; keylane broker list"


async def test_why_names_a_broker_that_is_gone_before_the_producers_that_wait_for_it(
    cluster: Cluster,
):
    async with used(cluster) as admin, Producer(cluster.addresses) as producer:
        key = await key_on(admin, ["g2"])
        cluster.brokers[1].kill()
        receipt = producer.send(SUBJECT, b"late", key=key)
        try:
            until = time.monotonic() + 60
            while not (await admin.describe_group(SUBJECT, GROUP)).waiting_producers:
                assert time.monotonic() < until
                await asyncio.sleep(0.1)
            found = await admin.why(SUBJECT, GROUP)
            assert found.causes[0].code in {"broker_gone", "broker_silent"}, found
            assert "producer_waits" not in {each.code for each in found.causes}
        finally:
            cluster.brokers[1].restart()
            await receipt


async def test_why_is_answered_in_time_while_one_of_two_metaservers_hangs(
    tmp_path: Path, postgres: Postgres
):
    settings = f"database_url = {json.dumps(postgres.url())}\n"
    with Cluster(tmp_path, meta_settings=settings, metas=2) as cluster:
        async with used(cluster):
            pause(cluster.metas[0].process.pid)
            try:
                for _ in range(3):
                    async with Admin(cluster.addresses) as admin:
                        began_s = time.monotonic()
                        found = await admin.why(SUBJECT, GROUP)
                        took_s = time.monotonic() - began_s
                    assert found.causes[0].code == "all_acked"
                    assert found.unknown == ()
                    assert took_s < PAGE_S_MAX
            finally:
                resume(cluster.metas[0].process.pid)


async def test_why_says_where_to_look_while_the_only_metaserver_hangs(cluster: Cluster):
    async with used(cluster) as admin:
        pause(cluster.meta_program.process.pid)
        try:
            with pytest.raises(UnreachableError, match=cluster.meta) as raised:
                await admin.why(SUBJECT, GROUP)
        finally:
            resume(cluster.meta_program.process.pid)
        assert "keylane broker health HOST:PORT" in raised.value.hint
