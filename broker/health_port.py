"""The port at which a broker answers probes and scrapes in every state, also while it follows and
listens nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from ..protocol.control import Health
from ..rpc.access.guard import Guard
from ..rpc.operating.metrics import ServerMetrics
from ..rpc.operating.probes import metrics_route, probe_routes
from ..rpc.operating.served_network import ServedNetwork
from ..rpc.server import PROBED, ControlRoute, Server
from .copies.follower import Follower
from .metrics import collect_cuts
from .settings import BrokerSettings


@contextlib.asynccontextmanager
async def answering_probes(
    settings: BrokerSettings,
    served_network: ServedNetwork,
    routes: Sequence[ControlRoute],
    guard: Guard | None = None,
) -> AsyncIterator[None]:
    """
    Answer those of the routes that are for probes and scrapes at `health_port`, if it is set.

    Raises:
        AddressError: the port is in use.
    """
    if not settings.health_port:
        yield
        return
    probed = [route for route in routes if route.endpoint.path in PROBED]
    server = Server(probed, serving=settings, tls=served_network.tls, guard=guard)
    await server.start(settings.host, settings.health_port)
    try:
        yield
    finally:
        await server.stop()


def follower_routes(
    follower: Follower, served_network: ServedNetwork, boot_ns: Callable[[], int]
) -> list[ControlRoute]:
    """Return the routes of a follower. It is ready when its copy can take the broker's place."""
    metrics = ServerMetrics("broker", boot_ns)
    metrics.add(served_network.collect)
    metrics.add(partial(collect_cuts, follower))

    async def health() -> Health:
        reason = "" if follower.is_complete else "the copy is not complete"
        return Health(program="broker", ready=not reason, reason=reason, details={"follows": True})

    return [*probe_routes(health), metrics_route(metrics)]
