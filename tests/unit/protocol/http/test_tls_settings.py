"""The TLS of a client is refused where it is made, not by the first connection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keylane.protocol.errors import ConfigError
from keylane.protocol.http.tls_settings import TlsSettings


@pytest.mark.parametrize(
    "value", [None, True, 5, b"ca.pem", "a\0b", "\ud800", object(), ["ca.pem"]]
)
@pytest.mark.parametrize("name", ["ca", "cert", "key"])
def test_tls_settings_refuse_what_is_no_path(name: str, value: Any):
    given: dict[str, Any] = {"ca": "ca.pem", "cert": "cert.pem", "key": "key.pem", name: value}
    with pytest.raises(ConfigError, match=rf"^{name} must be the path of a PEM file"):
        TlsSettings(**given)


def test_tls_settings_refuse_no_authority_and_half_a_pair():
    with pytest.raises(ConfigError, match="ca must be the path of a PEM file, not ''"):
        TlsSettings(ca="")
    for half in ({"cert": "cert.pem"}, {"key": "key.pem"}):
        with pytest.raises(ConfigError, match="needs both its file and that of its key"):
            TlsSettings(ca="ca.pem", **half)


def test_tls_settings_take_a_path_as_its_text():
    given: Any = Path("certs") / "ca.pem"
    assert TlsSettings(ca=given) == TlsSettings(ca="certs/ca.pem")
