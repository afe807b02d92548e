"""A cluster with access control: who may do what, end to end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from keylane import Admin, Consumer, Message, Producer
from keylane.protocol.access.tokens import make_token
from support.cluster import Cluster


class GuardedCluster(Cluster):
    """A cluster with access control, and the token of its administrator."""

    def __init__(self, folder: Path, brokers: int = 1) -> None:
        self.admin_token = make_token(secrets.randbits)
        (folder / "admin.token").write_text(self.admin_token)
        (folder / "cluster.token").write_text(make_token(secrets.randbits))
        super().__init__(
            folder,
            brokers,
            meta_settings=(
                f'access = "on"\nadmin_token_file = "{folder}/admin.token"\n'
                f'cluster_token_file = "{folder}/cluster.token"\n'
            ),
            broker_settings=f'access = "on"\ntoken_file = "{folder}/cluster.token"\n',
        )

    def admin(self) -> Admin:
        return Admin(self.meta, token=self.admin_token)


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
