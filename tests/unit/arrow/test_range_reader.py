"""Several ranges are read in order, prefetched over one connection, and within a rate limit."""

from __future__ import annotations

import os
import threading
import time

import pyarrow as pa
import pytest

from keylane.arrow.planner import PlannedRange
from keylane.arrow.process_loop import ProcessLoop
from keylane.arrow.range_reader import FRAMES_AHEAD, RangeStream, read_ranges
from keylane.arrow.selection import ReadOptions
from keylane.arrow.task_reader import read_task
from keylane.protocol.ids import Subject
from keylane.rpc import http_network
from keylane.rpc.liveness import silence
from support.shelves import Sent, Shelves


def options(shelves: Shelves, **fields) -> ReadOptions:
    return ReadOptions(
        meta=(shelves.address,),
        subjects=(Subject("flights"),),
        **{"columns": ("partition", "offset"), **fields},
    )


def planned(shelves: Shelves, partition_id: int, start: int, end: int) -> PlannedRange:
    return PlannedRange(
        partition_id=partition_id,
        broker_group="g0",
        address=shelves.address,
        start=start,
        end=end,
        subject="flights",
        range_start=0,
        range_end=1024,
        queue=0,
        logic_start=0,
        epoch=0,
    )


@pytest.fixture
def filled(shelves: Shelves) -> Shelves:
    """Partitions 3 and 4 with 40 batches of 200 kB and 2 rows."""
    for number in range(40):
        for partition_id in (3, 4):
            shelves.shelf(partition_id).put(Sent(b"k", bytes(200_000)), Sent(b"k", b"%d" % number))
    return shelves


def rows(batches) -> list[tuple[int, int]]:
    table = pa.Table.from_batches(batches)
    return list(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True))


def test_ranges_are_read_in_the_order_given(filled):
    """Rows come range after range, empty ones and a partition that comes twice included."""
    ranges = [(4, 3, 20), (3, 0, 80), (3, 5, 5), (4, 20, 41)]
    read = read_ranges(options(filled), [planned(filled, *each) for each in ranges])
    assert rows(read) == [(number, at) for number, a, b in ranges for at in range(a, b)]


def test_connection_gives_signs_of_life_while_the_caller_pauses(filled, monkeypatch):
    """A caller that pauses keeps its connection and its prefetched frames."""
    monkeypatch.setattr(silence, "CHECK_INTERVAL_S", 0.1)
    connections = []
    open_channel = http_network.HttpNetwork.open_channel

    async def counted(network, address, *, timeout_ms):
        connections.append(address)
        return await open_channel(network, address, timeout_ms=timeout_ms)

    monkeypatch.setattr(http_network.HttpNetwork, "open_channel", counted)
    batches = read_ranges(
        options(filled, batch_rows=1), [planned(filled, 3, 0, 80), planned(filled, 4, 0, 80)]
    )
    first = next(batches)
    time.sleep(1)
    assert len(filled.reads) == 1 + FRAMES_AHEAD, "what is read ahead is bounded"
    assert len(rows([first, *batches])) == 160
    assert len(connections) == 1
    assert filled.calls == []


def test_readers_of_a_process_share_a_connection(filled, monkeypatch):
    """Later and concurrent tasks reuse the first task's connection."""
    list(read_ranges(options(filled), [planned(filled, 3, 0, 80)]))
    opened = []
    monkeypatch.setattr(
        http_network.HttpNetwork, "open_channel", lambda *_args, **_named: opened.append(1)
    )
    counts = []

    def read() -> None:
        counts.append(len(rows(read_ranges(options(filled), [planned(filled, 4, 0, 80)]))))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [80, 80, 80]
    assert opened == []


def test_reader_works_in_a_child_of_a_process_that_has_read(filled):
    """A forked child opens its own connections, and the parent's remain usable."""
    batches = read_ranges(options(filled, batch_rows=1), [planned(filled, 3, 0, 80)])
    first = next(batches)
    child = os.fork()
    if not child:
        status = 1
        try:
            status = len(rows(read_ranges(options(filled), [planned(filled, 4, 0, 80)]))) - 80
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(rows([first, *batches])) == 80


def test_reader_keeps_to_its_bytes_a_second(filled):
    """3.2 MB at 4 MB a second take most of a second, in answers of a quarter of that."""
    limited = options(filled, bytes_per_second=4_000_000)
    started = time.monotonic()
    assert len(rows(read_ranges(limited, [planned(filled, 3, 0, 32)]))) == 32
    assert 0.5 < time.monotonic() - started < 5
    assert {read.bytes_max for read in filled.reads} == {1_000_000}


def test_reader_left_early_reads_no_further(filled):
    """A task that stops after a few rows, like LIMIT, leaves no read in progress."""
    batches = read_ranges(options(filled, batch_rows=1), [planned(filled, 3, 0, 80)] * 50)
    next(batches)
    batches.close()
    time.sleep(0.2)
    reads = len(filled.reads)
    assert reads <= 2 + FRAMES_AHEAD
    time.sleep(0.2)
    assert len(filled.reads) == reads


def test_loop_of_the_process_begins_again_after_its_end(filled):
    """After a close, at exit or explicit, nothing remains open, and the next reader starts a new
    loop.
    """
    ranges = [planned(filled, 3, 0, 4)]
    assert len(rows(read_ranges(options(filled), ranges))) == 4
    before = ProcessLoop.current()
    before.close()
    before.close()
    assert not any(thread.name == "keylane reader" for thread in threading.enumerate())
    assert len(rows(read_ranges(options(filled), ranges))) == 4
    assert ProcessLoop.current() is not before


@pytest.mark.parametrize("keys", [None, frozenset({b"k"})])
def test_reading_goes_on_when_ctrl_c_interrupts_a_wait_for_rows(filled, monkeypatch, keys):
    """Otherwise a read that ended early would look complete."""
    reading = read_task(options(filled, batch_rows=2, keys=keys), [planned(filled, 3, 1, 79)])
    read, interrupts = [next(reading)], 0
    while True:
        with monkeypatch.context() as patched:
            if interrupts < 3:
                patched.setattr(RangeStream, "next", _interrupted)
            try:
                read.append(next(reading))
            except KeyboardInterrupt:
                interrupts += 1
            except StopIteration:
                break
    assert interrupts == 3
    assert rows(read) == [(3, offset) for offset in range(1, 79)]


def _interrupted(_stream: RangeStream) -> None:
    raise KeyboardInterrupt
