"""Numbers in text of callers: ASCII digits alone."""

from __future__ import annotations

import pytest

from keylane.protocol.errors import InvalidRequestError, Reason
from keylane.protocol.http.posted import posted_messages
from keylane.protocol.ids import partition_number
from keylane.protocol.reading.instants import parse_ago_ms
from keylane.protocol.scheduled.deliver_at import read_instant_ms
from keylane.protocol.text import parse_number
from keylane.rpc.server import whole_number
from support.raising import raises

OTHERS = [
    "1_000",
    "+1",
    " 1",
    "1 ",
    "1\n",
    "\u0663",
    "\u00b2",
    "\uff11",
    "0x1",
    "1e3",
    "1.0",
    "",
    "--1",
]


@pytest.mark.parametrize("text", [*OTHERS, "9223372036854775808", "1" * 5_000, "-1"])
def test_number_is_none_when_the_text_is_more_than_digits(text: str) -> None:
    assert parse_number(text) is None


def test_number_is_what_its_digits_say() -> None:
    assert [parse_number(text) for text in ("0", "007", "9223372036854775807")] == [0, 7, 2**63 - 1]


@pytest.mark.parametrize("text", OTHERS)
def test_parameter_is_refused_when_it_is_no_plain_number(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="whole number"):
        whole_number({"limit": text}, "limit", 5, low=-1)
    with raises(Reason.DELIVER_AT):
        read_instant_ms(text)
    assert parse_ago_ms(f"-{text}h") is None or text == ""
    assert partition_number(f"orders.p{text}") is None


def test_parameter_may_be_negative_where_that_means_something() -> None:
    assert whole_number({"after": "-1"}, "after", 5, low=-1) == -1


@pytest.mark.parametrize("name", ["key", "key_base64", "Message-Key"])
def test_key_is_refused_when_it_is_given_empty(name: str) -> None:
    """A variable of a script that is empty: its messages were stored without order."""
    with pytest.raises(InvalidRequestError, match=f"{name} is empty"):
        posted_messages(b"value", {name: ""})
    assert posted_messages(b"value", {})[0].key == b""
