"""Whether a history of calls that overlap could have been made one at a time. Pure.

A call takes effect at one instant between its invocation and its return. A history is linearizable
if such instants can be chosen so that a sequential object, the model, would have given the answers
that were given.

Source: Wing and Gong's search with Lowe's memory of (calls taken, state), as in Porcupine, against
which `cross_check.py` holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

FOREVER = 1 << 62
"""The return of a call without an answer: it takes effect at any time after its invocation, or, at
the end, unseen.
"""
STEPS_MAX = 2_000_000
"""Of a search; more is no verdict."""

State = TypeVar("State", bound=Hashable)
Call = TypeVar("Call")


class Operation(NamedTuple, Generic[Call]):
    """A call and its answer, between two instants."""

    invoked: int
    returned: int
    call: Call


class UndecidedError(Exception):
    """The search took too long."""


class _Entry:
    """An invocation or a return in the list of what is not taken yet, in the order of time."""

    __slots__ = ("after", "before", "index", "match")

    def __init__(self, index: int) -> None:
        self.index = index
        self.match: _Entry | None = None
        """Of an invocation: its return."""
        self.before: _Entry | None = None
        self.after: _Entry | None = None


def is_linearizable(
    operations: Sequence[Operation[Call]],
    initial: State,
    step: Callable[[State, Call], State | None],
) -> bool:
    """
    True if the history could have happened one call at a time.

    Args:
        step: the state after a call, or None if the object in this state would not have answered
            so.

    Raises:
        UndecidedError: more than STEPS_MAX steps.
    """
    head = _linked(operations)
    taken: list[tuple[_Entry, State]] = []
    mask, state = 0, initial
    seen: set[tuple[int, State]] = {(0, initial)}
    entry = head.after
    steps = 0
    while head.after is not None:
        steps += 1
        if steps > STEPS_MAX:
            raise UndecidedError
        assert entry is not None
        if entry.match is not None:
            following = step(state, operations[entry.index].call)
            with_it = mask | 1 << entry.index
            if following is not None and (with_it, following) not in seen:
                seen.add((with_it, following))
                taken.append((entry, state))
                mask, state = with_it, following
                _lift(entry)
                entry = head.after
            else:
                entry = entry.after
        else:  # a return is reached whose call is not taken: the last choice was wrong
            if not taken:
                return False
            chosen, state = taken.pop()
            mask ^= 1 << chosen.index
            _unlift(chosen)
            entry = chosen.after
    return True


def _linked(operations: Sequence[Operation[Call]]) -> _Entry:
    """All invocations and returns by their instants; at one instant invocations come first, as they
    overlap.
    """
    events: list[tuple[int, int, _Entry]] = []
    for index, operation in enumerate(operations):
        invocation, answer = _Entry(index), _Entry(index)
        invocation.match = answer
        events += [(operation.invoked, 0, invocation), (operation.returned, 1, answer)]
    events.sort(key=lambda event: event[:2])
    head = last = _Entry(-1)
    for _, _, entry in events:
        last.after, entry.before = entry, last
        last = entry
    return head


def _lift(entry: _Entry) -> None:
    """Take an invocation and its return out of the list."""
    for gone in (entry, entry.match):
        assert gone is not None
        assert gone.before is not None
        gone.before.after = gone.after
        if gone.after is not None:
            gone.after.before = gone.before


def _unlift(entry: _Entry) -> None:
    """Put them back where they were."""
    for back in (entry.match, entry):
        assert back is not None
        assert back.before is not None
        back.before.after = back
        if back.after is not None:
            back.after.before = back
