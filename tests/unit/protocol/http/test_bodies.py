"""Bodies of calls: values of derived classes go as what they are, text that no wire carries is
refused.
"""

from __future__ import annotations

import json
from enum import IntEnum, StrEnum

import numpy as np
import pytest

from keylane.protocol.errors import InvalidRequestError, Reason
from keylane.protocol.http.bodies import check_no_nul, encode_body
from support.raising import raises


class ShownText(str):  # noqa: SLOT000 - as programs write them
    """As text that a template gives."""

    def __str__(self) -> str:
        return "shown"


class Number(int):
    """As a number of an ORM."""


class SubjectName(StrEnum):
    """Subjects of a program."""

    ORDERS = "orders"


class Count(IntEnum):
    """Counts of a program."""

    TWO = 2


def test_body_has_the_values_of_derived_classes():
    """They were a TypeError of the packer."""
    given = [
        ShownText("a"),
        np.str_("b"),
        SubjectName.ORDERS,
        Number(1),
        Count.TWO,
        np.float64(1.5),
        True,
    ]
    assert json.loads(encode_body(given)) == ["a", "b", "orders", 1, 2, 1.5, True]
    assert encode_body(None) == b""


def test_body_is_refused_when_a_text_in_it_is_no_unicode():
    """It was a UnicodeEncodeError."""
    with pytest.raises(InvalidRequestError, match=r"'a\\ud800' is not valid text: surrogates"):
        encode_body({"label": "a\ud800"})


def test_body_is_refused_when_a_value_has_no_json():
    with pytest.raises(TypeError, match="object cannot be sent in JSON"):
        encode_body([object()])


@pytest.mark.parametrize(
    ("body", "params", "place"),
    [
        (b'{"client":"a\\u0000b"}', {}, "client"),
        (b'{"a":[{"client":"\\u0000"}]}', {}, "client"),
        (b'{"deep":{"x\\u0000":1}}', {}, "name of a field"),
        (b"", {"order_strategy": "\0"}, "order_strategy"),
    ],
)
def test_text_with_a_nul_is_refused_by_the_name_of_its_field(body, params, place):
    with pytest.raises(InvalidRequestError, match=f"POST /x: '{place}' has the character U"):
        check_no_nul("POST /x", body, params)


def test_name_with_a_nul_is_an_invalid_name():
    with raises(Reason.NAME_INVALID):
        check_no_nul("POST /x", b'{"subject":"a\\u0000b"}', {})
    with raises(Reason.NAME_INVALID):
        check_no_nul("GET /x", b"", {"group": "\0"})


def test_escaped_backslash_before_u0000_is_taken():
    """It is six letters, and no NUL."""
    check_no_nul("POST /x", b'{"client":"a\\\\u0000b"}', {"subject": "s"})
