"""Refuses the calls about access at a metaserver without access control."""

from __future__ import annotations

from ...protocol.endpoints import ACCESS
from ...protocol.errors import InvalidRequestError, Reason
from ...rpc.server import ControlRoute


class AccessOff:
    """Takes the place of `AccessService` where there is no access control."""

    def routes(self) -> list[ControlRoute]:
        """Return a route for each of `endpoints.ACCESS`."""

        async def refuse(_body: object, _params: object) -> object:
            raise InvalidRequestError(Reason.ACCESS_OFF)

        return [ControlRoute(endpoint, refuse) for endpoint in ACCESS]
