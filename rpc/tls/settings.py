"""The connection settings of all server programs, and a client's TLS settings from its
environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...protocol.address import is_host, is_loopback, is_wildcard
from ...protocol.errors import ConfigError
from ...protocol.http.tls_settings import TlsSettings
from ..access.settings import AUTO, is_access_on
from ..origin import is_host_pattern

CA_VARIABLE = "KEYLANE_TLS_CA"
CERT_VARIABLE = "KEYLANE_TLS_CERT"
KEY_VARIABLE = "KEYLANE_TLS_KEY"
RELOADED_TLS = frozenset({"tls_cert", "tls_key", "tls_ca", "tls_client_ca"})
"""Settings that a running server reloads on SIGHUP. The files are read again even if their paths
have not changed.
"""
_FILES = ("metrics_token_file", "tls_cert", "tls_key", "tls_ca", "tls_client_ca")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSettings:
    """The address that a server program listens at, and the security of its connections."""

    host: str = field(
        default="127.0.0.1",
        metadata={"doc": "address to listen on; other than loopback it needs tls_cert"},
    )
    advertised_host: str = field(
        default="",
        metadata={"doc": "name or address by which others reach this server; empty: host"},
    )
    tls_cert: Path | None = field(
        default=None, metadata={"doc": "PEM file of the server's certificate: TLS 1.3 is served"}
    )
    tls_key: Path | None = field(
        default=None, metadata={"doc": "PEM file of the certificate's private key"}
    )
    tls_ca: Path | None = field(
        default=None,
        metadata={"doc": "PEM file of the authority that other servers' certificates are of"},
    )
    tls_client_ca: Path | None = field(
        default=None,
        metadata={"doc": "PEM file of an authority: clients need a certificate of it"},
    )
    tls_client_principals: bool = field(
        default=False,
        metadata={
            "doc": "true: a client without a token is the principal cert:NAME of its certificate; "
            "one with a token needs none"
        },
    )
    insecure_network: bool = field(
        default=False,
        metadata={"doc": "true: serve any address without TLS; everybody can read and write"},
    )
    access: str = field(
        default=AUTO,
        metadata={
            "doc": "on: callers need a right; off: everybody may do everything; auto: off on "
            "loopback, on elsewhere"
        },
    )

    metrics_hosts: tuple[str, ...] = field(
        default=(),
        metadata={
            "doc": "names, addresses and networks (10.0.0.0/8) by which scrapers and probes may "
            "call /metrics and /health/*; *: any"
        },
    )
    metrics_token_file: Path | None = field(
        default=None,
        metadata={
            "doc": "file with a token that /metrics asks for; who has a right on every subject may "
            "read it too"
        },
    )

    @property
    def reached_as(self) -> str:
        """The host name by which others reach this server."""
        return self.advertised_host or self.host

    @property
    def is_open(self) -> bool:
        """True if addresses other than loopback are allowed for this server and for brokers."""
        return self.tls_cert is not None or self.insecure_network

    @property
    def is_insecure(self) -> bool:
        """True if other machines may connect without TLS."""
        return self.tls_cert is None and self.insecure_network and not is_loopback(self.host)

    @property
    def is_guarded(self) -> bool:
        """True if callers must authenticate and need rights."""
        return is_access_on(self.access, self.host)

    @property
    def is_unguarded(self) -> bool:
        """True if other machines may connect, and everyone may do everything."""
        return not self.is_guarded and not is_loopback(self.host)

    def client_tls(self) -> TlsSettings | None:
        """Return the TLS settings for this server's connections to others, or None if they use no
        TLS.
        """
        if self.tls_ca is None:
            return None
        return TlsSettings(
            ca=str(self.tls_ca), cert=str(self.tls_cert or ""), key=str(self.tls_key or "")
        )


def serving_problems(values: Mapping[str, object]) -> list[str]:
    """Return the problems with the given values of `ServingSettings`, as sentences."""
    problems = [
        f"{name} must be the path of a file"
        for name in _FILES
        if not (values.get(name) is None or isinstance(values[name], Path))
    ]
    given_names = {name for name in _FILES if values.get(name) is not None}
    if given_names & {"tls_cert", "tls_key"} and not given_names >= {
        "tls_cert",
        "tls_key",
        "tls_ca",
    }:
        missing_names = sorted({"tls_cert", "tls_key", "tls_ca"} - given_names)
        problems.append(f"TLS needs also {' and '.join(missing_names)}")
    elif "tls_client_ca" in given_names and "tls_cert" not in given_names:
        problems.append("tls_client_ca needs also tls_cert, tls_key and tls_ca")
    principals = values.get("tls_client_principals", False)
    if not isinstance(principals, bool):
        problems.append("tls_client_principals must be true or false")
    elif principals and "tls_client_ca" not in given_names:
        problems.append("tls_client_principals needs also tls_client_ca")
    if not isinstance(values.get("insecure_network", False), bool):
        problems.append("insecure_network must be true or false")
    host, advertised_host = values.get("host", "127.0.0.1"), values.get("advertised_host", "")
    # Without either, the server refuses to start at this address, and gives advice about TLS.
    is_reachable = "tls_cert" in given_names or values.get("insecure_network") is True
    if not isinstance(host, str) or not host:
        problems.append("host must be an address")
    elif is_reachable and not advertised_host and is_wildcard(host):
        problems.append(f"host {host} needs advertised_host: others cannot connect to {host}")
    hosts = values.get("metrics_hosts", ())
    problems += [
        f"metrics_hosts are names, addresses, networks such as 10.0.0.0/8, or *, not {name!r:.80}"
        for name in (hosts if isinstance(hosts, tuple) else (hosts,))
        if not isinstance(name, str) or not is_host_pattern(name)
    ]
    if advertised_host and (not isinstance(advertised_host, str) or not is_host(advertised_host)):
        problems.append(f"advertised_host must be a name or address, not {advertised_host!r:.80}")
    return problems


def tls_of_environment(environment: Mapping[str, str] | None = None) -> TlsSettings | None:
    """
    Return the TLS settings for clients from the environment (KEYLANE_TLS_CA, KEYLANE_TLS_CERT,
    KEYLANE_TLS_KEY), or None if there are none.

    Args:
        environment: variables by name; None uses those of this process.

    Raises:
        ConfigError: a client certificate is set, but no certificate authority.
    """
    variables = os.environ if environment is None else environment
    ca, cert, key = (variables.get(name, "") for name in (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE))
    if not ca:
        if cert or key:
            raise ConfigError(f"{CERT_VARIABLE} and {KEY_VARIABLE} need also {CA_VARIABLE}")
        return None
    return TlsSettings(ca=ca, cert=cert, key=key)
