"""Apache Kafka, a node of KRaft, with confluent-kafka, whose work is done by the C library
librdkafka.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import which
from typing import Any, ClassVar

from peers.durability import Durability
from peers.measure import free_port, is_listening
from peers.systems.base import (
    COMMIT_EVERY_S,
    FIRST,
    KEYS,
    Client,
    Handling,
    Ready,
    System,
    client_version,
    first_line_of,
)

CLUSTER = "a2V5bGFuZS1wZWVycy0xMQ"
CONFIG = """\
process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={data}
num.partitions=4
offsets.topic.replication.factor={nodes}
transaction.state.log.replication.factor={nodes}
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
num.network.threads=3
num.io.threads=8
socket.send.buffer.bytes=102400
socket.receive.buffer.bytes=102400
{more}
"""
"""What the shipped server.properties sets, but for names and places; groups begin without a
delay.
"""
LOGGING = """\
Configuration:
  Appenders:
    Console:
      name: C
      PatternLayout:
        pattern: '%d %p %m%n'
  Loggers:
    Root:
      level: WARN
      AppenderRef:
        - ref: C
"""
BATCH = 500


class Kafka(System):
    """Its default: the page cache."""

    title = "Kafka, confluent-kafka"
    client = "peers.systems.kafka:KafkaClient"
    durability = Durability.PAGE_CACHE
    promise = (
        "in the page cache of the broker (`acks=all`, idempotent); lost if the machine loses power"
    )
    settings = (
        "broker: the shipped server.properties, "
        "`group.initial.rebalance.delay.ms=0`, heap of 1 GB, G1;"
        " producer: `acks=all`, `enable.idempotence=true`; consumer: `fetch.queue.backoff.ms=10`"
        " (with its default of 1,000 it handles a fifth), a commit every 50 ms, `consume(500)`"
    )
    sends_per_second = 250_000
    more = ""
    nodes = 1
    topic_config: ClassVar[dict[str, str]] = {}

    @classmethod
    def missing_text(cls, home: Path) -> str:
        if not list(home.glob("server/kafka_*.jar")):
            return "no jars of Kafka in HOME/server"
        if not client_version(home, "confluent-kafka"):
            return "no confluent-kafka in HOME/clients"
        return "" if which("java") else "no java"

    @classmethod
    def versions(cls, home: Path) -> dict[str, str]:
        jar = next(iter(home.glob("server/kafka_*.jar")), Path())
        java = first_line_of("java", "-version").split('"')
        return {
            "Kafka": jar.stem.rpartition("-")[2],
            "Java": java[1] if len(java) > 1 else java[0],
            "confluent-kafka": client_version(home, "confluent-kafka"),
        }

    def start(self, folder: Path) -> None:
        logging = folder / "log4j2.yaml"
        logging.write_text(LOGGING)
        java = ["java", f"-Dlog4j2.configurationFile={logging}", "-cp", f"{self.home}/server/*"]
        ports = [(free_port(), free_port()) for _ in range(self.nodes)]
        voters = ",".join(
            f"{node}@127.0.0.1:{controller}" for node, (_, controller) in enumerate(ports, start=1)
        )
        for node, (port, controller) in enumerate(ports, start=1):
            config = folder / f"server-{node}.properties"
            config.write_text(
                CONFIG.format(
                    node=node,
                    nodes=self.nodes,
                    voters=voters,
                    port=port,
                    controller=controller,
                    data=folder / f"log-{node}",
                    more=self.more,
                )
            )
            tool = [*java, "kafka.tools.StorageTool", "format", "-t", CLUSTER, "-c", str(config)]
            subprocess.run(tool, check=True, capture_output=True)
            self._start_node(folder / f"kafka-{node}.log", java, config)
        self.where = {"servers": ",".join(f"127.0.0.1:{port}" for port, _ in ports)}
        self.wait_until(lambda: all(is_listening(port) for port, _ in ports), "Kafka")
        if self.nodes > 1:
            self.wait_until(lambda: len(self._brokers()) == self.nodes, "the cluster of Kafka")

    def _start_node(self, log: Path, java: list[str], config: Path) -> None:
        self.spawn(
            log,
            *java[:1],
            "-Xmx1G",
            "-Xms1G",
            "-server",
            "-XX:+UseG1GC",
            "-XX:MaxGCPauseMillis=20",
            "-XX:InitiatingHeapOccupancyPercent=35",
            "-XX:+ExplicitGCInvokesConcurrent",
            "-Djava.awt.headless=true",
            *java[1:],
            "kafka.Kafka",
            str(config),
        )

    def _brokers(self) -> Sequence[int]:
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": self.where["servers"]})
        return list(admin.list_topics(timeout=10).brokers)

    def create(self, topics: Sequence[str], partitions: int) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": self.where["servers"]})
        made = admin.create_topics(
            [
                NewTopic(
                    topic,
                    num_partitions=partitions,
                    replication_factor=self.nodes,
                    config=self.topic_config,
                )
                for topic in topics
            ]
        )
        for created in made.values():
            created.result(30)
        time.sleep(0.3)  # its leaders are elected after the answer


class KafkaFsync(Kafka):
    """Each append synced."""

    title = "Kafka, fsynced, confluent-kafka"
    durability = Durability.FSYNCED
    promise = "fsynced with each append of a batch (`log.flush.interval.messages=1`)"
    settings = "as above, and broker: `log.flush.interval.messages=1`"
    sends_per_second = 150_000
    more = "log.flush.interval.messages=1"


class KafkaReplicated(Kafka):
    """Three nodes."""

    title = "Kafka of three nodes, confluent-kafka"
    promise = (
        "in the page caches of all nodes in sync, at least two of three (`acks=all`, "
        "`min.insync.replicas=2`)"
    )
    settings = "as those of one node; topics: `replication.factor=3`, `min.insync.replicas=2`"
    sends_per_second = 100_000
    nodes = 3
    topic_config: ClassVar[dict[str, str]] = {"min.insync.replicas": "2"}

    def leader(self, topic: str) -> int:
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": self.where["servers"]})
        node = admin.list_topics(topic, timeout=10).topics[topic].partitions[0].leader
        return self._children[node - 1].pid


class KafkaClient(Client):
    """Counts every ack; commits positions."""

    library = "confluent_kafka:Consumer"

    async def open_producer(self) -> None:
        from confluent_kafka import Producer

        self._acked = self._sent = 0
        self._producer = Producer(
            {
                "bootstrap.servers": self.where["servers"],
                "acks": "all",
                "enable.idempotence": True,
            }
        )
        await self.send(KEYS[0], FIRST)

    def _on_ack(self, error: Any, _message: Any) -> None:
        if error is not None:
            raise RuntimeError(str(error))
        self._acked += 1

    async def send_all(self, value: bytes, count: int) -> None:
        produce, poll, on_ack, topic = (
            self._producer.produce,
            self._producer.poll,
            self._on_ack,
            self.topic,
        )
        for number in range(count):
            while True:
                try:
                    produce(topic, value, KEYS[number % 10_000], on_delivery=on_ack)
                    break
                except BufferError:
                    poll(0.01)
            if not number % 100:
                poll(0)
        self._sent += count
        await self.drain()

    async def send(self, key: bytes, value: bytes) -> None:
        await self.post(key, value)
        self._producer.flush()

    async def post(self, key: bytes, value: bytes) -> None:
        self._producer.produce(self.topic, value, key, on_delivery=self._on_ack)
        self._sent += 1

    async def pause(self, seconds: float) -> None:
        self._producer.poll(0)
        time.sleep(seconds)

    async def drain(self) -> None:
        self._producer.flush()
        assert self._acked == self._sent, (self._acked, self._sent)

    async def close_producer(self) -> None:
        self._producer.flush()

    def _open_assigned(self, topic: str) -> tuple[Any, list[Any]]:
        """Open a consumer; return it with its partitions, and the messages received meanwhile."""
        from confluent_kafka import Consumer

        consumer = Consumer(
            {
                "bootstrap.servers": self.where["servers"],
                "group.id": f"peers-{os.getpid()}-{topic}",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                # By default one second, which starves a consumer of over 100,000 messages a second
                # and partition.
                "fetch.queue.backoff.ms": 10,
            }
        )
        assigned: list[Any] = []
        consumer.subscribe([topic], on_assign=lambda _, partitions: assigned.extend(partitions))
        received: list[Any] = []
        while not assigned:
            received += consumer.consume(BATCH, 0.1)
        return consumer, received

    async def consume(self, handle: Handling, ready: Ready) -> None:
        consumer, batch = self._open_assigned(self.topic)
        ready()
        take = handle.message
        committed_at = time.monotonic()
        while True:
            for message in batch:
                if message.error():
                    raise RuntimeError(message.error())
                take(message.key(), message.value())
            if handle.remaining <= 0:
                break
            if batch and time.monotonic() - committed_at > COMMIT_EVERY_S:
                consumer.commit(asynchronous=True)
                committed_at = time.monotonic()
            batch = consumer.consume(BATCH, 0.001) or consumer.consume(1, 0.1)
        consumer.commit(asynchronous=False)
        consumer.close()

    async def open_consumer(self, topic: str) -> Callable[[], Any]:
        # a library without types
        return self._open_assigned(topic)[0].close  # type: ignore[no-any-return]
