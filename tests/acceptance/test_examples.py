"""The programs in examples/ do what they say, run as their reader runs them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping

import pytest

from keylane import Admin, Producer
from keylane.admin import ResetTo
from keylane.cli.java import find_java
from support.cluster import Cluster
from support.java import environment_without_java
from support.pages import blocks_of
from tidy.tree import ROOT

pytestmark = pytest.mark.acceptance

EXAMPLES = ROOT / "examples"
TIMEOUT_S = 200
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""The example ends before the second compiler or a parallel collector pays off."""


def run(
    cluster: Cluster, name: str, *arguments: str, environment: Mapping[str, str] = os.environ
) -> list[str]:
    """The lines that an example prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env={**environment, "KEYLANE_META": cluster.meta},
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


async def fill(cluster: Cluster, subject: str, pairs: list[tuple[bytes, bytes]]) -> None:
    await cluster.create(subject)
    async with Producer(cluster.meta) as producer:
        await producer.send_all(subject, pairs)


async def test_send_and_handle(file_cluster):
    """Each customer's steps are handled in the order they were sent."""
    await file_cluster.create("parcels")
    sent, *customers = run(file_cluster, "send_and_handle.py")
    assert sent.startswith("sent 12,")
    assert customers == [f"{name} placed paid packed shipped" for name in ("ada", "bob", "cyd")]


async def test_ack_by_hand(file_cluster, tmp_path):
    """What was acked is in the file, once, and a second run gets the next ones."""
    await fill(file_cluster, "readings", [(b"k", b"%d" % n) for n in range(20)])
    path = tmp_path / "readings.txt"
    for upto in (10, 20):
        assert run(file_cluster, "ack_by_hand.py", str(path)) == [f"wrote 10 messages to {path}"]
        assert path.read_text().split() == [str(n) for n in range(upto)]


async def test_add_each_once(file_cluster, tmp_path):
    """A reset hands all payments out again, and none of them is added twice."""
    await fill(file_cluster, "payments", [(b"k", b"%d" % n) for n in range(1, 11)])
    path = str(tmp_path / "bank.db")
    *_, last = run(file_cluster, "add_each_once.py", path)
    assert last == "payment of 10: balance 55"
    async with Admin(file_cluster.meta) as admin:
        await admin.reset_group("payments", "ledger", ResetTo.EARLIEST)
    assert run(file_cluster, "add_each_once.py", path) == []


async def test_refuse_a_paused_owner(file_cluster, tmp_path):
    """The page about it shows what the program prints, but for the tokens."""
    await file_cluster.create("transfers", partitions=1)
    lines = run(file_cluster, "refuse_a_paused_owner.py", str(tmp_path / "bank.db"))
    page = ROOT / "docs" / "do" / "fence-effects.md"
    (shown,) = [block.text.splitlines() for block in blocks_of(page) if block.language == "text"]
    places = re.compile(r"\b(token|partition) \d+")
    assert [places.sub(r"\1 n", line) for line in lines] == [
        places.sub(r"\1 n", line) for line in shown
    ]
    first, second = (int(re.findall(r"token (\d+)", line)[0]) for line in (lines[0], lines[2]))
    assert first < second


async def test_trace_sent_messages(file_cluster):
    """The spans of a ticket and of its bill are of the trace that the ticket was sent with."""
    for subject in ("tickets", "bills"):
        await file_cluster.create(subject)
    lines = run(file_cluster, "trace_sent_messages.py")
    traces: dict[str, list[str]] = {}
    for line in lines:
        ticket, *words = line.split()
        traces.setdefault(ticket, []).extend(word.split("-")[1] for word in words if "-" in word)
    assert set(traces) == {"ticket-0", "ticket-1", "ticket-2"}
    assert [len(ids) for ids in traces.values()] == [3, 3, 3]  # ordered, billed, mailed
    assert [len(set(ids)) for ids in traces.values()] == [1, 1, 1]
    assert len({ids[0] for ids in traces.values()}) == 3
    spans = [word.split("-")[2] for line in lines for word in line.split()[1:] if "-" in word]
    assert len(set(spans)) == 9


async def test_run_until_stopped(file_cluster):
    """At SIGTERM it hands over and ends in peace; the next run gets only what is left."""
    await fill(file_cluster, "stopped", [(b"k", b"%d" % n) for n in range(40)])
    program = (EXAMPLES / "run_until_stopped.py").read_text().replace('"readings"', '"stopped"')
    handled: list[str] = []
    while len(handled) < 40:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | {"KEYLANE_META": file_cluster.meta},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            count = 40 - len(handled) if handled else 15
            handled += [process.stdout.readline() for _ in range(count)]
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=TIMEOUT_S)
            *more, last = rest.splitlines(keepends=True)
            handled += more
            assert (process.returncode, last) == (0, "everything is handed over\n")
        finally:
            process.kill()
            process.wait()
    assert handled == [f"handled {n}\n" for n in range(40)]


@pytest.mark.spark
async def test_read_with_spark(file_cluster, tmp_path):
    """Spark adds up what was sent, on the Java of a Python package, and says nothing else."""
    environment = environment_without_java(tmp_path)
    environment["JAVA_HOME"] = str(find_java(environment).path)
    environment["SPARK_SUBMIT_OPTS"] = JAVA_OPTIONS
    await fill(file_cluster, "visits", [(b"a", b"1"), (b"b", b"3"), (b"a", b"2")])
    shown = [
        line.replace(" ", "")
        for line in run(file_cluster, "read_with_spark.py", environment=environment)
    ]
    assert "|a|3|" in shown
    assert "|b|3|" in shown


def test_every_example_is_run():
    """There is a test here for each program."""
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested
