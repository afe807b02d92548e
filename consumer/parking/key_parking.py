"""The parked messages of one partition, at its owner: new ones of a parked key go to the broker,
not to handlers.

    pulled ─▶ divert ─┬─ its key is parked ─▶ ParkSender ─▶ durable: counted as handled
                      ╰─ others ─▶ handed out ─▶ failed too often: park ─▶ ParkSender
    the broker's version changed ─▶ ListParked ─▶ a key to redrive ─▶ Redrives ─▶ free ─▶ as any
        other

Invariant
    From the call of `park` on, no message of its key is handed out until the broker has confirmed
    that the key is free.
"""

from __future__ import annotations

import logging

from ...protocol.control import Grant
from ...protocol.frames import Acquired, ListParked, ParkedKeys
from ...protocol.message import Message
from ...protocol.parked import (
    Failure,
    ParkedKeyRow,
    ParkKey,
    ParkState,
    decode_key_rows,
)
from ..settings import FailurePolicy
from .ancestors import Ancestors
from .context import ParkContext
from .park_sender import ParkSender
from .redrive import Redrives
from .retrying import Retrying

log = logging.getLogger("keylane.consumer")

FEW_SHARE = 32
"""The divisor of a batch up to which parked messages are few: each one that is taken out moves
those after it.
"""


class KeyParking:
    """The parked messages of one partition under one grant."""

    def __init__(self, context: ParkContext) -> None:
        self.keys: set[ParkKey] = set()
        """The keys whose messages are not handed out."""
        self.has_parked = False
        """True once something was parked on the partition, here or earlier."""
        self.version = 0
        """The broker's version when its keys were listed last; 0 if nothing is parked."""
        self._context = context
        self._sender = ParkSender(context)
        self._redrives = Redrives(context, self._sender, self._free)
        self._retrying = Retrying(context, self._sender, self._redrives)
        self._ancestors = Ancestors(context, self._sender, self.refresh)
        self._freeing: dict[ParkKey, list[Message]] = {}
        """The keys that are being freed, with the messages that arrived meanwhile."""
        self._freed_lately: set[ParkKey] = set()
        """The keys that were freed since the last listing began."""
        self._told = False
        self.stop = context.stop
        self.flush = self._sender.flush

    @property
    def busy(self) -> bool:
        """Return True while a change is not durable, or a parked message is with handlers."""
        return self._sender.busy or self._redrives.busy or self._retrying.busy

    @property
    def has_room(self) -> bool:
        """Return True if `wait_for_room` need not wait."""
        return self._sender.has_room and self._retrying.has_room

    async def wait_for_room(self) -> None:
        """Wait while too many messages wait to be parked, or wait for retry."""
        await self._sender.wait_for_room()
        await self._retrying.wait_for_room()

    # ── what the broker has ───────────────────────────────────────────────────────────────────────
    async def begin(self, answer: Acquired) -> None:
        """Take over the parked messages of the parents, if that is not done, and fetch the parked
        keys.
        """
        blocks = self._context.settings.failure_policy is FailurePolicy.BLOCK
        self._redrives.careful = answer.unreleased and not blocks
        self._redrives.inherits = True
        try:
            rows = await self.refresh() if await self._ancestors.adopt_all(answer) else []
        finally:
            self._redrives.inherits = False
        await self._retrying.begin(rows, careful=answer.unreleased)
        if self._ancestors.unneeded:
            self._ancestors.tell()

    def regranted(self, grant: Grant) -> None:
        """Take the ancestors from the same lease's latest grant, until their parked messages are
        taken over.
        """
        self._ancestors.regranted(grant)

    def note(self, version: int) -> None:
        """Note that something is parked, if the broker's version shows it."""
        if version:
            self.has_parked = True

    def knows(self, version: int) -> bool:
        """Return True if `check` would learn nothing."""
        return version <= self.version

    async def check(self, version: int) -> None:
        """Fetch the changes of an operator, if the broker's version is newer than the known one."""
        if not self.knows(version):
            await self.refresh()

    async def refresh(self) -> list[ParkedKeyRow]:
        """Fetch the parked keys, begin to redrive those that an operator wants handled again, and
        return the keys.
        """
        self.has_parked = True
        self._freed_lately.clear()
        context = self._context
        first: int | None = 0
        rows: list[ParkedKeyRow] = []
        version = 0
        while first is not None:
            answer, payload = await context.client.broker.call(ListParked(*context.who, first))
            assert isinstance(answer, ParkedKeys)
            rows += decode_key_rows(payload)
            version, first = answer.parked_version, answer.following
            self._ancestors.unneeded = answer.unneeded
        self.version = version
        rows = [row for row in rows if row.key not in self._freed_lately]
        self.keys.update(row.key for row in rows if isinstance(row.key, bytes) and row.key)
        for row in rows:
            waits = row.key in self._freeing or self._sender.stops(row.key)
            if row.state is ParkState.REDRIVING and not waits:
                self._redrive(row.key)
        return rows

    def _redrive(self, key: ParkKey) -> None:
        if self._context.owner.redrives:
            self._redrives.begin(key)
        elif not self._told:
            self._told = True
            log.warning(
                "%s: this consumer cannot redrive parked messages: that needs a handler of single "
                "messages, or iteration",
                self._context.log_name,
            )

    # ── messages ──────────────────────────────────────────────────────────────────────────────────
    def divert(self, messages: list[Message]) -> list[Message]:
        """Park the messages whose keys are parked, and return the others."""
        keys = self.keys
        parked = [message for message in messages if message.key in keys]
        if not parked:
            return messages
        diverted: dict[bytes, list[Message]] = {}
        for message in parked:
            diverted.setdefault(message.key, []).append(message)
        others = _others(messages, parked, keys)
        for key, behind in diverted.items():
            held = self._freeing.get(key)
            if held is not None:
                held += behind
            else:
                self._put(key, [message.offset for message in behind], None)
        return others

    def park(self, key: ParkKey, offsets: list[int], failure: Failure) -> None:
        """
        Set messages aside because the first of them fails; all later ones of the key follow them.

        Args:
            offsets: the sorted offsets, of the partition itself.
        """
        if isinstance(key, bytes) and key:
            self.keys.add(key)
        self._put(key, offsets, failure)

    def retry(self, offset: int, failure: Failure, pause_ms: int) -> None:
        """Set a message of the partition itself aside alone, and let it be handled again in
        `pause_ms`.
        """
        self.has_parked = True
        self._retrying.put(offset, failure, pause_ms)

    def _put(self, key: ParkKey, offsets: list[int], failure: Failure | None) -> None:
        self.has_parked = True
        self._sender.park(key, offsets, failure)

    def _free(self, key: ParkKey) -> None:
        """Hand a redriven key's messages out like any others, once the broker has confirmed it."""
        self._freeing[key] = []
        self._sender.free(key, lambda: self._freed(key))

    def _freed(self, key: ParkKey) -> None:
        held = self._freeing.pop(key)
        self.keys.discard(key)
        self._freed_lately.add(key)
        self._ancestors.tell()
        if held:
            self._context.client.hand_out(held)


def _others(messages: list[Message], parked: list[Message], keys: set[ParkKey]) -> list[Message]:
    """Return the messages without `parked`, those of `keys`; a few are taken out by their places if
    offsets have no gaps, as in a batch.
    """
    first, others = messages[0].offset, messages.copy()
    if len(parked) <= len(messages) // FEW_SHARE:
        for message in reversed(parked):
            at = message.offset - first
            if not 0 <= at < len(others) or others[at] is not message:
                break
            del others[at]
        else:
            return others
    return [each for each in messages if each.key not in keys]
