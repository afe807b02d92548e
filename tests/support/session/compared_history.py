"""A history whose requests also go to a real broker's service, over a simulated disk: what the
plain model says must be what the broker says.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from msgspec.structs import replace

from keylane.consumer.session.events import LeaveAncestor, ReadWindow, SendChanges, TakeTurn
from keylane.consumer.settings import ConsumerSettings
from keylane.protocol.batch import encode_batch
from keylane.protocol.errors import KeylaneError
from keylane.protocol.frames import Ack, Acked, Acquire, Acquired, Pull, Release
from keylane.protocol.parked import ChangeParkedKey, encode_parked, is_loose
from keylane.testing.machines.disk import SimDisk
from support.parked.desk import ParkedDesk
from support.session.history import GROUP, BrokenPromiseError, History
from support.session.partition_model import PARTITION_ID


class ComparedHistory(History):
    """The same actions, beside a real broker."""

    def __init__(
        self, rng: random.Random, settings: ConsumerSettings, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.loop = loop
        self.desk = ParkedDesk(SimDisk())
        self._appended = 0
        self._run(self.desk.host())
        super().__init__(rng, settings)
        self.broker.ranges_max, self.broker.keys_max = 10_000, 10_000

    def _run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def send(self) -> None:
        super().send()
        keys = self.broker.keys[self._appended :]
        if not keys:
            return
        data = encode_batch(
            partition_id=PARTITION_ID,
            sent_at_ns=[0] * len(keys),
            keys=keys,
            values=[b""] * len(keys),
            producer_id=7,
            producer_epoch=0,
            sequence=self._appended,
        )
        self._run(self.desk.append(data))
        self._appended += len(keys)

    # ── requests ──────────────────────────────────────────────────────────────────────────────────
    def _serve(self, request: Any) -> Any:
        if isinstance(request, TakeTurn | ReadWindow | LeaveAncestor):
            return super()._serve(request)
        real = self._ask(request)
        try:
            event = super()._serve(request)
        except KeylaneError as error:
            if type(real) is not type(error):
                raise BrokenPromiseError(f"{request}: {real!r}, and here {error!r}") from error
            raise
        if isinstance(real, KeylaneError):
            raise BrokenPromiseError(f"{request}: {real!r}, and here {event}")
        self._compare(event, real)
        return event

    def _ask(self, request: Any) -> Any:
        """The answer of the broker, or its refusal."""
        payload = b""
        if isinstance(request, SendChanges):
            payload = encode_parked(list(request.changes))
            request = request.frame
        if isinstance(request, Pull):
            request = replace(request, wait_ms=0)
        if isinstance(request, Ack):
            request = replace(request, promise_ms=0)  # the model of a broker gives none
        try:
            answer, _ = self._run(self.desk.ask(request, payload))
        except KeylaneError as error:
            return error
        return answer

    def batch_sizes(self, _rng: random.Random) -> list[int]:
        return [100]  # the broker answers with all that it has

    def _compare(self, event: Any, real: Any) -> None:
        if isinstance(event, Acquired):
            wanted = _facts(event)
            if wanted != _facts(real):
                raise BrokenPromiseError(f"the broker says {_facts(real)}, and here {wanted}")
        if isinstance(event, Acked) and event.cursor != real.cursor:
            raise BrokenPromiseError(f"the broker has cursor {real.cursor}, not {event.cursor}")
        group = self.desk.group
        have = group.acked.cursor, list(group.acked.ranges)
        wanted = self.broker.cursor, self.broker.ranges_above(self.broker.acked)
        if have != wanted:
            raise BrokenPromiseError(f"the broker has acks of {have}, not {wanted}")
        self._compare_parked()

    def _compare_parked(self) -> None:
        keys = self.desk.state()[3]
        have = {
            key: (state, [each for _, low, high in rows for each in range(low, high)])
            for key, (state, _, _, rows) in keys.items()
        }
        wanted = {key: (parked.state, parked.offsets) for key, parked in self.broker.parked.items()}
        for key in {*have, *wanted}:
            ours, theirs = wanted.get(key, ("", [])), have.get(key, ("", []))
            differ = ours[1] != theirs[1] or (ours[0] != theirs[0] and not is_loose(key))
            if differ:
                raise BrokenPromiseError(f"the broker has {key!r} {theirs}, not {ours}")

    # ── others ────────────────────────────────────────────────────────────────────────────────────
    def seal(self) -> None:
        super().seal()

        async def make_sealed() -> None:
            await self.desk.store.seal(PARTITION_ID)[1]

        self._run(make_sealed())

    def fence(self) -> None:
        super().fence()
        lease = (PARTITION_ID, GROUP, f"s{self.token}", self.token)
        self._run(self.desk.say(Acquire(*lease, 10_000)))
        self._run(self.desk.say(Release(*lease)))

    def adopt(self) -> None:
        """The broker has no ancestors here."""

    def inherit_suspects(self) -> None:
        """The broker has had no owner here."""
        self.send()

    inherit_dead_letters = inherit_suspects

    def remove(self) -> None:
        """Nothing is removed here."""

    def change_as_operator(self, key: Any, *, is_skip: bool) -> None:
        before = {each: parked.offsets.copy() for each, parked in self.broker.parked.items()}
        super().change_as_operator(key, is_skip=is_skip)
        rows = [(PARTITION_ID, offset, offset + 1) for offset in before[key]]
        asked = ChangeParkedKey(
            group=GROUP,
            key_hex=None if key is None else key.hex(),
            skip=rows[:1] if is_skip else None,
            retry=rows if not is_skip and key not in self.broker.parked else None,
        )
        self._run(self.desk.parking.change_key(asked, {"id": str(PARTITION_ID)}))


def _facts(answer: Acquired) -> tuple[Any, ...]:
    tries = {pair for pair in answer.attempts if pair[0] >= answer.cursor}
    ranges = [range(low, high) for low, high in answer.ranges]
    left = {pair for pair in tries if not any(pair[0] in each for each in ranges)}
    upto = max(answer.cursor, answer.suspects_upto)
    return (
        answer.cursor,
        answer.ranges,
        answer.next_offset,
        answer.sealed,
        left,
        upto,
        dict(answer.begun),
        answer.unreleased,
    )
