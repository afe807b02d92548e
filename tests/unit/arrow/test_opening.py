"""An error of opening a network names the file and the machine."""

from __future__ import annotations

import asyncio
import platform

import pytest

from keylane import TlsSettings
from keylane.arrow.connection_security import PLAIN, ConnectionSecurity
from keylane.arrow.opening import effective_security, open_network
from keylane.protocol.errors import Reason
from support.raising import raises


@pytest.mark.parametrize(
    ("secured", "error", "name"),
    [
        (
            ConnectionSecurity(tls=TlsSettings(ca="/nowhere/ca.pem")),
            Reason.CERTIFICATE_FILE,
            "/nowhere/ca.pem",
        ),
        (ConnectionSecurity(token_file="/nowhere/token"), Reason.TOKEN_INVALID, "/nowhere/token"),
    ],
    ids=("authority", "token"),
)
def test_file_that_is_missing_is_told_with_its_machine(secured, error, name):
    """A file that exists on the driver may be missing on an executor."""

    async def opened() -> None:
        open_network(secured)

    with raises(error) as caught:
        asyncio.run(opened())
    assert name in str(caught.value)
    assert f", on {platform.node()}" in str(caught.value)


def test_reader_after_a_change_of_the_environment_shares_no_connection(monkeypatch):
    before = effective_security(PLAIN)
    assert effective_security(PLAIN) == before
    monkeypatch.setenv("KEYLANE_TLS_CA", "/one/ca.pem")
    secured = effective_security(PLAIN)
    monkeypatch.setenv("KEYLANE_TOKEN_FILE", "/one/token")
    assert len({before, secured, effective_security(PLAIN)}) == 3
    given = ConnectionSecurity(tls=TlsSettings(ca="/two/ca.pem"), token_file="/two/token")
    told = effective_security(given)
    monkeypatch.delenv("KEYLANE_TLS_CA")
    assert effective_security(given) == told, "options count more than the environment"
