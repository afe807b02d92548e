"""The console's own scripts and styles, read from the package once."""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files
from typing import NamedTuple

from .lineage.look import STYLE

TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class Asset(NamedTuple):
    """A file for browsers."""

    body: bytes
    content_type: str
    digest: str
    """Changes with the file, so that a browser may keep it for ever under this digest."""


class Assets:
    """The files of `static/` by name."""

    def __init__(self) -> None:
        bodies = {"lineage.css": STYLE.encode()}
        for each in files(__package__).joinpath("static").iterdir():
            if each.name.rpartition(".")[2] in TYPES:
                bodies[each.name] = each.read_bytes()
        self._by_name = {
            name: Asset(
                body, TYPES[name.rpartition(".")[2]], blake2b(body, digest_size=6).hexdigest()
            )
            for name, body in bodies.items()
        }

    def get(self, name: str) -> Asset | None:
        """Return a file; None if there is none of this name."""
        return self._by_name.get(name)

    def address(self, name: str) -> str:
        """Return the address under which a browser keeps a file."""
        return f"/console/static/{name}?v={self._by_name[name].digest}"
