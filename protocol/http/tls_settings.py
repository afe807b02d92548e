"""The TLS settings of clients. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..settings import check_no_problems, field_values


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """
    The TLS settings of a client. All its connections use TLS, and the server's certificate must
    contain the host name to which the client connects.

    The values are paths of PEM files; a `pathlib.Path` is converted to text. See RFC 8446 and, for
    host names, RFC 9525.

    Raises:
        ConfigError: a value is not a path, or only one of the certificate and the key is given.
    """

    ca: str
    """The certificate authority that issued the servers' certificates."""
    cert: str = ""
    """The client certificate, for servers that ask for one."""
    key: str = ""
    """The private key of the client certificate."""

    def __post_init__(self) -> None:
        given: dict[str, object] = field_values(self)
        problems = []
        for name, value in given.items():
            path = value.__fspath__() if hasattr(value, "__fspath__") else value
            if not _is_path(path) or (name == "ca" and not path):
                problems.append(f"{name} must be the path of a PEM file, not {value!r:.40}")
            object.__setattr__(self, name, path)
        if not problems and bool(self.cert) != bool(self.key):
            problems.append("a client certificate needs both its file and that of its key")
        check_no_problems(problems)


def _is_path(value: object) -> bool:
    """Return True for a string that is empty or that the operating system accepts as a path."""
    if not isinstance(value, str):
        return False
    try:
        return b"\0" not in value.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return False
