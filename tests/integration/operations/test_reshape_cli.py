"""`keylane subject` resize, split, merge, move, evacuate, operations, history, as commands."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.cluster import Cluster, pause, resume
from support.server_process import run_keylane


async def keylane(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(run_keylane, "subject", *words, "--meta", cluster.meta)


async def answer(cluster: Cluster, *words: str) -> Any:
    done = await keylane(cluster, *words, "--output", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def test_resize_shows_its_plan_its_end_and_its_lineage(shared_cluster: Cluster):
    """A dry run changes nothing; the command ends when the operation is done; `history` draws the
    lineage.
    """
    await shared_cluster.create("drawn", partitions=1)
    planned = await answer(shared_cluster, "resize", "drawn", "--partitions", "2", "--dry-run")
    assert [operation["operation_id"] for operation in planned] == [0]
    assert len((await answer(shared_cluster, "history", "drawn"))["partitions"]) == 1

    done = await keylane(shared_cluster, "resize", "drawn", "--partitions", "2")
    assert done.returncode == 0, done.stderr
    assert "drawn: done, 3 of 3 steps" in done.stdout
    again = await keylane(shared_cluster, "resize", "drawn", "--partitions", "2")
    assert again.stdout == "nothing to do\n"
    table = (await keylane(shared_cluster, "operations", "drawn")).stdout
    assert "seals" in table  # it is true in every state, also before anything is sealed
    assert "opens" in table
    assert "sealed" not in table
    created = (await keylane(shared_cluster, "create", "drawn", "--partitions", "1")).stdout
    assert created.count(" open ") == 2
    assert created.count("[") == 2  # one range a row

    whole, left, right = (await answer(shared_cluster, "history", "drawn"))["partitions"]
    ids = [str(child["partition"]["partition_id"]) for child in (left, right)]
    (merged,) = await answer(shared_cluster, "merge", *ids)
    (child,) = merged["children"]
    groups = {"g1", "g2"} - {child["broker_group"]}
    (moved,) = await answer(
        shared_cluster, "move", str(child["partition_id"]), "--broker-group", groups.pop()
    )
    shown = await answer(shared_cluster, "operations", "drawn")
    assert [operation["kind"] for operation in shown] == ["move", "merge", "resize"]

    names = [whole["partition"]["name"], *("drawn.p1", "drawn.p2", "drawn.p3", "drawn.p4")]
    drawn = (await keylane(shared_cluster, "history", "drawn")).stdout.splitlines()
    assert drawn[0].startswith(
        "drawn: route version "
    )  # partitions without messages expire in between
    assert [line.strip("├└─│ ").split(" ")[0].rstrip(",") for line in drawn[1:]] == [
        *names[:2],
        *names[3:],
        names[2],
        names[3],
    ]
    assert moved["state"] == "done"
    refused = await keylane(shared_cluster, "cancel", str(moved["operation_id"]))
    assert "OPERATION_FORWARD" in refused.stderr
    assert drawn[-2].endswith((": sealed at 0", ": expired at 0"))
    assert sum(line.endswith(": open") for line in drawn) == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("resize", "nowhere", "--partitions", "2"), "SubjectUnknownError"),
        (("split", "1000000"), "PartitionUnknownError"),
        (("merge", "1000000", "1000001"), "PartitionUnknownError"),
        (("evacuate", "nowhere"), "BROKER_GROUP_UNKNOWN"),
    ],
)
async def test_command_ends_with_the_error_of_a_refused_request(
    shared_cluster: Cluster, words: tuple[str, ...], error: str
):
    """Exit status 1, and the error by name."""
    done = await keylane(shared_cluster, *words)
    assert done.returncode == 1
    assert error in done.stderr


async def test_evacuation_says_that_its_group_is_cordoned(tmp_path: Path):
    """
    The ids are printed when the operation is begun, canceled, done, and when there is nothing to
    do; with JSON and in it.
    """
    cluster = Cluster(tmp_path, 2)
    cordoned = "g2 gets no new partitions until: keylane broker uncordon g2"
    try:
        await cluster.create("left", partitions=2)
        pause(cluster.brokers[0].process.pid)
        begun = await keylane(cluster, "evacuate", "g2", "--no-wait", "--output", "json")
        (view,) = json.loads(begun.stdout)
        assert (view["state"], view["cordoned"]) == ("plan", "g2")
        assert begun.stderr == f"{cordoned}\n"
        canceled = await keylane(cluster, "cancel", str(view["operation_id"]))
        assert canceled.stdout == f"evacuate of left: canceled\n{cordoned}\n"
        resume(cluster.brokers[0].process.pid)
        done = await keylane(cluster, "evacuate", "g2")
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(f"{cordoned}\n")
        again = await keylane(cluster, "evacuate", "g2")
        assert again.stdout == f"nothing to do\n{cordoned}\n"
    finally:
        cluster.stop()


async def test_resize_says_on_standard_error_what_it_waits_for_when_its_output_is_piped(
    tmp_path: Path,
):
    """Ctrl-C ends the command, and the resize goes on."""
    cluster = Cluster(tmp_path, 1)
    try:
        await cluster.create("slow", partitions=1)
        pause(cluster.brokers[0].process.pid)
        words = ("resize", "slow", "--partitions", "2", "--output", "json")
        with subprocess.Popen(
            [sys.executable, "-m", "keylane.cli", "subject", *words, "--meta", cluster.meta],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as command:
            assert command.stderr is not None
            line = await asyncio.to_thread(command.stderr.readline)
            assert line.startswith("slow: ")
            assert "keylane subject operations slow shows it; Ctrl-C leaves it going on" in line
            command.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(command.wait, 30) == 130
        resume(cluster.brokers[0].process.pid)
        (view,) = await answer(cluster, "resize", "slow", "--partitions", "2")
        assert view["state"] in {"done", "fence"}
    finally:
        cluster.stop()
