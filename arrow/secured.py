"""How a reader secures its connections: TLS and a token, given by options, else by the environment of the process.

    tlsCa, tlsCert, tlsKey, tokenFile   ▶   KEYLANE_TLS_CA, …, KEYLANE_TOKEN_FILE, KEYLANE_TOKEN   ▶   neither

It travels with the options to other machines: paths of files do, which have to be there under the same names, and a
token never does.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from pathlib import Path

from ..protocol.access.tokens import check_token
from ..protocol.errors import ConfigError, InvalidRequestError
from ..protocol.http.tls_settings import TlsSettings
from ..rpc.access.token_file import TokenFile, TokenSource
from ..rpc.http_network import HttpNetwork, client_network


@dataclass(frozen=True, slots=True, kw_only=True)
class Secured:
    """The TLS and the token of a reader or a writer; what is not given comes from the environment where it is opened."""

    tls: TlsSettings | None = None
    token_file: str = ""
    """The path of a file with a token, which is read anew when the token is used."""
    token: str = field(default="", repr=False)
    """A token itself, of a reader that stays in its process."""

    def __reduce__(self) -> tuple[object, ...]:
        if self.token:
            raise InvalidRequestError("a token does not travel: give its file")
        return _of_files, (self.tls, self.token_file)

    def network(self) -> HttpNetwork:
        """
        A network of its own, for its caller to close; make it inside a running event loop.

        Raises:
            ConfigError: a file cannot be used; it says on which machine.
        """
        try:
            return client_network(self.tls, self._source())
        except ConfigError as error:
            raise type(error)(f"{error.message}, on {platform.node()}", **error.details) from error

    def _source(self) -> TokenSource | None:
        if self.token:
            token = check_token(self.token, "token=")
            return lambda: token
        return TokenFile(Path(self.token_file)) if self.token_file else None


def _of_files(tls: TlsSettings | None, token_file: str) -> Secured:
    return Secured(tls=tls, token_file=token_file)


PLAIN = Secured()
"""As the environment says."""
