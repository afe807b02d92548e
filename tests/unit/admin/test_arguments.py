"""Arguments of calls: converted to what goes over the wire, or refused by name."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import numpy as np
import pytest

from keylane import Admin
from keylane.admin import GroupStart, StartAt
from keylane.admin.arguments import (
    build_group_start,
    check_position_keyword,
    convert_argument,
    convert_mapping,
    to_epoch_ms,
)
from keylane.admin.group_resets import reset_group
from keylane.protocol.control import DeleteGroup, DeleteSubject, SwitchGroup
from keylane.protocol.errors import ConfigError, InvalidRequestError
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.progress import GroupReset, ResetGroup
from keylane.protocol.routing import ConsumeStrategy


def test_arguments_are_converted_to_the_types_of_the_call():
    """Texts become values of enumerations, lists become tuples."""
    assert convert_argument(Reshape, {"kind": "grow", "subject": "s", "queues": [3, 5]}) == Reshape(
        kind=OperationKind.GROW, subject="s", queues=(3, 5)
    )
    asked = convert_argument(SwitchGroup, {"strategy": "shared"})
    assert asked.strategy is ConsumeStrategy.SHARED


def test_argument_is_refused_by_its_name_when_its_type_is_wrong():
    """The error names the field, or the argument that has another name than its field."""
    with pytest.raises(InvalidRequestError, match="queues"):
        convert_argument(Reshape, {"kind": "grow", "queues": ["3"]})
    with pytest.raises(InvalidRequestError, match="consume_strategy"):
        convert_argument(SwitchGroup, {"strategy": "none"}, strategy="consume_strategy")


def test_argument_is_refused_when_it_is_no_text_of_unicode_or_very_long():
    """The first was a UnicodeEncodeError; the text of the second was as long as what was given."""
    with pytest.raises(InvalidRequestError, match="not valid text"):
        convert_argument(SwitchGroup, {"strategy": "a\ud800"})
    with pytest.raises(InvalidRequestError) as refused:
        convert_argument(SwitchGroup, {"strategy": "x" * 70_000})
    assert len(str(refused.value)) < 1_000


@pytest.mark.parametrize("given", [3, "ab", [1], np.int64(3), np.array([1, 2]), None])
def test_mapping_is_refused_by_its_name_when_it_is_something_else(given):
    """Offsets of a hold were an AttributeError, those of a publication a TypeError or a
    ValueError.
    """
    assert convert_mapping("ends", {1: 2}) == {1: 2}
    with pytest.raises(InvalidRequestError, match="ends must be a mapping"):
        convert_mapping("ends", given)


@pytest.mark.parametrize("kind", [DeleteSubject, DeleteGroup])
def test_id_is_refused_when_no_server_can_store_it(kind):
    """A metaserver met an OverflowError of SQLite."""
    with pytest.raises(InvalidRequestError, match="9223372036854775807"):
        convert_argument(kind, {"subject_id" if kind is DeleteSubject else "group_id": 2**63})


@pytest.mark.parametrize("given", [3, "2030-01-31", date(2030, 1, 1), True, datetime.min])
def test_time_is_refused_by_its_name_when_it_is_no_datetime_with_a_zone(given):
    """Of a token's begin and end; others than datetimes were an AttributeError."""
    assert to_epoch_ms("ends", datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)) == 1_000
    with pytest.raises(InvalidRequestError, match=r"ends .* time zone"):
        to_epoch_ms("ends", given)


RESETS = {"offset": "offset", "time": "at_ms", "shift": "shift", "cursors": "cursors"}


@pytest.mark.parametrize(
    ("given", "arguments", "hint"),
    [
        (86, RESETS, "to='offset', offset=86"),
        ("86", RESETS, "to='offset', offset=86"),
        (datetime(2026, 1, 1, tzinfo=UTC), RESETS, "to='time', at_ms=milliseconds since 1970"),
        ({1: 2}, RESETS, "to='cursors', cursors={1: 2}"),
        (1_700_000_000_000, {"time": "at_ms", "cursors": "cursors"}, "to='time', at_ms=17"),
    ],
)
def test_place_that_is_given_for_its_word_is_refused_with_the_argument_that_takes_it(
    given, arguments, hint
):
    with pytest.raises(InvalidRequestError, match="to is one of 'earliest', 'latest'") as told:
        check_position_keyword("to", given, **arguments)
    assert hint in told.value.hint


async def test_place_is_refused_when_it_is_given_for_the_word_of_a_reset_or_a_start():
    """Nothing is asked of the cluster."""

    async def ask(_body: ResetGroup) -> GroupReset:
        raise AssertionError

    with pytest.raises(InvalidRequestError, match="to is one of") as told:
        await reset_group(ask, {"to": 86, "at_ms": None, "cursors": None, "dry_run": False})
    assert "offset=86" in str(told.value.hint)
    with pytest.raises(InvalidRequestError, match="start is one of"):
        await Admin("127.0.0.1:1").create_group("orders", "billing", start={1: 7})  # type: ignore[arg-type]


NOW_MS = 1_800_000_000_000
HOUR_AGO = GroupStart(at=StartAt.TIME, at_ms=NOW_MS - 3_600_000)


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (("latest", None, None), GroupStart(at=StartAt.LATEST)),
        (("time", 5, None), GroupStart(at=StartAt.TIME, at_ms=5)),
        (("cursors", 5, {3: 7}), GroupStart(at=StartAt.CURSORS, at_ms=5, cursors={3: 7})),
        (("-1h", None, None), HOUR_AGO),
        (("2027-01-15T07:00:00Z", None, None), HOUR_AGO),
        ((timedelta(hours=-1), None, None), HOUR_AGO),
        ((datetime(2027, 1, 15, 7, tzinfo=UTC), None, None), HOUR_AGO),
    ],
)
def test_start_of_a_group_is_built_from_a_keyword_or_an_instant(arguments, start):
    assert build_group_start(*arguments, now_ms=NOW_MS) == start


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (("newest", None, None), ConfigError, "such as -1h.*'earliest' or 'latest'"),
        (("1h", None, None), ConfigError, "such as -1h.*'earliest' or 'latest'"),
        (("2099-01-01T00:00:00Z", None, None), ConfigError, "in the future"),
        ((datetime(2027, 1, 1), None, None), ConfigError, "no time zone"),
        (("-1h", 5, None), InvalidRequestError, "start=-1h goes without at_ms= and cursors="),
        (("-1h", None, {3: 7}), InvalidRequestError, "goes without at_ms= and cursors="),
        (("time", 1.5, None), InvalidRequestError, "at_ms"),
        (("cursors", 5, {3: -1}), InvalidRequestError, "cursors"),
        ((None, None, None), InvalidRequestError, "start"),
        ((b"latest", None, None), ConfigError, "start must be"),
    ],
)
def test_start_of_a_group_is_refused_with_what_is_accepted(arguments, kind, text):
    with pytest.raises(kind, match=text):
        build_group_start(*arguments, now_ms=NOW_MS)


@pytest.mark.parametrize("wanted", [0, 6, 9, -1, "2", True, 2.5, None])
async def test_number_of_folders_is_refused_before_a_call_when_it_is_not_1_to_5(wanted):
    async with Admin("127.0.0.1:1") as admin:
        with pytest.raises(InvalidRequestError, match="wanted"):
            await admin.set_copies("g1", wanted)
