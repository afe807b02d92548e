"""Broker groups are handed over between hosts until each serves as many, with real processes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from keylane.admin import Admin
from support.cluster import ALERT, Cluster, Program
from support.load import Load
from support.server_process import run_keylane

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.cluster(
        brokers=0, meta_settings=f"{ALERT}balance = true\nbalance_interval_ms = 300\n"
    ),
]
GROUPS = ("g1", "g2")


class Hosts:
    """Hosts a and b, each with a data folder of both broker groups."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.programs = {
            (host, group): Program(
                *("keylane.broker", "--group", group, "--data", str(folder / f"{host}-{group}")),
                *("--meta", cluster.meta, "--failover", "true", "--machine", host),
                *(("--follow", "true") if host == "b" else ()),
            )
            for host in ("a", "b")
            for group in GROUPS
        }
        cluster.brokers += self.programs.values()

    async def loads(self, admin: Admin) -> Counter[str]:
        """How many broker groups each host serves; of those whose sets are complete."""
        hosts = {f"127.0.0.1:{each._port}": host for (host, _), each in self.programs.items()}
        found = (await admin.list_brokers()).brokers
        whole = [each for each in found if each.available and each.folders == 2]
        return Counter(hosts[each.address] for each in whole)

    async def wait_for(self, admin: Admin, **loads: int) -> None:
        async with asyncio.timeout(60):
            while await self.loads(admin) != loads:
                await asyncio.sleep(0.1)


async def balance(cluster: Cluster, *words: str) -> dict:
    done = await asyncio.to_thread(
        run_keylane, "cluster", "balance", *words, "--meta", cluster.meta, "-o", "json"
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def test_masters_are_spread_by_a_command_and_by_the_metaserver_under_load(
    cluster: Cluster, tmp_path: Path
) -> None:
    await balance(cluster, "--stop")
    hosts = Hosts(cluster, tmp_path)
    async with Admin(cluster.meta) as admin:
        async with asyncio.timeout(60):
            while len((await admin.list_brokers()).brokers) < 2:
                await asyncio.sleep(0.1)
        for group in GROUPS:
            await admin.set_copies(group, 2)
        await admin.create_subject("orders", partitions=4)
        await hosts.wait_for(admin, a=2)
        async with Load(cluster.meta, "orders", keys=50) as load:
            await load.progress(300)
            planned = (await balance(cluster, "--dry-run"))["plan"]["hand_overs"]
            assert [(each["source"], each["target"]) for each in planned] == [("a", "b")]
            assert await hosts.loads(admin) == {"a": 2}, "nothing was done, nor by itself"
            done = await balance(cluster, "--yes")
            assert done["handed_over"] == planned
            await hosts.wait_for(admin, a=1, b=1)
            assert (await balance(cluster, "--dry-run"))["plan"]["hand_overs"] == []

            # A host is restarted, so the other one serves both, until the metaserver mends that.
            (group,) = {"g1", "g2"} - {done["handed_over"][0]["broker_group"]}
            await admin.hand_over(group)
            await hosts.wait_for(admin, b=2)
            await asyncio.sleep(1)  # three intervals
            assert await hosts.loads(admin) == {"b": 2}, "an operator has stopped it"
            await balance(cluster, "--start")
            await hosts.wait_for(admin, a=1, b=1)
            await load.progress(300)
            await load.finish()
        load.check()
    await cluster.check_history("orders", load.sent)
