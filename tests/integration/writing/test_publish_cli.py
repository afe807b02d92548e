"""`keylane subject publish` and `list --hidden`, as commands."""

from __future__ import annotations

import asyncio
import json
import subprocess

from keylane import Admin, Producer
from support.cluster import Cluster
from support.server_process import run_keylane


async def keylane(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(run_keylane, "subject", *words, "--meta", cluster.meta)


async def test_hidden_subject_is_listed_published_and_published_again(file_cluster: Cluster):
    """The list shows its target; a repeat says the same; a replaced subject has the new messages
    alone.
    """
    await file_cluster.create("told", partitions=1)
    async with Admin(file_cluster.meta) as admin, Producer(file_cluster.meta) as producer:
        await producer.send("told", b"old")
        for name in ("told.hidden-1", "told.hidden-2"):
            await admin.hide_subject("told", name)
            await producer.send(name, b"new")
            assert name not in (await keylane(file_cluster, "list")).stdout
            listed = await keylane(file_cluster, "list", "--hidden")
            assert f"{name}: hidden, to be published in told" in listed.stdout
            more = ("--replace", "--yes") if name.endswith("2") else ()
            for _ in range(2):
                done = await keylane(file_cluster, "publish", name, "told", *more)
                assert done.stdout == f"{name} is published in told\n", done.stderr
        described = await admin.describe_subject("told")
        assert sum(part.next_offset or 0 for part in described.partitions) == 1
    answer = await keylane(file_cluster, "publish", "told.hidden-1", "told", "--output", "json")
    assert json.loads(answer.stdout)["state"] == "done"
    refused = await keylane(file_cluster, "publish", "told", "told")
    assert refused.returncode == 1
    assert "1311" in refused.stderr
