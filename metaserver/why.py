"""Answers over HTTP why messages do not arrive: it asks this metaserver and the brokers as an admin
client does, as far as the caller has the rights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from ..protocol.access.rights import Rights
from ..protocol.clock import Clock
from ..protocol.endpoints import WHY
from ..protocol.errors import OverloadedError
from ..protocol.http.endpoint import Endpoint
from ..protocol.http.posted import requested_key
from ..protocol.why import Explanation
from ..rpc.access.guard import is_allowed
from ..rpc.client import BrokerClient
from ..rpc.network import Network
from ..rpc.server import ControlRoute, Params, check_params

T = TypeVar("T")
AT_ONCE_MAX = 16
"""The largest number of questions that are answered at a time. Each may call every broker."""
WITHIN_S = 5.0
"""The time limit for a question, in seconds. Only a database that hangs uses it up."""


class OwnCalls:
    """Makes calls of this metaserver without a connection."""

    def __init__(self, routes: Sequence[ControlRoute]) -> None:
        self._handlers = {
            route.endpoint.path: route.handler for route in routes if route.endpoint.is_get
        }

    async def call(
        self, endpoint: Endpoint[T], *, subject: str, group: str, timeout_ms: int | None = None
    ) -> T:
        """Make a call that has no body. WITHIN_S is its only limit."""
        del timeout_ms
        answer = await self._handlers[endpoint.path](None, {"subject": subject, "group": group})
        assert isinstance(answer, endpoint.answer)
        return answer


class WhyService:
    """
    Answers `GET /v1/subjects/{subject}/groups/{group}/why`.

    Args:
        routes: the other calls of this metaserver.
        network: connects to brokers.
    """

    def __init__(self, routes: Sequence[ControlRoute], network: Network, *, clock: Clock) -> None:
        self._own_calls = OwnCalls(routes)
        self._broker_at = partial(BrokerClient, network)
        self._clock = clock
        self._asked = 0

    def route(self) -> ControlRoute:
        """Return the route of the endpoint."""
        return ControlRoute(WHY, self.explain)

    async def explain(self, _body: object, params: Params) -> Explanation:
        """
        Answer a question.

        Raises:
            InvalidRequestError, SubjectUnknownError, GroupUnknownError, StorageError
            OverloadedError: too many questions are being answered, or this one was not answered in
                time.
        """
        from ..admin.why.asking import ask_why  # only who asks loads it

        check_params(WHY, params)
        key = requested_key(params)
        subject, group = params["subject"], params["group"]
        if self._asked >= AT_ONCE_MAX:
            raise OverloadedError(
                f"{AT_ONCE_MAX} such questions are being answered, and no more at a time",
                limit=AT_ONCE_MAX,
            )
        self._asked += 1
        try:
            async with asyncio.timeout(WITHIN_S):
                return await ask_why(
                    subject,
                    group,
                    key,
                    meta=self._own_calls,
                    broker_at=self._broker_at,
                    now_ms=self._clock.wall_ms,
                    may_read=is_allowed(Rights.READ, subject),
                )
        except TimeoutError:
            raise OverloadedError(f"it was not answered within {WITHIN_S:g} s") from None
        finally:
            self._asked -= 1
