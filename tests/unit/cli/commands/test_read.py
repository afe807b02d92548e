"""What `keylane read` takes as bounds."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from keylane.cli.commands.read import parse_bound, read_subject
from keylane.cli.options import OutputFormat
from keylane.errors import ConfigError, NotSentError
from support.ports import free_port


def test_bound_is_a_word_an_offset_or_a_time():
    assert [parse_bound(text) for text in ("earliest", "latest", "-1h")] == [
        "earliest",
        "latest",
        "-1h",
    ]
    assert parse_bound("42") == 42
    assert parse_bound("2024-05-31T12:00:00") == datetime(2024, 5, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize("text", ["", "1h", "soon", "-1", "1" * 20])
def test_bound_of_another_text_is_refused(text):
    with pytest.raises(ConfigError):
        parse_bound(text)


@pytest.mark.parametrize(
    ("start", "stop"),
    [("-1h", "-2h"), ("latest", "-1h"), ("9", "8"), ("-1h", "2024-05-31T12:00:00")],
)
async def test_end_before_the_beginning_is_refused(start: str, stop: str):
    """No metaserver is asked."""
    with pytest.raises(ConfigError, match="--from is after --to"):
        await read(start=start, stop=stop)


@pytest.mark.parametrize(
    ("start", "stop"), [("-2h", "-1h"), ("9", "9"), ("earliest", "0"), ("9", "-1h"), ("-1h", None)]
)
async def test_end_behind_the_beginning_is_read(start: str, stop: str | None):
    with pytest.raises(NotSentError):
        await read(start=start, stop=stop)


async def read(*, start: str, stop: str | None) -> None:
    """`keylane read` of a metaserver that does not listen."""
    await read_subject(
        f"127.0.0.1:{free_port()}",
        OutputFormat.TABLE,
        "orders",
        start=start,
        stop=stop,
        key=None,
        tags=None,
        partition=1,
        limit=None,
        follow=False,
        from_copies=False,
    )
