"""Why nothing arrives, asked of real processes: the right cause comes first, in time, with a broker
that stands still, and only what the caller may know.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import aiohttp
import pytest

from keylane import Admin, Consumer, Producer
from keylane.protocol.access.quota import BYTES_PER_S_MIN
from keylane.protocol.errors import GroupUnknownError, InvalidRequestError, SubjectUnknownError
from support.access.guarded import GuardedCluster, refusal_of
from support.cluster import Cluster
from support.made_causes import CAUSES, GROUP, Asked, ask_about, under_load

SUBJECT = "orders"
TOOK_MS_MAX = 3_000
"""An answer takes 0.6 s where a broker hangs; the machine may be busy."""


def check(asked: list[Asked]) -> None:
    wrong = [each for each in asked if not each.is_right]
    assert not wrong
    assert max(each.took_ms for each in asked) < TOOK_MS_MAX


@pytest.mark.cluster(brokers=3)
async def test_why_names_each_of_ten_causes_first_though_a_broker_hangs(cluster: Cluster):
    others = [name for name, cause in CAUSES.items() if not cause.hangs]
    async with under_load(cluster):
        answers = await asyncio.gather(
            *(ask_about(cluster, name, 1, paused=False) for name in others)
        )
        for asked in (*answers, await ask_about(cluster, "hanging broker", 2)):
            check(asked)
        check(await ask_about(cluster, "suspended group", 2, paused=True))


@pytest.mark.whole
@pytest.mark.cluster(brokers=3)
@pytest.mark.parametrize("name", CAUSES)
async def test_why_names_a_cause_first_each_of_twenty_times(cluster: Cluster, name: str):
    async with under_load(cluster):
        check(await ask_about(cluster, name, 20))


# ── over HTTP, with the caller's rights ───────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedCluster]:
    with GuardedCluster(tmp_path_factory.mktemp("why")) as cluster:
        asyncio.run(cluster.made(SUBJECT))
        yield cluster


async def fail(_message: object) -> None:
    raise ValueError("card 4711 is not valid")


async def told(cluster: GuardedCluster, token: str, **query: str) -> dict[str, object]:
    """The answer of the metaserver over HTTP."""
    url = f"http://{cluster.meta}/v1/subjects/{SUBJECT}/groups/{GROUP}/why"
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, params=query, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
        found: dict[str, object] = await answer.json()
        return found


async def test_metaserver_tells_parked_keys_only_to_those_who_may_read(guarded: GuardedCluster):
    worker = await guarded.principal("worker", "produce", "consume", subject=SUBJECT)
    reader = await guarded.principal("reader", "read", subject=SUBJECT)
    sender = await guarded.principal("sender", "produce", subject=SUBJECT)
    stranger = await guarded.principal("stranger", "read", subject="others")
    consumer = Consumer(
        guarded.meta,
        subject=SUBJECT,
        group=GROUP,
        handler=fail,
        on_failure="park",
        tries_max=1,
        token=worker,
    )
    running = asyncio.create_task(consumer.run())
    async with Producer(guarded.meta, token=worker) as producer:
        await producer.send(SUBJECT, b"1", key="a")
    try:
        async with guarded.admin() as admin:
            until = time.monotonic() + 60
            while not [each async for each in admin.parked(SUBJECT, GROUP)]:
                assert time.monotonic() < until, "nothing was parked"
                await asyncio.sleep(0.1)
        seen = await told(guarded, reader, key="a")
        assert seen["causes"][0]["code"] == "parked"
        assert "card 4711 is not valid" in seen["causes"][0]["text"]
        hidden = await told(guarded, sender, key="a")
        assert "card 4711" not in json.dumps(hidden)
        assert hidden["unknown"] == [
            f"what is parked, stored and scheduled: the caller has no right to read {SUBJECT}"
        ]
        path = f"/v1/subjects/{SUBJECT}/groups/{GROUP}/why"
        assert await refusal_of(guarded.meta, path, token=stranger) == 1351
        assert await refusal_of(guarded.meta, path) == 1350
        assert await refusal_of(guarded.meta, f"{path}?key=", token=reader) == 1104
        assert await refusal_of(guarded.meta, f"{path}?kee=a", token=reader) == 1104
    finally:
        await consumer.close()
        await running


async def test_only_senders_say_that_they_wait(guarded: GuardedCluster):
    await guarded.made("awaited")
    sender = await guarded.principal("patient", "produce", subject="awaited")
    reader = await guarded.principal("curious", "read", subject="awaited")
    wait = {
        "client": "vm:1",
        "broker_group": "g1",
        "messages": 3,
        "waiting_ms": 900,
        "reason": "connection refused",
    }
    path = "/v1/subjects/awaited/route"
    url = f"http://{guarded.meta}{path}"
    async with guarded.admin() as admin, aiohttp.ClientSession() as session:
        await admin.create_group("awaited", GROUP)
        for token, count in ((reader, 0), (sender, 1)):
            async with session.get(
                url,
                params={"waiting": json.dumps([wait])},
                headers={"Authorization": f"Bearer {token}"},
            ) as answer:
                assert answer.status == 200
            waiting = (await admin.describe_group("awaited", GROUP)).waiting_producers
            assert len(waiting) == count
        found = await admin.why("awaited", GROUP)
        [cause] = [each for each in found.causes if each.code == "producer_waits"]
        assert "the producer vm:1 has 3 messages that are not stored yet" in cause.text
    assert await refusal_of(guarded.meta, f"{path}?waiting=[{{}}]", token=sender) == 1104


async def test_why_names_the_quota_for_which_a_sender_waits(guarded: GuardedCluster):
    token = await guarded.principal("shop", "produce", "consume", subject="limited")
    await guarded.made("limited")
    async with guarded.admin() as admin:
        await admin.create_group("limited", GROUP)
        await admin.set_quota("shop", bytes_per_s=BYTES_PER_S_MIN)
        async with Producer(guarded.meta, token=token) as producer:
            receipts = [producer.send("limited", bytes(10_000), key="a") for _ in range(120)]
            codes: set[str] = set()
            until = time.monotonic() + 30
            while "over_quota" not in codes and time.monotonic() < until:
                found = await admin.why("limited", GROUP)
                codes |= {each.code for each in found.causes}
            assert "over_quota" in codes
            [cause] = [each for each in found.causes if each.code == "over_quota"]
            assert "the limit of bytes of principal 'shop'" in cause.text
            for receipt in receipts:
                await receipt


# ── the command ───────────────────────────────────────────────────────────────────────────────────
async def test_command_shows_no_control_characters_of_anybody(shared_cluster: Cluster):
    evil = "\x1b[2J\x1b[1;1Hall is well\r\n\u202egnihton"

    async def fail_strangely(_message: object) -> None:
        raise ValueError(f"{evil} [bold]<script>alert(1)</script>")

    subject = f"strange-{time.time_ns()}"
    await shared_cluster.create(subject, partitions=1)
    consumer = Consumer(
        shared_cluster.meta,
        subject=subject,
        group=GROUP,
        handler=fail_strangely,
        on_failure="park",
        tries_max=1,
    )
    running = asyncio.create_task(consumer.run())
    try:
        async with Producer(shared_cluster.meta) as producer, Admin(shared_cluster.meta) as admin:
            await producer.send(subject, b"1", key=evil)
            until = time.monotonic() + 60
            while (await admin.why(subject, GROUP, key=evil)).causes[0].code != "parked":
                assert time.monotonic() < until
                await asyncio.sleep(0.1)
        for output in ("table", "json"):
            shown = await asyncio.to_thread(
                subprocess.run,
                [
                    *(sys.executable, "-m", "keylane.cli", "why", subject, "-g", GROUP),
                    *("--key", evil, "--meta", shared_cluster.meta, "--output", output),
                ],
                capture_output=True,
                check=True,
                env=os.environ,
            )
            text = shown.stdout.decode()
            assert "been parked for" in text
            assert "<script>" in text
            assert not {"\x1b", "\r", "\u202e"}.intersection(text)
            if output == "table":
                assert text.splitlines()[1].startswith("  1. ")
                assert all(line.startswith(("  ", GROUP)) for line in text.splitlines())
    finally:
        await consumer.close()
        await running


async def test_why_refuses_names_and_keys_that_cannot_be(shared_cluster: Cluster):
    async with Admin(shared_cluster.meta) as admin:
        for subject, group in (("\x1b[2J", GROUP), (SUBJECT, "../x"), ("", GROUP)):
            with pytest.raises(InvalidRequestError):
                await admin.why(subject, group)
        await shared_cluster.create("never-asked", partitions=1)
        for key in ("", 7, "\ud800"):
            with pytest.raises(InvalidRequestError):
                await admin.why("never-asked", GROUP, key=key)  # type: ignore[arg-type]
        with pytest.raises(SubjectUnknownError):
            await admin.why("no-such", GROUP)
        with pytest.raises(GroupUnknownError):
            await admin.why("never-asked", GROUP)
