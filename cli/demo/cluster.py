"""The processes of the demo: a metaserver, two brokers, three consumers and Spark."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ...admin import Admin, GroupDescription
from ...protocol.address import parse_address
from ...protocol.control import PartitionStatusList
from ...protocol.errors import InternalError, KeylaneError
from ...protocol.routing import OrderStrategy, Partition
from ...rpc.client import BrokerClient
from ...rpc.http_network import HttpNetwork
from ..connection import available_brokers
from .processes import Program
from .records import RecordTail

SUBJECT = "flights"
GROUP = "audit"
PARTITIONS = 4
BROKERS = 2
CONSUMERS = 3
TTL_MS = 2_000


class DemoCluster:
    """The processes of the demo, in one folder; create it inside a running event loop."""

    def __init__(self, folder: Path, meta_address: str, admin: Admin) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.logs.mkdir()
        self.meta_address = meta_address
        self.network = HttpNetwork()
        self.admin = admin
        self.partitions: tuple[Partition, ...] = ()
        _host, port = parse_address(self.meta_address)
        self.metaserver = self._program(
            "metaserver", "metaserver", "--data", str(folder / "metaserver"), "--port", str(port)
        )
        self.brokers = [self._broker(number, port="0") for number in range(1, BROKERS + 1)]
        self.runs = dict.fromkeys(range(1, BROKERS + 1), 0)
        """The number of restarts of each broker, by its number."""
        self.consumers: dict[str, Program] = {}
        self.tails: dict[str, RecordTail] = {}
        for number in range(1, CONSUMERS + 1):
            name = f"consumer-{number}"
            file = folder / f"{name}.csv"
            self.tails[name] = RecordTail(file)
            self.consumers[name] = self._program(
                name,
                "cli.demo.consumer",
                "--meta",
                self.meta_address,
                "--subject",
                SUBJECT,
                "--group",
                GROUP,
                "--name",
                name,
                "--file",
                str(file),
                "--ttl-ms",
                str(TTL_MS),
            )
        self.spark = self._program(
            "spark", "cli.demo.spark_job", "--meta", self.meta_address, "--subject", SUBJECT
        )

    def _program(self, name: str, module: str, *arguments: str) -> Program:
        return Program(name, module, list(arguments), self.logs / f"{name}.log")

    def _broker(self, number: int, *, port: str) -> Program:
        name = f"broker-{number}"
        return self._program(
            name,
            "broker",
            "--group",
            name,
            "--data",
            str(self.folder / name),
            "--meta",
            self.meta_address,
            "--port",
            port,
        )

    async def start_servers(self, on_ready: Callable[[Program], None]) -> None:
        """Start metaserver and brokers, and call `on_ready` for each that is ready; raise the
        errors of `Program.ready`.
        """
        servers = [self.metaserver, *self.brokers]
        for server in servers:
            server.start()

        async def follow(server: Program) -> None:
            await server.ready()
            on_ready(server)

        await asyncio.gather(*(follow(server) for server in servers))

    async def create_subject(self) -> None:
        """
        Create the subject on both broker groups, after both have reported themselves.

        Raises:
            InternalError: the partitions are not spread evenly.
        """
        await available_brokers(self.admin, BROKERS)
        created = await self.admin.create_subject(
            SUBJECT, partitions=PARTITIONS, order_strategy=OrderStrategy.STRICT
        )
        self.partitions = created.route.open_partitions()
        spread = Counter(partition.broker_group for partition in self.partitions)
        if sorted(spread.values()) != [PARTITIONS // BROKERS] * BROKERS:
            raise InternalError(f"the partitions are spread as {dict(spread)}")

    async def start_consumers(self) -> None:
        """Start the consumers, and wait until they share the partitions."""
        for consumer in self.consumers.values():
            consumer.start()
        await asyncio.gather(*(consumer.ready() for consumer in self.consumers.values()))
        while True:
            self.check()
            held = _partitions_held(await self.group())
            if len(held) == CONSUMERS and sum(held.values()) == PARTITIONS:
                return
            await asyncio.sleep(0.05)

    async def group(self) -> GroupDescription:
        """Return the group with its owners."""
        return await self.admin.describe_group(SUBJECT, GROUP)

    def busiest_consumer(self, group: GroupDescription) -> tuple[str, dict[int, int]]:
        """Return the consumer with the most partitions, and its fencing token for each of them."""
        name, _count = _partitions_held(group).most_common(1)[0]
        return name, {
            partition.partition_id: partition.token
            for partition in group.partitions
            if partition.owner == name
        }

    async def statuses(self) -> list[tuple[int, PartitionStatusList]]:
        """Return the run and the partitions of each broker that answers."""
        statuses = []
        for number, broker in enumerate(self.brokers, start=1):
            # Read first: a late answer of a killed run must not count as one of the next run.
            run = self.runs[number]
            try:
                status = await BrokerClient(self.network, broker.address).partitions()
                statuses.append((run, status))
            except KeylaneError:
                continue  # killed, or not restarted yet
        return statuses

    async def restart_broker(self, number: int) -> None:
        """Kill the broker with SIGKILL, start it again on the same port and folder, and wait until
        it is ready.
        """
        old = self.brokers[number - 1]
        self.runs[number] += 1
        await old.kill()
        _host, port = parse_address(old.address)
        new = self.brokers[number - 1] = self._broker(number, port=str(port))
        new.start()
        await new.ready()

    def check(self) -> None:
        """Raise InternalError if a process that should live has ended."""
        for program in (self.metaserver, *self.brokers, *self.consumers.values(), self.spark):
            program.check()

    async def stop_consumers(self) -> None:
        """Let the consumers leave the group and end."""
        await asyncio.gather(*(consumer.stop() for consumer in self.consumers.values()))

    async def stop(self, *, keep_servers: bool) -> None:
        """End all processes, except the servers if `keep_servers`, and close the network."""
        await asyncio.gather(self.spark.stop(), self.stop_consumers())
        if not keep_servers:
            await asyncio.gather(*(broker.stop() for broker in self.brokers))
            await self.metaserver.stop()
        await self.network.close()


def _partitions_held(group: GroupDescription) -> Counter[str]:
    """Return the number of partitions of each consumer."""
    return Counter(partition.owner for partition in group.partitions if partition.owner is not None)
