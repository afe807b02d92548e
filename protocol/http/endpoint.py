"""A control call with method, path, bodies and rights; `endpoints.py` has the table. Pure."""

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
    """Type of the body; bytes: any content type, which the handler reads; None: there is no body.
    """
    answer: type[A_co]
    rights: Rights
    summary: str
    query: tuple[str, ...] = ()
    """Optional parameters after the question mark."""
    headers: tuple[str, ...] = ()
    """Optional headers that the handler gets among the parameters, under these names."""
    content: tuple[tuple[str, Any], ...] = ()
    """Content types of a body of bytes, each with the type of its JSON, or of its lines; bytes:
    anything.
    """
    answered_as: str = "application/json"
    """Content type of the answer."""
    idempotent: bool = False
    """True for a POST that may be repeated when its outcome is unknown. A GET may always be
    repeated.
    """
    told_again: bool = False
    """True for a POST that its client repeats by itself, or whose content is in the next one, so
    that losing one costs little.
    """
    timeout_ms: int | None = None
    """Milliseconds that a client waits for the answer; None: its own `timeout_ms`."""
    one_address: bool = False
    """True if only one metaserver is asked, because the caller knows how much time is left for the
    next one, and what to ask it.
    """

    @property
    def is_get(self) -> bool:
        """True if the method says that the call only reads."""
        return self.method == "GET"

    @property
    def repeatable(self) -> bool:
        """True if the call may be repeated when its outcome is unknown."""
        return self.idempotent or self.is_get

    def path_of(self, **names: object) -> str:
        """Return the path with its `{names}` filled in, percent-encoded. Raises
        InvalidRequestError if one is not valid Unicode.
        """
        try:
            parts = {key: quote(str(name), safe="") for key, name in names.items()}
        except UnicodeEncodeError as error:
            raise InvalidRequestError(bad_text(error)) from None
        return self.path.format_map(parts)

    @staticmethod
    def query_of(given: Mapping[str, object] | None) -> dict[str, str] | None:
        """Return the parameters after the question mark as texts, without those that are None."""
        if given is None:
            return None
        return {name: str(value) for name, value in given.items() if value is not None}
