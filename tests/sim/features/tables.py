"""Producers that send tables of rows, beside others: the rows of a key keep their order, and each
is stored once.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pyarrow as pa

from keylane.checker.events import Sent, Settled
from keylane.producer.client import Producer
from keylane.protocol.errors import Fate, KeylaneError, TableError
from keylane.protocol.operations import OperationKind, Reshape
from sim.actors.clients import SUBJECT, ProducerHost
from sim.features.feature import Feature
from sim.swarm import Swarm

LANES = "abcd"
ROWS_MAX = 20
"""An error names up to 100 rows."""


class TableProducer(ProducerHost):
    """Sends one table after the other, each of several record batches."""

    hurries_until_s = 0.0
    """Small tables follow each other until then: some meet a partition that is sealed and has no
    successor yet.
    """

    @property
    def _hurries(self) -> bool:
        return self.loop.now < self.hurries_until_s

    async def _send_all(self, producer: Producer, count: int) -> None:
        """Send tables in several tasks, and single messages beside them: rows meet partitions that
        refused others.
        """
        await asyncio.gather(*(self._send_tables(producer, count, lane) for lane in LANES))

    async def _send_tables(self, producer: Producer, count: int, lane: str) -> None:
        rng = self.rng
        name, number = f"{self.name}.{self.starts}{lane}", 0
        while number < count and not (self._closing and self._producer is not None):
            size = rng.randint(1, 3 if self._hurries else ROWS_MAX)
            await self._send_table(producer, name, range(number, number + size))
            number += size
            until_s = self.loop.now + self._pace * rng.choice((0.0, 0.05, 0.3)) * rng.random()
            while self.loop.now < until_s and not self._hurries:
                await asyncio.sleep(0.02)
            if not self._closing:
                await self._send(producer, rng.choice((0, 1)))

    async def _send_table(self, producer: Producer, name: str, numbers: range) -> None:
        rng = self.rng
        rows: list[tuple[bytes, bytes]] = []
        for number in numbers:
            key = rng.choice(self._keys) if rng.random() < 0.95 else b""
            value = b"%s:%d" % (name.encode(), number)
            value += b"." * int(self._padding_bytes * rng.random() ** 3)
            self._record(Sent(value, key, name, number, strict=True))
            self.waiting[value] = None
            rows.append((key, value))
        try:
            receipt = await producer.send_arrow(
                self.subject, self._source(rows), key="key", value="value"
            )
        except TableError as error:
            self._given_up(rows, error)
        except KeylaneError as error:  # before the first row
            self._settle_rows(rows, "gone" if error.fate is Fate.UNKNOWN else "withdrawn")
        else:
            if receipt.stored != len(rows) or receipt.refused:
                self.loop.faults.append(f"{receipt!r} for {len(rows)} rows")
            self._settle_rows(rows, "flushed")

    def _source(self, rows: list[tuple[bytes, bytes]]) -> Any:
        """The rows in several record batches, in memory or as a stream."""
        step = self.rng.choice((1, 7, ROWS_MAX))
        schema = pa.schema([("key", pa.binary()), ("value", pa.binary())])
        batches = []
        for start in range(0, len(rows), step):
            keys, values = zip(*rows[start : start + step], strict=True)
            batches.append(pa.record_batch([pa.array(keys), pa.array(values)], schema=schema))
        if self.rng.random() < 0.5:
            return pa.RecordBatchReader.from_batches(schema, batches)
        return pa.Table.from_batches(batches)

    def _settle_rows(self, rows: list[tuple[bytes, bytes]], outcome: str) -> None:
        for _, value in rows:
            self._record(Settled(value, outcome))
            self.waiting.pop(value, None)

    def _given_up(self, rows: list[tuple[bytes, bytes]], error: TableError) -> None:
        """All other rows are stored; of those that are named, some or none may be."""
        if not self._closing and not self._limited:
            self.loop.faults.append(f"a strict subject gives rows up: {error}")
        named = set(error.rows)
        if len(named) != error.messages or error.stored + error.messages != len(rows):
            self.loop.faults.append(f"{error!r} for {len(rows)} rows")
        outcome = "withdrawn" if error.fate is Fate.NOT_DONE else "gone"
        self._settle_rows([row for number, row in enumerate(rows) if number in named], outcome)
        self._settle_rows(
            [row for number, row in enumerate(rows) if number not in named], "flushed"
        )


class Tables(Feature):
    """See the module."""

    faults = frozenset({"resize", "broker_crash", "producer_close"})

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        return replace(swarm, static=rng.random() < 0.1, messages=60, keys=12)

    def build(self) -> None:
        self._senders = [
            self.add_producer(TableProducer, f"t{number}")
            for number in range(self.rng.choice((1, 2)))
        ]

    async def work(self) -> None:
        """Resize while tables are on their way, and close producers in the middle of one."""
        world, rng = self.world, self.rng
        while not world.faults.healed:
            await self.pause(1.2)
            busy = [host for host in self._senders if host.running and host.busy]
            if not busy:
                continue
            world.faults.done += 1
            if rng.random() < 0.6:
                count = rng.randint(1, 6)
                ask = Reshape(kind=OperationKind.RESIZE, subject=SUBJECT, partitions=count)
                for host in self._senders:
                    host.hurries_until_s = world.loop.now + 0.5
                await world._reshape(ask)
            else:
                host = rng.choice(busy)
                host.close()
                world.loop.after(1.0 + rng.random(), world.faults.restart, host)
