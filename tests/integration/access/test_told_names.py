"""No answer names what its caller may not see; and rights allow what belongs to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest

from keylane import Admin, Consumer, Producer
from keylane.protocol import endpoints
from keylane.protocol.access.tokens import make_token
from keylane.protocol.errors import AccessDeniedError, KeylaneError, UnauthenticatedError
from keylane.protocol.operations import OperationKind, Reshape
from keylane.rpc.client import BrokerClient
from keylane.rpc.http_network import HttpNetwork
from support.access.guarded import GuardedCluster, capabilities
from support.server_process import run_keylane

SECRET, OWN = "merger-of-acme", "shop"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedCluster]:
    folder = tmp_path_factory.mktemp("named")
    (folder / "metrics.token").write_text(make_token(lambda bits: (1 << bits) - 2))
    served = f'metrics_token_file = "{folder}/metrics.token"\nmetrics_hosts = "10.77.0.0/16"\n'
    cluster = GuardedCluster(folder, meta_settings=served, broker_settings=served)
    with cluster:
        asyncio.run(cluster.made(SECRET))
        asyncio.run(cluster.made(OWN))
        yield cluster


async def answer_of(
    address: str,
    path: str,
    bearer: str,
    *,
    method: str = "GET",
    body: object = None,
    host: str = "",
) -> tuple[int, str]:
    """The status and text of an answer."""
    headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
    headers |= {"Host": host} if host else {}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://{address}{path}", headers=headers, json=body) as answer,
    ):
        return answer.status, await answer.text()


async def secret_partition(guarded: GuardedCluster) -> int:
    async with guarded.admin() as admin:
        route = (await admin._metaserver_client.call(endpoints.SUBJECT, subject=SECRET)).route
    return int(route.partitions[0].partition_id)


async def test_refusal_does_not_name_the_subject_of_a_partition_when_its_caller_may_not_see_it(
    guarded: GuardedCluster,
) -> None:
    partition_id = await secret_partition(guarded)
    token = await guarded.principal("stranger", "produce", "read", "consume", subject=OWN)
    bearer = (await capabilities(guarded.meta, token))["bearer"]
    broker = guarded.brokers[0].address
    one = f"/v1/partitions/{partition_id}"
    calls: list[tuple[str, str, object]] = [
        ("GET", one, None),
        ("GET", f"{one}/offset?at_ms=1", None),
        ("GET", f"{one}/parked?group=g", None),
        ("GET", f"{one}/parked/offsets?group=g", None),
        ("POST", f"{one}/seal", None),
        ("POST", f"{one}/holds", {"job": "j", "from_offset": 0, "ttl_ms": 60_000}),
        ("POST", f"{one}/parked", {"group": "g"}),
        ("POST", "/v1/partitions/bounds", {"partitions": [{"partition_id": partition_id}]}),
        ("GET", f"/v1/subjects/{OWN}/messages?partition={partition_id}", None),
    ]
    for method, path, body in calls:
        status, text = await answer_of(broker, path, bearer, method=method, body=body)
        assert status in (400, 403, 404), (path, status, text)
        assert SECRET not in text, path
        if one in path or "bounds" in path:
            assert f"partition {partition_id}" in text or "cluster" in text or status == 400, text
    network = HttpNetwork(token=token)
    network.add_metaservers([guarded.meta])
    try:
        with pytest.raises(AccessDeniedError) as caught:
            await BrokerClient(network, broker).control(endpoints.PARTITION, id=partition_id)
    finally:
        await network.close()
    assert SECRET not in str(caught.value)
    assert not caught.value.details.get("subject")


async def test_refusal_names_the_subject_when_its_caller_sees_it_by_another_right(
    guarded: GuardedCluster,
) -> None:
    partition_id = await secret_partition(guarded)
    token = await guarded.principal("sender", "produce", subject=SECRET)
    bearer = (await capabilities(guarded.meta, token))["bearer"]
    path = f"/v1/partitions/{partition_id}/parked?group=g"
    status, text = await answer_of(guarded.brokers[0].address, path, bearer)
    assert status == 403
    assert f"--subject {SECRET}" in text


async def test_session_of_others_is_not_named_when_a_stranger_calls_with_its_id(
    guarded: GuardedCluster,
) -> None:
    own = await guarded.principal("owner", "consume", "produce", subject=SECRET)
    stranger = await guarded.principal("stranger2", "consume", subject=OWN)
    async with Consumer(guarded.meta, subject=SECRET, group="deal", token=own) as consumer:
        session = consumer._last_opening.membership.session
        body = {"session": session}
        status, text = await answer_of(
            guarded.meta, "/v1/consumers/leave", stranger, method="POST", body=body
        )
    assert status == 403
    assert SECRET not in text
    assert "deal" not in text


async def test_metrics_are_for_their_token_and_for_who_may_see_all(guarded: GuardedCluster) -> None:
    scraper = (guarded.folder / "metrics.token").read_text()
    stranger = await guarded.principal("nosy", "read", subject=OWN)
    everything = await guarded.principal("ops", "read", subject="*")
    for address, is_meta in ((guarded.meta, True), (guarded.brokers[0].address, False)):
        for bearer in ("", scraper[:-1] + "A", stranger):
            status, text = await answer_of(address, "/metrics", bearer)
            assert status in (401, 403)
            assert SECRET not in text
        shown = everything
        if not is_meta:
            shown = (await capabilities(guarded.meta, everything))["bearer"]
        for bearer in (scraper, shown):
            status, text = await answer_of(address, "/metrics", bearer)
            assert status == 200
            assert "keylane_build_info" in text
        assert (await answer_of(address, "/health/live", ""))[0] == 200
    checked = run_keylane(
        "cluster",
        "check",
        "--meta",
        guarded.meta,
        "--output",
        "json",
        environment={"KEYLANE_TOKEN": guarded.admin_token},
    )
    assert json.loads(checked.stdout)["ok"], checked.stdout
    refused = run_keylane(
        "cluster",
        "check",
        "--meta",
        guarded.meta,
        "--output",
        "json",
        environment={"KEYLANE_TOKEN": stranger},
    )
    assert "has no right" in refused.stdout


async def test_probe_by_address_is_answered_when_metrics_hosts_mean_it(
    guarded: GuardedCluster,
) -> None:
    scraper = (guarded.folder / "metrics.token").read_text()
    for path in ("/metrics", "/health/live", "/health/ready"):
        status, _ = await answer_of(guarded.meta, path, scraper, host="10.77.0.11:7000")
        assert status == 200
        status, text = await answer_of(guarded.meta, path, scraper, host="10.78.0.11:7000")
        assert status == 421
        assert "metrics_hosts" in text
    status, text = await answer_of(
        guarded.meta, "/v1/health", guarded.admin_token, host="10.77.0.11:7000"
    )
    assert status == 421


async def test_scheduled_messages_are_refused_when_the_caller_may_not_read(
    guarded: GuardedCluster,
) -> None:
    token = await guarded.principal("late", "produce", subject=OWN)
    async with Admin(guarded.meta, token=token) as admin:
        for subject in (OWN, None):
            with pytest.raises(AccessDeniedError):
                await admin.list_scheduled(subject=subject)
    done = run_keylane(
        "scheduled", "list", "--meta", guarded.meta, environment={"KEYLANE_TOKEN": token}
    )
    assert done.returncode == 1
    assert "has no right" in done.stderr
    async with Admin(guarded.meta, token=make_token(lambda _bits: 7)) as admin:
        with pytest.raises(UnauthenticatedError):
            await admin.list_scheduled()


async def test_administrator_of_a_subject_makes_its_groups_and_cancels_its_operations(
    guarded: GuardedCluster,
) -> None:
    token = await guarded.principal("keeper", "administer", subject="kept")
    member = await guarded.principal("member", "consume", subject="kept")
    async with Admin(guarded.meta, token=token) as admin:
        await admin.create_subject("kept", partitions=2)
        made = await admin.create_group("kept", "billing", start="earliest")
        assert made.group == "billing"
        with pytest.raises(AccessDeniedError, match="make a group of"):
            await admin.create_group(OWN, "billing", start="earliest")
        (operation,) = (
            await admin._metaserver_client.call(
                endpoints.RESHAPE, Reshape(kind=OperationKind.RESIZE, subject="kept", partitions=4)
            )
        ).operations
        refusal = None
        try:
            await admin.cancel(operation.operation_id)
        except KeylaneError as error:  # it may have gone too far to be canceled
            refusal = error
        assert not isinstance(refusal, AccessDeniedError)
    async with Admin(guarded.meta, token=member) as admin:
        await admin.create_group("kept", "other", start="earliest")
        with pytest.raises(AccessDeniedError):
            await admin.cancel(operation.operation_id)
    stranger = await guarded.principal("stranger3", "administer", subject=OWN)
    status, text = await answer_of(
        guarded.meta, f"/v1/operations/{operation.operation_id}/cancel", stranger, method="POST"
    )
    assert status == 403
    assert "kept" not in text


async def test_canceled_message_is_not_named_when_its_subject_is_of_others(
    guarded: GuardedCluster,
) -> None:
    sender = await guarded.principal("sender2", "produce", subject=SECRET)
    async with Producer(guarded.meta, token=sender) as producer:
        receipt = await producer.send(
            SECRET, b"later", deliver_at=datetime.now(UTC) + timedelta(days=1)
        )
    stranger = await guarded.principal("stranger4", "produce", subject=OWN)
    bearer = (await capabilities(guarded.meta, stranger))["bearer"]
    path = f"/v1/scheduled/{receipt.scheduled_id}/cancel"
    status, text = await answer_of(guarded.brokers[0].address, path, bearer, method="POST")
    assert status == 403
    assert SECRET not in text


async def test_audit_rows_say_which_metaserver_when_it_noted_them(guarded: GuardedCluster) -> None:
    async with guarded.admin() as admin, asyncio.timeout(60):
        while not (rows := (await admin.list_audit(who="admin", subject=SECRET)).rows):
            await asyncio.sleep(0.1)
    assert {row.event.server for row in rows} == {f"metaserver {guarded.meta}"}
