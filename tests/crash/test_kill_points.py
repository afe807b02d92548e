"""A real broker killed at every point of its work on the disk: nothing acked is lost, nothing is stored twice.

For each named point the broker is killed when it passes it for the first time, the second time, and so on until a
whole run no longer gets there.  After each kill it is started again, and the client sends again what was not acked,
under the same sequences.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from broker_forks import Forks
from broker_process import NO_METASERVER
from keylane.broker.storage.fail_points import POINTS
from keylane.protocol.batch import batch_starts, columns
from keylane.protocol.errors import KeylaneError
from keylane.protocol.frames import Ack, Acked, Acquire, Acquired, Append, Appended, Batches, Read
from keylane.rpc.client import BrokerClient
from keylane.rpc.http_network import HttpNetwork
from sim.store import SESSION, batch, facts

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]

BATCHES = 8
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    found = Forks()
    yield found
    found.close()


@dataclass
class Known:
    """What the client was told."""

    acked: dict[int, int] = field(default_factory=dict)
    """sequence → base offset"""
    token: int = 0
    cursor: int = 0


def data_of(number: int) -> bytes:
    return batch(sequence=3 * number, count=3, value=b"x" * 300)


async def work(client: BrokerClient, known: Known) -> None:
    """Everything that a broker writes, answered or not."""
    await client.host_partition(facts(1))
    for first in range(0, BATCHES, 2):
        numbers = range(first, first + 2)
        calls = [client.call(Append(0, 1), data_of(number)) for number in numbers]
        for number, (answer, _) in zip(numbers, await asyncio.gather(*calls), strict=True):
            assert isinstance(answer, Appended)
            if 3 * number in known.acked:
                assert answer.duplicate
            assert answer.base_offset in {3 * number, -1}
            known.acked[3 * number] = 3 * number
        token = known.token + 1
        acquired, _ = await client.call(Acquire(0, 1, "audit", SESSION, token, 5000))
        assert isinstance(acquired, Acquired)
        assert acquired.cursor >= known.cursor
        known.token = token
        ack = Ack(0, 1, "audit", SESSION, token, ((0, max(first, acquired.cursor) + 1),))
        answer, _ = await client.call(ack)
        assert isinstance(answer, Acked)
        known.cursor = max(known.cursor, answer.cursor)


async def check(client: BrokerClient, known: Known) -> None:
    """All is there, once and in order; the fence and the cursor did not fall."""
    (group,) = (await client.partition(1)).groups
    assert group.token >= known.token
    assert group.cursor >= known.cursor
    values: list[int] = []
    while len(values) < 3 * BATCHES:
        answer, payload = await client.call(Read(0, 1, len(values), 1 << 20))
        assert isinstance(answer, Batches)
        for at, header in batch_starts(payload):
            assert header.base_offset == len(values)
            cut = columns(payload, header, at)
            values += [int(cut.blob[a:b].split()[-1]) for a, b in pairwise(cut.value_edges)]
        assert answer.next_offset == 3 * BATCHES
    assert values == list(range(3 * BATCHES))


class Run:
    """One broker's folder, and the lives it has there."""

    def __init__(self, forks: Forks, root: Path, known: Known) -> None:
        self._forks = forks
        self._known = known
        root.mkdir()
        config = root / "broker.toml"
        config.write_text("segment_bytes = 4096\nsnapshot_bytes = 4096\n")
        self._arguments = (
            "--group", "g1", "--data", str(root / "data"), "--meta", NO_METASERVER,
            "--config", str(config),
        )  # fmt: skip

    async def live(self, point: str = "", *, whole: bool = False) -> int:
        """Serve the client until the broker is killed or the work is done; how the broker ended."""
        environment = {"KEYLANE_FAIL_AT": point} if point else {}
        pid, address = await asyncio.to_thread(self._forks.start, *self._arguments, **environment)
        if address:
            network = HttpNetwork()
            client = BrokerClient(network, address, timeout_ms=5000)
            try:
                await work(client, self._known)
                if whole:
                    await check(client, self._known)
            except KeylaneError:
                assert not whole
            finally:
                await client.close()
                await network.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        return await asyncio.to_thread(self._forks.ended, pid)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_every_passage_of(point, forks, tmp_path):
    """Killed at this point, however often it was passed before, the broker has lost nothing it had answered."""
    count = 0
    while True:
        count += 1
        known = Known()
        run = Run(forks, tmp_path / str(count), known)
        ended = asyncio.run(run.live(f"{point}:{count}"))
        if ended == 0:
            break
        assert ended == KILLED
        assert asyncio.run(run.live(whole=True)) == 0
        if count % 4 == 0:  # and once more, after the clean stop
            assert asyncio.run(run.live(whole=True)) == 0
    assert count > 1 or point in {"truncate", "truncated", "remove", "removed"}


def test_killed_again_while_coming_up(forks, tmp_path):
    """A broker killed at every operation of its start, one start after the other, comes up in the end."""
    known = Known()
    run = Run(forks, tmp_path / "data", known)
    assert asyncio.run(run.live("synced:5")) == KILLED
    for point in ("create", "created", "write", "write~", "written", "sync", "synced"):
        for count in (1, 2):
            asyncio.run(run.live(f"{point}:{count}"))
    assert asyncio.run(run.live(whole=True)) == 0


def test_a_point_that_is_none(forks, tmp_path):
    """A misspelt point refuses the start."""
    run = Run(forks, tmp_path / "data", Known())
    for text in ("nowhere:1", "sync", "sync:0", "sync:x"):
        assert asyncio.run(run.live(text)) == 1
