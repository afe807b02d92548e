"""Appends against a model: whatever is sent, repeated, reordered or restarted, each message is stored once, in order."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from keylane.broker.storage.files import Files, RealFiles
from keylane.protocol.batch import batch_starts, columns
from keylane.protocol.errors import ProducerFencedError, SequenceGapError
from sim.clock import ManualClock
from sim.disk import SimDisk
from sim.store import Desk, batch, open_store

PRODUCERS = 3


class AppendsAgainstAModel(RuleBasedStateMachine):
    """The model: per producer its epoch and the number of messages stored, and the list of all messages."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.disk = SimDisk()
        self.clock = ManualClock()
        self.stored: list[bytes] = []
        self.producers: dict[int, tuple[int, int]] = {}
        self.offsets: dict[tuple[int, int, int], int] = {}
        """(producer, epoch, sequence) → offset"""
        self.start()
        self.run(self.desk.host())

    def start(self) -> None:
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
    )
    def append(self, producer_id: int, back: int, count: int, newer: int) -> None:
        """A batch that begins `back` messages before the next one, in this epoch or beside it."""
        epoch, upto = self.producers.get(producer_id, (0, 0))
        sequence = max(0, upto - back)
        asked_epoch = max(0, epoch + newer)
        data = batch(producer_id=producer_id, epoch=asked_epoch, sequence=sequence, count=count)
        expected = upto if asked_epoch == epoch else 0
        fenced = asked_epoch < epoch
        try:
            answer = self.run(self.desk.append(data))
        except ProducerFencedError:
            assert fenced
            return
        except SequenceGapError as error:
            told = error.details["expected"]
            assert not fenced
            assert sequence > expected or sequence < expected < sequence + count
            assert told == expected
            return
        assert not fenced
        if answer.duplicate:
            assert sequence + count <= expected
            at = self.offsets[producer_id, epoch, sequence]
            assert answer.base_offset in (at, -1)
            return
        assert sequence == expected
        assert answer.base_offset == len(self.stored)
        for number in range(sequence, sequence + count):
            self.offsets[producer_id, asked_epoch, number] = len(self.stored)
            self.stored.append(b"value %d" % number)
        self.producers[producer_id] = (asked_epoch, sequence + count)

    @rule()
    def restart(self) -> None:
        """A clean stop and a start."""
        self.run(self.desk.store.close())
        self.start()

    @rule(seed=st.integers(0, 1 << 16))
    def crash(self, seed: int) -> None:
        """An end without a goodbye: what was answered is on the disk."""
        self.disk = self.disk.after_crash(random.Random(seed))
        self.start()

    @rule(data=st.data())
    def read_somewhere(self, data) -> None:
        """From any offset the messages are the model's, and contiguous."""
        start = data.draw(st.integers(0, len(self.stored)))
        answer, payload = self.run(self.desk.read(start, bytes_max=data.draw(st.integers(1, 4000))))
        assert (answer.upto > start) == (start < len(self.stored))
        following = None
        for at, header in batch_starts(payload):
            cut = columns(payload, header, at)
            values = [
                cut.blob[a:b] for a, b in zip(cut.value_edges, cut.value_edges[1:], strict=False)
            ]
            assert values == self.stored[header.base_offset : header.next_offset]
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
    """The same over real files; an end without a goodbye leaves a folder as a killed process does."""

    def __init__(self) -> None:
        self.folders = tempfile.TemporaryDirectory()
        self.root = Path(self.folders.name)
        self.lives = 0
        self.opened: list[RealFiles] = []
        super().__init__()

    def start(self) -> None:
        files = RealFiles(self.root / str(self.lives))
        files.make_folder("")
        self.opened.append(files)
        self.open(files, index="rocksdb")

    @rule(seed=st.just(0))
    def crash(self, seed: int) -> None:
        """See the base; whatever RocksDB has not yet written is not in the copy."""
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
TestAppends.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestAppendsWithRocksDB = AppendsWithRocksDB.TestCase
TestAppendsWithRocksDB.settings = settings(max_examples=8, stateful_step_count=20, deadline=None)
