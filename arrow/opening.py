"""Opens the network of a reader or a writer, secured as its options say.  Network only."""

from __future__ import annotations

import platform
from typing import NamedTuple

from ..protocol.errors import ConfigError
from ..protocol.http.tls_settings import TlsSettings
from ..rpc.access.token_file import TokenSource, token_from_file, told_by_environment
from ..rpc.http_network import HttpNetwork, client_network
from ..rpc.tls.settings import tls_of_environment
from .secured import Secured


class InForce(NamedTuple):
    """What secures a connection that is opened now: a reader after a change of the environment
    shares none of before.
    """

    secured: Secured
    tls: TlsSettings | None
    environment: tuple[str, str]
    """The file with a token and the token, where neither is given."""


def in_force(secured: Secured) -> InForce:
    """Raises ConfigError: the environment has a client certificate without an authority."""
    has_token = bool(secured.token or secured.token_file)
    told = ("", "") if has_token else told_by_environment()
    return InForce(secured, secured.tls or tls_of_environment(), told)


def open_network(secured: Secured) -> HttpNetwork:
    """
    A network of its own, for its caller to close; call it inside a running event loop.

    Raises:
        ConfigError: a file cannot be used; the text says on which machine.
    """
    try:
        return client_network(secured.tls, _source_of(secured))
    except ConfigError as error:
        raise error.copy(message=f"{error.message}, on {platform.node()}") from error


def _source_of(secured: Secured) -> TokenSource | None:
    token = secured.token
    if token:
        return lambda: token
    return token_from_file(secured.token_file) if secured.token_file else None
