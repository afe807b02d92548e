"""Bugs of loops of programs: messages in hand, given back, paused, and left out because their key
is parked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from keylane.consumer.dispatch.loop import RunsInHand
from keylane.consumer.session import calls, taking, windows
from keylane.consumer.session.lanes import KeyLanes, Unopened
from keylane.consumer.session.offsets import ranges_of
from keylane.consumer.session.windows import divert
from keylane.consumer.settings import FailurePolicy
from keylane.protocol.message import Message
from sim.mutants.mutant import Breaks, Patches
from sim.mutants.of_consumers import lanes_ignore_keys


class _OpenedBatch:
    """A pulled batch whose messages are made."""

    def __init__(self, batch: Unopened) -> None:
        self._batch = batch
        self._messages = batch.open()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def open(self) -> list[Message]:
        return self._messages


def another_policy_hands_parked_keys_out(patches: Patches) -> None:
    """Messages of a parked key that were pulled before are handed out once the policy is no longer
    to park.
    """

    def divert(session: Any, messages: Any, now_ms: int) -> Any:
        if session.settings.failure_policy is FailurePolicy.PARK:
            return real(session, messages, now_ms)
        return messages

    real = patches.set(taking, "divert", divert)


def later_batches_are_parked_before_earlier_ones(patches: Patches) -> None:
    """Messages of a parked key are parked when they are pulled: a redrive hands them out before
    those that wait unopened.
    """

    def store(session: Any, event: Any, now_ms: int) -> None:
        waiting, session.lanes.stored = session.lanes.stored, deque()
        real(session, event, now_ms)
        pulled, session.lanes.stored = session.lanes.stored, waiting
        for batch in pulled:
            opened = batch._replace(batch=_OpenedBatch(batch.batch))
            messages = divert(session, opened.open(), now_ms)
            if messages:
                waiting.append(opened._replace(ranges=ranges_of(messages)))

    real = patches.set(calls, "_store", store)


def held_messages_come_after_newer_ones(patches: Patches) -> None:
    """What came while a redriven key was freed is handed out a second later, and newer messages of
    the key meanwhile.
    """

    def release(session: Any, key: Any) -> None:
        held, session.parking.releasing[key] = session.parking.releasing.get(key, []), []
        real(session, key)
        if held:
            asyncio.get_running_loop().call_later(1, session.lanes.extra.extend, held)

    real = patches.set(windows, "_release", release)


def loop_gets_those_behind_a_parked_message(patches: Patches) -> None:
    """A message that fails too often is parked, and those that wait behind it are handed out."""

    def remove_key(self: Any, key: bytes, _matches: Any) -> list[Any]:
        self.extra.extendleft(reversed(self.busy.pop(key, None) or ()))
        return []

    patches.set(KeyLanes, "remove_key", remove_key)


def given_back_goes_to_the_end(patches: Patches) -> None:
    """A message that is given back comes again after those that wait behind it."""

    def wait(self: Any, message: Any, due_ms: int, last: Any = None) -> None:
        queue = self.busy.get(message.key)
        if queue:
            queue.append(message)
            self.pass_on(message.key)
        else:
            real(self, message, due_ms, last)

    real = patches.set(KeyLanes, "wait", wait)


def given_back_alone(patches: Patches) -> None:
    """A message is given back, and the later ones of its key stay in hand: they are acked before
    it.
    """

    def take_back(self: Any, failed: Any) -> list[Any]:
        self.leave(failed)
        return []

    patches.set(KeyLanes, "take_back", take_back)


def keys_in_hand_hold_nothing(patches: Patches) -> None:
    """A loop that has not acked a message gets the next one of its key."""
    lanes_ignore_keys(patches)


def lower_offsets_stay_in_hand(patches: Patches) -> None:
    """With a message that is given back the program has dead letters of its key on, which have
    lower offsets and came behind it.
    """

    def take_back(self: Any, failed: Any) -> Any:
        others = self.together.get(failed.key, [])
        place = next((at for at, each in enumerate(others) if each is failed), len(others))
        lower = [each for each in others[place + 1 :] if each.offset < failed.offset]
        if lower:
            self.together[failed.key] = [each for each in others if each not in lower]
        later = real(self, failed)
        if lower:
            self.together.setdefault(failed.key, []).extend(lower)
        return later

    real = patches.set(KeyLanes, "take_back", take_back)


def acks_of_no_message_ack_a_run(patches: Patches) -> None:
    """An ack of no message is taken for one of all that came with messages of failed tries."""

    def ack_many(self: Any, messages: list[Message]) -> bool:
        if not messages and not self.many_taken:
            messages = self.many_taken = [each for _, run in self.many for each in run]
        return bool(real(self, messages))

    real = patches.set(RunsInHand, "ack_many", ack_many)


BREAKS: tuple[Breaks, ...] = (
    acks_of_no_message_ack_a_run,
    another_policy_hands_parked_keys_out,
    later_batches_are_parked_before_earlier_ones,
    held_messages_come_after_newer_ones,
    loop_gets_those_behind_a_parked_message,
    given_back_goes_to_the_end,
    given_back_alone,
    keys_in_hand_hold_nothing,
    lower_offsets_stay_in_hand,
)
