"""A cluster with access control: who may do what, end to end."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from keylane import Consumer, Message, Producer
from keylane.admin import CancelOutcome
from keylane.protocol import endpoints
from keylane.protocol.control import Heartbeat, Join
from keylane.protocol.errors import (
    AccessDeniedError,
    InvalidRequestError,
    Reason,
    UnauthenticatedError,
)
from keylane.protocol.frames import Authenticate, Challenge
from keylane.rpc.access.client_credentials import ClientCredentials
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.access.guarded import GuardedCluster, capabilities, figures_of, refusal_of
from support.raising import raises
from support.server_process import run_keylane


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedCluster]:
    with GuardedCluster(tmp_path_factory.mktemp("guarded")) as cluster:
        yield cluster


async def test_messages_pass_when_rights_are_granted(guarded: GuardedCluster):
    got = asyncio.Event()

    async def handle(_message: Message) -> None:
        got.set()

    async with guarded.admin() as admin:
        for _ in range(100):
            if any(broker.available for broker in (await admin.list_brokers()).brokers):
                break
            await asyncio.sleep(0.1)
        await admin.create_subject("a.orders", partitions=1)
        shop = (await admin.create_token("shop")).token
        audit = (await admin.create_token("audit")).token
        await admin.grant("shop", "produce", subject="a.*")
        await admin.grant("audit", "consume", subject="a.*", group="billing")
    async with Producer(guarded.meta, token=shop) as producer:
        await producer.send("a.orders", b"1", key=b"k")
    consumer = Consumer(
        guarded.meta, subject="a.orders", group="billing", handler=handle, token=audit
    )
    async with consumer:
        running = asyncio.create_task(consumer.run())
        await asyncio.wait_for(got.wait(), 10)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("token", "code"),
    [
        (None, UnauthenticatedError.code),
        ("kl_" + "A" * 43, UnauthenticatedError.code),
        ("kc_" + "A" * 300, UnauthenticatedError.code),
        ("", UnauthenticatedError.code),
    ],
)
async def test_servers_refuse_callers_they_do_not_know(
    guarded: GuardedCluster, token: str | None, code: int
):
    broker = guarded.brokers[0].address
    assert await refusal_of(guarded.meta, "/v1/subjects", token=token) == code
    assert await refusal_of(broker, "/v1/partitions", token=token) == code
    post = {"method": "POST", "data": b"[" * 100_000}
    assert await refusal_of(broker, "/v1/subjects/x/messages", token=token, **post) == code


async def test_cancel_of_a_forgotten_id_is_unknown_to_principals_that_may_produce(
    guarded: GuardedCluster,
):
    """A delivered message tells its outcome; who may produce nowhere is refused as for a message
    that waits.
    """
    async with guarded.admin() as admin:
        for _ in range(100):
            if any(broker.available for broker in (await admin.list_brokers()).brokers):
                break
            await asyncio.sleep(0.1)
        await admin.create_subject("later.mine", partitions=1)
        sender = (await admin.create_token("later")).token
        stranger = (await admin.create_token("stranger")).token
        await admin.grant("later", "produce", subject="later.*")
        await admin.grant("stranger", "consume", subject="later.*", group="g")
    at = datetime.now(UTC) + timedelta(milliseconds=300)
    async with Producer(guarded.meta, token=sender) as producer:
        soon = await producer.send("later.mine", b"1", deliver_at=at)
        hour = await producer.send("later.mine", b"2", deliver_at=at + timedelta(hours=1))
        forgotten = replace(hour, scheduled_id="00" * 16)
        with raises(Reason.SCHEDULED_UNKNOWN):
            await producer.cancel(forgotten)
        async with Producer(guarded.meta, token=stranger) as other:
            for receipt in (hour, forgotten):
                with pytest.raises(AccessDeniedError):
                    await other.cancel(receipt)
        assert await producer.cancel(hour) is CancelOutcome.CANCELED
        assert await producer.cancel(hour) is CancelOutcome.CANCELED
        await asyncio.sleep(1)
        assert await producer.cancel(soon) is CancelOutcome.DELIVERED


async def test_rights_end_where_the_pattern_ends(guarded: GuardedCluster):
    async with guarded.admin() as admin:
        await admin.create_subject("b.in", partitions=1)
        await admin.create_subject("bin", partitions=1)
        token = (await admin.create_token("narrow")).token
        await admin.grant("narrow", "produce", subject="b.*")
    async with Producer(guarded.meta, token=token) as producer:
        await producer.send("b.in", b"1", key=b"k")
        with pytest.raises(AccessDeniedError) as refused:
            await producer.send("bin", b"1", key=b"k")
    assert refused.value.principal == "narrow"
    assert "keylane access grant narrow" in refused.value.message


async def test_query_does_not_stand_in_for_what_the_call_is_about(guarded: GuardedCluster):
    async with guarded.admin() as admin:
        await admin.create_subject("c.own", partitions=1)
        await admin.create_subject("victim", partitions=1)
        token = (await admin.create_token("trickster")).token
        await admin.grant("trickster", "administer", subject="c.*")
    ask: dict[str, Any] = {"method": "POST", "token": token}
    tricks = {
        "/v1/operations?subject=c.own": {"kind": "resize", "subject": "victim", "partitions": 3},
        "/v1/operations": {"kind": "move", "subject": "c.own", "partition_ids": [1]},
        "/v1/subjects/victim/delete?subject=c.own": {},
        "/v1/subjects": {"subject": "ab"},
    }
    for path, body in tricks.items():
        assert await refusal_of(guarded.meta, path, json=body, **ask) == AccessDeniedError.code
    loss: dict[str, Any] = {"subject": "c.own", "broker_group": "g2", "accept_loss": True}
    for path, body in {
        "/v1/operations": loss | {"kind": "resize", "partitions": 2},
        "/v1/subjects/c.own/settings": loss | {"retention": "time"},
    }.items():
        code = await refusal_of(guarded.meta, path, json=body, **ask)
        assert code == InvalidRequestError.code, path
    path = "/v1/subjects/c.own%2F..%2Fvictim/delete"
    assert await refusal_of(guarded.meta, path, json={}, **ask) == Reason.NAME_INVALID.code
    headers = {"Authorization": f"Bearer {guarded.admin_token}"}
    async with aiohttp.ClientSession() as session:
        url = f"http://{guarded.meta}/v1/subjects"
        async with session.get(url, headers=[*headers.items(), *headers.items()]) as twice:
            assert (await twice.json())["code"] == UnauthenticatedError.code
        async with session.get(f"{url}?token={guarded.admin_token}", headers=headers) as in_url:
            assert (await in_url.json())["code"] == Reason.TOKEN_IN_URL.code
        async with session.get(url, headers=headers | {"Origin": "http://evil"}) as site:
            assert (await site.json())["code"] == Reason.ORIGIN.code
        async with session.get(url, headers=headers | {"Host": "evil:7000"}) as rebound:
            assert (await rebound.json())["code"] == Reason.FOREIGN_HOST.code


async def test_heartbeat_needs_the_right_on_the_group_of_its_session(guarded: GuardedCluster):
    """The caller's own session is renewed."""
    sessions = {}
    for subject, name in (("h.own", "own"), ("h.others", "others")):
        await guarded.made(subject)
        token = await guarded.principal(name, "consume", subject=subject)
        network = HttpNetwork(token=token)
        sessions[name] = session = f"{len(sessions):032x}"
        try:
            meta = MetaClient(network, [guarded.meta])
            await meta.call(
                endpoints.JOIN, Join(subject=subject, group="g", session=session, ttl_ms=60_000)
            )
            await meta.call(endpoints.HEARTBEAT, Heartbeat(session=session))
            if name == "others":
                with pytest.raises(AccessDeniedError):
                    await meta.call(endpoints.HEARTBEAT, Heartbeat(session=sessions["own"]))
        finally:
            await network.close()


