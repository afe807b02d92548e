"""A broker's service whose answers are noted, and checked against what is durable, before they are
told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from keylane.broker.service import BrokerService
from keylane.checker.events import Event
from keylane.protocol.frames import Answer, Request
from keylane.rpc.plane.prompt import PromptCall
from sim.machines.promises import DurableEnds
from support.observation import served, set_aside


class WatchedService:
    """
    As the service that it is given.

    Args:
        tick: the number of the next event.
        record: takes an event.
        faults: what was told too early is added to them.
    """

    def __init__(
        self,
        service: BrokerService,
        durable: DurableEnds,
        *,
        tick: Callable[[], int],
        record: Callable[[Event], None],
        faults: list[object],
    ) -> None:
        self._service = service
        self._durable = durable
        self.tick = tick
        self._record = record
        self._faults = faults

    async def handle(self, request: Request, payload: memoryview) -> tuple[Answer, bytes]:
        began = self.tick()
        for parked in set_aside(request, payload):
            self._record(parked)
        answer, data = await self._service.handle(request, payload)
        self.note(request, answer, began)
        return answer, data

    def begin(self, request: Request, payload: memoryview, call: PromptCall) -> bool:
        return self._service.begin(request, payload, _WatchedCall(self, request, call, self.tick()))

    def note(self, request: Request, answer: Answer, began: int) -> None:
        """Note an answer that is about to be told."""
        if early := self._durable.told_early(request, answer):
            self._faults.append(early)
        event = served(request, answer, began)
        if event is not None:
            self._record(event)


class _WatchedCall:
    def __init__(
        self, watched: WatchedService, request: Request, call: PromptCall, began: int
    ) -> None:
        self._watched = watched
        self._request = request
        self._began = began
        self._call = call
        self.refuse, self.hand_to_task = call.refuse, call.hand_to_task
        self.reserve_bytes = call.reserve_bytes

    def answer(self, answer: Answer, data: bytes = b"") -> None:
        self._watched.note(self._request, answer, self._began)
        self._call.answer(answer, data)

    def send_part(self, answer: Answer, data: bytes = b"") -> None:
        self._watched.note(self._request, answer, self._began)
        self._began = self._watched.tick()  # the owner is checked again for the next answer
        self._call.send_part(answer, data)

    @property
    def accepts_parts(self) -> bool:
        return self._call.accepts_parts

    def cancel_on_disconnect(self, future: asyncio.Future[None]) -> None:
        self._call.cancel_on_disconnect(future)
