"""The calls on leases and fences that clients and brokers wrote down, as histories for
`linearizable.py`.

     7 Served    kind, group, partition, token, began, …              a broker accepted a call; the instant is its answer's
     8 Calling   number, call, session, group, partition, token, holding [[partition, token], …]
     9 Answered  number, error or "", ttl_ms, grants [[partition, token], …]

A lease, one for each (group, partition): the session that has it, and its token.
    observe   the answer of a join or heartbeat lists it: the session has it already, or takes it while it is free, with a
              higher token than any before
    release   the session that has it with this token gives it up; a heartbeat whose `holding` lacks it does the same
    end       the session left, or has been silent for its ttl since the last call that was answered
A fence, one for each (group, partition) at its broker: a call is accepted with the highest token
only, an acquire raises it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from linearizable import FOREVER, Operation, UndecidedError, is_linearizable

SERVED, CALLING, ANSWERED = 7, 8, 9
Place = tuple[str, int]
"""Group and partition id."""


class LeaseCall(NamedTuple):
    """What a call says of a lease: "observe", "release", "end"."""

    kind: str
    session: str
    token: int


class FenceCall(NamedTuple):
    """A call that a broker accepted."""

    kind: str
    token: int


LeaseState = tuple[str, int]
"""Session and token; "" for no session, with the highest token so far."""


def step_lease(state: LeaseState, call: LeaseCall) -> LeaseState | None:
    """The lease after a call; None if it would not have been answered so."""
    session, token = state
    if call.kind == "observe":
        if session:
            return state if state == (call.session, call.token) else None
        return (call.session, call.token) if call.token > token else None
    mine = session == call.session and call.token in {0, token}
    return ("", token) if mine else state


def step_fence(token: int, call: FenceCall) -> int | None:
    """The fence after a call; None if the broker should have refused it."""
    if call.kind in {"acquire", "reset"}:
        return call.token if call.token >= token else None
    return token if call.token == token else None


class _Session:
    __slots__ = ("answered_ns", "asked_ns", "group", "left", "ttl_ns")

    def __init__(self, group: str, asked_ns: int) -> None:
        self.group = group
        self.asked_ns = asked_ns
        """Invocation of its first join: one that is repeated renews nothing."""
        self.answered_ns = 0
        """Invocation of the last call that renewed it for certain."""
        self.ttl_ns = 0
        self.left: list[tuple[int, int]] = []


class _Calling(NamedTuple):
    invoked: int
    call: str
    session: str
    group: str
    partition_id: int
    token: int
    holding: list[list[int]] | None


class Calls:
    """Gathers the calls of all clients; then `judge` them."""

    def __init__(self) -> None:
        self._calling: dict[tuple[str, int], _Calling] = {}
        self._sessions: dict[str, _Session] = {}
        self._observed: defaultdict[str, dict[int, int]] = defaultdict(dict)
        """By session: what a heartbeat said that it has, and no later call took back."""
        self._leases: defaultdict[Place, list[Operation[LeaseCall]]] = defaultdict(list)
        self._fences: defaultdict[Place, list[Operation[FenceCall]]] = defaultdict(list)

    def note(self, source: str, at_ns: int, kind: int, fields: list[Any]) -> None:
        """Take an event of the file `source`; those of one file come in the order of time."""
        if kind == SERVED:
            call, group, partition_id, token, began_ns, *_ = fields
            served = Operation(began_ns, at_ns, FenceCall(call, token))
            self._fences[group, partition_id].append(served)
        elif kind == CALLING:
            number, *rest = fields
            calling = self._calling[source, number] = _Calling(at_ns, *rest)
            self._sessions.setdefault(calling.session, _Session(calling.group, at_ns))
            if calling.holding is not None:
                self._note_holding(calling)
        elif kind == ANSWERED:
            number, error, ttl_ms, grants = fields
            self._note_answer(self._calling.pop((source, number)), at_ns, error, ttl_ms, grants)

    def _note_holding(self, calling: _Calling) -> None:
        """What a heartbeat leaves out is free from now on."""
        held = {partition_id for partition_id, _ in calling.holding or ()}
        observed = self._observed[calling.session]
        for partition_id in [known for known in observed if known not in held]:
            self._add(calling, partition_id, "release", observed.pop(partition_id), FOREVER)

    def _note_answer(
        self, calling: _Calling, at_ns: int, error: str, ttl_ms: int, grants: list[list[int]]
    ) -> None:
        session = self._sessions[calling.session]
        if calling.call == "release":
            returned = FOREVER if error else at_ns
            self._observed[calling.session].pop(calling.partition_id, None)
            self._add(calling, calling.partition_id, "release", calling.token, returned)
        elif calling.call == "leave":
            session.left.append((calling.invoked, FOREVER if error else at_ns))
        elif not error:
            invoked = session.asked_ns if calling.call == "join" else calling.invoked
            session.answered_ns, session.ttl_ns = invoked, ttl_ms * 1_000_000
            for partition_id, token in grants:
                self._observed[calling.session][partition_id] = token
                self._add(calling, partition_id, "observe", token, at_ns)

    def _add(
        self, calling: _Calling, partition_id: int, kind: str, token: int, returned: int
    ) -> None:
        operation = Operation(calling.invoked, returned, LeaseCall(kind, calling.session, token))
        self._leases[calling.group, partition_id].append(operation)

    def histories(
        self,
    ) -> tuple[dict[Place, list[Operation[LeaseCall]]], dict[Place, list[Operation[FenceCall]]]]:
        """All that was gathered, with calls that were never answered and the ends of sessions."""
        for calling in self._calling.values():
            if calling.call == "release":
                self._add(calling, calling.partition_id, "release", calling.token, FOREVER)
            elif calling.call == "leave":
                self._sessions[calling.session].left.append((calling.invoked, FOREVER))
        self._calling.clear()
        for (group, _), lease in self._leases.items():
            known = {operation.call.session for operation in lease}
            lease += [
                Operation(invoked, returned, LeaseCall("end", name, 0))
                for name, session in self._sessions.items()
                if session.group == group and name in known
                for invoked, returned in (
                    *session.left,
                    (session.answered_ns + session.ttl_ns, FOREVER),
                )
            ]
        return dict(self._leases), dict(self._fences)

    def judge(self) -> Iterable[tuple[str, str]]:
        """(kind, text) of each history that could not have happened one call at a time."""
        leases, fences = self.histories()
        for place, lease in leases.items():
            yield from _verdict(
                "lease", place, lambda ops=lease: is_linearizable(ops, ("", 0), step_lease)
            )
        for place, fence in fences.items():
            yield from _verdict(
                "fence", place, lambda ops=fence: is_linearizable(ops, 0, step_fence)
            )


def _verdict(name: str, place: Place, decide: Any) -> Iterable[tuple[str, str]]:
    try:
        if not decide():
            yield "not linearizable", f"{name} of partition {place[1]}, group {place[0]}"
    except UndecidedError:
        yield "undecided", f"{name} of partition {place[1]}, group {place[0]}"
