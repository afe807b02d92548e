"""`keylane produce` with files, against real brokers."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from keylane.cli.commands.produce import INTERRUPT_FLUSH_S
from keylane.protocol.routing import Route
from support.cluster import Cluster
from support.server_process import run_keylane

TIMEOUT_S = 60


async def keylane(cluster: Cluster, *arguments: str, text: str = "") -> tuple[int, str, str]:
    """Status, standard output and standard error of `keylane ARGUMENTS`."""
    done = await asyncio.to_thread(
        run_keylane, *arguments, "--meta", cluster.meta, text=text, timeout_s=TIMEOUT_S
    )
    return done.returncode, done.stdout, done.stderr


async def values_by_key(cluster: Cluster, route: Route) -> dict[bytes, list[bytes]]:
    """The stored values of each key, in their order."""
    stored: dict[bytes, list[bytes]] = {}
    for part in (await cluster.log(route)).values():
        for message in part:
            stored.setdefault(message.key, []).append(message.value)
    return stored


async def test_rows_of_a_csv_file_are_stored_by_key(shared_cluster: Cluster, tmp_path: Path):
    """A bad row is told with its line; the same file is sent on from there, once it is mended."""
    route = await shared_cluster.create("csv")
    file = tmp_path / "orders.csv"
    rows = [f'c{number % 7},"event\n{number}"' for number in range(500)]
    bad = [*rows[:300], "c1", *rows[301:]]
    file.write_text("customer,event\n" + "\n".join(bad) + "\n")
    command = ("produce", "csv", "--file", str(file), "--key-field", "customer", "-o", "json")
    status, out, errors = await keylane(shared_cluster, *command)
    problem = json.loads(errors)
    receipts = [json.loads(line) for line in out.splitlines()]
    assert (status, problem["name"], len(receipts)) == (1, "InputError", 300)
    assert "line 602: the header has 2 columns, and this row 1" in problem["message"]
    assert (problem["details"]["line"], problem["details"]["lines"]) == (602, "602-")
    assert [receipt["line"] for receipt in receipts] == list(range(2, 602, 2))
    assert {receipt["reordered"] for receipt in receipts} == {False}

    file.write_text("customer,event\n" + "\n".join(rows) + "\n")
    status, out, errors = await keylane(shared_cluster, *command, "--lines", "602-")
    assert (status, errors, len(out.splitlines())) == (0, "", 200)
    sent: dict[bytes, list[dict[str, str]]] = {}
    for number in range(500):
        row = {"customer": f"c{number % 7}", "event": f"event\n{number}"}
        sent.setdefault(row["customer"].encode(), []).append(row)
    stored = await values_by_key(shared_cluster, route)
    assert {key: list(map(json.loads, values)) for key, values in stored.items()} == sent


async def test_person_is_told_what_to_type(shared_cluster: Cluster):
    """A terminal gets one line, and no advice about the lines of a file."""
    route = await shared_cluster.create("typed", partitions=1)
    command = ("produce", "typed", "--key-separator", ":", "--meta", shared_cluster.meta)

    async def typed(text: str) -> tuple[int, str, str]:
        done = await asyncio.to_thread(
            run_keylane, *command, text=text, timeout_s=TIMEOUT_S, terminal=True
        )
        return done.returncode, done.stdout, done.stderr

    reading = "reading messages from standard input, one per line; Ctrl-D ends\n"
    status, out, errors = await typed("k:first\n\x04")
    assert (status, errors) == (0, reading)
    assert out.startswith("stored at offset 0 ")
    status, _, errors = await typed("paid\n")
    assert (status, errors) == (
        1,
        reading + "keylane: line 1: no separator, so no key; --keyless sends such lines without "
        "order; a line with a key is KEY:VALUE. Lines stored: 0 [InputError 1404 "
        "INPUT_UNFINISHED]\n  Run the command again, and type the lines that are not stored.\n",
    )
    assert await values_by_key(shared_cluster, route) == {b"k": [b"first"]}


async def test_lines_of_ndjson_are_stored_as_they_are(shared_cluster: Cluster):
    """From standard input; headers become properties, also beside those of a line."""
    route = await shared_cluster.create("ndjson", partitions=1)
    lines = ['{"customer": 7, "n": 1.50}', "", '{"customer": 7, "n": 2}']
    headers = ("--header", "source=till=3", "--header", "zone=")
    status, out, _ = await keylane(
        shared_cluster,
        *("produce", "ndjson", "--format", "ndjson", "--key-field", "customer", *headers),
        text="\n".join(lines),
    )
    assert (status, out) == (
        0,
        f"2 messages stored; partitions: {route.partitions[0].partition_id}\n",
    )
    assert await values_by_key(shared_cluster, route) == {
        b"7": [lines[0].encode(), lines[2].encode()]
    }
    line = '{"key": "7", "value": "v", "properties": {"zone": "own"}}'
    status, _, errors = await keylane(
        shared_cluster, "produce", "ndjson", "--format", "json", *headers, text=line
    )
    assert (status, errors) == (0, "")
    status, _, _ = await keylane(shared_cluster, "produce", "ndjson", "single", *headers)
    assert status == 0
    status, out, _ = await keylane(
        shared_cluster, "consume", "ndjson", "-g", "g", "-n", "4", "-o", "json"
    )
    messages = [json.loads(text) for text in out.splitlines()]
    given = {"source": "till=3", "zone": ""}
    assert [message["properties"] for message in messages] == [
        given,
        given,
        {"source": "till=3", "zone": "own"},
        given,
    ]
    assert (status, messages[3]["value"]) == (0, "single")


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.csv", "", "the input has no header"),
        ("a.csv", "a,b\n1,2\n", "no column 'customer', but: a, b"),
        ("a.csv", 'customer\n"ann\n', "the row of line 2 ends in a quoted field"),
        ("a.csv", "customer\n,\n", "line 2: the header has 1 column, and this row 2"),
        ("a.jsonl", '{"customer": null}\n', "line 1: no key in 'customer'"),
        ("a.jsonl", "hello\n", "line 1: not a JSON object"),
    ],
)
async def test_bad_file_is_told_with_its_line(
    shared_cluster: Cluster, tmp_path: Path, name: str, text: str, why: str
):
    """Nothing is stored, and nothing hangs."""
    await shared_cluster.create("bad-file")
    file = tmp_path / name
    file.write_text(text)
    status, out, errors = await keylane(
        shared_cluster, "produce", "bad-file", "--file", str(file), "--key-field", "customer"
    )
    assert (status, out) == (1, "")
    assert why in errors
    assert "Lines stored: 0; lines not stored: " in errors


@pytest.mark.crash
async def test_reordered_messages_are_counted_when_a_broker_is_away(cluster: Cluster):
    """BEST_TRIED: after `leave_after_ms` keyed messages go elsewhere, and the command says so."""
    await cluster.create("away", partitions=2, strategy="best_tried")
    cluster.brokers[0].kill()
    text = "".join(f"k{number}=v\n" for number in range(40))
    status, out, errors = await keylane(
        cluster, "produce", "away", "--key-separator", "=", text=text
    )
    assert (status, "declared as reordered" in errors) == (0, True)
    assert out.startswith("40 messages stored, ")
    assert " of them reordered; partitions: " in out


@pytest.mark.crash
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
async def test_lines_that_wait_for_a_broker_are_named_when_the_command_is_interrupted(
    cluster: Cluster, tmp_path: Path, stop: signal.Signals
):
    """The input has ended before; the lines that are named, sent once more, complete it."""
    route = await cluster.create("waiting", partitions=2)
    away, here = cluster.brokers
    near = [each for each in route.partitions if each.address == here.address]
    file = tmp_path / "input"
    file.write_text("".join(f"k{number}=v{number}\n" for number in range(1, 41)))
    away.kill()
    command = ["produce", "waiting", "--key-separator", "=", "--file", str(file), "-o", "json"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "keylane.cli",
        *command,
        "--meta",
        cluster.meta,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(TIMEOUT_S):
        while not any((await cluster.log(replace(route, partitions=near))).values()):
            await asyncio.sleep(0.1)
        process.send_signal(stop)
        _, errors = await process.communicate()
    # A producer whose messages wait for 5 s says so before, on the same standard error.
    *warnings, last = errors.splitlines()
    assert all(b" messages wait, the oldest for " in each for each in warnings), errors
    assert last.startswith(b"{"), errors
    told = json.loads(last)["details"]
    assert 0 < told["stored"] < 40

    away.restart()
    status, _, again = await keylane(cluster, *command, "--lines", told["lines"])
    assert (status, again) == (0, "")
    sent = {b"k%d" % number: [b"v%d" % number] for number in range(1, 41)}
    assert await values_by_key(cluster, route) == sent


@pytest.mark.crash
async def test_second_interrupt_ends_the_wait_and_names_the_lines(cluster: Cluster, tmp_path: Path):
    """The lines wait for a broker that is away; the command ends at once, and nothing is lost."""
    await cluster.create("hurried", partitions=1)
    file = tmp_path / "input"
    file.write_text("".join(f"k{number}=v{number}\n" for number in range(1, 41)))
    for broker in cluster.brokers:
        broker.kill()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "keylane.cli", "produce", "hurried"),
        *("--key-separator", "=", "--file", str(file), "-o", "json", "--meta", cluster.meta),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(TIMEOUT_S):
        assert process.stderr is not None
        assert b" messages wait, the oldest for " in await process.stderr.readline()
        began_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
    assert time.monotonic() - began_s < INTERRUPT_FLUSH_S
    assert process.returncode == 130
    assert b"never closed" not in errors
    details = json.loads(errors.splitlines()[-1])["details"]
    assert (details["stored"], details["lines"]) == (0, "1-")
