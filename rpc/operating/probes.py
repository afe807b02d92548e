"""Routes for supervisors and scrapers: liveness, readiness, and metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ...protocol import endpoints
from ...protocol.control import Done, Health
from ..server import ControlRoute, Params, Reply
from .metrics import ServerMetrics


def probe_routes(health: Callable[[], Awaitable[Health]]) -> list[ControlRoute]:
    """Return the routes for LIVE and READY; `health` returns whether the server is ready."""

    async def live(_body: object, _params: Params) -> Done:
        return Done()

    async def ready(_body: object, _params: Params) -> Reply:
        answer = await health()
        return Reply(answer, 200 if answer.ready else 503)

    return [ControlRoute(endpoints.LIVE, live), ControlRoute(endpoints.READY, ready)]


def metrics_route(metrics: ServerMetrics) -> ControlRoute:
    """Return the route for METRICS."""

    async def exposition(_body: object, _params: Params) -> str:
        return await metrics.exposition()

    return ControlRoute(endpoints.METRICS, exposition)
