"""`keylane group` create, set, suspend, resume and describe, as an operator types them."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Any

from keylane import Consumer, Producer
from support.cluster import Cluster, eventually
from support.server_process import run_keylane
from support.terminal import CTRL_C, at_terminal


def keylane(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    return run_keylane("group", *words, "--meta", cluster.meta)


def settings(cluster: Cluster, subject: str) -> dict[str, Any]:
    described = keylane(cluster, "describe", subject, "g", "-o", "json")
    answer: dict[str, Any] = json.loads(described.stdout)["settings"]
    return answer


async def test_commands_store_what_describe_shows(shared_cluster: Cluster):
    """As a table for people, and as JSON."""
    await shared_cluster.create("group-commands", partitions=1)
    where = ("group-commands", "g")
    looked = keylane(shared_cluster, "describe", *where)
    assert "GroupUnknownError" in looked.stderr
    assert "keylane group list SUBJECT" in looked.stderr
    made = keylane(shared_cluster, "create", *where, "--start", "-1h")
    assert "g on group-commands: exclusive, began at" in made.stdout
    other = keylane(shared_cluster, "create", *where, "--start", "latest")
    assert (other.returncode, "ConflictError 1260" in other.stderr) == (1, True)
    words = ("--on-failure", "park", "--tries-max", "5")
    backoff = ("--backoff-first-ms", "1", "--backoff-max-ms", "9")
    assert keylane(shared_cluster, "set", *where, *words, *backoff).returncode == 0
    said = keylane(shared_cluster, "suspend", *where, "--client", "sick").stdout
    assert "no consumer named sick had a partition" in said
    again = keylane(shared_cluster, "suspend", *where, "--client", "sick").stdout
    assert "no consumer" not in again, "the switch is set already"
    shown = keylane(shared_cluster, "describe", *where).stdout
    assert "stored policy: on failure park, tries max 5, back-off 1 to 9 ms" in shown
    assert "clients suspended by an operator: sick" in shown
    stored = settings(shared_cluster, "group-commands")
    assert stored["policy"]["on_failure"] == "park"
    assert (stored["start"]["at"], stored["suspended_clients"]) == ("time", ["sick"])
    assert "stored policy: none" in keylane(shared_cluster, "set", *where, "--forget").stdout


async def test_reset_asks_before_it_skips_messages(shared_cluster: Cluster):
    """On a terminal, with live consumers and without; a reset back asks nothing."""
    await shared_cluster.create("group-skips", partitions=1)
    where = ("group-skips", "g")
    async with Producer(shared_cluster.meta) as producer:
        for _ in range(3):
            await producer.send("group-skips", b"v")
    assert keylane(shared_cluster, "create", *where).returncode == 0

    def cursor() -> int:
        described = keylane(shared_cluster, "describe", *where, "-o", "{partitions.offset}")
        return int(described.stdout)

    def at_keyboard(keys: str, *words: str) -> tuple[int, str]:
        words = ("group", "reset", *where, *words, "--meta", shared_cluster.meta)
        with at_terminal(*words) as terminal:
            if keys:
                terminal.wait_for("[y/N]: ")
                terminal.press(keys)
            return terminal.end(), terminal.shown

    status, shown = await asyncio.to_thread(at_keyboard, CTRL_C, "--to", "latest", "--live")
    assert status == 130
    assert "Skip up to 3 messages of group-skips, which no consumer of g will handle?" in shown
    assert cursor() == 0
    assert (await asyncio.to_thread(at_keyboard, "n\n", "--to", "latest"))[0] == 1
    assert cursor() == 0
    assert (await asyncio.to_thread(at_keyboard, "y\n", "--shift", "2"))[0] == 0
    assert cursor() == 2
    assert (await asyncio.to_thread(at_keyboard, "", "--to", "latest", "--yes"))[0] == 0
    assert cursor() == 3
    assert (await asyncio.to_thread(at_keyboard, "", "--to", "earliest", "--live"))[0] == 0
    assert cursor() == 0


async def test_commands_suspend_and_resume_a_consumer(shared_cluster: Cluster):
    """It hands over and stays; the exit status of a group that does not exist is 1."""
    await shared_cluster.create("group-suspended", partitions=1)
    where = ("group-suspended", "g")
    assert keylane(shared_cluster, "suspend", *where).returncode == 1
    async with Consumer(
        shared_cluster.meta, subject="group-suspended", group="g", handler=print
    ) as consumer:
        await eventually(lambda: consumer.assignment)
        assert "suspended by an operator" in keylane(shared_cluster, "suspend", *where).stdout
        await eventually(lambda: not consumer.assignment)
        assert settings(shared_cluster, "group-suspended")["suspended"]
        assert "suspended by" not in keylane(shared_cluster, "resume", *where).stdout
        await eventually(lambda: consumer.assignment)
