"""Small random histories of a lease, right and wrong ones, and a check of them that tries every
order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations

from leases import LeaseCall, LeaseState, step_lease
from linearizable import FOREVER, Operation

NO_HOLDER: LeaseState = ("", 0)


def random_history(rng: random.Random, calls: int) -> list[Operation[LeaseCall]]:
    """A history of a right lease whose instants are stretched, in one of two then spoiled at
    random.
    """
    state = NO_HOLDER
    history: list[Operation[LeaseCall]] = []
    for instant in range(0, 10 * calls, 10):
        session, token = state
        kind = rng.choice(("observe", "observe", "release", "end"))
        if kind == "observe":
            call = LeaseCall(kind, session or rng.choice("ab"), token if session else token + 1)
        else:
            call = LeaseCall(kind, rng.choice("ab"), rng.choice((0, token)))
        following = step_lease(state, call)
        assert following is not None
        state = following
        returned = instant + rng.randrange(1, 15)
        if kind != "observe" and rng.random() < 0.2:
            returned = FOREVER
        history.append(Operation(instant - rng.randrange(10), returned, call))
    if rng.random() < 0.8:
        index = rng.randrange(calls)
        call = history[index].call
        other = rng.choice(
            (
                call._replace(session="b" if call.session == "a" else "a"),
                call._replace(token=max(1, call.token - 1)),
            )
        )
        history[index] = history[index]._replace(call=other)
    rng.shuffle(history)
    return history


def try_every_order(history: Sequence[Operation[LeaseCall]]) -> bool:
    """True if some order of the calls keeps to their instants and to the lease."""
    for order in permutations(history):
        state: LeaseState | None = NO_HOLDER
        latest = -FOREVER
        for operation in order:
            latest = max(latest, operation.invoked)
            if operation.returned < latest or state is None:
                break
            state = step_lease(state, operation.call)
        else:
            if state is not None:
                return True
    return False
