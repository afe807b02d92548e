"""A cluster of real processes on loopback, for tests that start, kill and restart them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Self

from keylane import Admin
from keylane.protocol import endpoints
from keylane.protocol.batch import batch_starts, columns
from keylane.protocol.control import CreateSubject, Retention, Route, SubjectView
from keylane.protocol.errors import KeylaneError, UnavailableError, UnreachableError
from keylane.protocol.frames import Read
from keylane.protocol.message import Message
from keylane.protocol.operations import (
    OperationState,
    OperationView,
    PartitionHistory,
    Reshape,
)
from keylane.protocol.routing import PartitionState
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.ports import free_port
from support.server_process import ServerProcess


class Program:
    """One process of ours that prints a ready line, and can be killed and started again on its
    port.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self._arguments = arguments
        self.address = ""
        self.environment: dict[str, str] = {}
        """Added to ours at the next start."""
        self._port = free_port()
        self.process = self._start()

    def _start(self) -> ServerProcess:
        arguments = (*self._arguments, "--port", str(self._port))
        return ServerProcess(self._module, arguments, **self.environment)

    def ready(self) -> Program:
        """Wait until the program serves."""
        line = self.process.stdout.readline()
        if not line:
            self.process.stdout.close()
            raise AssertionError(f"{self._module} ended with status {self.process.wait()}")
        self.address = json.loads(line)["address"]
        return self

    def kill(self) -> None:
        """Kill the program with SIGKILL."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def restart(self) -> None:
        """Start again on the same port and folder."""
        self.process = self._start()
        self.ready()

    def restart_to_die_after(self, step: str) -> None:
        """Kill the program, and start it again so that it kills itself right after this step."""
        self.kill()
        self.environment = {"KEYLANE_DIE_AFTER": step}
        self.restart()

    async def died(self) -> None:
        """Wait until the program has killed itself; its next start is an ordinary one."""
        await eventually(lambda: self.process.poll() is not None, what="its death")
        self.process.stdout.close()
        self.environment = {}

    def stop(self) -> None:
        """End the program, with SIGTERM if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdout.close()


class Cluster:
    """
    One metaserver on SQLite, or several on what the settings name, and `brokers` broker groups g1,
    g2, …

    Use it in a `with` statement, which stops every program at its end.
    """

    def __init__(
        self,
        folder: Path,
        brokers: int = 2,
        *,
        meta_settings: str = "",
        broker_settings: str = "",
        metas: int = 1,
    ) -> None:
        config = folder / "metaserver.toml"
        config.write_text(meta_settings)
        broker_config = folder / "broker.toml"
        broker_config.write_text(broker_settings)
        self.metas = [
            Program(
                *("keylane.metaserver", "--config", str(config)),
                *("--data", str(folder / f"meta-{number}")),
            ).ready()
            for number in range(metas)
        ]
        self.meta_program = self.metas[0]
        self.brokers = [
            Program(
                *("keylane.broker", "--config", str(broker_config)),
                *("--group", f"g{number}", "--data", str(folder / f"broker-{number}")),
                *("--meta", ",".join(self.addresses)),
            )
            for number in range(1, brokers + 1)
        ]
        for broker in self.brokers:
            broker.ready()

    @property
    def meta(self) -> str:
        return self.meta_program.address

    @property
    def addresses(self) -> list[str]:
        """The addresses of all metaservers."""
        return [meta.address for meta in self.metas]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def stop(self) -> None:
        for program in (*self.brokers, *self.metas):
            program.stop()

    async def create(
        self,
        subject: str,
        *,
        partitions: int = 4,
        strategy: str = "strict",
        retention: Retention = Retention.ACKED,
        static: bool = False,
    ) -> Route:
        """Create a subject over all brokers that run; waits until they have reported themselves."""
        body = CreateSubject(
            subject=subject,
            partitions=partitions,
            order_strategy=strategy,
            retention=retention,
            static=static,
        )
        wanted = sum(broker.process.poll() is None for broker in self.brokers)
        async with meta_of(self) as meta:
            until = time.monotonic() + 60
            while True:
                brokers = (await meta.health()).details.get("brokers", [])
                reported = sum(bool(broker["available"]) for broker in brokers)
                try:
                    if reported >= wanted:  # else which broker has the first partition is chance
                        view: SubjectView = await meta.create_subject(body)
                        return view.route
                except UnavailableError:
                    pass
                assert time.monotonic() < until, "the brokers did not report themselves"
                await asyncio.sleep(0.05)

    async def reshape(self, ask: Reshape, *, seconds: float = 60.0) -> list[OperationView]:
        """Change partitions and wait until it is done."""
        async with meta_of(self) as meta:
            views = (await meta.call(endpoints.RESHAPE, ask)).operations
            return [await done_operation(meta, view, seconds=seconds) for view in views]

    async def check_history(self, subject: str, sent: dict[bytes, list[bytes]]) -> None:
        """In the logs, parents before children, the messages of each key are those sent, in order,
        each once.
        """
        network = HttpNetwork()
        meta = MetaClient(network, [self.meta])
        try:
            history = await available_history(meta, subject)
            whole = []
            for past in sorted(history, key=lambda past: past.partition.partition_id):
                broker = BrokerClient(network, past.partition.address)
                part = await read_partition(broker, subject, past.partition.partition_id)
                await broker.close()
                if past.partition.state is PartitionState.SEALED:
                    assert len(part) == past.end_offset
                whole += part
        finally:
            await network.close()
        assert_order_per_key(whole, sent)

    async def log(self, route: Route) -> dict[int, list[Message]]:
        """Every message stored, by partition, as the brokers give it to readers without a group."""
        network = HttpNetwork()
        messages: dict[int, list[Message]] = {}
        try:
            for partition in route.partitions:
                broker = BrokerClient(network, partition.address)
                messages[partition.partition_id] = await read_partition(
                    broker, route.subject, partition.partition_id
                )
                await broker.close()
        finally:
            await network.close()
        return messages


