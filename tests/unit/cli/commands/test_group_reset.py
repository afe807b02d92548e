"""The target of `keylane group reset --to`."""

import json

import msgspec
import pytest

from keylane.admin import ResetTo
from keylane.cli.commands.group import count_skipped, parse_target, still_parked_line
from keylane.protocol.errors import ConfigError
from keylane.protocol.progress import CursorView, GroupReset


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("earliest", (ResetTo.EARLIEST, None, None)),
        ("latest", (ResetTo.LATEST, None, None)),
        ("17", (ResetTo.OFFSET, 17, None)),
        ("1970-01-01T00:00:01", (ResetTo.TIME, None, 1_000)),
        ("1970-01-01T01:00:00+01:00", (ResetTo.TIME, None, 0)),
        ("-1h", (ResetTo.TIME, None, 3_600_000)),
        ("-3h", (ResetTo.TIME, None, 0)),
    ],
)
def test_target_is_a_word_an_offset_or_a_time(text, target):
    assert parse_target(text, now_ms=7_200_000) == target


@pytest.mark.parametrize("text", ["", "-1", "yesterday", "1969-01-01", "٣"])
def test_other_target_is_refused(text):
    with pytest.raises(
        ConfigError, match="give earliest, latest, an offset, how long ago, such as -1h"
    ):
        parse_target(text, now_ms=0)


def reset_with(*parked: int | None) -> GroupReset:
    cursors = [
        CursorView(partition_id=7 + n, queue=0, cursor=3, logic_cursor=3, token=5, parked=each)
        for n, each in enumerate(parked)
    ]
    return GroupReset(subject="orders", group="billing", cursors=cursors)


def test_messages_between_a_cursor_and_a_later_one_are_skipped():
    """A partition that is set back skips nothing."""
    moves = ((3, 10), (10, 3), (0, 2), (5, 5), (None, 9))
    cursors = [
        CursorView(
            partition_id=7, queue=0, cursor=after, logic_cursor=after, token=0, before=before
        )
        for before, after in moves
    ]
    assert count_skipped(GroupReset(subject="orders", group="billing", cursors=cursors)) == 9


def test_line_says_how_many_messages_stay_parked_and_where():
    assert still_parked_line(reset_with(1, 0)) == (
        "1 message of partitions before these stays parked on 1 partition (7): keylane parked list "
        "orders billing"
    )
    assert "5 messages of partitions before these stay parked on 2 partitions (7, 9)" in (
        still_parked_line(reset_with(2, 0, 3))
    )


@pytest.mark.parametrize("parked", [(0, 0), (None, None)])
def test_no_line_is_shown_when_nothing_stays_parked_or_it_is_not_said(parked):
    assert still_parked_line(reset_with(*parked)) == ""


def test_answer_of_an_earlier_metaserver_is_read_without_the_number():
    told = msgspec.to_builtins(reset_with(4))
    del told["cursors"][0]["parked"]
    read = msgspec.json.decode(json.dumps(told), type=GroupReset)
    assert read.cursors[0].parked is None
