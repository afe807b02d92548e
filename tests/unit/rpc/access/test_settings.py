"""Access control is on if other machines may connect, unless it is turned off explicitly."""

from __future__ import annotations

import pytest

from keylane.rpc.access.settings import access_problems, hash_problems, is_access_on
from keylane.rpc.tls.settings import ServingSettings

NEEDED = ("token_file", "token_hash")


@pytest.mark.parametrize(
    ("access", "host", "on"),
    [
        ("auto", "127.0.0.1", False),
        ("auto", "127.0.0.2", False),
        ("auto", "::1", False),
        ("auto", "localhost", False),
        ("auto", "0.0.0.0", True),
        ("auto", "a.example", True),
        ("auto", "::", True),
        ("on", "127.0.0.1", True),
        ("off", "0.0.0.0", False),
        ("auto", 7, False),
    ],
)
def test_access_is_on_where_others_are_served(access: str, host: str, on: bool) -> None:
    assert is_access_on(access, host) is on


def test_server_is_unguarded_only_where_that_is_written() -> None:
    assert not ServingSettings().is_unguarded
    assert not ServingSettings(host="0.0.0.0").is_unguarded
    assert ServingSettings(host="0.0.0.0").is_guarded
    assert ServingSettings(host="0.0.0.0", access="off").is_unguarded
    assert not ServingSettings(access="off").is_unguarded


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, None),
        ({"host": "0.0.0.0"}, None),
        ({"host": "0.0.0.0", "tls_cert": "c"}, "0.0.0.0 is not a loopback address"),
        ({"host": "0.0.0.0", "insecure_network": True}, 'access = "off" serves everybody'),
        ({"host": "0.0.0.0", "tls_cert": "c", "access": "off"}, None),
        ({"host": "0.0.0.0", "tls_cert": "c", "token_hash": "h"}, None),
        ({"access": "on"}, "token_file or token_hash is missing; access = on needs it"),
        ({"access": "maybe"}, "access is on, off or auto"),
    ],
)
def test_problems_name_the_token_that_is_missing(values, problem) -> None:
    problems = access_problems(values, NEEDED)
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]


@pytest.mark.parametrize(
    ("value", "named", "fits"),
    [
        ("", False, True),
        ("a" * 64, False, True),
        ("A" * 64, False, False),
        ("a" * 63, False, False),
        (7, False, False),
        (("g1:" + "a" * 64,), True, True),
        (("a" * 64,), True, False),
        (("g1:" + "a" * 64, "g2"), True, False),
    ],
)
def test_hashes_are_64_hexadecimal_digits(value, named: bool, fits: bool) -> None:
    assert (hash_problems({"x": value}, "x", named=named) == []) is fits