@contextlib.asynccontextmanager
async def meta_of(cluster: Cluster) -> AsyncIterator[MetaClient]:
    """A client of the cluster's first metaserver."""
    network = HttpNetwork()
    try:
        yield MetaClient(network, [cluster.meta])
    finally:
        await network.close()


async def begun(meta: MetaClient, ask: Reshape) -> None:
    """Begin an operation at a metaserver that dies of it."""
    with contextlib.suppress(UnreachableError):
        while True:
            try:
                await meta.call(endpoints.RESHAPE, ask)
                return
            except UnavailableError:
                await asyncio.sleep(0.05)


async def done_operation(
    meta: MetaClient, view: OperationView, *, seconds: float = 60.0
) -> OperationView:
    """Wait until an operation is done; the metaserver may be down meanwhile."""
    until = time.monotonic() + seconds
    while view.state is not OperationState.DONE:
        assert time.monotonic() < until, f"not done: {view}"
        await asyncio.sleep(0.01)
        try:
            operations = (await meta.call(endpoints.OPERATIONS, subject=view.subject)).operations
        except UnreachableError:
            continue
        view = next(
            operation for operation in operations if operation.operation_id == view.operation_id
        )
    return view


async def delete_subject(meta: str | Iterable[str], subject: str, *, force: bool = False) -> None:
    """Delete a subject; every broker has dropped it at the end."""
    async with asyncio.timeout(60), Admin(meta) as admin:
        view = await admin.delete_subject(subject, force=force)
        while view.left:
            await asyncio.sleep(0.05)
            view = await admin.delete_subject(subject, subject_id=view.subject_id)


async def delete_group(
    meta: str | Iterable[str], subject: str, group: str, *, force: bool = False
) -> None:
    """Delete a group; every broker has forgotten it at the end."""
    async with asyncio.timeout(60), Admin(meta) as admin:
        view = await admin.delete_group(subject, group, force=force)
        while view.left:
            await asyncio.sleep(0.05)
            view = await admin.delete_group(subject, group, group_id=view.group_id)


async def silent(meta: MetaClient, group: str) -> None:
    """Wait until the metaserver takes a broker group for silent."""
    while True:
        brokers = (await meta.health()).details["brokers"]
        if not next(broker["available"] for broker in brokers if broker["broker_group"] == group):
            return
        await asyncio.sleep(0.05)


async def available_history(meta: MetaClient, subject: str) -> list[PartitionHistory]:
    """The history of a subject, as soon as the metaserver knows the address of each partition."""
    until = time.monotonic() + 60
    while True:
        partitions = (await meta.call(endpoints.HISTORY, subject=subject)).partitions
        missing = [past.partition for past in partitions if past.partition.address is None]
        if not missing:
            return partitions
        assert time.monotonic() < until, f"not available: {missing}"
        await asyncio.sleep(0.05)


async def read_partition(broker: BrokerClient, subject: str, partition_id: int) -> list[Message]:
    """All messages of one partition."""
    messages: list[Message] = []
    while True:
        answer, payload = await broker.call(Read(partition_id, len(messages), 1 << 20))
        if not payload:
            return messages
        for start, header in batch_starts(payload):
            cut = columns(payload, header, start)
            assert header.base_offset == len(messages)
            keys, values = (
                [cut.blob[low:high] for low, high in pairwise(edges)]
                for edges in (cut.key_edges, cut.value_edges)
            )
            messages.extend(
                Message(subject, key, value, offset, partition_id, sent_at_ns)
                for offset, (key, value, sent_at_ns) in enumerate(
                    zip(keys, values, cut.sent_at_ns, strict=True), header.base_offset
                )
            )
        assert answer.upto == len(messages)


async def eventually(condition, *, seconds: float = 60.0, what: str = "the condition") -> None:
    """Wait until `condition()` is true."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what} did not come true within {seconds} s"
        await asyncio.sleep(0.01)


def assert_order_per_key(messages: list[Message], sent: dict[bytes, list[bytes]]) -> None:
    """The values of each key are those sent, in that order, each once."""
    stored: dict[bytes, list[bytes]] = {}
    for message in messages:
        stored.setdefault(message.key, []).append(message.value)
    assert stored == sent


def pause(pid: int) -> None:
    """SIGSTOP: the process stands still, as in a long garbage collection or a frozen machine."""
    os.kill(pid, signal.SIGSTOP)


def resume(pid: int) -> None:
    """SIGCONT."""
    os.kill(pid, signal.SIGCONT)


__all__ = [
    "Cluster",
    "KeylaneError",
    "Program",
    "assert_order_per_key",
    "done_operation",
    "eventually",
    "pause",
    "read_partition",
    "resume",
]


ALERT = "operation_lease_ms = 400\nbroker_heartbeat_ms = 200\nbroker_ttl_ms = 1500\n"
"""Settings of a metaserver that soon notices which broker is silent."""


def alert_cluster(folder: Path, brokers: int = 2) -> Cluster:
    """Brokers and a metaserver that soon notices which of them is silent, to be killed and
    restarted.
    """
    return Cluster(folder, brokers, meta_settings=ALERT)
