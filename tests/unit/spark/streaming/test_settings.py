"""What can be streamed with which PySpark."""

from __future__ import annotations

import pytest

from keylane.arrow.selection import ReadOptions
from keylane.protocol.errors import Reason
from keylane.protocol.ids import Subject
from keylane.spark.streaming.settings import stream_settings
from support.raising import raises


def options(rows_max: int | None = None, group: str | None = None) -> ReadOptions:
    return ReadOptions(
        meta=("127.0.0.1:1",),
        subjects=(Subject("flights"),),
        max_rows_per_trigger=rows_max,
        commit_group=group,
    )


def test_settings_are_those_of_the_options():
    """A stream ends where the option `end` says, if it is given."""
    settings = stream_settings(options(5), {"meta", "END"}, has_read_limits=True)
    assert (settings.rows_max, settings.has_end) == (5, True)
    assert not stream_settings(options(), {"meta"}, has_read_limits=False).has_end


@pytest.mark.parametrize(
    ("given", "asked", "option"),
    [
        ({"meta"}, options(5), "maxRowsPerTrigger"),
        ({"end"}, options(), "end"),
        ({"meta"}, options(group="g"), "commitGroup"),
    ],
    ids=("limit", "end", "group"),
)
def test_limits_ends_and_groups_are_refused_by_an_older_pyspark(given, asked, option):
    """It does not tell where a batch begins."""
    with raises(Reason.NOT_STREAMABLE, match=r"needs PySpark 4\.2") as caught:
        stream_settings(asked, given, has_read_limits=False)
    assert caught.value.option == option
