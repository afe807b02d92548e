"""Doubles of the clients of servers: a control call reaches the method that has its endpoint's
name.
"""

from __future__ import annotations

from typing import Any

from keylane.protocol import endpoints
from keylane.protocol.http.endpoint import Endpoint


class MetaDouble:
    """Stands for a MetaClient: `call(endpoints.HISTORY, subject="s")` is answered by
    `history("s")`.
    """

    async def call(
        self, endpoint: Endpoint[Any], body: object = None, *, query: object = None, **more: Any
    ) -> Any:
        """What the method returns; it gets the names of the path, the body, and the times by
        name.
        """
        return await _answered(self, endpoint, body, more)


class BrokerDouble:
    """Stands for a BrokerClient: `control(endpoints.PARTITION, id=7)` is answered by
    `partition(7)`.
    """

    async def control(
        self, endpoint: Endpoint[Any], body: object = None, *, query: object = None, **more: Any
    ) -> Any:
        """What the method returns; it gets the names of the path, and the body."""
        return await _answered(self, endpoint, body, more)


def name_of(endpoint: Endpoint[Any]) -> str:
    """The name of a row of the table, in small letters."""
    return next(name.lower() for name, row in vars(endpoints).items() if row is endpoint)


async def _answered(
    double: object, endpoint: Endpoint[Any], body: object, more: dict[str, Any]
) -> Any:
    times = {name: more.pop(name) for name in ("wait_ms", "timeout_ms") if name in more}
    given = [*more.values(), *([] if body is None else [body])]
    return await getattr(double, name_of(endpoint))(*given, **times)
