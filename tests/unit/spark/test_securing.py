"""The options of TLS and of the token: files alone, checked together, of reads and of writes."""

from __future__ import annotations

import pytest

from keylane import TlsSettings
from keylane.arrow.connection_security import PLAIN, ConnectionSecurity
from keylane.protocol.errors import ConfigError
from keylane.spark.options import parse_options
from keylane.spark.writing.job import parse_write_options

LEAST = {"meta": "127.0.0.1:7000", "subject": "flights"}
TOKEN = "kl_" + "a" * 43
PARSERS = (lambda given: parse_options(given, now_ms=0), parse_write_options)


@pytest.fixture(params=PARSERS, ids=("read", "write"))
def secured_by(request):
    """How a read or a write with these options is secured."""

    def secured_by(**given: str) -> ConnectionSecurity:
        return request.param(LEAST | given).security

    return secured_by


def test_files_of_tls_and_token_are_taken_as_they_are_named(secured_by):
    """In any case; without any of them the environment of each process says it."""
    assert secured_by() is PLAIN
    assert secured_by(TLSCA="ca.pem", tokenfile="t") == ConnectionSecurity(
        tls=TlsSettings(ca="ca.pem"), token_file="t"
    )
    assert secured_by(tlsCa="a", tlsCert="b", tlsKey="c") == ConnectionSecurity(
        tls=TlsSettings(ca="a", cert="b", key="c")
    )
    assert secured_by(tokenFile="t") == ConnectionSecurity(token_file="t")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"token": TOKEN}, "token: a token is not an option"),
        ({"tokenFile": TOKEN}, "tokenFile: this is a token"),
        ({"tlsCert": "b", "tlsCa": "a"}, "tlsKey: a client certificate needs both"),
        ({"tlsKey": "b", "tlsCa": "a"}, "tlsCert: a client certificate needs both"),
        ({"tlsCert": "b", "tlsKey": "c"}, "tlsCa: required with tlsCert and tlsKey"),
        ({"tlsCa": "a\0b"}, "tlsCa: give the path of a file"),
        ({"tlsC": "a"}, "tlsC: unknown; did you mean tlsCa"),
        ({"meta": f"127.0.0.1:7000?token={TOKEN}"}, "meta: "),
    ],
    ids=str,
)
def test_option_that_cannot_secure_is_named_without_its_secret(secured_by, given, told):
    """A token in an option would stand in plans and logs; the error does not repeat it."""
    with pytest.raises(ConfigError) as caught:
        secured_by(**given)
    assert told.lower() in str(caught.value).lower()
    assert TOKEN not in str(caught.value)
