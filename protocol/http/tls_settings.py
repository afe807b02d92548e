"""The TLS settings of clients. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..settings import check_no_problems, field_values


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """
    TLS settings of a client. All its connections use TLS, and the server's certificate must contain
    the host name to which the client connects.

    The values are paths of PEM files; a `pathlib.Path` is converted to text. Source: RFC 8446; RFC
    9525 for host names.

    Raises:
        ConfigError: a value is not a path, or only one of certificate and key is given.
    """

    ca: str
    """Certificate authority that issued the servers' certificates."""
    cert: str = ""
    """Client certificate, for servers that ask for one."""
    key: str = ""
    """Private key of the client certificate."""

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
    """Return True for a string that the operating system accepts as a path, or that is empty."""
    if not isinstance(value, str):
        return False
    try:
        return b"\0" not in value.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return False
