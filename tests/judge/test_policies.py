"""The judge finds what a member of a group must not do under its failure policy, in records that
are broken on purpose, and nothing in the record of killed members that did right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import segments
from test_judge import FolderWriter, Log

from proof.second_opinion import second_opinion

COUNT = 4
STRICT = {"subject": "s", "is_ordered": True, "sets_aside": "nothing", "tries": 3}
PARKING = STRICT | {"sets_aside": "keys"}
BURYING = STRICT | {"sets_aside": "messages"}
RETRYING = BURYING | {"tries": 1}
SHARED = BURYING | {"is_ordered": False}


class BrokenRecord:
    """The record of a run with four messages of a key in partition 1, and one group, "g"."""

    def __init__(self, folder: Path, promise: dict[str, Any]) -> None:
        (folder / "groups.json").write_text(json.dumps({"g": promise}))
        self._folder = folder
        self._log = Log(folder)
        self.broker = FolderWriter(folder, "b0")
        self.broker.partition(1)
        self.broker.messages(1, 0, *((b"k", b"v%d" % number) for number in range(COUNT)))
        for number in range(COUNT):
            self._log.sent(b"v%d" % number, number, told=(1, number))

    def begins(self, offset: int, owner: int) -> None:
        """A handler of this owner begins; an owner that says no more was killed in it."""
        session = f"s{owner}"
        self._log.note(2, "g", session, 1, offset, b"v%d" % offset, owner, 0, 0, True, None, False)

    def handles(self, *offsets: int, owner: int) -> None:
        for offset in offsets:
            self.begins(offset, owner)
            self._log.note(3, "g", 1, offset, owner, f"s{owner}")

    def fails(self, offset: int, owner: int, *, times: int = 1) -> None:
        for _ in range(times):
            self.begins(offset, owner)
            self.drops(offset, owner)

    def drops(self, offset: int, owner: int) -> None:
        self._log.note(4, f"s{owner}", 1, offset)

    def sets_aside(
        self, key: bytes | int | None, *offsets: int, kind: str = "E", tries: int = 3
    ) -> None:
        """The first one has failed; they are handled later, and then no longer aside."""
        failure = (kind, "", "c", 0, tries)
        for offset in offsets:
            self.broker.parked(1, (segments.PARK, key, ((offset, offset + 1),), failure, 0))
            failure = None

    def takes_back(self, key: bytes | int | None, *offsets: int) -> None:
        for offset in offsets:
            self.broker.parked(1, (segments.UNPARK, key, 1, ((offset, offset + 1),)))

    def judged(self, *, acked: int = COUNT) -> dict[str, Any]:
        self.broker.acked(1, acked)
        return second_opinion(self._folder)

    def findings(self, *, acked: int = COUNT) -> dict[str, int]:
        return self.judged(acked=acked)["findings"]


def test_judge_finds_nothing_when_owners_were_killed_and_the_next_ones_handled_again(
    tmp_path: Path,
):
    record = BrokenRecord(tmp_path, STRICT)
    record.handles(0, 1, owner=1)
    record.begins(2, owner=1)
    record.handles(0, 1, owner=2)
    record.fails(2, owner=2, times=5)
    record.begins(2, owner=2)
    record.handles(1, 2, 3, owner=3)
    told = record.judged()
    assert (told["findings"], told["interrupted"], told["handled"]) == ({}, {"g": 2}, COUNT)


def test_judge_finds_a_message_that_no_owner_handled_to_its_end(tmp_path: Path):
    record = BrokenRecord(tmp_path, STRICT)
    record.handles(0, 1, 2, owner=1)
    record.begins(3, owner=1)
    assert record.findings() == {"acked unhandled": 1}


def test_judge_finds_a_message_that_is_missing_at_the_end(tmp_path: Path):
    record = BrokenRecord(tmp_path, STRICT)
    record.handles(0, 1, 2, owner=1)
    assert record.findings(acked=3) == {"not handled": 1}


def test_judge_finds_a_group_that_handled_nothing(tmp_path: Path):
    assert BrokenRecord(tmp_path, STRICT).findings() == {"acked unhandled": COUNT}


def test_judge_finds_a_message_that_was_skipped_by_the_next_owner(tmp_path: Path):
    """The first owner was killed in message 1; the second one goes on behind it."""
    record = BrokenRecord(tmp_path, STRICT)
    record.handles(0, owner=1)
    record.begins(1, owner=1)
    record.handles(2, 3, owner=2)
    assert record.findings() == {"acked unhandled": 1, "handled too early": 1}


@pytest.mark.parametrize(
    ("promise", "findings"), [(STRICT, {"handled backwards": 1}), (SHARED, {})]
)
def test_judge_finds_an_owner_that_goes_back(
    tmp_path: Path, promise: dict[str, Any], findings: dict[str, int]
):
    """An earlier owner had handled message 1, but this one begins with message 2."""
    record = BrokenRecord(tmp_path, promise)
    record.handles(0, 1, owner=1)
    record.handles(2, 1, 3, owner=2)
    assert record.findings() == findings


def test_judge_lets_a_batch_that_failed_be_handled_again(tmp_path: Path):
    record = BrokenRecord(tmp_path, STRICT)
    record.handles(0, 1, owner=1)
    record.fails(2, owner=1)
    record.drops(0, owner=1)
    record.drops(1, owner=1)
    record.handles(0, 1, 2, 3, owner=1)
    assert record.findings() == {}


@pytest.mark.parametrize(
    ("promise", "key", "findings"),
    [
        (STRICT, b"k", {"set aside with its key": 1}),
        (STRICT, None, {"set aside alone": 1}),
        (PARKING, b"k", {}),
        (PARKING, None, {"set aside alone": 1}),
        (PARKING, 2, {"set aside alone": 1}),
        (BURYING, None, {}),
        (BURYING, b"k", {"set aside with its key": 1}),
        (RETRYING, 1, {}),
        (SHARED, None, {}),
    ],
)
def test_judge_knows_what_each_policy_sets_aside(
    tmp_path: Path, promise: dict[str, Any], key: bytes | int | None, findings: dict[str, int]
):
    record = BrokenRecord(tmp_path, promise)
    record.handles(0, 1, 2, owner=1)
    record.fails(3, owner=1, times=3)
    record.sets_aside(key, 3)
    record.takes_back(key, 3)
    record.handles(3, owner=1)
    assert record.findings() == findings


@pytest.mark.parametrize("promise", [PARKING, BURYING])
@pytest.mark.parametrize(
    ("failed", "kind", "tries", "findings"),
    [
        (3, "E", 3, {}),
        (2, "E", 2, {"set aside too soon": 1}),
        (0, "E", 3, {"set aside too soon": 1}),
        (0, "crashed", 2, {}),
        (0, "crashed", 1, {"set aside too soon": 1}),
    ],
)
def test_judge_finds_a_message_that_is_set_aside_too_soon(
    tmp_path: Path,
    promise: dict[str, Any],
    failed: int,
    kind: str,
    tries: int,
    findings: dict[str, int],
):
    record = BrokenRecord(tmp_path, promise)
    record.handles(0, 1, 2, owner=1)
    record.fails(3, owner=1, times=failed)
    key = b"k" if promise is PARKING else None
    record.sets_aside(key, 3, kind=kind, tries=tries)
    record.takes_back(key, 3)
    record.handles(3, owner=2)
    assert record.findings() == findings


def test_judge_finds_a_message_that_passes_a_failing_one_of_its_key(tmp_path: Path):
    """The failing one is parked, with its key, and handled later: but the next one did not wait."""
    record = BrokenRecord(tmp_path, PARKING)
    record.handles(0, owner=1)
    record.fails(1, owner=1, times=3)
    record.sets_aside(b"k", 1)
    record.handles(2, 3, owner=1)
    record.takes_back(b"k", 1)
    record.handles(1, owner=2)
    assert record.findings() == {"handled too early": 1}


@pytest.mark.parametrize(("failed", "findings"), [(3, {}), (2, {"handled too early": 1})])
def test_judge_lets_messages_pass_one_that_failed_as_often_as_its_policy_says(
    tmp_path: Path, failed: int, findings: dict[str, int]
):
    """The process was killed before the broker had stored that the message is a dead letter."""
    record = BrokenRecord(tmp_path, BURYING)
    record.handles(0, owner=1)
    record.fails(1, owner=1, times=failed)
    record.handles(2, owner=1)
    record.handles(1, 2, 3, owner=2)
    assert record.findings() == findings
