"""Very many keys are parked at a real broker: every answer about them has its bounds."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from keylane import Admin
from keylane.console.page import ROWS_MAX
from support.cluster import Cluster
from support.parked.many_keys import park_many

SUBJECT, GROUP = "crowded", "billing"
PAGES = 20


def memory_mb(pid: int) -> float:
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


async def listed(cluster: Cluster, *words: str) -> tuple[list[dict[str, object]], str]:
    """What the command lists as JSON, and what it says on standard error."""
    done = await asyncio.to_thread(
        subprocess.run,
        [
            *(sys.executable, "-m", "keylane.cli", "parked", "list", SUBJECT, GROUP, *words),
            *("--meta", cluster.meta, "--output", "json"),
        ],
        capture_output=True,
        check=True,
        text=True,
    )
    return json.loads(done.stdout), done.stderr


@pytest.mark.cluster(brokers=1)
@pytest.mark.parametrize(
    ("partitions", "keys"), [(4, 2_500), pytest.param(100, 10_000, marks=pytest.mark.whole)]
)
async def test_answers_about_very_many_parked_keys_have_their_bounds(
    cluster: Cluster, partitions: int, keys: int
):
    """The figures of a million keys are in docs/PARKING.md."""
    broker = cluster.brokers[0].process.pid
    empty_mb = memory_mb(broker)
    began_s = time.perf_counter()
    found = await park_many(cluster, SUBJECT, GROUP, partitions=partitions, keys=keys)
    total = partitions * keys
    figures = {"keys": total, "parked_s": round(time.perf_counter() - began_s, 1)}
    figures["broker_mb"] = round(memory_mb(broker) - empty_mb)
    async with Admin(cluster.meta) as admin, aiohttp.ClientSession() as session:
        described = await admin.describe_group(SUBJECT, GROUP)
        assert sum(each.parked or 0 for each in described.partitions) == total

        took_ms = []
        for key in (None, found[min(found)][-1]):
            began_s = time.perf_counter()
            told = await admin.why(SUBJECT, GROUP, key=key)
            took_ms.append((time.perf_counter() - began_s) * 1000)
            [cause] = [each for each in told.causes if each.code == "parked"]
            counted = f"{total} keys have been parked" if key is None else "the key has been parked"
            # As many as the broker has counted in the time that it has.
            partial = re.match(r"at least \d+ keys have been parked", cause.text)
            assert cause.text.startswith(counted) or (partial and told.unknown and total > 100_000)
            assert f"no such customer: {keys - 1}" in cause.text
        figures["why_ms"] = round(max(took_ms))

        path = f"http://{cluster.meta}/console/subjects/{SUBJECT}/groups/{GROUP}/parked"
        metaserver = cluster.meta_program.process.pid
        took_ms, sizes, before_mb = [], [], 0.0
        for number in range(PAGES):
            after = f"{max(found)}.{number * ROWS_MAX}" if number % 2 else ""
            began_s = time.perf_counter()
            async with session.get(path, params={"after": after} if after else {}) as answer:
                page = await answer.text()
                assert answer.status == 200, page
            took_ms.append((time.perf_counter() - began_s) * 1000)
            sizes.append(len(page))
            assert page.count("no such customer: ") == ROWS_MAX
            before_mb = before_mb or memory_mb(metaserver)
        figures["page_ms"] = round(sorted(took_ms)[PAGES // 2])
        figures["pages_mb"] = round(memory_mb(metaserver) - before_mb, 1)
        assert max(sizes) < 500_000
        assert figures["pages_mb"] < 30, "the first page is loaded already"

    began_s = time.perf_counter()
    views, more = await listed(cluster, "--limit", "50")
    figures["list_s"] = round(time.perf_counter() - began_s, 1)
    assert len(views) == 50
    assert more == "there are more than these 50: --limit shows more\n"
    figures["list_mb"] = round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
    [view], more = await listed(cluster, "--key", found[max(found)][7].decode(), "--limit", "1")
    assert (view["key"], more) == (found[max(found)][7].decode(), "")
    print(json.dumps(figures))
