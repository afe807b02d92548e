"""What servers write to their logs at the default level: one line for each thing that happens."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keylane import Admin, Consumer, ConsumerSettings, KeylaneError
from keylane.cli.connection import wait_for_brokers
from keylane.errors import UnauthenticatedError
from support.access.secured_cluster import SecuredCluster
from support.cluster import eventually
from support.ports import free_port
from support.server_process import ServerProcess

FORGED = 'a\n{"level": "CRITICAL", "message": "forged"}\x1b[2J\u202e'


class LoggedServer:
    """A server whose log goes to a file."""

    def __init__(self, program: str, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.process = ServerProcess(f"keylane.{program}", arguments, errors=errors.fileno())
        self.address: str = json.loads(self.process.stdout.readline())["address"]

    def lines(self) -> list[dict[str, Any]]:
        """The lines of the log, each a JSON object."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def said(self, text: str) -> bool:
        """Whether a line matches a pattern."""
        return any(re.search(text, line["message"]) for line in self.lines())

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture
def metaserver(tmp_path: Path) -> Iterator[LoggedServer]:
    server = LoggedServer(
        *("metaserver", tmp_path / "meta.log", "--data", str(tmp_path / "meta"), "--port", "0"),
        *("--broker-ttl-ms", "2000", "--broker-heartbeat-ms", "200"),
    )
    yield server
    if server.process.poll() is None:
        server.stop()


def broker_arguments(tmp_path: Path, metaserver: LoggedServer, port: int) -> tuple[str, ...]:
    return (
        *("--group", "g1", "--data", str(tmp_path / "g1"), "--port", str(port)),
        *("--meta", metaserver.address),
    )


async def handle(_message: object) -> None:
    """Handle a message."""


async def test_log_has_one_line_for_each_event_at_the_default_level(
    tmp_path: Path, metaserver: LoggedServer
) -> None:
    """A start, a registration, a rebalance, an operation and its end, a broker that falls silent
    and comes back, the stop; nothing else, and nothing twice.
    """
    arguments = broker_arguments(tmp_path, metaserver, free_port())
    broker = LoggedServer("broker", tmp_path / "broker.log", *arguments)
    async with Admin(metaserver.address, wait_s=60) as admin:
        await wait_for_brokers(admin, 1)
        await admin.create_subject("orders", partitions=2)
        settings = ConsumerSettings(name=FORGED)
        consumer = Consumer(
            metaserver.address, subject="orders", group="billing", handler=handle, settings=settings
        )
        async with consumer:
            await eventually(lambda: metaserver.said("is rebalanced"))
            await admin.resize("orders", 4)
            await eventually(lambda: metaserver.said(r"operation \d+ on orders is done"))
        broker.process.kill()
        broker.process.wait()
        broker.process.stdout.close()
        await eventually(lambda: metaserver.said("is silent"))
        broker = LoggedServer("broker", tmp_path / "broker.log", *arguments)
        await eventually(lambda: metaserver.said("is heard again"))
    broker.stop()
    metaserver.stop()
    meta_lines, broker_lines = metaserver.lines(), broker.lines()
    expected = [
        r"listens at 127\.0\.0\.1:\d+",
        r"broker group g1 is registered at 127\.0\.0\.1:\d+",
        r"group billing of orders is rebalanced among 1 consumer: 2 partitions granted, 0 .*",
        r"operation \d+ begins: resize of orders",
        r"operation \d+ on orders is done",
        r"broker group g1 at \S+ is silent: nothing was heard for .* s",
        r"broker group g1 is heard again, at 127\.0\.0\.1:\d+",
        "stopping",
        "stopped",
    ]
    messages = [line["message"] for line in meta_lines]
    assert [line for line, count in Counter(messages).items() if count > 1] == []
    further = [each for each in messages if not any(re.fullmatch(one, each) for one in expected)]
    assert all("group billing of orders is rebalanced" in each for each in further)
    for pattern in expected:
        found = [each for each in messages if re.fullmatch(pattern, each)]
        assert len(found) == 1, (pattern, messages)
    starts = [line["message"] for line in broker_lines]
    assert [each for each in starts if "registered" in each] == [
        "registered with the metaserver"
    ] * 2
    assert starts[-2:] == ["stopping", "stopped"]
    assert not any(line["message"] == "forged" for line in (*meta_lines, *broker_lines))


def request_id(address: str, path: str) -> str:
    """The id in the head of an answer, also of an error."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return str(answer.headers["Keylane-Request-Id"])
    except urllib.error.HTTPError as error:
        with error:
            return str(error.headers["Keylane-Request-Id"])


async def test_id_of_a_request_joins_the_clients_error_and_the_log(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The line of the audit log has the id that the client's error has; no name forges a line."""
    cluster = SecuredCluster(tmp_path_factory.mktemp("said"))
    try:
        async with Admin(cluster.meta, tls=cluster.tls, token="kl_" + "w" * 43) as admin:
            with pytest.raises(UnauthenticatedError) as caught:
                await admin.describe_subject("orders")
        with pytest.raises(KeylaneError):
            async with cluster.admin() as admin:
                await admin.describe_subject(FORGED)
    finally:
        cluster.stop()
    lines = [json.loads(line) for line in cluster.log.read_text().splitlines()]
    ids = [line.get("request_id") for line in lines if line.get("outcome") == "refused"]
    assert caught.value.request_id in ids
    assert all(line["level"] != "CRITICAL" for line in lines)


def test_answer_has_the_id_of_its_request(metaserver: LoggedServer) -> None:
    """Each its own, in a header, whatever the path is."""
    paths = ("/v1/health", "/v1/%0A%7B%22level%22", "/v1/none")
    ids = {request_id(metaserver.address, path) for path in paths}
    assert len(ids) == 3
    assert all(re.fullmatch("[0-9a-f]{16}", each) for each in ids)
    assert all(line["level"] in {"INFO", "WARNING"} for line in metaserver.lines())
