"""The routes that a broker knows: a first message is asked for once, and an older answer changes
nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any

from keylane.broker.peers import Peers
from keylane.protocol.control import SubjectView
from keylane.protocol.errors import SubjectUnknownError
from keylane.protocol.routing import OrderStrategy, Route


def route(version: int, *, subject_id: int = 1) -> Route:
    return Route(
        subject="s",
        version=version,
        order_strategy=OrderStrategy.STRICT,
        partitions=(),
        subject_id=subject_id,
    )


class AskedNetwork:
    """A metaserver whose answers come when a test gives them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, asyncio.Future[Any]]] = []

    async def control(self, method: str, _address: str, path: str, _answer: Any, **_: Any) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.calls.append((f"{method} {path.rpartition('/')[2]}", future))
        return await future

    async def next_call(self, kind: str) -> asyncio.Future[Any]:
        async with asyncio.timeout(10):
            while not self.calls:
                await asyncio.sleep(0)
        asked, future = self.calls.pop(0)
        assert asked == kind
        return future


def peers_on(network: AskedNetwork) -> Peers:
    # no data call is made
    return Peers(None, "g1", ["127.0.0.1:1"], network)  # type: ignore[arg-type]


async def test_first_messages_of_a_subject_share_one_creation_call():
    network = AskedNetwork()
    peers = peers_on(network)
    posts = [asyncio.create_task(peers.route_to_send("s")) for _ in range(20)]
    for _ in range(2):  # of all requests, then of the sender
        (await network.next_call("GET route")).set_exception(SubjectUnknownError())
    (await network.next_call("POST auto-create")).set_result(
        SubjectView(subject="s", order_strategy=OrderStrategy.STRICT, route=route(1))
    )
    (await network.next_call("GET route")).set_result(route(1))
    assert await asyncio.gather(*posts) == [route(1)] * 20
    assert network.calls == []


async def test_older_route_does_not_replace_a_newer_one_when_it_is_answered_later():
    network = AskedNetwork()
    peers = peers_on(network)
    slow = asyncio.create_task(peers.fetch_route("s"))
    late = await network.next_call("GET route")
    quick = asyncio.create_task(peers.fetch_or_create_route("s"))
    (await network.next_call("GET route")).set_result(route(5))
    assert await quick == route(5)
    late.set_result(route(4))
    assert await slow == route(5)
    assert await peers.route("s") == route(5)


async def test_route_of_an_earlier_subject_does_not_replace_that_of_the_later_one():
    """Versions of two subjects say nothing: what was asked later counts."""
    network = AskedNetwork()
    peers = peers_on(network)
    slow = asyncio.create_task(peers.fetch_route("s"))
    late = await network.next_call("GET route")
    quick = asyncio.create_task(peers.fetch_or_create_route("s"))
    (await network.next_call("GET route")).set_result(route(1, subject_id=2))
    await quick
    late.set_result(route(9, subject_id=1))
    assert (await slow).subject_id == 1
    assert await peers.route("s") == route(1, subject_id=2)
    again = asyncio.create_task(peers.fetch_route("s"))
    (await network.next_call("GET route")).set_result(route(1, subject_id=3))
    assert (await again).subject_id == 3
    assert await peers.route("s") == route(1, subject_id=3)
