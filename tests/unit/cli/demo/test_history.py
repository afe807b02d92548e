"""The demo's run becomes a history: clean ones pass, each broken one is caught by name."""

import time
from dataclasses import replace

import pytest

from keylane.checker.events import Looked
from keylane.cli.demo.history import (
    JUDGED_GROUP,
    JudgedRun,
    PartitionLog,
    Record,
    SentRows,
    judge_run,
)

# Rows 0..7; keys a and b in partition 1, c and no key in partition 2.
KEYS = [b"a", b"b", b"c", b"a", b"", b"b", b"a", b"c"]
SOURCE = SentRows(keys=KEYS, digests=[100 + row for row in range(8)])


def partition_log(*rows: int) -> PartitionLog:
    return PartitionLog(
        rows=rows, keys=[KEYS[row] for row in rows], digests=[100 + row for row in rows]
    )


LOG = {1: partition_log(0, 1, 3, 5, 6), 2: partition_log(2, 4, 7)}


def handled(partition_id: int, token: int, *offsets: int, at_ms: int = 0) -> list[Record]:
    """Records of these offsets, one millisecond apart."""
    rows = LOG[partition_id].rows
    return [
        Record(KEYS[rows[offset]], rows[offset], partition_id, offset, token, at_ms + step)
        for step, offset in enumerate(offsets)
    ]


CLEAN = {
    "one": handled(1, 1, 0, 1, 2) + handled(2, 2, 0, 1, 2),
    "two": handled(1, 3, 2, 3, 4, at_ms=1_000),
}


def observation(*fields: int, run: int = 0) -> Looked:
    return Looked(JUDGED_GROUP, *fields, run)


def clean(judged: JudgedRun) -> bool:
    return not judged.findings.total


def only(judged: JudgedRun, *anomalies: str) -> None:
    """These anomalies and no others, each with an example."""
    findings = judged.findings
    assert {name for name, n in findings.counts.items() if n} == set(anomalies)
    assert {example.split(":")[0] for example in findings.examples} == set(anomalies)


def test_history_is_clean_with_a_hand_over_and_a_redelivery():
    """A run with one hand-over and one message handled twice is clean, and its numbers are
    right.
    """
    judged = judge_run(SOURCE, LOG, CLEAN)
    assert clean(judged)
    assert judged.findings.examples == []
    assert (
        judged.stored,
        judged.handled,
        judged.redelivered,
        judged.findings.order_violations,
    ) == (
        8,
        8,
        1,
        0,
    )


def test_concurrency_within_an_owner():
    """Inside one owner, different keys may pass each other; only a key's own messages keep their
    order.
    """
    records = {"one": handled(1, 1, 1, 0, 3, 2, 4), "two": handled(2, 1, 2 - 1, 0, 2)}
    assert clean(judge_run(SOURCE, LOG, records))


def test_row_in_no_partition_is_lost():
    """A row in no partition is lost."""
    log = LOG | {2: partition_log(2, 4)}
    records = {"one": handled(1, 1, 0, 1, 2, 3, 4) + handled(2, 1, 0, 1)}
    judged = judge_run(SOURCE, log, records)
    only(judged, "lost")
    assert judged.stored == 7


def test_stored_message_is_lost_when_it_is_never_handled():
    """A message that is stored and never handled is lost."""
    records = {"one": handled(1, 1, 0, 1, 2, 3, 4) + handled(2, 1, 0, 2)}
    judged = judge_run(SOURCE, LOG, records)
    only(judged, "starvation")
    assert judged.lost == 1
    assert judged.handled == 7


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": (2, 4, 99)},
        {"digests": [102, 104, 1]},
        {"keys": [b"c", b"", b"d"]},
    ],
)
def test_phantom_in_the_log(wrong):
    """A stored message that was not sent so - unknown row, other value, other key - is a
    phantom.
    """
    judged = judge_run(SOURCE, LOG | {2: replace(LOG[2], **wrong)}, CLEAN)
    assert judged.findings.counts["phantom"] >= 1
    assert not clean(judged)


