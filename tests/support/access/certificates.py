"""Certificate files for tests: a private authority in a folder, and servers' settings with
certificates of it.
"""

import datetime as dt
from pathlib import Path
from typing import Any

from keylane.cli.commands.cluster.certificates import CertificateAuthority, CertificatePair
from keylane.protocol.http.tls_settings import TlsSettings
from keylane.rpc.tls.settings import ServingSettings

NOW = dt.datetime.now(dt.UTC)


class CertificateShelf:
    """A folder with the files of one authority."""

    def __init__(self, folder: Path, name: str = "a test") -> None:
        self.folder = folder
        self.authority = CertificateAuthority.create(name, NOW)
        self.ca = folder / f"{name.replace(' ', '-')}-ca.pem"
        self.ca.write_bytes(self.authority.pair.certificate)

    @property
    def client(self) -> TlsSettings:
        """A client that trusts this authority, without a certificate of its own."""
        return TlsSettings(ca=str(self.ca))

    def put(self, name: str, pair: CertificatePair) -> tuple[Path, Path]:
        """Write NAME.pem and NAME.key, and return their paths."""
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        cert.write_bytes(pair.certificate)
        key.write_bytes(pair.key)
        return cert, key

    def files(self, name: str = "server", *hosts: str, **lifetime: Any) -> dict[str, Path]:
        """The settings tls_cert, tls_key and tls_ca of a server; `hosts` are the names of its
        certificate.
        """
        pair = self.authority.issue(hosts or ("127.0.0.1", "localhost"), **lifetime)
        cert, key = self.put(name, pair)
        return {"tls_cert": cert, "tls_key": key, "tls_ca": self.ca}

    def serving(self, *hosts: str, **lifetime: Any) -> ServingSettings:
        """The settings of a server with a new certificate."""
        return ServingSettings(**self.files("server", *hosts, **lifetime))
