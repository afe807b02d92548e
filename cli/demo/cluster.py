"""The processes of the demo: a metaserver, two brokers, three consumers and Spark."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ...admin import Admin, GroupDescription
from ...broker.offline.promotion import promote_candidate, read_candidate, wait_for_promotion
from ...broker.storage.fail_points import make_files
from ...protocol.address import parse_address
from ...protocol.control import PartitionStatusList
from ...protocol.errors import InternalError, KeylaneError
from ...protocol.routing import OrderStrategy, Partition
from ...rpc.client import BrokerClient
from ...rpc.http_network import HttpNetwork
from ..connection import wait_for_brokers
from .processes import Program
from .records import RecordTail

SUBJECT = "flights"
GROUP = "audit"
PARTITIONS = 4
BROKERS = 2
CONSUMERS = 3
TTL_MS = 2_000
BROKER_TTL_MS = 1_000
"""How long a broker may be silent before a copy can take its place, in milliseconds; the default is
ten times as long.
"""
BROKER_TO_LOSE = 2
"""The number of the broker whose data folder is lost."""


class DemoCluster:
    """The processes of the demo, in one folder. Must be created in a running event loop."""

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
            "metaserver",
            "metaserver",
            *("--data", str(folder / "metaserver"), "--port", str(port)),
            *("--broker-heartbeat-ms", str(BROKER_TTL_MS // 4)),
            *("--broker-ttl-ms", str(BROKER_TTL_MS)),
        )
        self.copy = self._copy(BROKER_TO_LOSE)
        self.brokers = [self._broker(number, port="0") for number in range(1, BROKERS + 1)]
        self.restarts = dict.fromkeys(range(1, BROKERS + 1), 0)
        """Maps each broker number to the number of times that broker was restarted."""
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

    def _broker(self, number: int, *, port: str, folder: Path | None = None) -> Program:
        name = f"broker-{number}"
        return self._program(
            name,
            "broker",
            "--group",
            name,
            "--data",
            str(folder or self.folder / name),
            "--meta",
            self.meta_address,
            "--port",
            port,
        )

    def _copy(self, number: int) -> Program:
        group = f"broker-{number}"
        name = f"{group}-copy"
        return self._program(
            name,
            "broker",
            *("--group", group, "--data", str(self.folder / name)),
            *("--meta", self.meta_address, "--follow", "true"),
        )

    async def start_copy(self) -> None:
        """Start the copy of a broker's data folder, and wait until acks wait for it."""
        group = f"broker-{BROKER_TO_LOSE}"
        self.copy.start()
        await self.admin.set_copies(group, 2, may_share_machine=True)
        while not (await self.admin.copies(group)).members:
            self.check()
            await asyncio.sleep(0.05)

    async def start_servers(self, on_ready: Callable[[Program], None]) -> None:
        """Start the metaserver and the brokers, calling `on_ready` as each becomes ready. Raises
        the errors of `Program.wait_until_ready`.
        """
        servers = [self.metaserver, *self.brokers]
        for server in servers:
            server.start()

        async def wait_until_ready(server: Program) -> None:
            await server.wait_until_ready()
            on_ready(server)

        await asyncio.gather(*(wait_until_ready(server) for server in servers))

    async def create_subject(self) -> None:
        """
        Create the subject, with partitions on both broker groups, once both of them have sent a
        report.

        Raises:
            InternalError: the partitions are not spread evenly.
        """
        await wait_for_brokers(self.admin, BROKERS)
        created = await self.admin.create_subject(
            SUBJECT, partitions=PARTITIONS, order_strategy=OrderStrategy.STRICT
        )
        self.partitions = created.route.open_partitions()
        spread = Counter(partition.broker_group for partition in self.partitions)
        if sorted(spread.values()) != [PARTITIONS // BROKERS] * BROKERS:
            raise InternalError(f"the partitions are spread as {dict(spread)}")

    async def start_consumers(self) -> None:
        """Start the consumers and wait until they share the partitions."""
        for consumer in self.consumers.values():
            consumer.start()
        await asyncio.gather(*(consumer.wait_until_ready() for consumer in self.consumers.values()))
        while True:
            self.check()
            counts = _count_partitions(await self.group())
            if len(counts) == CONSUMERS and sum(counts.values()) == PARTITIONS:
                return
            await asyncio.sleep(0.05)

    async def group(self) -> GroupDescription:
        """Return a description of the consumer group, including its owners."""
        return await self.admin.describe_group(SUBJECT, GROUP)

    def busiest_consumer(self, group: GroupDescription) -> tuple[str, dict[int, int]]:
        """Return the consumer with the most partitions and its fencing token for each of them."""
        name, _count = _count_partitions(group).most_common(1)[0]
        return name, {
            partition.partition_id: partition.token
            for partition in group.partitions
            if partition.owner == name
        }

    async def statuses(self) -> list[tuple[int, PartitionStatusList]]:
        """Return the restart count and the partitions of each broker that responds."""
        statuses = []
        for number, broker in enumerate(self.brokers, start=1):
            # Read this first, because a late reply of a killed process must not be attributed to
            # its successor.
            restart_count = self.restarts[number]
            try:
                status = await BrokerClient(self.network, broker.address).partitions()
                statuses.append((restart_count, status))
            except KeylaneError:
                continue  # killed, or not restarted yet
        return statuses

    async def lose_broker(self) -> None:
        """Kill a broker with SIGKILL, remove its data folder, promote the copy, start a broker on
        it at the same port, and wait until it is ready.
        """
        killed = self.brokers[BROKER_TO_LOSE - 1]
        self.restarts[BROKER_TO_LOSE] += 1
        await killed.kill()
        name = f"broker-{BROKER_TO_LOSE}"
        await asyncio.to_thread(shutil.rmtree, self.folder / name)
        await self.copy.kill()
        folder = self.folder / f"{name}-copy"
        await self._promote(name, folder)
        _host, port = parse_address(killed.address)
        restarted = self._broker(BROKER_TO_LOSE, port=str(port), folder=folder)
        self.brokers[BROKER_TO_LOSE - 1] = restarted
        restarted.start()
        await restarted.wait_until_ready()

    async def _promote(self, group: str, folder: Path) -> None:
        """Promote a copy as soon as its broker counts as silent."""
        files = make_files(str(folder))
        files.lock()
        try:
            candidate = await asyncio.to_thread(read_candidate, files)
            ask = partial(
                self.admin.promote_copy,
                group,
                candidate.copy.copy_id,
                broker_id=candidate.broker_id,
                log_end=candidate.log_end,
            )
            await wait_for_promotion(ask, pause_s=0.1)
            await asyncio.to_thread(promote_candidate, files, candidate)
        finally:
            files.close()

    def check(self) -> None:
        """Raise InternalError if a process has exited unexpectedly."""
        for program in (self.metaserver, *self.brokers, *self.consumers.values(), self.spark):
            program.check()

    async def stop_consumers(self) -> None:
        """Stop the consumers, which leave the group."""
        await asyncio.gather(*(consumer.stop() for consumer in self.consumers.values()))

    async def stop(self, *, keep_servers: bool) -> None:
        """Stop all processes, except the servers if `keep_servers` is set, and close the
        network.
        """
        await asyncio.gather(self.spark.stop(), self.stop_consumers())
        if not keep_servers:
            await self.copy.stop()
            await asyncio.gather(*(broker.stop() for broker in self.brokers))
            await self.metaserver.stop()
        await self.network.close()


def _count_partitions(group: GroupDescription) -> Counter[str]:
    """Count the partitions of each consumer."""
    return Counter(partition.owner for partition in group.partitions if partition.owner is not None)
