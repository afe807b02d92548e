"""The calls about access at a metaserver without access control: each is refused."""

from __future__ import annotations

from ...protocol.endpoints import ACCESS
from ...protocol.errors import InvalidRequestError, Reason
from ...rpc.server import ControlRoute


class AccessOff:
    """Stands for the service of access where there is none."""

    def routes(self) -> list[ControlRoute]:
        """A route for each of `endpoints.ACCESS`."""

        async def refuse(_body: object, _params: object) -> object:
            raise InvalidRequestError(Reason.ACCESS_OFF)

        return [ControlRoute(endpoint, refuse) for endpoint in ACCESS]
