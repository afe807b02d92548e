"""The `keylane` command without standard input, output or errors, as a supervisor or `>&-` starts
it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from keylane import Admin
from support.cluster import Cluster

pytestmark = pytest.mark.acceptance


@pytest.mark.parametrize(
    ("name", "closed", "told"),
    [
        ("in", "<&-", True),
        ("out", ">&-", False),
        ("err", "2>&-", True),
        ("all", "<&- >&- 2>&-", False),
    ],
)
async def test_command_does_its_work_when_standard_streams_are_closed(
    shared_cluster: Cluster, name: str, closed: str, told: bool
):
    """Its sockets do not take their numbers; libuv ended the process with SIGABRT when it closed
    one.
    """
    subject = f"closed-{name}"
    command = '"$0" -m keylane.cli subject create "$1" --partitions 1 '
    done = subprocess.run(
        ["/bin/sh", "-c", command + closed, sys.executable, subject],
        env={**os.environ, "KEYLANE_META": shared_cluster.meta},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (subject in done.stdout) == told
    async with Admin(shared_cluster.meta) as admin:
        assert (await admin.describe_subject(subject)).subject == subject
