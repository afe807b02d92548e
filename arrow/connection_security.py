"""The TLS settings and token of a reader's or writer's connections, from its options or the
environment. Pure.

    tlsCa, tlsCert, tlsKey, tokenFile  ▶  KEYLANE_TLS_CA, …, KEYLANE_TOKEN_FILE, KEYLANE_TOKEN
                                       ▶  neither TLS nor a token

Only the paths of files are sent to other machines, where the files must exist under the same names.
A token itself is never sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protocol.errors import InvalidRequestError
from ..protocol.http.tls_settings import TlsSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSecurity:
    """The TLS settings and token of a reader or writer. Anything that is not set comes from the
    environment of the process that connects.
    """

    tls: TlsSettings | None = None
    token_file: str = ""
    """The path of a token file, which is read again at each use."""
    token: str = field(default="", repr=False)
    """A token, for a reader that is not sent to other processes."""

    def __reduce__(self) -> tuple[object, ...]:
        if self.token:
            raise InvalidRequestError("a token is not sent to other processes: give its file")
        return _from_files, (self.tls, self.token_file)


def _from_files(tls: TlsSettings | None, token_file: str) -> ConnectionSecurity:
    return ConnectionSecurity(tls=tls, token_file=token_file)


PLAIN = ConnectionSecurity()
"""Takes the TLS settings and token from the environment."""
