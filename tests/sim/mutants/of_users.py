"""Bugs that show only when users do more than open once, send, handle and wait."""

from __future__ import annotations

from typing import Any

from keylane.broker.partition import partition as partition_module
from keylane.broker.partition.appends import Duplicate
from keylane.consumer.client import Consumer
from keylane.consumer.group.membership import Membership
from keylane.consumer.session import calls
from keylane.producer import sending as producer_sending
from keylane.producer.client import Producer
from keylane.producer.send_budget import SendBudget
from keylane.protocol.errors import ClosedError, SequenceReusedError
from keylane.protocol.frames import PullShared
from keylane.rpc.environment import environment_of
from keylane.rpc.loop_binding import LoopBinding
from sim.mutants.mutant import Breaks, Patches


def _trust_sequences(patches: Patches) -> None:
    """A broker takes an id, an epoch and a sequence for the batch that they name."""

    def decide(producer: Any, header: Any, **kwargs: Any) -> Any:
        try:
            return real(producer, header, **kwargs)
        except SequenceReusedError:
            return Duplicate(0)

    real = patches.set(partition_module, "decide_append", decide)


def ids_of_the_users_generator(patches: Patches) -> None:
    """Two generators of one seed give two producers one id."""
    _trust_sequences(patches)

    def begin(self: Any, meta: Any) -> None:
        real(self, meta)
        self._identity.producer_id = self._rng.getrandbits(63) | 1

    real = patches.set(Producer, "_begin_opening", begin)


def id_drawn_when_made(patches: Patches) -> None:
    """Each process that opens a copy has the id of the original, and each opening has that of the
    first.
    """
    _trust_sequences(patches)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real_init(self, *args, **kwargs)
        self._drawn = environment_of(self._environment).draw_identity(63) | 1

    def begin(self: Any, meta: Any) -> None:
        real_begin(self, meta)
        self._identity.producer_id = self._drawn

    real_init = patches.set(Producer, "__init__", init)
    real_begin = patches.set(Producer, "_begin_opening", begin)


def sessions_of_the_users_generator(patches: Patches) -> None:
    """Two consumers join under one session."""

    def init(self: Any, member: Any, **kwargs: Any) -> None:
        real(self, member, **kwargs)
        self._draw_identity = kwargs["rng"].getrandbits

    real = patches.set(Membership, "__init__", init)


def reopened_with_what_was_closed(patches: Patches) -> None:
    """A consumer that was closed and is opened again counts as closing from its beginning."""

    def new_opening(self: Any, network: Any) -> Any:
        opening, last = real(self, network), self._last_opening
        if last is not None:
            opening.closing, opening._opened = last.closing, last._opened
        return opening

    real = patches.set(Consumer, "_new_opening", new_opening)


def cancelled_close_is_broken_off(patches: Patches) -> None:
    """A cancelled close breaks its hand-overs off, and the next close releases everything."""

    async def close(self: Any) -> None:
        if self._loop_binding.is_open_here:
            await self._last_opening._close()

    patches.set(Consumer, "close", close)


def flush_tells_no_failure(patches: Patches) -> None:
    patches.set(SendBudget, "take_unreported_error", lambda self: None)


def shared_messages_held_for_an_hour(patches: Patches) -> None:
    """Messages lost on their way to a consumer of a shared group are kept from the others."""

    def pull(*fields: Any) -> PullShared:
        return PullShared(*fields[:-1], 3_600_000)

    patches.set(calls, "PullShared", pull)


def home_is_not_looked_at(patches: Patches) -> None:
    """A client takes calls from any thread and event loop."""

    def check_closed(self: Any) -> None:
        if not self.is_open_here:
            raise ClosedError("not open")

    patches.set(producer_sending, "make_thread_check", lambda: lambda: True)
    patches.set(LoopBinding, "check", check_closed)
    for name in ("check_not_elsewhere", "check_thread"):
        patches.set(LoopBinding, name, lambda self: None)


BREAKS: tuple[Breaks, ...] = (
    ids_of_the_users_generator,
    id_drawn_when_made,
    sessions_of_the_users_generator,
    reopened_with_what_was_closed,
    cancelled_close_is_broken_off,
    flush_tells_no_failure,
    shared_messages_held_for_an_hour,
    home_is_not_looked_at,
)
