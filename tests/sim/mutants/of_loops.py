"""Bugs of loops of programs: messages in hand, given back, paused, and left out because their key
is parked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import Any

from keylane.consumer.handling import in_hand
from keylane.consumer.handling.in_hand import UnackedMessages
from keylane.consumer.handling.stream import Stream
from keylane.consumer.parking.key_parking import KeyParking
from keylane.consumer.settings import FailurePolicy
from sim.mutants.mutant import Breaks, Patches


def another_policy_hands_parked_keys_out(patches: Patches) -> None:
    """Messages of a parked key that were pulled before are handed out once the policy is no longer
    to park.
    """

    def open_stored(self: Any) -> None:
        if self._failure_rules.policy is FailurePolicy.PARK:
            real(self)
            return
        self._waiting.extend(self._stored.popleft().messages())

    real = patches.set(Stream, "_open_stored", open_stored)


def later_batches_are_parked_before_earlier_ones(patches: Patches) -> None:
    """Messages of a parked key are parked when they are pulled: a redrive hands them out before
    those that wait unopened.
    """

    def put_batch(self: Any, batch: Any) -> None:
        batch.client.park_rows_of_parked_keys(batch)
        real(self, batch)

    real = patches.set(Stream, "put_batch", put_batch)


def held_messages_come_after_newer_ones(patches: Patches) -> None:
    """What came while a redriven key was freed is handed out a second later, and newer messages of
    the key meanwhile.
    """

    def freed(self: Any, key: Any) -> None:
        held, self._releasing_keys[key] = self._releasing_keys[key], []
        real(self, key)
        if held:
            later = partial(self._context.client.hand_out, held)
            asyncio.get_running_loop().call_later(1, later)

    real = patches.set(KeyParking, "_on_key_released", freed)


def loop_gets_those_behind_a_parked_message(patches: Patches) -> None:
    """A message that fails too often is parked, and those that wait behind it are handed out."""

    def remove_failed(self: Any, failed: Any, _ours: Any) -> Any:
        self.record_ack(failed)
        return [failed], [], []

    patches.set(UnackedMessages, "remove_failed", remove_failed)


def opened_messages_pass_a_parked_one(patches: Patches) -> None:
    """A message is parked without those of its key that wait in opened batches."""

    def set_aside(self: Any, *args: Any) -> Any:
        kept, self._waiting = self._waiting, deque()
        try:
            return real(self, *args)
        finally:
            self._waiting = kept

    real = patches.set(Stream, "_set_aside", set_aside)


def paused_messages_pass_a_parked_one(patches: Patches) -> None:
    """A message is parked without those of its key that wait in a paused partition."""

    def set_aside(self: Any, *args: Any) -> Any:
        kept, self._paused = self._paused, {}
        try:
            return real(self, *args)
        finally:
            self._paused = kept

    real = patches.set(Stream, "_set_aside", set_aside)


def given_back_goes_to_the_end(patches: Patches) -> None:
    """A message that is given back comes again after those that wait behind it."""

    def requeue(self: Any, message: Any, due_ns: int) -> Any:
        back = real(self, message, due_ns)
        lane = self._lane_of(message.key or (message.partition_id, message.offset))
        if len(lane.messages) > 1:
            lane.messages.append(lane.messages.pop(0))
        return back

    real = patches.set(UnackedMessages, "requeue", requeue)


def given_back_alone(patches: Patches) -> None:
    """A message is given back, and the later ones of its key stay in hand: they are waited for in
    vain, or acked before it.
    """

    def requeue(self: Any, message: Any, due_ns: int) -> Any:
        self.unregistered.register()
        lane = self._lane_of(message.key or (message.partition_id, message.offset))
        later, lane.unacked = lane.unacked, {id(message): message}
        back = real(self, message, due_ns)
        lane.unacked = {number: each for number, each in later.items() if each is not message}
        return back

    real = patches.set(UnackedMessages, "requeue", requeue)


def keys_in_hand_hold_nothing(patches: Patches) -> None:
    """A loop that has not acked a message gets the next one of its key."""

    def first(self: Any, arrived: Any, now_ns: int, **_ordered: Any) -> Any:
        return real(self, arrived, now_ns, ordered=False)

    real = patches.set(UnackedMessages, "take_first", first)


def resumed_messages_come_after_later_ones(patches: Patches) -> None:
    """What was paused comes behind what waits for its key since."""
    patches.set(UnackedMessages, "add_resumed", lambda _self, messages: messages)


def lower_offsets_stay_in_hand(patches: Patches) -> None:
    """With a message that is given back the program has dead letters of its key on, which have
    lower offsets and came behind it.
    """

    def behind(lane: Any, message: Any) -> Any:
        return [each for each in lane.unacked.values() if each.offset > message.offset]

    patches.set(in_hand, "_handed_out_after", behind)


BREAKS: tuple[Breaks, ...] = (
    another_policy_hands_parked_keys_out,
    later_batches_are_parked_before_earlier_ones,
    held_messages_come_after_newer_ones,
    loop_gets_those_behind_a_parked_message,
    opened_messages_pass_a_parked_one,
    paused_messages_pass_a_parked_one,
    given_back_goes_to_the_end,
    given_back_alone,
    keys_in_hand_hold_nothing,
    resumed_messages_come_after_later_ones,
    lower_offsets_stay_in_hand,
)
