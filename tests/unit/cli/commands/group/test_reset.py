"""The target of `keylane group reset --to`."""

import pytest

from keylane.admin import ResetTo
from keylane.cli.commands.group.reset import parse_target
from keylane.protocol.errors import ConfigError


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
        ConfigError, match="neither earliest, latest, an offset, how long ago as -1h"
    ):
        parse_target(text, now_ms=0)
