"""`keylane subject lineage`: the picture of a real subject, and files that cannot be written."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from keylane import Admin, Consumer, Message
from support.cluster import Cluster
from support.load import Load
from support.server_process import run_keylane

SVG = "{http://www.w3.org/2000/svg}"


async def keylane(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(run_keylane, "subject", *words, "--meta", cluster.meta)


async def test_lineage_is_drawn_from_what_has_happened(shared_cluster: Cluster, tmp_path: Path):
    """A resize and a move under load, with a group that keeps up and one that has read nothing."""
    subject, file = "pictured", tmp_path / "lineage.svg"
    started_ms = time.time() * 1000
    await shared_cluster.create(subject, partitions=2)

    async def handle(_message: Message) -> None:
        pass

    async with Admin(shared_cluster.meta) as admin:
        await admin.create_group(subject, "resting")
        consumer = Consumer(shared_cluster.meta, subject=subject, group="busy", handler=handle)
        running = asyncio.create_task(consumer.run())
        async with Load(shared_cluster.meta, subject, keys=20) as load:
            await load.progress(50)
            await admin.wait(await admin.resize(subject, 3))
            await load.progress(50)
            moved = (await admin.history(subject)).partitions[-1].partition
            to = ({"g1", "g2"} - {moved.broker_group}).pop()
            await admin.wait(await admin.move([moved.partition_id], to=to))
            await load.progress(50)
        history = (await admin.history(subject)).partitions
        lag = await admin.lag(subject, "resting")
        while await admin.lag(subject, "busy"):
            await asyncio.sleep(0.05)
        done = await keylane(shared_cluster, "lineage", subject, "--svg", str(file))
        running.cancel()
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{file} shows the lineage of {subject}; open it in a browser\n"
    opened_ms = [entry.opened_ms or 0 for entry in history]
    assert started_ms - 1 <= opened_ms[0] < opened_ms[2] < opened_ms[-1] <= time.time() * 1000 + 1
    assert opened_ms == [opened_ms[0]] * 2 + [opened_ms[2]] * 3 + [opened_ms[-1]]

    root = ET.fromstring(file.read_text())
    titles = [str(each.text) for each in root.iter(f"{SVG}title")]
    assert sum("logical partitions" in title for title in titles) == len(history)
    said = root.findtext(f"{SVG}desc") or ""
    assert "2 → 3; " in said
    assert f"to {to}. Now 3 open partitions" in said
    assert "busy has acked everything." in said
    assert f"resting is {lag:,} messages behind, in 6 partitions." in said


async def test_lineage_is_written_as_programs_want_it(shared_cluster: Cluster, tmp_path: Path):
    """To standard output without another word; about a file as JSON; for some groups alone."""
    subject, file = "piped", tmp_path / "lineage.svg"
    await shared_cluster.create(subject, partitions=1)
    async with Admin(shared_cluster.meta) as admin:
        for group in ("one", "two"):
            await admin.create_group(subject, group)
    piped = await keylane(shared_cluster, "lineage", subject, "--svg", "-", "--group", "two")
    assert piped.returncode == 0, piped.stderr
    assert piped.stderr == ""
    said = ET.fromstring(piped.stdout).findtext(f"{SVG}desc") or ""
    assert said.endswith("two has acked everything.")
    assert "one has acked" not in said
    assert "… and 1 more group" in piped.stdout
    words = ("lineage", subject, "--svg", str(file), "--output", "json")
    written = json.loads((await keylane(shared_cluster, *words)).stdout)
    assert written == {"subject": subject, "file": str(file), "size_bytes": file.stat().st_size}


@pytest.mark.parametrize("name", ["missing/lineage.svg", ""])
async def test_file_that_cannot_be_written_is_refused(
    shared_cluster: Cluster, tmp_path: Path, name: str
):
    """Its folder does not exist, or it is a folder."""
    await shared_cluster.create("unwritten", partitions=1)
    file = tmp_path / name
    done = await keylane(shared_cluster, "lineage", "unwritten", "--svg", str(file))
    assert done.returncode == 1
    assert f"cannot write {file}: " in done.stderr
    assert "[ConfigError 1001" in done.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("nosuch", "--svg", "-"), "SubjectUnknownError 1110"),
        (("unread", "--svg", "-", "--group", "nosuch"), "GroupUnknownError 1112"),
    ],
)
async def test_unknown_subject_and_group_are_refused(
    shared_cluster: Cluster, words: tuple[str, ...], error: str
):
    await shared_cluster.create("unread", partitions=1)
    done = await keylane(shared_cluster, "lineage", *words)
    assert done.returncode == 1
    assert f"[{error}" in done.stderr
    assert done.stdout == ""
