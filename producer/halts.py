"""Messages that are not acked in their time, and the keys that are halted by that.

    deadline passed ─▶ the message is given up, its key halted ─▶ what is newer of the key and was never sent is
    given up too, and nothing of it is taken ─▶ the caller says `resume`, and sends again in order

What is on its way when its time is over cannot be taken out of its batch: it is told as UNKNOWN, and goes on.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..protocol.clock import Clock
from ..protocol.errors import DeliveryTimeoutError, KeyHaltedError, KeylaneError
from ..protocol.message import unpack_properties
from ..protocol.text import key_digest, seconds
from .account import Account
from .parcel import Parcel

NO_ANSWER = "the broker has not answered yet"
NOT_SENT = "it waits behind older messages, or for its batch to fill"


class Halts:
    """The halted keys of one subject."""

    def __init__(self, subject: str, clock: Clock, account: Account) -> None:
        self.keys: set[bytes] = set()
        self._subject = subject
        self._clock = clock
        self._account = account

    def check(self, key: bytes) -> None:
        """Raises KeyHaltedError while `key` is halted."""
        if key in self.keys:
            text = f"an older message of {key_digest(key)} of {self._subject!r} timed out, and the key is halted"
            raise KeyHaltedError(text, subject=self._subject, key=key)

    def resume(self, key: bytes) -> None:
        """Messages of this key are sent again from now on."""
        self.keys.discard(key)

    def expire(self, waiting: Iterable[tuple[Parcel, str]]) -> bool:
        """
        Halt the keys of all messages whose time is over, and give up those that are on their way.

        Args:
            waiting: parcels, and what the messages of each wait for.

        Returns:
            True if any time is over: then `withdraw` from all that was never sent.
        """
        now_ms = self._clock.boot_ms()
        over = False
        for parcel, waits_for in waiting:
            overdue = _overdue(parcel, now_ms)
            over = over or bool(overdue)
            for index in overdue:
                if parcel.keys[index]:
                    self.keys.add(parcel.keys[index])
                if parcel.sends:
                    error = self._time_out(parcel, index, now_ms, waits_for or NO_ANSWER)
                    self._account.give_up_message(parcel, index, error, doubtful=True)
            if overdue and parcel.sends:
                parcel.drop_deadlines(overdue)
        return over

    def withdraw(self, parcel: Parcel, *, waits_for: str) -> Parcel | None:
        """Give up what is overdue or of a halted key in a parcel that was never sent; returns what stays of it."""
        now_ms = self._clock.boot_ms()
        overdue = set(_overdue(parcel, now_ms))
        keys = self.keys
        if not overdue and keys.isdisjoint(parcel.keys):
            return parcel
        taken, rest = parcel.divided(lambda index: index in overdue or parcel.keys[index] in keys)
        self._account.replaced(parcel, taken, rest)
        if taken is not None:
            late = set(_overdue(taken, now_ms))
            for index in range(len(taken)):
                if index in late:
                    error = self._time_out(taken, index, now_ms, waits_for or NOT_SENT)
                else:
                    error = self._error(KeyHaltedError, taken, index, KeyHaltedError.summary)
                self._account.give_up_message(taken, index, error, doubtful=False)
            self._account.leave(taken)
        return rest

    def _time_out(self, parcel: Parcel, index: int, now_ms: int, cause: str) -> KeylaneError:
        assert parcel.deadlines is not None
        at_ms, timeout_ms = parcel.deadlines[index]
        took = seconds(now_ms - at_ms + timeout_ms)
        whose = key_digest(parcel.keys[index])
        text = f"a message of {self._subject!r}, {whose}, was not acked in {took}: {cause}"
        return self._error(DeliveryTimeoutError, parcel, index, text)

    def _error(
        self, kind: type[KeylaneError], parcel: Parcel, index: int, text: str
    ) -> KeylaneError:
        packed = parcel.properties[index] if parcel.properties else b""
        return kind(
            text,
            subject=self._subject,
            key=parcel.keys[index],
            value=parcel.values[index],
            properties=dict(unpack_properties(packed)),
        )


def _overdue(parcel: Parcel, now_ms: int) -> list[int]:
    """The messages of a parcel whose time is over and whose fate is not known."""
    if parcel.deadlines is None or parcel.first_deadline_ms > now_ms:
        return []
    return [
        index
        for index, (at_ms, _timeout_ms) in parcel.deadlines.items()
        if at_ms <= now_ms and not parcel.settled(index)
    ]
