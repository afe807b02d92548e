"""A control call: method, path, bodies, rights; the table of all calls is `endpoints.py`.  Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from msgspec import Struct

A_co = TypeVar("A_co", covariant=True)


class Rights(enum.StrEnum):
    """The right that a call needs; where access control is on, servers check it (`access.rights`)."""

    PRODUCE = "produce"
    CONSUME = "consume"
    READ = "read"
    """Messages, without a consumer group."""
    ADMINISTER = "administer"
    """Operators."""
    CLUSTER = "cluster"
    """The servers of the cluster among themselves."""
    ANY = "any"
    """Any of those above, on the same subject: what clients of every kind need."""
    KNOWN = "known"
    """A caller with a token of the cluster."""
    OPEN = "open"
    """Nothing, not even a token."""

    @property
    def doing(self) -> str:
        """How a refusal names what was tried."""
        return {"produce": "produce to", "consume": "consume", "any": "see"}.get(self, self.value)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[A_co]):
    """A control call, answered with an `A_co`."""

    method: str
    path: str
    request: type[Struct | bytes] | None
    """The type of the body; bytes: of any content type, read by the handler; None: the call has no body."""
    answer: type[A_co]
    rights: Rights
    summary: str
    query: tuple[str, ...] = ()
    """Optional parameters behind the question mark."""
    headers: tuple[str, ...] = ()
    """Optional headers that the handler gets among the parameters, under these names."""
    content: tuple[tuple[str, Any], ...] = ()
    """Content types of a body of bytes, each with the type of its JSON, or of its lines; bytes: any."""
    answered_as: str = "application/json"
    """The content type of the answer."""
    idempotent: bool = False
    """A POST that may be repeated when its outcome is unknown.  A GET may always be repeated."""

    @property
    def repeatable(self) -> bool:
        """True if the call may be repeated when its outcome is unknown."""
        return self.idempotent or self.method == "GET"

    def path_of(self, **names: object) -> str:
        """The path with its `{names}` filled in, percent-encoded."""
        return self.path.format_map({key: quote(str(name), safe="") for key, name in names.items()})
