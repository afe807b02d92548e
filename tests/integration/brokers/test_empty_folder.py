"""A broker's disk is lost and an empty one stands at its address: each text on the way names what
helps.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from keylane import Producer
from keylane.producer import ProducerSettings
from keylane.protocol import endpoints
from keylane.protocol.routing import Route, logical_partition
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, alert_cluster, eventually, silent
from support.server_process import run_keylane

SENDING = ProducerSettings(call_timeout_ms=1_000)
WAY_OUT = "keylane broker evacuate g2 --accept-loss"


async def keylane(
    cluster: Cluster, *words: str, typed: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line; `typed`: on a terminal, with this input."""
    words = (*words, "--meta", cluster.meta)
    return await asyncio.to_thread(
        run_keylane, *words, text=typed or "", terminal=typed is not None
    )


def key_at(route: Route, group: str) -> bytes:
    """An order key of a partition on this broker group."""
    ranges = [
        range(partition.range_start, partition.range_end)
        for partition in route.open_partitions()
        if partition.broker_group == group
    ]
    keys = (b"k%d" % number for number in range(10_000))
    return next(key for key in keys if any(logical_partition(key) in each for each in ranges))


def readiness(address: str) -> tuple[int, str]:
    """Status and reason of a broker's /health/ready."""
    try:
        with urlopen(f"http://{address}/health/ready") as answer:
            return answer.status, ""
    except HTTPError as error:
        with error:
            return error.code, str(json.load(error)["reason"])


async def test_texts_beside_an_empty_folder_name_the_way_out(tmp_path: Path) -> None:
    """Of a producer, of `broker list`, of the broker's health; the broker listens, says so, and is
    not ready.
    """
    with alert_cluster(tmp_path) as cluster:
        route = await cluster.create("s", partitions=2, strategy="strict")
        key = key_at(route, "g2")
        async with Producer(cluster.meta, settings=SENDING) as producer:
            await producer.send("s", b"0", key=key)
            cluster.brokers[1].kill()
            shutil.rmtree(tmp_path / "broker-2")
            cluster.brokers[1].restart()  # waits for the line `{"ready": true, …}`
            await asyncio.sleep(
                1
            )  # the producer sees that its connection has ended, so that no message is doubtful
            waiting = [producer.send("s", b"1", key=key)]
            waiting += [producer.send("s", b"2") for _ in range(20)]
            await eventually(lambda: readiness(cluster.brokers[1].address)[0] == 503)
            await eventually(lambda: WAY_OUT in readiness(cluster.brokers[1].address)[1])
            await eventually(
                lambda: "belongs to another data folder" in str(producer.stats.waiting)
            )
            for _ in range(200):
                for entry in producer.waiting().keys:
                    if entry.advice:
                        assert "belongs to another data folder" in entry.reason
                        assert WAY_OUT in entry.advice
                assert "no open partition" not in str(producer.stats.waiting)
                await asyncio.sleep(0.01)
            for form in ("table", "json"):
                listed = await keylane(cluster, "broker", "list", "--output", form)
                assert WAY_OUT in listed.stdout + listed.stderr
            network = HttpNetwork()
            await silent(MetaClient(network, [cluster.meta]), "g2")
            await network.close()
            done = await keylane(cluster, *WAY_OUT.split()[1:])
            assert done.returncode == 0, done.stdout + done.stderr
            await asyncio.wait_for(asyncio.gather(*waiting), 60)


@pytest.mark.parametrize("flag", ["--without-source", "--accept-loss"])
async def test_evacuation_right_after_the_kill_says_when_to_ask_again(
    tmp_path: Path, flag: str
) -> None:
    with Cluster(tmp_path, 2) as cluster:
        await cluster.create("s", partitions=2, strategy="strict")
        cluster.brokers[1].kill()
        done = await keylane(cluster, "broker", "evacuate", "g2", flag)
        assert done.returncode == 1
        assert "ago, within its ttl" in done.stderr
        assert "try again once it is silent, at the latest in " in done.stderr


async def test_loss_is_accepted_on_a_terminal_when_the_answer_is_yes(tmp_path: Path) -> None:
    """The command shows what is given up and asks; a dry run and --yes do not."""
    with alert_cluster(tmp_path) as cluster:
        await cluster.create("s", partitions=2, strategy="strict")
        cluster.brokers[1].kill()
        network = HttpNetwork()
        meta = MetaClient(network, [cluster.meta])
        evacuate = ("broker", "evacuate", "g2", "--accept-loss")
        try:
            await silent(meta, "g2")
            dry = await keylane(cluster, *evacuate, "--dry-run", typed="")
            assert (dry.returncode, "Give up" in dry.stderr) == (0, False)
            no = await keylane(cluster, *evacuate, typed="n\n")
            assert no.returncode == 1
            assert "of s would be given up: its end is not known" in no.stderr
            assert "Give up the messages that only broker group g2 has" in no.stderr
            assert not any(
                past.lost for past in (await meta.call(endpoints.HISTORY, subject="s")).partitions
            )
            yes = await keylane(cluster, *evacuate, typed="y\n")
            assert yes.returncode == 0, yes.stdout + yes.stderr
            assert any(
                past.lost for past in (await meta.call(endpoints.HISTORY, subject="s")).partitions
            )
            again = await keylane(cluster, *evacuate, "--yes", typed="")
            assert (again.returncode, "Give up" in again.stderr) == (0, False)
        finally:
            await network.close()
