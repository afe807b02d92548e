"""Opens the network of a reader or a writer, secured as its options say.  Network only."""

from __future__ import annotations

import platform

from ..protocol.errors import ConfigError
from ..rpc.access.token_file import TokenSource, token_from_file
from ..rpc.http_network import HttpNetwork, client_network
from .secured import Secured


def open_network(secured: Secured) -> HttpNetwork:
    """
    A network of its own, for its caller to close; call it inside a running event loop.

    Raises:
        ConfigError: a file cannot be used; the text says on which machine.
    """
    try:
        return client_network(secured.tls, _source_of(secured))
    except ConfigError as error:
        raise type(error)(f"{error.message}, on {platform.node()}", **error.details) from error


def _source_of(secured: Secured) -> TokenSource | None:
    token = secured.token
    if token:
        return lambda: token
    return token_from_file(secured.token_file) if secured.token_file else None
