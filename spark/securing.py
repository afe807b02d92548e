"""The options that secure connections, of readers and writers: files of TLS and of a token, never a
token itself.  Pure.

    tlsCa       PEM file of the authority that the servers' certificates are of      KEYLANE_TLS_CA
    tlsCert     PEM file of a client certificate, where servers want one             KEYLANE_TLS_CERT
    tlsKey      PEM file of its private key                                          KEYLANE_TLS_KEY
    tokenFile   file with a token, of a cluster with access control                  KEYLANE_TOKEN_FILE

What is not given comes from the environment of the process: of the driver, and of each executor.
The files are read on the driver and in tasks, so they lie on each machine under the same path.

Source: Spark shows options in plans and keeps them in catalogs and event logs, so a secret is not
one.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..arrow.secured import PLAIN, Secured
from ..protocol.http.tls_settings import TlsSettings

TLS_CA, TLS_CERT, TLS_KEY, TOKEN_FILE = NAMES = ("tlsCa", "tlsCert", "tlsKey", "tokenFile")
PATH_MAX = 4_096


def path_of(text: str) -> str:
    """The path of a file.  Raises ValueError."""
    if "\0" in text or len(text) > PATH_MAX:
        raise ValueError(f"the path of a file is wanted, not {text!r:.80}")
    return text


def token_path_of(text: str) -> str:
    """The path of a file with a token.  Raises ValueError: it is a token; the text does not have
    it.
    """
    if text.startswith("kl_"):
        raise ValueError("this is a token; the path of a file with it is wanted")
    return path_of(text)


def secured_of(paths: Mapping[str, str], problems: dict[str, str]) -> Secured:
    """
    How the connections of a source are secured.

    Args:
        paths: name of an option → its value, of those that were given.
        problems: takes what is missing: name of the option → what about it.
    """
    ca, cert, key = (paths.get(name, "") for name in (TLS_CA, TLS_CERT, TLS_KEY))
    halved = bool(cert) != bool(key)
    if halved:
        problems[TLS_KEY if cert else TLS_CERT] = (
            "a client certificate needs both its file and that of its key"
        )
    elif cert and not ca:
        problems[TLS_CA] = "required with tlsCert and tlsKey"
    token_file = paths.get(TOKEN_FILE, "")
    if not ca and not token_file:
        return PLAIN
    return Secured(
        tls=TlsSettings(ca=ca, cert=cert, key=key) if ca and not halved else None,
        token_file=token_file,
    )
