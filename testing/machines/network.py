"""A network between simulated processes, with delays, losses, late and duplicate calls, one-way
cuts, and resets.

    data plane     like TCP: in order until it breaks; a cut holds what is in flight, and healing
                   delivers it or breaks the connection; a server may read what arrived on a
                   connection after its client has abandoned it and opened another
    control calls  each on its own: late, twice, lost on the way there, or lost on the way back,
                   after their effect

The handlers are the real ones: `BrokerService.handle` for frames, and `ControlRoute` tables for
control calls. Everything crosses the network as bytes.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import msgspec

from ...protocol.control import ErrorBody
from ...protocol.errors import (
    InternalError,
    InvalidRequestError,
    KeylaneError,
    NotSentError,
)
from ...protocol.frames import Request
from ...protocol.http.bodies import encode_body, encode_json
from ...rpc.network import no_answer
from ...rpc.plane.prompt import DataService
from ...rpc.server import ControlRoute, status_of
from .connection import Connection, SimChannel
from .loop import Process, SimLoop
from .machine import Machine

T = TypeVar("T")


@dataclass(slots=True)
class NetworkConditions:
    """The current delays and fault probabilities of the network. Probabilities are per message."""

    delay_s: float = 0.001
    late_chance: float = 0.0
    late_s: float = 3.0
    loss_chance: float = 0.0
    duplicate_chance: float = 0.0
    orphan_chance: float = 0.0
    """The probability that calls that were in flight when their connection ended are still served,
    possibly much later.
    """
    held_chance: float = 0.5
    """The probability that data in flight when a link is cut arrives after the cut, instead of
    breaking its connection.
    """


@cache
def _compile_pattern(path: str) -> re.Pattern[str]:
    """Return a pattern that matches a path with its placeholders filled in."""
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))


class Listener:
    """A process that serves requests at an address."""

    def __init__(
        self,
        process: Process,
        machine: Machine,
        routes: Sequence[ControlRoute],
        data_service: DataService | None = None,
    ) -> None:
        self.process = process
        self.machine = machine
        self.data_service = data_service
        self._routes = [(route, _compile_pattern(route.endpoint.path)) for route in routes]

    def find(self, method: str, path: str) -> tuple[ControlRoute, dict[str, str]]:
        """Return the route for a call, and the values of the placeholders in its path."""
        for route, pattern in self._routes:
            match = pattern.fullmatch(path)
            if match is not None and route.endpoint.method == method:
                return route, match.groupdict()
        raise InvalidRequestError(f"{method} {path}: no such call")


class Internet:
    """All links between machines, which may be cut, and the process at each address."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.conditions = NetworkConditions()
        self.listeners: dict[str, Listener] = {}
        self.machines: dict[str, Machine] = {}
        """The machine for each address that was ever used."""
        self.cut_links: set[tuple[str, str]] = set()
        self.connections: list[Connection] = []
        self.messages = 0
        self._held_calls: list[tuple[str, str, Callable[[], None]]] = []
        self.on_call: Callable[[Process, str], None] = lambda _process, _call: None
        """Called with each control call and each new connection, as text, before it is sent."""
        self.on_frame: Callable[[Process, Request, bool], None] = lambda *_: None
        """Called with each request on a connection, and with True if the connection is open."""

    def listen(self, address: str, listener: Listener) -> None:
        """Register a process that serves at an address."""
        self.listeners[address] = listener
        self.machines[address] = listener.machine

    def remove_process(self, process: Process, *, machine_down: bool) -> None:
        """Remove a process that has ended. Its address refuses calls and its connections break,
        unless its machine is down.
        """
        for address, listener in list(self.listeners.items()):
            if listener.process is process:
                del self.listeners[address]
        if not machine_down:
            for connection in self.connections:
                if process in {connection.client, connection.server.process}:
                    connection.reset()
        self.connections = [connection for connection in self.connections if not connection.broken]

    def draw_delay_s(self) -> float:
        """Return the latency of a message in seconds."""
        conditions = self.conditions
        delay_s = conditions.delay_s * (0.2 + 1.6 * self.rng.random())
        if conditions.late_chance and self.rng.random() < conditions.late_chance:
            delay_s += conditions.late_s * self.rng.random()
        return delay_s

    def draw_duplicate_delay_s(self) -> float:
        """Return the additional latency of a duplicate in seconds."""
        return self.conditions.late_s * self.rng.random()

    def serves_lost_calls(self) -> bool:
        """Return True if a server still reads the calls that were in flight when their connection
        ended.
        """
        chance = self.conditions.orphan_chance
        return bool(chance) and self.rng.random() < chance

    def loses_message(self) -> bool:
        """Return True if the next message should be lost."""
        chance = self.conditions.loss_chance
        return bool(chance) and self.rng.random() < chance

    def is_cut(self, source: str, target: str) -> bool:
        """Return True if the link from `source` to `target` is cut."""
        return (source, target) in self.cut_links

    def carry(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Deliver a message once. If the link is cut, the message is held until the cut is healed,
        or lost.
        """
        self.messages += 1

        def on_arrival() -> None:
            if not self.is_cut(source, target):
                deliver()
            elif self.rng.random() < self.conditions.held_chance:
                self._held_calls.append((source, target, deliver))

        if not self.loses_message():
            self.loop.after(self.draw_delay_s(), on_arrival)

    def cut_link(self, source: str, target: str) -> None:
        """Block all messages in this direction."""
        self.cut_links.add((source, target))

    def heal_link(self, source: str, target: str) -> None:
        """Unblock messages in this direction. Held messages arrive, or break their connection."""
        self.cut_links.discard((source, target))
        for connection in list(self.connections):
            if {connection.client.name, connection.server.process.name} == {source, target}:
                if self.rng.random() < self.conditions.held_chance:
                    connection.flush()
                else:
                    connection.reset()
        held_calls, self._held_calls = self._held_calls, []
        for call in held_calls:
            if call[:2] == (source, target):
                self.loop.after(self.draw_delay_s(), call[2])
            else:
                self._held_calls.append(call)

    def break_link(self, source: str, target: str) -> None:
        """Heal a link after breaking its connections."""
        for connection in list(self.connections):
            if {connection.client.name, connection.server.process.name} == {source, target}:
                connection.reset()
        self.heal_link(source, target)

    def heal(self) -> None:
        """End all faults and cuts."""
        for link in sorted(self.cut_links):
            self.heal_link(*link)
        conditions = self.conditions
        conditions.late_chance = conditions.loss_chance = conditions.duplicate_chance = 0.0
        conditions.orphan_chance = 0.0


class SimNetwork:
    """The network as seen by one process; see `keylane.rpc.network.Network`."""

    def __init__(self, internet: Internet, process: Process) -> None:
        self._internet = internet
        self._process = process
        self._loop = internet.loop

    async def open_channel(self, address: str, *, timeout_ms: int) -> SimChannel:
        """See `Network.open_channel`."""
        internet = self._internet
        future: asyncio.Future[SimChannel] = self._loop.create_future()
        client = self._process
        internet.on_call(client, "for a connection")

        def deliver(channel: SimChannel | None) -> None:
            if future.done():
                if channel is not None:
                    channel.connection.reset()
            elif channel is None:
                future.set_exception(NotSentError(f"cannot reach the broker at {address}"))
            else:
                future.set_result(channel)

        def arrive() -> None:
            listener = internet.listeners.get(address)
            if listener is None or listener.data_service is None:
                machine = internet.machines.get(address)
                if machine is None or machine.up:
                    internet.loop.after(
                        internet.draw_delay_s(), internet.loop.post, client, deliver, None
                    )
                return
            name = listener.process.name
            if internet.is_cut(client.name, name) or internet.is_cut(name, client.name):
                return
            connection = Connection(internet, client, listener)
            internet.connections.append(connection)
            internet.loop.after(
                internet.draw_delay_s(),
                internet.loop.post,
                client,
                deliver,
                SimChannel(connection, address),
            )

        internet.messages += 1
        self._loop.after(internet.draw_delay_s(), arrive)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await future
        except TimeoutError:
            raise NotSentError(f"cannot reach the broker at {address}: time") from None

    async def is_accepting(self, address: str, *, timeout_ms: int) -> bool:
        """See `Network.is_accepting`."""
        internet, client = self._internet, self._process
        await asyncio.sleep(min(internet.draw_delay_s(), timeout_ms / 1000))
        listener = internet.listeners.get(address)
        if listener is None:
            return False
        name = listener.process.name
        return not (internet.is_cut(client.name, name) or internet.is_cut(name, client.name))

    async def control(
        self,
        method: str,
        address: str,
        path: str,
        answer: type[T],
        *,
        body: object = None,
        query: Mapping[str, str] | None = None,
        timeout_ms: int,
        new_connection: bool = False,
    ) -> T:
        """See `Network.control`. Every call has its own connection."""
        del new_connection
        self._internet.on_call(self._process, f"{method} {path}")
        encoded_body = encode_body(body)
        future: asyncio.Future[tuple[int, bytes]] = self._loop.create_future()
        call = _ControlCall(self, method, address, path, encoded_body, dict(query or {}), future)
        is_duplicated = self._internet.rng.random() < self._internet.conditions.duplicate_chance
        call.send()
        if is_duplicated:
            is_late = self._internet.rng.random() < 0.5
            self._loop.after(self._internet.draw_duplicate_delay_s() if is_late else 0.0, call.send)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                status, data = await future
        except TimeoutError:
            raise no_answer(method, path, f"no answer from {address} to {method} {path}") from None
        if status == 0:
            refused = NotSentError(f"cannot reach {address}", address=address)
            refused.is_refused = True
            raise refused
        if status == -1:
            raise no_answer(method, path, f"no answer from {address} to {method} {path}: reset")
        if status == 200:
            return msgspec.json.decode(data, type=answer)
        raise msgspec.json.decode(data, type=ErrorBody).error()

    async def close(self) -> None:
        """See `Network.close`."""


class _ControlCall:
    """A control call in flight, and its reply."""

    def __init__(  # noqa: PLR0917 - the parts of a call, in their order
        self,
        network: SimNetwork,
        method: str,
        address: str,
        path: str,
        encoded_body: bytes,
        query: dict[str, str],
        future: asyncio.Future[tuple[int, bytes]],
    ) -> None:
        self._internet = network._internet
        self._client = network._process
        self._method = method
        self._address = address
        split = urlsplit(path)
        self._path = split.path
        self._encoded_body = encoded_body
        self._query = dict(parse_qsl(split.query)) | query
        self._future = future

    def send(self) -> None:
        internet = self._internet
        listener = internet.listeners.get(self._address)
        target = self._address if listener is None else listener.process.name
        if internet.rng.random() < internet.conditions.loss_chance:
            # The connection broke before the call arrived.
            internet.loop.after(
                internet.draw_delay_s(), internet.loop.post, self._client, self._complete, -1, b""
            )
            return
        internet.carry(self._client.name, target, self._arrive)

    def _complete(self, status: int, data: bytes) -> None:
        if not self._future.done():
            self._future.set_result((status, data))

    def _reply(self, source: str, status: int, data: bytes) -> None:
        """Send a reply to the client; status 0 means that the connection was refused."""
        internet = self._internet
        internet.carry(
            source,
            self._client.name,
            lambda: internet.loop.post(self._client, self._complete, status, data),
        )

    def _arrive(self) -> None:
        """Serve the call at its address, or refuse it if nothing listens there."""
        internet = self._internet
        listener = internet.listeners.get(self._address)
        if listener is None:
            machine = internet.machines.get(self._address)
            if machine is None or machine.up:
                self._reply(self._address, 0, b"")
            return
        internet.loop.post(listener.process, self._serve, listener)

    def _serve(self, listener: Listener) -> None:
        self._task = asyncio.ensure_future(self._answer(listener))

    async def _answer(self, listener: Listener) -> None:
        try:
            route, params = listener.find(self._method, self._path)
            body: Any = None
            if route.endpoint.request is not None:
                body = msgspec.json.decode(self._encoded_body, type=route.endpoint.request)
            params = self._query | params
            route.check(self._encoded_body, params)
            result = await route.handler(body, params)
            status, data = 200, encode_json(result)
        except msgspec.MsgspecError as error:
            status, data = 400, encode_json(ErrorBody.of(InvalidRequestError(str(error))))
        except KeylaneError as error:
            status, data = status_of(error), encode_json(ErrorBody.of(error))
        except Exception as error:  # noqa: BLE001 - an error that the real server would log is a fault
            self._internet.loop.faults.append(error)
            status, data = 500, encode_json(ErrorBody.of(InternalError()))
        self._reply(listener.process.name, status, data)
