"""A control call: method, path, bodies, rights; the table of all calls is `endpoints.py`.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from msgspec import Struct

from ..access.rights import Rights as Rights  # noqa: PLC0414 - exported
from ..errors import InvalidRequestError
from ..text import bad_text

A_co = TypeVar("A_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[A_co]):
    """A control call, answered with an `A_co`."""

    method: str
    path: str
    request: type[Struct | bytes] | None
    """The type of the body; bytes: of any content type, read by the handler; None: the call has no
    body.
    """
    answer: type[A_co]
    rights: Rights
    summary: str
    query: tuple[str, ...] = ()
    """Optional parameters behind the question mark."""
    headers: tuple[str, ...] = ()
    """Optional headers that the handler gets among the parameters, under these names."""
    content: tuple[tuple[str, Any], ...] = ()
    """Content types of a body of bytes, each with the type of its JSON, or of its lines; bytes:
    any.
    """
    answered_as: str = "application/json"
    """The content type of the answer."""
    idempotent: bool = False
    """A POST that may be repeated when its outcome is unknown.  A GET may always be repeated."""
    told_again: bool = False
    """A POST that its client makes again by itself, or whose content its next one has: one that
    gets lost costs little.
    """
    timeout_ms: int | None = None
    """How long a client waits for the answer, in milliseconds; None: its own `timeout_ms`."""
    one_address: bool = False
    """Only one metaserver is asked: the caller knows how much time is left for the next, and what
    to ask it.
    """

    @property
    def is_get(self) -> bool:
        """True if the call only asks, by its method."""
        return self.method == "GET"

    @property
    def repeatable(self) -> bool:
        """True if the call may be repeated when its outcome is unknown."""
        return self.idempotent or self.is_get

    def path_of(self, **names: object) -> str:
        """The path with its `{names}` filled in, percent-encoded.  Raises InvalidRequestError: one
        is no text of Unicode.
        """
        try:
            parts = {key: quote(str(name), safe="") for key, name in names.items()}
        except UnicodeEncodeError as error:
            raise InvalidRequestError(bad_text(error)) from None
        return self.path.format_map(parts)

    @staticmethod
    def query_of(given: Mapping[str, object] | None) -> dict[str, str] | None:
        """The parameters behind the question mark as texts; one that is None is left out."""
        if given is None:
            return None
        return {name: str(value) for name, value in given.items() if value is not None}
