"""Opens the network of a reader or writer with the TLS settings and token from its options, and
runs work with it. Performs network I/O.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from ..protocol.errors import ConfigError
from ..protocol.http.tls_settings import TlsSettings
from ..rpc.access.token_file import TokenSource, token_from_file, token_variables
from ..rpc.http_network import HttpNetwork, client_network
from ..rpc.network import Network
from ..rpc.tls.settings import tls_of_environment
from .connection_security import PLAIN, ConnectionSecurity

T = TypeVar("T")


class EffectiveSecurity(NamedTuple):
    """
    The TLS settings and token that a connection opened now would use, as a key for pooled
    connections.

    The key changes with the environment, so that a reader does not reuse older connections.
    """

    security: ConnectionSecurity
    tls: TlsSettings | None
    environment: tuple[str, str]
    """The token file and token from the environment; both are empty if the options name a token."""


def effective_security(security: ConnectionSecurity) -> EffectiveSecurity:
    """
    Return the TLS settings and token from the options or, if they have none, from the environment.

    Raises:
        ConfigError: the environment names a client certificate, but no certificate authority.
    """
    has_token = bool(security.token or security.token_file)
    environment = ("", "") if has_token else token_variables()
    return EffectiveSecurity(security, security.tls or tls_of_environment(), environment)


def open_network(security: ConnectionSecurity) -> HttpNetwork:
    """
    Open a network, which the caller must close; an event loop must be running.

    Raises:
        ConfigError: a file cannot be used; the message names the machine.
    """
    try:
        return client_network(security.tls, _source_of(security))
    except ConfigError as error:
        raise error.copy(message=f"{error.message}, on {platform.node()}") from error


def _source_of(security: ConnectionSecurity) -> TokenSource | None:
    token = security.token
    if token:
        return lambda: token
    return token_from_file(security.token_file) if security.token_file else None


def run_with_network(
    work: Callable[[Network], Awaitable[T]], security: ConnectionSecurity = PLAIN
) -> T:
    """
    Run `work(network)`, close the network, and return the result.

    This blocks, so the calling thread must not have a running event loop.
    """

    async def run() -> T:
        network = open_network(security)
        try:
            return await work(network)
        finally:
            await network.close()

    return asyncio.run(run())
