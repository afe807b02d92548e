"""A real broker in a folder of its own, killed at a chosen point, and a client that remembers each
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from keylane.broker.storage.files import RealFiles
from keylane.broker.storage.index.kinds import mark_incomplete
from keylane.broker.storage.log.commit_log import segment_bases, segment_path
from keylane.broker.storage.snapshot import FOLDER as SNAPSHOTS
from keylane.protocol import endpoints
from keylane.protocol.batch import batch_starts, columns, encode_batch
from keylane.protocol.control import BrokerHeartbeat, BrokerWelcome
from keylane.protocol.errors import InvalidRequestError, KeylaneError, OffsetOutOfRangeError
from keylane.protocol.frames import (
    Ack,
    Acked,
    Acquire,
    Acquired,
    Append,
    Appended,
    Batches,
    CancelScheduled,
    Read,
    Schedule,
)
from keylane.protocol.progress import RegisterGroups
from keylane.protocol.routing import OrderStrategy, Route, RouteVersion
from keylane.protocol.scheduled.receipt import CancelOutcome
from keylane.rpc.client import BrokerClient
from keylane.rpc.http_network import HttpNetwork
from keylane.rpc.server import ControlRoute, Params, Server
from sim.machines.store import SESSION, batch, facts
from support.brokers.broker_forks import Forks

KILLED = -signal.SIGKILL
COUNT = 3
AT_MS = int((time.time() + 300 * 86_400) * 1_000)
"""Messages of a batch."""


@dataclass
class ToldBeforeKill:
    """The answers that the client got."""

    acked: dict[int, int] = field(default_factory=dict)
    """sequence → base offset"""
    token: int = 0
    cursor: int = 0
    scheduled: set[bytes] = field(default_factory=set)
    """Ids of the scheduled messages that wait."""
    canceled: set[bytes] = field(default_factory=set)
    doubtful: set[bytes] = field(default_factory=set)
    """Ids of those of which a cancel, or the message itself, has no answer yet."""


def data_of(number: int) -> bytes:
    return batch(sequence=COUNT * number, count=COUNT, value=b"x" * 300)


@contextlib.asynccontextmanager
async def _desk() -> AsyncIterator[str]:
    """The address of a metaserver that takes reports, before which retention removes nothing, and
    knows the subject of scheduled messages.
    """

    async def welcome(_body: BrokerHeartbeat, _params: object) -> BrokerWelcome:
        return BrokerWelcome(heartbeat_ms=1_000, ttl_ms=10_000)

    async def route(_body: object, params: Params) -> Route:
        return Route(
            subject=params["subject"],
            version=RouteVersion(1),
            order_strategy=OrderStrategy.STRICT,
            partitions=(),
            subject_id=1,
        )

    server = Server(
        [ControlRoute(endpoints.BROKER_HEARTBEAT, welcome), ControlRoute(endpoints.ROUTE, route)]
    )
    await server.start("127.0.0.1", 0)
    try:
        yield server.address
    finally:
        await server.stop()


class Run:
    """One broker's folder, and the lives it has there."""

    def __init__(self, forks: Forks, root: Path, *, kind: str = "file", batches: int = 8) -> None:
        self._forks = forks
        self.kind = kind
        self._known = ToldBeforeKill()
        self._first = 0
        self._batches = batches
        self.root = root
        self.data = root / "data"
        root.mkdir()

    def copy(self, root: Path, *, batches: int, kind: str = "") -> Run:
        """A copy of the folder, for a client that sends some more batches."""
        run = Run(self._forks, root, kind=kind or self.kind, batches=self._batches + batches)
        shutil.copytree(self.data, run.data)
        run._known = copy.deepcopy(self._known)
        run._first = self._batches - 2  # the last ones are sent again
        return run

    async def live(
        self,
        point: str = "",
        *,
        whole: bool = False,
        retain: bool = False,
        stop_s: float | None = None,
    ) -> int:
        """
        Serve the client until the broker is killed or the work is done; how the broker ended.

        Args:
            whole: nothing kills the broker, and every message is read back.
            retain: retention has segments to remove, and the work is not done before.
            stop_s: seconds after which the broker is asked to end.
        """
        config = self.root / "broker.toml"
        config.write_text(
            f"segment_bytes = 4096\nsnapshot_bytes = 4096\nindex = '{self.kind}'\n"
            f"retention_bytes = {4096 if retain else 0}\n"
        )
        async with _desk() as meta:
            return await self._live(point, config, meta, whole=whole, retain=retain, stop_s=stop_s)

    async def _live(
        self,
        point: str,
        config: Path,
        meta: str,
        *,
        whole: bool,
        retain: bool,
        stop_s: float | None,
    ) -> int:
        environment = {"KEYLANE_FAIL_AT": point} if point else {}
        pid, address = await asyncio.to_thread(
            self._forks.start,
            *("--group", "g1", "--data", str(self.data), "--meta", meta),
            *("--config", str(config)),
            **environment,
        )
        if not address:
            return await asyncio.to_thread(self._forks.ended, pid)
        if stop_s is not None:
            asyncio.get_running_loop().call_later(stop_s, _stop, pid)
        try:
            await self._talk(address, whole=whole, retain=retain)
        except KeylaneError:
            if whole:
                raise
        finally:
            _stop(pid)
            ended = await asyncio.to_thread(self._forks.ended, pid)
        return ended

    async def _talk(self, address: str, *, whole: bool, retain: bool) -> None:
        network = HttpNetwork()
        client = BrokerClient(network, address, timeout_ms=60_000)
        try:
            await self._work(client)
            while retain and not self.first_position():
                await client.control(endpoints.PARTITION, id=1)  # it lives
                await asyncio.sleep(0.005)
            if whole:
                await self._check(client)
        finally:
            await client.close()
            await network.close()

    async def _work(self, client: BrokerClient) -> None:
        """Make every kind of call that writes to the disk."""
        known = self._known
        # A broker before this one has it with messages.
        with contextlib.suppress(InvalidRequestError):
            await client.control(endpoints.HOST_PARTITION, facts(1))
        await client.control(
            endpoints.REGISTER_GROUPS, RegisterGroups(groups=("audit",), complete=True), id=1
        )
        for first in range(self._first, self._batches, 2):
            numbers = range(first, first + 2)
            calls = [client.call(Append(1), data_of(number)) for number in numbers]
            for number, (answer, _) in zip(numbers, await asyncio.gather(*calls), strict=True):
                assert isinstance(answer, Appended)
                if COUNT * number in known.acked:
                    assert answer.duplicate
                assert answer.base_offset in {COUNT * number, -1}
                known.acked[COUNT * number] = COUNT * number
            token = known.token + 1
            acquired, _ = await client.call(Acquire(1, "audit", SESSION, token, 60_000))
            assert isinstance(acquired, Acquired)
            assert acquired.cursor >= known.cursor
            known.token = token
            cursor = acquired.cursor
            upto = max(COUNT * first + 1, min(cursor + 1, COUNT * (first + 2)))
            answer, _ = await client.call(Ack(1, "audit", SESSION, token, ((0, upto),)))
            assert isinstance(answer, Acked)
            known.cursor = max(known.cursor, answer.cursor)
            await self._schedule(client, first)

    async def _schedule(self, client: BrokerClient, first: int) -> None:
        """Schedule two messages for the next year, the second under an id that a life before may
        have used; cancel one of three.
        """
        known = self._known
        for number in (first, first + 1):
            scheduled_id = b"%016d" % number
            known.doubtful.add(scheduled_id)
            if scheduled_id not in known.canceled:
                message = encode_batch(
                    partition_id=0,
                    sent_at_ns=[1],
                    keys=[b""],
                    values=[b"later" * 40],
                    producer_id=7,
                    producer_epoch=0,
                    sequence=0,
                )
                await client.call(Schedule("s", AT_MS, scheduled_id), message)
                known.scheduled.add(scheduled_id)
            if number % 3 == 0:
                known.scheduled.discard(scheduled_id)
                canceled, _ = await client.call(CancelScheduled(scheduled_id))
                assert canceled.outcome == CancelOutcome.CANCELED
                known.canceled.add(scheduled_id)
            known.doubtful.discard(scheduled_id)

    async def _check(self, client: BrokerClient) -> None:
        """Every message that a group still needs is there, once and in order; fence and cursor did
        not fall.
        """
        known = self._known
        page = await client.control(endpoints.SCHEDULED, limit=1_000)
        waiting = [bytes.fromhex(each.scheduled_id) for each in page.messages]
        assert len(waiting) == len(set(waiting))
        assert known.scheduled - known.doubtful <= set(waiting)
        assert not (known.canceled - known.doubtful) & set(waiting)
        (group,) = (await client.control(endpoints.PARTITION, id=1)).groups
        assert group.token >= known.token
        assert group.cursor >= known.cursor
        end = COUNT * self._batches
        first = offset = 0
        values: list[int] = []
        while offset < end:
            try:
                answer, payload = await client.call(Read(1, offset, 1 << 20))
            except OffsetOutOfRangeError:
                assert not values
                first = offset = (await client.control(endpoints.PARTITION, id=1)).first_offset
                assert 0 < first <= group.cursor
                continue
            assert isinstance(answer, Batches)
            for at, header in batch_starts(payload):
                assert header.base_offset == offset
                cut = columns(payload, header, at)
                values += [int(cut.blob[a:b].split()[-1]) for a, b in pairwise(cut.value_edges)]
                offset += header.count
            assert answer.next_offset == end
        assert values == list(range(first, end))

    # ── its folder, between two lives ─────────────────────────────────────────────────────────────
    def first_position(self) -> int:
        """The position at which the log begins."""
        return segment_bases(RealFiles(self.data))[0]

    def snapshots(self) -> list[str]:
        """Names of the snapshots, oldest first."""
        return sorted(path.name for path in (self.data / SNAPSHOTS).iterdir())

    def damage_snapshot(self) -> None:
        """Spoil the newest one, so that the next one is whole again."""
        (self.data / SNAPSHOTS / self.snapshots()[-1]).write_bytes(b"")

    def tear(self) -> int:
        """Leave a piece of a record at the end of the log; how long it was without it."""
        files = RealFiles(self.data)
        last = self.data / segment_path(segment_bases(files)[-1])
        size = last.stat().st_size
        with last.open("ab") as log:
            log.write(b"torn")
        return size

    def distrust_index(self) -> None:
        """Leave the index as interrupted work on it does."""
        mark_incomplete(RealFiles(self.data), self.kind)


def _stop(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def aged(forks: Forks, root: Path, kind: str, *, batches: int = 8) -> Run:
    """A folder with segments that retention may remove, old snapshots, a torn end and an index to
    rebuild.
    """
    run = Run(forks, root, kind=kind, batches=batches)
    assert asyncio.run(run.live()) == 0
    run.damage_snapshot()
    assert asyncio.run(run.live()) == 0  # writes a whole one
    assert asyncio.run(run.live(whole=True)) == 0  # and one of changes
    run.damage_snapshot()
    run.tear()
    run.distrust_index()
    return run
