"""The principal in a client's certificate, and the names that principals may have."""

from __future__ import annotations

from typing import Any

import pytest

from keylane.protocol.access.principals import check_principal, is_outside
from keylane.protocol.errors import Reason
from keylane.rpc.access.peers import peer_of
from support.raising import raises

END = "Nov 24 05:00:00 2027 GMT"


def certificate(*uris: str, names: tuple[str, ...] = ("shop",)) -> dict[str, Any]:
    return {
        "subject": tuple((("commonName", name),) for name in names),
        "subjectAltName": (("DNS", "shop.example"), *(("URI", uri) for uri in uris)),
        "notAfter": END,
    }


@pytest.mark.parametrize(
    ("given", "principal"),
    [
        (certificate(), "cert:shop"),
        (certificate("spiffe://shop/eu"), "cert:spiffe://shop/eu"),
        (certificate("spiffe://a/b", "spiffe://a/c"), None),
        (certificate(names=("a", "b")), None),
        (certificate(names=()), None),
        (certificate(names=("a b",)), None),
        (certificate(names=("*",)), None),
        (certificate(names=("cert:admin\n",)), None),
        (None, None),
        ({}, None),
    ],
)
def test_certificate_names_one_principal_or_none(given, principal: str | None):
    peer = peer_of(given)
    assert (None if peer is None else peer.principal) == principal
    assert peer is None or peer.ends_at_ms == 1_827_032_400_000


def test_names_of_outside_principals_have_a_kind_and_no_white_space():
    for name in ("cert:shop", "jwt:alice@example.org", "group:ops", "jwt:a|b/c=d"):
        assert is_outside(name)
        assert check_principal(name) == name
    for name in ("shop", "admin-1"):
        assert not is_outside(name)
        assert check_principal(name) == name
    for name in ("cert:", "jwt:a b", "x:y", "jwt:*", "cert:a\n", "", "*", "jwt:" + "a" * 300, 7):
        with raises(Reason.NAME_INVALID):
            check_principal(name)
