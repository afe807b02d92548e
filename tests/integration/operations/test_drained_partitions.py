"""Tables of partitions leave out those that are sealed and drained, and say how many; JSON has
all.
"""

from __future__ import annotations

import asyncio
import json

from keylane import Consumer, Message, Producer
from keylane.protocol.operations import OperationKind, Reshape
from support.cluster import Cluster, eventually
from support.server_process import run_keylane


async def keylane(cluster: Cluster, *words: str) -> str:
    done = await asyncio.to_thread(run_keylane, *words, "--meta", cluster.meta)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(table: str, subject: str) -> int:
    """Rows of a table of partitions."""
    return sum(f" {subject}.p" in line for line in table.splitlines())


async def test_table_leaves_out_drained_partitions_when_a_subject_was_resized_often(
    shared_cluster: Cluster,
):
    """A group that has read nothing keeps them in the subject's table, and in its own."""
    subject = "often-resized"
    where = {
        "subject": ("subject", "describe", subject),
        "slow": ("group", "describe", subject, "slow"),
        "quick": ("group", "describe", subject, "quick"),
    }
    handled: list[Message] = []
    await shared_cluster.create(subject, partitions=2)
    for group in ("slow", "quick"):
        await keylane(shared_cluster, "group", "create", subject, group)
    async with Producer(shared_cluster.meta) as producer:
        for count in (3, 2):
            for number in range(64):
                producer.send(subject, b"v", key=b"%d" % number)
            await producer.flush()
            resize = Reshape(kind=OperationKind.RESIZE, subject=subject, partitions=count)
            await shared_cluster.reshape(resize)
    described = json.loads(await keylane(shared_cluster, *where["subject"], "-o", "json"))
    total = len(described["partitions"])
    drained = total - 2
    async with Consumer(
        shared_cluster.meta, subject=subject, group="quick", handler=handled.append
    ) as consumer:
        await eventually(lambda: len(handled) == 128)
        await eventually(lambda: len(consumer.assignment) == 2)
    shown = {name: await keylane(shared_cluster, *words) for name, words in where.items()}
    assert {name: rows(table, subject) for name, table in shown.items()} == {
        "subject": total,
        "slow": total,
        "quick": 2,
    }
    note = f"… and {drained} drained partitions (--all shows them)"
    assert [name for name, table in shown.items() if note in table] == ["quick"]
    await keylane(shared_cluster, "group", "delete", subject, "slow", "--yes")
    table = await keylane(shared_cluster, *where["subject"])
    assert (rows(table, subject), note in table) == (2, True)
    for name in ("subject", "quick"):
        table = await keylane(shared_cluster, *where[name], "--all")
        assert (rows(table, subject), "drained" in table) == (total, False)
        answered = json.loads(await keylane(shared_cluster, *where[name], "-o", "json"))
        assert len(answered["partitions"]) == total
