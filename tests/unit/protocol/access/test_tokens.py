"""Tokens: their text, and where they do not belong."""

from __future__ import annotations

import pytest

from keylane.protocol.access.tokens import check_no_token, check_token, make_token
from keylane.protocol.address import parse_addresses
from keylane.protocol.errors import Reason
from support.raising import raises

TOKEN = make_token(lambda bits: (1 << bits) - 1)


@pytest.mark.parametrize("text", ["", "kl_", TOKEN + "x", TOKEN[:-1], "kl_" + "!" * 43, None])
def test_token_is_refused_when_it_is_none(text: object):
    with raises(Reason.TOKEN_INVALID) as refused:
        check_token(text, "here")
    assert len(str(text)) < 9 or str(text) not in refused.value.message


def test_token_is_read_with_white_space_around_it():
    assert check_token(f" {TOKEN}\n", "here") == TOKEN


@pytest.mark.parametrize(
    ("path", "query"),
    [("/v1", {"token": "x"}), ("/v1", {"q": TOKEN}), (f"/v1/{TOKEN}", {}), ("/", {"Token": ""})],
)
def test_token_in_a_url_is_refused(path: str, query: dict[str, str]):
    with raises(Reason.TOKEN_IN_URL):
        check_no_token(path, query)


def test_token_in_an_address_is_refused_and_not_repeated():
    with raises(Reason.TOKEN_IN_URL) as refused:
        parse_addresses(f"{TOKEN}@127.0.0.1:7000")
    assert TOKEN not in str(refused.value)