@pytest.mark.parametrize(
    "record",
    [
        Record(b"c", 7, 2, 1, 9, 5_000),
        Record(b"c", 7, 2, 3, 9, 5_000),
        Record(b"c", 7, 2, -1, 9, 5_000),
        Record(b"x", 7, 2, 2, 9, 5_000),
        Record(b"c", 7, 3, 2, 9, 5_000),
    ],
)
def test_record_of_a_message_that_is_not_stored_there_is_a_phantom(record):
    """A record of a message that is not at that place of the log is a phantom."""
    only(judge_run(SOURCE, LOG, CLEAN | {"ghost": [record]}), "phantom")


def test_row_stored_twice_is_a_duplicate():
    """A row stored twice is a duplicate."""
    log = LOG | {2: partition_log(2, 4, 7, 7)}
    records = {"one": CLEAN["one"] + [Record(b"c", 7, 2, 3, 2, 9)], "two": CLEAN["two"]}
    only(judge_run(SOURCE, log, records), "duplicate")


def test_rows_of_a_key_stored_out_of_order_are_an_inversion():
    """Two rows of one key stored against the order of sending are an inversion."""
    log = LOG | {1: partition_log(0, 1, 6, 5, 3)}
    records = {
        "one": [Record(KEYS[row], row, 1, n, 1, 0) for n, row in enumerate(log[1].rows)]
        + handled(2, 2, 0, 1, 2)
    }
    only(judge_run(SOURCE, log, records), "inversion")


def test_key_in_two_partitions():
    """A key with messages in two partitions is an inversion: nothing orders them."""
    log = {1: partition_log(0, 1, 3, 5), 2: partition_log(2, 4, 7, 6)}
    records = {
        "one": handled(1, 1, 0, 1, 2, 3) + handled(2, 2, 0, 1, 2) + [Record(b"a", 6, 2, 3, 2, 9)]
    }
    only(judge_run(SOURCE, log, records), "inversion")


def test_skip_within_an_owner():
    """An owner that jumps over a message of a key skips, even if a later owner handles it."""
    records = {
        "one": handled(1, 1, 0, 1, 4, 3) + handled(2, 1, 0, 1, 2),
        "two": handled(1, 3, 2, 4, at_ms=1_000),
    }
    only(judge_run(SOURCE, LOG, records), "skip")


def test_skip_at_hand_over():
    """A new owner skips when it begins a key past the last message that earlier owners handled."""
    records = {
        "one": handled(1, 1, 0, 1) + handled(2, 1, 0, 1, 2),
        "two": handled(1, 3, 4, 3, at_ms=1_000),
        "three": handled(1, 5, 2, at_ms=2_000),
    }
    only(judge_run(SOURCE, LOG, records), "skip")


def test_rewind_at_hand_over():
    """A new owner may begin again far back: that is redelivery and no anomaly."""
    records = {"one": CLEAN["one"], "two": handled(1, 3, 0, 1, 2, 3, 4, at_ms=1_000)}
    judged = judge_run(SOURCE, LOG, records)
    assert clean(judged)
    assert judged.redelivered == 3


@pytest.mark.parametrize("offsets", [(0, 2, 2, 4), (0, 2, 4, 0)])
def test_owner_is_nonmonotonic_when_it_handles_an_older_message(offsets):
    """An owner that handles a key's message again, or an older one, is nonmonotonic."""
    records = {"one": handled(1, 1, 1, 3, *offsets) + handled(2, 1, 0, 1, 2)}
    only(judge_run(SOURCE, LOG, records), "nonmonotonic")


@pytest.mark.parametrize(
    "later", [observation(1, 3, 1, 0), observation(1, 2, 5, 0)], ids=["cursor", "token"]
)
def test_cursor_is_nonmonotonic_when_it_or_its_token_falls(later):
    """A cursor that falls, or a token that falls, is nonmonotonic."""
    cursors = [observation(1, 3, 4, 0), later]
    only(judge_run(SOURCE, LOG, CLEAN, cursors), "nonmonotonic")


