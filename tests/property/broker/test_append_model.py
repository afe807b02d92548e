"""
Appends against a model, with repeats, reordering, restarts and producers that share an id: each
message is stored once, in order, and nothing is told to be stored that is not.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from keylane.broker.partition.appends import REMEMBERED_BATCHES
from keylane.broker.storage.files import Files, RealFiles
from keylane.protocol.batch import batch_starts, columns
from keylane.protocol.errors import ProducerFencedError, SequenceGapError, SequenceReusedError
from keylane.protocol.record import Header
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store
from support.running.examples import examples

PRODUCERS = 3


def values_of(data: bytes | memoryview, header: Header, start: int = 0) -> list[bytes]:
    cut = columns(data, header, start)
    return [cut.blob[low:high] for low, high in pairwise(cut.value_edges)]


class AppendsAgainstAModel(RuleBasedStateMachine):
    """The model: per producer id its epoch and the batches stored, and the list of all messages."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.disk = SimDisk()
        self.clock = ManualClock()
        self.stored: list[bytes] = []
        self.producers: dict[int, tuple[int, int]] = {}
        """id → epoch, next sequence"""
        self.batches: dict[int, dict[bytes, int]] = {}
        """id → the batches stored under its epoch → offset, the oldest first"""
        self.clashed_ids: set[int] = set()
        """Ids whose epoch was refused for being used twice, since the last start."""
        self.start()
        self.run(self.desk.host())

    def start(self) -> None:
        self.clashed_ids.clear()
        self.open(self.disk, index="file")

    def open(self, files: Files, *, index: str) -> None:
        store = open_store(
            files, clock=self.clock, index=index, segment_bytes=4096, cache_bytes=3000
        )
        self.desk = Desk(store, self.clock)

    def run(self, call):
        return self.loop.run_until_complete(call)

    def teardown(self) -> None:
        self.loop.close()

    @rule(
        producer_id=st.integers(1, PRODUCERS),
        back=st.integers(-3, 12),
        count=st.integers(1, 6),
        newer=st.integers(-1, 1) | st.just(0),
        twin=st.booleans(),
    )
    def append(self, producer_id: int, back: int, count: int, newer: int, twin: bool) -> None:
        """A batch that begins `back` messages before the next one, in this epoch or beside it, by
        one of two producers.
        """
        epoch, upto = self.producers.get(producer_id, (0, 0))
        self.send(producer_id, max(0, epoch + newer), max(0, upto - back), count, twin=twin)

    @rule(producer_id=st.integers(1, PRODUCERS), back=st.integers(0, 2 * REMEMBERED_BATCHES))
    def repeat(self, producer_id: int, back: int) -> None:
        """The bytes of a stored batch again."""
        stored = list(self.batches.get(producer_id, {}))
        if stored:
            self.send_bytes(producer_id, stored[-1 - min(back, len(stored) - 1)])

    def send(self, producer_id: int, epoch: int, sequence: int, count: int, *, twin: bool) -> None:
        value = b"twin" if twin else b"value"
        self.send_bytes(
            producer_id,
            batch(
                producer_id=producer_id, epoch=epoch, sequence=sequence, count=count, value=value
            ),
        )

    def send_bytes(self, producer_id: int, data: bytes) -> None:
        epoch, upto = self.producers.get(producer_id, (0, 0))
        ((_, header),) = batch_starts(data)
        same = header.producer_epoch == epoch and producer_id in self.producers
        expected = upto if same else 0
        remembered = list(self.batches.get(producer_id, {}))[-REMEMBERED_BATCHES:] if same else []
        clashed = same and producer_id in self.clashed_ids
        try:
            answer = self.run(self.desk.append(data))
        except ProducerFencedError:
            assert header.producer_epoch < epoch
            return
        except SequenceGapError as error:
            told = error.expected
            assert header.sequence > expected == told
            return
        except SequenceReusedError:
            assert data not in remembered
            assert header.sequence < expected or clashed
            self.clashed_ids.add(producer_id)
            return
        assert header.producer_epoch >= epoch
        if answer.duplicate:
            assert data in remembered
            assert answer.base_offset == self.batches[producer_id][data]
            return
        assert not clashed
        assert header.sequence == expected
        assert answer.base_offset == len(self.stored)
        if not same:
            self.batches[producer_id] = {}
            self.clashed_ids.discard(producer_id)
        self.batches[producer_id][data] = len(self.stored)
        self.stored += values_of(data, header)
        self.producers[producer_id] = (header.producer_epoch, header.sequence + header.count)

    @rule()
    def restart(self) -> None:
        """A clean stop and a start."""
        self.run(self.desk.store.close())
        self.start()

    @rule(seed=st.integers(0, 1 << 16))
    def crash(self, seed: int) -> None:
        """An end without a goodbye: what was answered is on the disk."""
        self.disk = self.disk.disk_after_crash(random.Random(seed))
        self.start()

    @rule(data=st.data())
    def read_somewhere(self, data) -> None:
        """From any offset the messages are the model's, and contiguous."""
        start = data.draw(st.integers(0, len(self.stored)))
        answer, payload = self.run(self.desk.read(start, bytes_max=data.draw(st.integers(1, 4000))))
        assert (answer.upto > start) == (start < len(self.stored))
        following = None
        for at, header in batch_starts(payload):
            stored = self.stored[header.base_offset : header.next_offset]
            assert values_of(payload, header, at) == stored
            assert (
                following == header.base_offset or header.base_offset <= start < header.next_offset
            )
            following = header.next_offset
        assert following in {None, answer.upto}
        assert answer.next_offset == len(self.stored)

    @invariant()
    def dense(self) -> None:
        assert self.desk.store.state.partition(1).readable_offset == len(self.stored)


class AppendsWithRocksDB(AppendsAgainstAModel):
    """The same over real files; an end without a goodbye leaves a folder as a killed process
    does.
    """

    def __init__(self) -> None:
        self.folders = tempfile.TemporaryDirectory()
        self.root = Path(self.folders.name)
        self.lives = 0
        self.opened: list[RealFiles] = []
        super().__init__()

    def start(self) -> None:
        self.clashed_ids.clear()
        files = RealFiles(self.root / str(self.lives))
        files.make_folder("")
        self.opened.append(files)
        self.open(files, index="rocksdb")

    @rule(seed=st.just(0))
    def crash(self, seed: int) -> None:
        """See the base; the copy lacks what RocksDB has not written yet."""
        left = self.desk.store
        before, after = self.root / str(self.lives), self.root / str(self.lives + 1)
        shutil.copytree(before, after)
        self.lives += 1
        self.start()
        self.run(left.close())

    def teardown(self) -> None:
        self.run(self.desk.store.close())
        super().teardown()
        for files in self.opened:
            files.close()
        self.folders.cleanup()


TestAppends = AppendsAgainstAModel.TestCase
TestAppends.settings = settings(max_examples=examples(25), stateful_step_count=30, deadline=None)
TestAppendsWithRocksDB = AppendsWithRocksDB.TestCase
TestAppendsWithRocksDB.settings = settings(
    max_examples=examples(8), stateful_step_count=20, deadline=None
)