async def test_brokers_refuse_a_revoked_token_within_five_seconds(guarded: GuardedCluster):
    broker = guarded.brokers[0].address
    async with guarded.admin() as admin:
        made = await admin.create_token("leaver")
        await admin.grant("leaver", "read")
        bearer = (await capabilities(guarded.meta, made.token))["bearer"]
        headers = {"Authorization": f"Bearer {bearer}"}
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{broker}/v1/partitions", headers=headers) as answer:
                assert answer.status == 200
        await admin.revoke_token(made.view.token_id)
    began = time.monotonic()
    while True:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{broker}/v1/partitions", headers=headers) as answer:
                if answer.status == 401:
                    break
        assert time.monotonic() - began < 5
        await asyncio.sleep(0.05)
    assert await refusal_of(guarded.meta, "/v1/health", token=made.token) == (
        UnauthenticatedError.code
    )


async def test_capability_of_a_connection_is_refused_on_another(guarded: GuardedCluster):
    broker = guarded.brokers[0].address
    async with guarded.admin() as admin:
        token = (await admin.create_token("holder")).token
        await admin.grant("holder", "read")
    network, thief = HttpNetwork(token=token), HttpNetwork(token=guarded.admin_token)
    try:
        network.add_metaservers([guarded.meta])
        client_credentials = network._credentials
        assert isinstance(client_credentials, ClientCredentials)
        shown = await client_credentials.data_capability()
        assert shown is not None
        channel = await thief._connect(broker, 5_000)
        challenge, _ = await channel.call(Challenge(), timeout_ms=5_000)
        stolen = shown.key.sign_challenge(bytes(32), broker)
        with pytest.raises(UnauthenticatedError):
            await channel.call(Authenticate(shown.text, stolen, broker), timeout_ms=5_000)
        right = shown.key.sign_challenge(challenge.nonce, broker)
        assert await channel.call(Authenticate(shown.text, right, broker), timeout_ms=5_000)
        await channel.close()
    finally:
        await network.close()
        await thief.close()
    assert await refusal_of(broker, "/v1/partitions", token=shown.text) == (
        UnauthenticatedError.code
    )


async def test_refusals_are_counted_by_code(guarded: GuardedCluster):
    await refusal_of(guarded.meta, "/v1/subjects")
    figures = await figures_of(guarded.meta)
    assert 'keylane_refusals_total{code="1350",error="UnauthenticatedError"}' in figures


def test_broker_health_is_shown_without_a_token_and_shows_none_to_the_broker(
    guarded: GuardedCluster,
):
    """A supervisor needs no token for it, and an administrator's stays with metaservers."""
    broker = guarded.brokers[0].address
    refused_before = refusals_of(broker)
    for token in ({}, {"KEYLANE_TOKEN": guarded.admin_token}):
        environment = {**os.environ, **token}
        done = run_keylane("broker", "health", broker, "-o", "json", environment=environment)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["ready"]
    assert refusals_of(broker) == refused_before
    misled = run_keylane("broker", "health", guarded.meta)
    assert (misled.returncode, "of a metaserver" in misled.stderr) == (1, True)


def refusals_of(address: str) -> list[str]:
    figures = asyncio.run(figures_of(address))
    return [line for line in figures.splitlines() if line.startswith("keylane_refusals_total")]
