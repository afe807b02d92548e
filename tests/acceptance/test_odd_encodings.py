"""The `keylane` command where the output has no UTF-8, and with arguments that are no UTF-8."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from keylane import Admin, Producer
from support.cluster import Cluster

pytestmark = pytest.mark.acceptance


def keylane(
    meta: str, *arguments: str | bytes, encoding: str = "utf-8"
) -> subprocess.CompletedProcess[bytes]:
    """`keylane ARGUMENTS` with an output of `encoding`."""
    return subprocess.run(
        [sys.executable, "-m", "keylane.cli", *arguments],
        env={**os.environ, "KEYLANE_META": meta, "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("command", ["read", "consume"])
async def test_message_is_printed_when_the_output_lacks_its_characters(
    shared_cluster: Cluster, command: str
):
    """`read` and `consume` ended with a traceback, `consume` at the same message each time."""
    subject = f"emoji-{command}"
    await shared_cluster.create(subject, partitions=1)
    async with Producer(shared_cluster.meta) as producer:
        await producer.send(subject, "wért 😀".encode(), key="ключ".encode())
    form = {
        "read": ["--output", "json"],
        "consume": ["--output", "json", "--group", "g", "--count", "1"],
    }
    ran = keylane(shared_cluster.meta, command, subject, *form[command], encoding="ascii")
    assert (ran.returncode, ran.stderr) == (0, b"")
    message = json.loads(ran.stdout)
    assert (message["key"], message["value"]) == ("ключ", "wért 😀")


async def test_read_finds_a_key_when_it_is_no_utf_8(shared_cluster: Cluster):
    """`produce --key` takes any bytes; `read --key` ended with a traceback."""
    subject = "keys-of-bytes"
    await shared_cluster.create(subject, partitions=2)
    sent = keylane(shared_cluster.meta, "produce", subject, "--key", b"\xff\xfe", "paid")
    assert sent.returncode == 0, sent.stderr
    ran = keylane(shared_cluster.meta, "read", subject, "--key", b"\xff\xfe", "--output", "{value}")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"paid\n", b"")


async def test_name_of_a_client_is_refused_when_it_is_no_text(shared_cluster: Cluster):
    """`group suspend --client` ended with a traceback."""
    subject = "clients-of-bytes"
    await shared_cluster.create(subject, partitions=1)
    async with Admin(shared_cluster.meta) as admin:
        await admin.create_group(subject, "g")
    ran = keylane(shared_cluster.meta, "group", "suspend", subject, "g", "--client", b"\xff")
    assert ran.returncode == 1
    assert b"not valid text" in ran.stderr
    assert b"InvalidRequestError 1104" in ran.stderr
    assert b"Traceback" not in ran.stderr
