"""Names and offsets that are let through, and those that are not."""

from __future__ import annotations

from typing import Any

import pytest

from keylane.protocol.errors import Reason
from keylane.protocol.ids import (
    MAX_I64,
    check_name,
    check_offset,
    partition_name,
    partition_number,
)
from support.raising import raises


@pytest.mark.parametrize("name", ["a", "0", "A.b_c-9", "x" * 200, "flights", "9lives"])
def test_legal_name_comes_back_as_it_is(name):
    """A name of the documented form passes unchanged."""
    assert check_name("subject", name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../x",
        "/etc/passwd",
        "a/b",
        "a\\b",
        "a\0b",
        "\0",
        "x" * 201,
        "x" * 300,
        ".",
        "..",
        ".hidden",
        "-flag",
        "_x",
        "%retry%",
        "a b",
        "a\n",
        "\na",
        "é",
        "٣",
        "a\ud800",
        None,
        7,
        b"a",
    ],
    ids=lambda name: repr(name)[:20],
)
def test_illegal_name_is_refused(name):
    """Paths, NUL, blanks, signs, other scripts, 300 characters and other types are no names."""
    with raises(Reason.NAME_INVALID) as caught:
        check_name("subject", name)
    assert caught.value.kind == "subject"
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("offset", [0, 1, MAX_I64])
def test_offset_within_its_range_passes(offset):
    """Offsets are whole numbers in [0, 2**63)."""
    assert check_offset(offset) == offset


@pytest.mark.parametrize(
    "offset", [-1, MAX_I64 + 1, 10**400, 1.0, "1", None], ids=lambda o: repr(o)[:9]
)
def test_anything_else_is_no_offset(offset):
    """Negative and huge numbers, and what is no whole number, are refused."""
    with raises(Reason.OFFSET_INVALID) as caught:
        check_offset(offset)
    assert repr(offset)[:40] in caught.value.message


@pytest.mark.parametrize("number", [0, 8, 999_999_999])
def test_partition_number_reads_what_partition_name_wrote(number):
    assert partition_number(partition_name("a.p7", number)) == number


@pytest.mark.parametrize("name", ["flights", "flights.p", "flights.px", "flights.p1234567890"])
def test_partition_number_is_none_in_another_name(name):
    assert partition_number(name) is None


def test_illegal_name_is_quoted_in_the_text_and_plain_in_the_attribute():
    with raises(Reason.NAME_INVALID) as caught:
        check_name("subject", "a b\n")
    assert caught.value.message == "illegal name (kind=subject, name='a b\\n')"
    assert (caught.value.kind, caught.value.name) == ("subject", "a b\n")


@pytest.mark.parametrize("offset", [True, False, 1.0, -1, 2**63, "1", None])
def test_offset_is_a_whole_number_and_no_bool(offset: Any):
    with raises(Reason.OFFSET_INVALID):
        check_offset(offset)
