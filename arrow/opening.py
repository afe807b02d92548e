"""Opens the network of a reader or writer, with the TLS and token of its options. Network only."""

from __future__ import annotations

import platform
from typing import NamedTuple

from ..protocol.errors import ConfigError
from ..protocol.http.tls_settings import TlsSettings
from ..rpc.access.token_file import TokenSource, token_from_file, token_variables
from ..rpc.http_network import HttpNetwork, client_network
from ..rpc.tls.settings import tls_of_environment
from .secured import Secured


class InForce(NamedTuple):
    """
    The TLS and token under which a connection is opened now.

    After a change of the environment it differs, so that a reader does not share earlier
    connections.
    """

    secured: Secured
    tls: TlsSettings | None
    environment: tuple[str, str]
    """The token file and the token of the environment; both empty where the options name one."""


def in_force(secured: Secured) -> InForce:
    """
    Combine the options with the environment.

    Raises:
        ConfigError: the environment has a client certificate without an authority.
    """
    has_token = bool(secured.token or secured.token_file)
    environment = ("", "") if has_token else token_variables()
    return InForce(secured, secured.tls or tls_of_environment(), environment)


def open_network(secured: Secured) -> HttpNetwork:
    """
    Open a network, which the caller has to close; an event loop must be running.

    Raises:
        ConfigError: a file cannot be used; the text names the machine.
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
