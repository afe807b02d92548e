"""What `keylane read` takes as bounds."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from keylane.cli.commands.read import parse_bound
from keylane.errors import ConfigError


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
