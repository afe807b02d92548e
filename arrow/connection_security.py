"""The TLS and the token of a reader's or writer's connections, from its options or the environment.
Pure.

    tlsCa, tlsCert, tlsKey, tokenFile  ▶  KEYLANE_TLS_CA, …, KEYLANE_TOKEN_FILE, KEYLANE_TOKEN
                                       ▶  neither TLS nor a token

The options are sent to other machines, but only the paths of files, which must exist there under
the same names; a token itself is never sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protocol.errors import InvalidRequestError
from ..protocol.http.tls_settings import TlsSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSecurity:
    """TLS and token of a reader or writer; what is not set is taken from the environment of the
    process that connects.
    """

    tls: TlsSettings | None = None
    token_file: str = ""
    """Path of a file with a token; it is read again at each use."""
    token: str = field(default="", repr=False)
    """A token, for a reader that is not sent to other processes."""

    def __reduce__(self) -> tuple[object, ...]:
        if self.token:
            raise InvalidRequestError("a token is not sent to other processes: give its file")
        return _from_files, (self.tls, self.token_file)


def _from_files(tls: TlsSettings | None, token_file: str) -> ConnectionSecurity:
    return ConnectionSecurity(tls=tls, token_file=token_file)


PLAIN = ConnectionSecurity()
"""TLS and token come from the environment."""
