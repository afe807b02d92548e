"""Certificate and key files that cannot be used are refused with their paths, and change
nothing.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from keylane.protocol.errors import ConfigError, Reason
from keylane.protocol.http.tls_settings import TlsSettings
from keylane.rpc.tls.contexts import ServerTls, client_context, names_of, read_certificate
from keylane.rpc.tls.settings import ServingSettings
from support.access.certificates import NOW, CertificateShelf
from support.raising import raises


@pytest.fixture
def shelf(tmp_path: Path) -> CertificateShelf:
    return CertificateShelf(tmp_path)


def test_names_are_those_of_the_certificate(shelf: CertificateShelf) -> None:
    files = shelf.files("server", "a.example", "10.0.0.1", "::1")
    certificate = read_certificate(files["tls_cert"])
    assert names_of(certificate) == {"a.example", "10.0.0.1", "::1"}
    assert ServerTls(ServingSettings(**files)).names == {"a.example", "10.0.0.1", "::1"}


@pytest.mark.parametrize(
    ("start", "days", "text"),
    [
        (NOW - dt.timedelta(days=9), 8, "expired on"),
        (NOW + dt.timedelta(days=2), 8, "is valid from"),
    ],
    ids=["ended", "early"],
)
def test_server_refuses_a_certificate_that_is_not_valid_today(
    shelf: CertificateShelf, start: dt.datetime, days: int, text: str
) -> None:
    with raises(Reason.CERTIFICATE_FILE, match=text) as caught:
        ServerTls(shelf.serving(start=start, days=days))
    assert caught.value.path == str(shelf.folder / "server.pem")


@pytest.mark.parametrize("broken", ["tls_cert", "tls_key", "tls_client_ca"])
@pytest.mark.parametrize("content", [None, b"", b"\xff\x00", b"-----BEGIN CERTIFICATE-----\n"])
def test_server_refuses_a_file_that_is_unreadable(
    shelf: CertificateShelf, broken: str, content: bytes | None
) -> None:
    files = shelf.files() | {"tls_client_ca": shelf.folder / "clients.pem"}
    files["tls_client_ca"].write_bytes(shelf.ca.read_bytes())
    files[broken].unlink()
    if content is not None:
        files[broken].write_bytes(content)
    with raises(Reason.CERTIFICATE_FILE) as caught:
        ServerTls(ServingSettings(**files))
    assert caught.value.path == str(files[broken])
    assert caught.value.hint


def test_server_refuses_the_key_of_another_certificate(shelf: CertificateShelf) -> None:
    files = shelf.files("server") | {"tls_key": shelf.files("other")["tls_key"]}
    with raises(Reason.CERTIFICATE_KEY) as caught:
        ServerTls(ServingSettings(**files))
    assert caught.value.path == str(files["tls_key"])


def test_reloading_keeps_the_old_files_when_the_new_ones_do_not_fit(
    shelf: CertificateShelf,
) -> None:
    settings = shelf.serving("a.example")
    tls = ServerTls(settings)
    before = tls.expires_s
    shelf.put("server", shelf.authority.issue(["b.example"], days=5))
    (shelf.folder / "server.key").write_bytes(shelf.authority.issue(["c.example"]).key)
    with raises(Reason.CERTIFICATE_KEY):
        tls.reload(settings)
    assert (tls.names, tls.expires_s) == ({"a.example"}, before)
    shelf.put("server", shelf.authority.issue(["b.example"], days=5))
    tls.reload(settings)
    assert tls.names == {"b.example"}


def test_client_refuses_files_that_cannot_be_used(shelf: CertificateShelf) -> None:
    files = shelf.files("client")
    with raises(Reason.CERTIFICATE_FILE):
        client_context(TlsSettings(ca=str(shelf.folder / "none.pem")))
    with pytest.raises(ConfigError, match="both"):
        client_context(TlsSettings(ca=str(shelf.ca), cert=str(files["tls_cert"])))
    other = shelf.files("other")
    with raises(Reason.CERTIFICATE_KEY):
        client_context(
            TlsSettings(ca=str(shelf.ca), cert=str(files["tls_cert"]), key=str(other["tls_key"]))
        )
