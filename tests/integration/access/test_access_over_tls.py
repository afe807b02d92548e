"""Access control over TLS: both are on, and brokers are reached by another name than they listen
on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from keylane import Admin, Consumer, Producer
from keylane.cli.connection import wait_for_brokers
from keylane.metaserver.running import running_metaserver
from keylane.metaserver.settings import metaserver_settings
from keylane.protocol.errors import ConfigError, Reason, UnauthenticatedError
from support.access.secured_cluster import NAME, SecuredCluster
from support.raising import raises


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    cluster = SecuredCluster(tmp_path_factory.mktemp("secured"))
    yield cluster
    cluster.stop()


async def test_messages_pass_over_tls_with_tokens_and_not_without(secured: SecuredCluster):
    async with Admin(secured.meta, tls=secured.tls, token=secured.admin_token, wait_s=30) as admin:
        await wait_for_brokers(admin, 1)
        await admin.create_subject("orders", partitions=2)
        route = await admin.describe_subject("orders")
        assert {part.address.partition(":")[0] for part in route.partitions} == {NAME}
        shop = (await admin.create_token("shop")).token
        billing = (await admin.create_token("billing")).token
        await admin.grant("shop", "produce", subject="orders")
        await admin.grant("billing", "consume", subject="orders", group="g")
    sent = {b"%d" % number for number in range(20)}
    async with Producer(secured.meta, tls=secured.tls, token=shop) as producer:
        for value in sent:
            producer.send("orders", value, key=value)
        await producer.flush()
    got = set()
    consumer = Consumer(
        secured.meta, subject="orders", group="g", start="earliest", tls=secured.tls, token=billing
    )
    async with asyncio.timeout(60), consumer:
        async for message in consumer:
            got.add(message.value)
            await message.ack()
            if got == sent:
                break
    with pytest.raises(UnauthenticatedError):
        async with Producer(secured.meta, tls=secured.tls):
            pass


async def test_start_is_refused_first_for_settings_and_then_for_an_address_without_tls(
    tmp_path: Path,
):
    """Access control is no reason to serve other machines without TLS; where they are served it is
    on by itself.
    """
    given = {"data": tmp_path / "data", "host": "10.1.2.3"}
    with pytest.raises(ConfigError, match="admin_token_file or admin_token_hash is missing"):
        metaserver_settings(given | {"access": "on"})
    with pytest.raises(ConfigError, match="access is on, off or auto"):
        metaserver_settings(given | {"access": "of"})
    served = given | {"insecure_network": True}
    with pytest.raises(
        ConfigError, match=r"10\.1\.2\.3 is not a loopback address; access = \"off\""
    ):
        metaserver_settings(served)
    assert metaserver_settings(served | {"access": "off"}).is_unguarded
    with pytest.raises(ConfigError, match="admin_token_hash is the SHA-256"):
        metaserver_settings(given | {"admin_token_hash": "abc"})
    with pytest.raises(ConfigError, match="broker_token_hashes are NAME:HASH"):
        metaserver_settings(given | {"broker_token_hashes": "g1"})
    files = {"admin_token_file": "none", "cluster_token_file": "none"}
    for settings in (
        metaserver_settings(given),
        metaserver_settings(given | files | {"access": "on"}),
    ):
        with raises(Reason.INSECURE_HOST, match="no TLS"):
            async with running_metaserver(settings):
                pass
    assert not (tmp_path / "data").exists()