def test_cursor_after_a_crash():
    """A broker that crashed may show an older cursor, which was not durable; an older token is
    never right.
    """
    cursors = [observation(1, 3, 4, 0), observation(1, 3, 2, 0, run=1)]
    assert clean(judge_run(SOURCE, LOG, CLEAN, cursors))
    cursors = [observation(1, 3, 4, 0), observation(1, 2, 4, 0, run=1)]
    only(judge_run(SOURCE, LOG, CLEAN, cursors), "nonmonotonic")


def test_consumers_under_the_same_token_are_a_violation():
    """Two consumers under one token on one partition are named."""
    records = CLEAN | {"twin": handled(2, 2, 0, 1)}
    judged = judge_run(SOURCE, LOG, records)
    assert judged.findings.counts["duplicate token"]
    assert judged.findings.order_violations >= 1


def test_stale_ack_by_late_record():
    """A message handled by a fenced owner and by no later one was acked by the fenced one."""
    records = {
        "one": handled(1, 1, 0, 1, 2) + handled(1, 1, 3, at_ms=1_500) + handled(2, 2, 0, 1, 2),
        "two": handled(1, 3, 2, at_ms=1_000) + handled(1, 3, 4, at_ms=2_000),
    }
    only(judge_run(SOURCE, LOG, records), "stale effect")


def test_late_record_handled_again():
    """A fenced owner that finishes a message in hand does no harm if the new owner handles it
    again.
    """
    records = {
        "one": handled(1, 1, 0, 1, 2) + handled(1, 1, 3, at_ms=1_500) + handled(2, 2, 0, 1, 2),
        "two": handled(1, 3, 2, 3, 4, at_ms=1_000),
    }
    assert clean(judge_run(SOURCE, LOG, records))


def test_stale_ack_by_cursor():
    """A cursor that rises under a token whose owner did not handle what it passed was moved by
    another.
    """
    cursors = [observation(1, 3, 1, 0), observation(1, 3, 5, 0)]
    only(judge_run(SOURCE, LOG, CLEAN, cursors), "stale effect")


def test_cursor_over_acked_ranges():
    """A cursor may pass what an earlier owner had acked above it, and what the current owner
    handled.
    """
    cursors = [
        observation(2, 2, 0, 0),
        observation(1, 1, 1, 0),
        observation(1, 3, 1, 1),
        observation(1, 3, 5, 0),
        observation(2, 2, 3, 0),
    ]
    assert clean(judge_run(SOURCE, LOG, CLEAN, cursors))


def test_examples_are_few():
    """However much is wrong, each anomaly keeps a handful of examples and the full count."""
    total = 10_000
    source = SentRows(keys=[b"k"] * total, digests=[0] * total)
    judged = judge_run(source, {}, {})
    assert judged.findings.counts["lost"] == total
    assert len(judged.findings.examples) == 5


@pytest.mark.slow
def test_history_of_a_hundred_thousand_rows_is_judged_in_seconds():
    """A hundred thousand rows handled by two owners each are judged in one pass."""
    total, partitions = 100_000, 4
    keys = [b"N%d" % (row * 7919 % 4000) for row in range(total)]
    log, records = {}, {}
    for number in range(partitions):
        rows = [row for row in range(total) if row * 7919 % 4000 % partitions == number]
        log[number] = PartitionLog(rows, [keys[row] for row in rows], [0] * len(rows))
        lines = [Record(keys[row], row, number, n, 1, n) for n, row in enumerate(rows)]
        half = len(lines) // 2
        records[f"first-{number}"] = lines[:half]
        records[f"second-{number}"] = [
            line._replace(token=2, at_ms=total + line.at_ms) for line in lines[half - 10 :]
        ]
    began = time.process_time()
    judged = judge_run(SentRows(keys, [0] * total), log, records)
    assert clean(judged)
    assert judged.redelivered == 10 * partitions
    # Seconds of the processor, about 1 of them here: what else the machine does is not counted.
    assert time.process_time() - began < 12
