"""The definition of a control call: its method, path, bodies and rights. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from msgspec import Struct

from ..access.rights import Rights as Rights  # noqa: PLC0414 - exported
from ..errors import InvalidRequestError
from ..text import invalid_unicode_text

A_co = TypeVar("A_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[A_co]):
    """A control call whose response body is an `A_co`."""

    method: str
    path: str
    request: type[Struct | bytes] | None
    """The type of the request body. If it is bytes, the handler decodes the body; None means that
    there is no body.
    """
    answer: type[A_co]
    rights: Rights
    summary: str
    query: tuple[str, ...] = ()
    """The optional query parameters."""
    headers: tuple[str, ...] = ()
    """The optional headers that are passed to the handler as parameters under these names."""
    content: tuple[tuple[str, Any], ...] = ()
    """The content types of a body of bytes, each with the type of its JSON or of its lines; bytes
    means any content.
    """
    response_type: str = "application/json"
    """The content type of the response."""
    idempotent: bool = False
    """True for a POST that may be retried when its outcome is unknown. A GET may always be
    retried.
    """
    caller_repeats: bool = False
    """True for a POST that its caller repeats anyway, or whose content is included in the next one,
    so that losing a call does little harm.
    """
    timeout_ms: int | None = None
    """The timeout of the call in milliseconds; None means the client's `timeout_ms`."""
    one_address: bool = False
    """True if the client tries only one metaserver per call, because the caller decides whether to
    retry with the next one.
    """

    @property
    def is_get(self) -> bool:
        """True if the method is GET."""
        return self.method == "GET"

    @property
    def repeatable(self) -> bool:
        """True if the call may be retried when its outcome is unknown."""
        return self.idempotent or self.is_get

    def path_of(self, **names: object) -> str:
        """Return the path with percent-encoded names in its placeholders. Raises
        InvalidRequestError if a name is not valid Unicode.
        """
        try:
            path_parts = {key: quote(str(name), safe="") for key, name in names.items()}
        except UnicodeEncodeError as error:
            raise InvalidRequestError(invalid_unicode_text(error)) from None
        return self.path.format_map(path_parts)

    @staticmethod
    def query_of(given: Mapping[str, object] | None) -> dict[str, str] | None:
        """Return the query parameters as strings, omitting those that are None."""
        if given is None:
            return None
        return {name: str(value) for name, value in given.items() if value is not None}
