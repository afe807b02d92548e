"""Serves pages for people beside the control calls, without telling their handler about aiohttp.

request ─▶ body read, limits checked ─▶ PageRequest ─▶ handler ─▶ PageAnswer, or a stream of events
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import parse_qsl

from aiohttp import web

from ..protocol.errors import InvalidRequestError

FIELDS_MAX = 500
"""The maximum number of fields of a form."""
FORM = "application/x-www-form-urlencoded"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """A request of a browser."""

    method: str
    path: str
    """The decoded path below the prefix, such as "/subjects/orders"; "" for the prefix itself."""
    query: Mapping[str, str]
    cookies: Mapping[str, str]
    form: Mapping[str, str] = field(default_factory=dict)
    """The fields of a posted form."""
    is_secure: bool = False
    """True if the connection uses TLS."""
    identify: Callable[[str], Awaitable[str]]
    """A function that returns the principal of a token, and counts the connection as that
    principal's. Raises UnauthenticatedError.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAnswer:
    """The answer to a browser: a body, or a stream that is sent until it ends."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    events: AsyncGenerator[bytes, None] | None = None


class PageRoute(NamedTuple):
    """The pages below a prefix, and their handler, which raises no KeylaneError."""

    prefix: str
    handler: Callable[[PageRequest], Awaitable[PageAnswer]]


def parse_form(content_type: str, body: bytes) -> dict[str, str]:
    """Return the fields of a form. Raises InvalidRequestError."""
    if not body:
        return {}
    if content_type != FORM:
        raise InvalidRequestError(f"a form is {FORM}, not {content_type!r:.80}")
    try:
        return dict(
            parse_qsl(
                body.decode(), keep_blank_values=True, max_num_fields=FIELDS_MAX, errors="strict"
            )
        )
    except ValueError as error:
        raise InvalidRequestError(f"the form cannot be read: {error}") from None


async def send_answer(
    request: web.Request, answer: PageAnswer, *, write_s: float
) -> web.StreamResponse:
    """
    Return the response for an answer; a stream has been sent when this returns.

    Args:
        write_s: the time in seconds that the browser has to read each part of a stream.
    """
    if answer.events is None:
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    await response.prepare(request)
    async with aclosing(answer.events) as events:
        async for part in events:
            async with asyncio.timeout(write_s):
                await response.write(part)
    return response
