"""Manages a partition's parked keys at its owner: new messages of a parked key are parked too,
instead of being handled.

    pulled ─▶ divert ─┬─ key is parked ─▶ ParkSender ─▶ durable: counts as handled
                      ╰─ others ─▶ handed out ─▶ failed too often: park ─▶ ParkSender
    the broker's version changed ─▶ ListParked ─▶ a key to redrive ─▶ Redrives ─▶ free

Invariant
    After `park` is called, no message of the key is handed out until the broker has confirmed that
    the key is free.
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
from .retry_runner import RetryRunner

log = logging.getLogger("keylane.consumer")

FEW_SHARE = 32
"""If parked messages make up at most 1/FEW_SHARE of a batch, they are deleted one by one from a
copy of the list. With more of them this would be slow, because each deletion moves the messages
after it.
"""


class KeyParking:
    """Manages the parked messages of one partition under one grant."""

    def __init__(self, context: ParkContext) -> None:
        self.keys: set[ParkKey] = set()
        """The keys whose messages are not handed out."""
        self.has_parked = False
        """True once any message of the group was parked on the partition."""
        self.version = 0
        """The broker's version at the last listing of parked keys; 0 if nothing is parked."""
        self._context = context
        self._sender = ParkSender(context)
        self._redrives = Redrives(context, self._sender, self._release_key)
        self._retrying = RetryRunner(context, self._sender, self._redrives)
        self._ancestors = Ancestors(context, self._sender, self.refresh)
        self._releasing_keys: dict[ParkKey, list[Message]] = {}
        """The keys that are being freed, with the messages that have arrived in the meantime."""
        self._released_keys: set[ParkKey] = set()
        """The keys freed since the last listing began; the listing may still contain them."""
        self._warned = False
        self.stop = context.stop
        self.flush = self._sender.flush

    @property
    def busy(self) -> bool:
        """True while a change is not durable, or handlers have a parked message."""
        return self._sender.busy or self._redrives.busy or self._retrying.busy

    @property
    def has_capacity(self) -> bool:
        """True if `wait_for_capacity` would not wait."""
        return self._sender.has_capacity and self._retrying.has_capacity

    async def wait_for_capacity(self) -> None:
        """Wait while too many messages wait to be parked or retried."""
        await self._sender.wait_for_capacity()
        await self._retrying.wait_for_capacity()

    # ── state of the broker ───────────────────────────────────────────────────────────────────────
    async def begin(self, answer: Acquired) -> None:
        """Adopt the parents' parked messages, unless that is already done, and fetch the parked
        keys.
        """
        blocks = self._context.settings.failure_policy is FailurePolicy.BLOCK
        self._redrives.careful = answer.unreleased and not blocks
        self._redrives.keys_are_inherited = True
        try:
            rows = await self.refresh() if await self._ancestors.adopt_all(answer) else []
        finally:
            self._redrives.keys_are_inherited = False
        await self._retrying.begin(rows, careful=answer.unreleased)
        if self._ancestors.unneeded_ancestors:
            self._ancestors.notify_unneeded_ancestors()

    def update_grant(self, grant: Grant) -> None:
        """Update the ancestors from a newer grant of the same lease, unless all have been
        adopted.
        """
        self._ancestors.update_grant(grant)

    def record_version(self, version: int) -> None:
        """Record, from the broker's version, whether any message was ever parked."""
        if version:
            self.has_parked = True

    def is_current(self, version: int) -> bool:
        """Return True if `check` would have no effect."""
        return version <= self.version

    async def check(self, version: int) -> None:
        """Fetch an operator's changes, if `version` is newer than the known version."""
        if not self.is_current(version):
            await self.refresh()

    async def refresh(self) -> list[ParkedKeyRow]:
        """Fetch and return the parked keys, and start redriving those that an operator has
        chosen.
        """
        self.has_parked = True
        self._released_keys.clear()
        context = self._context
        first: int | None = 0
        rows: list[ParkedKeyRow] = []
        version = 0
        while first is not None:
            answer, payload = await context.client.broker.call(ListParked(*context.lease, first))
            assert isinstance(answer, ParkedKeys)
            rows += decode_key_rows(payload)
            version, first = answer.parked_version, answer.following
            self._ancestors.unneeded_ancestors = answer.unneeded_ancestors
        self.version = version
        rows = [row for row in rows if row.key not in self._released_keys]
        self.keys.update(row.key for row in rows if isinstance(row.key, bytes) and row.key)
        for row in rows:
            waits = row.key in self._releasing_keys or self._sender.ends_redrive(row.key)
            if row.state is ParkState.REDRIVING and not waits:
                self._redrive(row)
        return rows

    def _redrive(self, row: ParkedKeyRow) -> None:
        if self._context.owner.allows_redrives:
            self._redrives.begin(row.key, is_empty=not row.messages)
        elif not self._warned:
            self._warned = True
            log.warning(
                "%s: this consumer cannot redrive parked messages: use a handler of single "
                "messages, or iterate",
                self._context.log_name,
            )

    # ── messages ──────────────────────────────────────────────────────────────────────────────────
    def park_later_messages(self, messages: list[Message]) -> list[Message]:
        """Park messages whose keys are parked, and return the others."""
        keys = self.keys
        parked = [message for message in messages if message.key in keys]
        if not parked:
            return messages
        messages_by_key: dict[bytes, list[Message]] = {}
        for message in parked:
            messages_by_key.setdefault(message.key, []).append(message)
        other_messages = _without_parked(messages, parked, keys)
        for key, new_messages in messages_by_key.items():
            releasing_messages = self._releasing_keys.get(key)
            if releasing_messages is not None:
                releasing_messages += new_messages
            else:
                self._send_park(key, [message.offset for message in new_messages], None)
        return other_messages

    def park(self, key: ParkKey, offsets: list[int], failure: Failure) -> None:
        """
        Park messages because the first one failed. Later messages of the key will be parked too.

        Args:
            offsets: sorted offsets in this partition.
        """
        if isinstance(key, bytes) and key:
            self.keys.add(key)
        self._send_park(key, offsets, failure)

    def retry(self, offset: int, failure: Failure, pause_ms: int) -> None:
        """Park a message of this partition alone, and retry it in `pause_ms`."""
        self.has_parked = True
        self._retrying.put(offset, failure, pause_ms)

    def _send_park(self, key: ParkKey, offsets: list[int], failure: Failure | None) -> None:
        self.has_parked = True
        self._sender.park(key, offsets, failure)

    def _release_key(self, key: ParkKey) -> None:
        """Free a redriven key, and hand out its messages again once the broker has confirmed the
        release.
        """
        self._releasing_keys[key] = []
        self._sender.release_key(key, lambda: self._on_key_released(key))

    def _on_key_released(self, key: ParkKey) -> None:
        messages = self._releasing_keys.pop(key)
        self.keys.discard(key)
        self._released_keys.add(key)
        self._ancestors.notify_unneeded_ancestors()
        if messages:
            self._context.client.hand_out(messages)


def _without_parked(
    messages: list[Message], parked: list[Message], keys: set[ParkKey]
) -> list[Message]:
    """Return the messages without `parked`, which are the messages of `keys`. If the offsets have
    no gaps, as in a batch, a few messages are deleted by index.
    """
    first, other_messages = messages[0].offset, messages.copy()
    if len(parked) <= len(messages) // FEW_SHARE:
        for message in reversed(parked):
            index = message.offset - first
            if not 0 <= index < len(other_messages) or other_messages[index] is not message:
                break
            del other_messages[index]
        else:
            return other_messages
    return [message for message in messages if message.key not in keys]
