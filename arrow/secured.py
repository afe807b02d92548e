"""How a reader or a writer secures its connections: TLS and a token, given by options, else by the
environment.  Pure.

    tlsCa, tlsCert, tlsKey, tokenFile   ▶   KEYLANE_TLS_CA, …, KEYLANE_TOKEN_FILE, KEYLANE_TOKEN   ▶   neither

It travels with the options to other machines: paths of files do, which have to be there under the
same names, and a token never does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protocol.errors import InvalidRequestError
from ..protocol.http.tls_settings import TlsSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Secured:
    """The TLS and the token; what is not given comes from the environment of the process that
    connects.
    """

    tls: TlsSettings | None = None
    token_file: str = ""
    """The path of a file with a token, which is read anew when the token is used."""
    token: str = field(default="", repr=False)
    """A token itself, checked, of a reader that stays in its process."""

    def __reduce__(self) -> tuple[object, ...]:
        if self.token:
            raise InvalidRequestError("a token does not travel: give its file")
        return _of_files, (self.tls, self.token_file)


def _of_files(tls: TlsSettings | None, token_file: str) -> Secured:
    return Secured(tls=tls, token_file=token_file)


PLAIN = Secured()
"""As the environment says."""
