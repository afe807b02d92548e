"""Drives `step` through a random history of one partition, and judges each message that begins.

    actions: send, answer or fail a request, want, handle, fail, time, pause, operators, stop, crash
    at the end everything is healed, and every message must have been handled

The rules that it judges by are those of a reader of docs/PARKING.md and docs/ORDER.md; of the
session it only looks at what is asked and handed out, and at its count of messages.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from keylane.consumer.session import step as step_module
from keylane.consumer.session.events import (
    AncestorLeft,
    BatchFailed,
    CallFailed,
    CancelHandlers,
    FailureOutcome,
    FindBroker,
    FlightsPulled,
    KeysListed,
    LeaseGranted,
    LeaveAncestor,
    LeaveTurn,
    MessageFailed,
    MessageHangs,
    MessagesHandled,
    MessagesReturned,
    Paused,
    Pulled,
    ReadWindow,
    Ready,
    RunEnded,
    RunSpread,
    SendChanges,
    SourceUnreadable,
    Stopped,
    TakeTurn,
    Tick,
    TurnTaken,
    WindowRead,
    WorkersFree,
    WorkWanted,
)
from keylane.consumer.session.state import LocalAcks, PartitionSession, SessionPhase, Taking
from keylane.consumer.settings import AckMode, ConsumerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.errors import FencedError, KeylaneError, UnreachableError
from keylane.protocol.frames import (
    Ack,
    Acquire,
    AcquireShared,
    ListParked,
    Pull,
    PullShared,
    Read,
    Release,
)
from keylane.protocol.groups import FailurePolicy, FullPolicy
from keylane.protocol.message import Message
from keylane.protocol.offsets import AckedOffsets
from keylane.protocol.parked import (
    Failure,
    Park,
    ParkOrDeadLetter,
    ParkState,
    hanging_failure,
    is_loose,
)
from support.session.partition_model import KEYS, PARTITION_ID, ParkedModel, PartitionModel

LEASE_MS = 10_000
GROUP = "audit"
NO_END_MS = 1 << 53
"""The end of the lease of a broadcast consumer."""
FAILURE = Failure("ValueError", "bad", "test", 1, 1)
HANG = hanging_failure("its handler has not returned", client="test", at_ms=1, attempts=0)
_BACKOFF = Backoff(first_ms=50, max_ms=400)


def settings_of(*, tries_max: int = 2, **given: Any) -> ConsumerSettings:
    return ConsumerSettings(
        ttl_ms=LEASE_MS,
        tries_max=tries_max,
        retry_tries_max=3,
        buffer_messages=6,
        max_records=4,
        in_flight_messages=6,
        in_flight_ms=3_000,
        backoff=_BACKOFF,
        handler_backoff=_BACKOFF,
        retry_backoff=_BACKOFF,
        **given,
    )


EXCLUSIVE = [
    settings_of(on_failure=policy, ack=ack)
    for policy in FailurePolicy
    for ack in (AckMode.LINGERING, AckMode.LINGERING, AckMode.EACH)
]
EXCLUSIVE += [settings_of(on_failure="park", on_full=full, tries_max=1) for full in FullPolicy] * 3
AT_MOST_ONCE = [settings_of(ack=AckMode.BEFORE)]
BROADCAST = [settings_of(broadcast=True)]
SHARED = [settings_of(on_failure=policy, consume_strategy="shared") for policy in FailurePolicy]


POOL = EXCLUSIVE * 2 + SHARED * 2 + AT_MOST_ONCE * 3 + BROADCAST * 3
"""What histories draw their settings from."""
ACTIONS_EACH = 60


def play(seed: int) -> History:
    """Play the history of a seed to its end."""
    rng = random.Random(seed)
    history = History(rng, rng.choice(POOL))
    history.play(ACTIONS_EACH)
    return history


class BrokenPromiseError(AssertionError):
    """A session has broken a promise."""


class History:
    """One history, from a generator that decides everything."""

    def __init__(self, rng: random.Random, settings: ConsumerSettings | None = None) -> None:
        self.rng = rng
        self.settings = settings or rng.choice(EXCLUSIVE)
        self.is_shared = self.settings in SHARED
        self.is_broadcast = self.settings.broadcast
        self.in_batches = rng.random() < 0.2
        is_exclusive = not (self.is_shared or self.is_broadcast)
        is_early = self.settings.ack is AckMode.BEFORE
        self.takes_many = (
            is_exclusive and not is_early and not self.in_batches and rng.random() < 0.4
        )
        """True for a program that takes several messages of a key at once."""
        self.acked = AckedOffsets()
        """What a broadcast consumer has acked."""
        is_small = rng.random() < 0.3
        self.broker = PartitionModel(
            ranges_max=1 if is_small else 1_000, keys_max=1 if rng.random() < 0.4 else 1_000
        )
        self.drawn = _DRAWN[int(rng.random() * len(_DRAWN))]
        self.keys = KEYS
        if self.in_batches and rng.random() < 0.6:
            self.drawn = _DRAWN_IN_BATCHES
            self.keys = KEYS[:2]
        elif self.takes_many and rng.random() < 0.6:
            self.drawn = _DRAWN_AT_ONCE
            self.keys = KEYS[:3]
        self.is_early = is_early
        self.broker.is_early = self.is_early
        self.is_away = rng.random() < 0.3
        """True if nothing of a source can be read that has an unreadable message."""
        self.ever: set[int] = set()
        """What any session has begun."""
        self.rejects: Callable[[Message], bool] | None = None
        if rng.random() < 0.2:
            self.rejects = _is_rejected
            self.broker.rejected = lambda offset: offset % 4 == 1
        if not (self.is_shared or self.is_broadcast) and rng.random() < 0.2:
            self.adopt()
        self.offsets_of: dict[bytes, list[int]] = defaultdict(list)
        self.now_ms = 1_000
        self.first_wanted = 0
        self.token = 0
        self.steps = 0
        self.lease_until_ms = 0
        self.in_flight_until_ms: dict[int, int] = {}
        self.is_calm = False
        dice = 1.0 if self.is_shared or self.is_broadcast else rng.random()
        if dice < 0.12:
            self.inherit_suspects()
        elif dice < 0.2:
            self.inherit_dead_letters()
        else:
            self.send()
        self.open()

    # ── the session ───────────────────────────────────────────────────────────────────────────────
    def open(self) -> None:
        """A new owner, under the next token."""
        self.token += 1
        self.own_token = self.token
        self.calls: list[Any] = []
        self.hands: dict[tuple[int, int], Message] = {}
        self.batches: list[list[Message]] = []
        """What handlers of batches have."""
        self.beginning: set[int] = set()
        """The batch that begins."""
        self.run: list[Message] = []
        self.done: set[tuple[int, int]] = set()
        self.failed: set[int] = set()
        """What failed in this session, or was handed out alone."""
        self.recorded: set[int] = set()
        """What the broker has recorded as begun."""
        self.is_paused = self.is_stopped = self.has_more = self.must_cancel = False
        self.has_turn = self.is_fenced = False
        self.suspects: set[int] = set()
        self.accused: set[int] = set()
        self.free = 0
        self.empty_read_ms = -1
        self.refused: set[int] = set()
        """Ancestors that did not want to be told; the next owner tries again."""
        self.received = 0
        """What a shared group's session was given: no more of it can have ended."""
        self.troubled: dict[int, int | None] = {}
        """What failed or hangs, and was not redriven: for how long; None: it is in no handler."""
        self.redriven_troubled: set[int] = set()
        self.careful_until_ms = 0
        self.wait_until_ms = self.now_ms
        lease = (PARTITION_ID, GROUP, f"s{self.token}", self.token)
        rng = random.Random(self.rng.getrandbits(32))
        self.session = PartitionSession(
            lease,
            self.settings,
            rng,
            epoch_ms=10**12,
            rejects=self.rejects,
            broadcast=LocalAcks(self.acked, self.rejects) if self.is_broadcast else None,
            has_ancestors=bool(self.broker.ancestors),
            taking=Taking(in_batches=self.in_batches),
        )
        self.renew()
        if self.is_shared:
            self.free_workers()

    def inherit_suspects(self) -> None:
        """Two owners have ended with the same few messages in hand."""
        broker = self.broker
        for key in (b"a", b"a", self.rng.choice(KEYS)):
            self.offsets_of[key].append(len(broker.keys))
            broker.keys.append(key)
        self.token = broker.fence = 2
        broker.is_released = False
        broker.once_to = broker.pulled_to = len(broker.keys)

    def inherit_dead_letters(self) -> None:
        """Earlier owners have set messages aside, of which the first cannot be read."""
        broker = self.broker
        for key in (*self.rng.choices(KEYS, k=6), b"b", b"b", b"b"):
            self.offsets_of[key].append(len(broker.keys))
            broker.keys.append(key)
        broker.parked[None] = ParkedModel(ParkState.PARKED, [0, 1, 2])
        broker.parked[1] = ParkedModel(ParkState.PARKED, [3, 4, 5])
        broker.parked[b"b"] = ParkedModel(ParkState.PARKED, [6, 7, 8])
        broker.acked.update(range(9))
        broker.version = 1
        broker.unreadable.update({0, 3})
        if self.rng.random() < 0.5:
            broker.adopt_loose(9, frozenset({0, 1, 2}))

    def adopt(self) -> None:
        """The partition has adopted parked keys of ancestors."""
        for source, key in zip((7, 8), self.rng.sample(KEYS[1:], 2), strict=True):
            self.broker.adopt(source, key)

    def renew(self) -> None:
        until_ms = NO_END_MS if self.is_broadcast else self.now_ms + LEASE_MS
        if self.now_ms < self.lease_until_ms or not self.session.tenure.until_ms:
            self.lease_until_ms = until_ms
        self.feed(LeaseGranted(until_ms))

    def feed(self, event: Any) -> Ready:
        """Give the session an event, and do what it says."""
        self.steps += 1
        self.is_renewal = type(event) is Tick and self.session.acks.due_ms > self.now_ms
        ready = step_module.step(self.session, event, self.now_ms)
        self.has_more = ready.has_more
        self.wait_until_ms = ready.wait_until_ms
        if ready.wait_until_ms <= self.now_ms and not self.session.has_ended:
            raise BrokenPromiseError("a timer in the past")
        for request in ready.requests:
            self._take_request(request)
        if ready.hand_out and self.in_batches:
            self._begin_batch(ready.hand_out)
        elif ready.hand_out:
            if ready.hand_out is self.session.lanes.run:
                if self.hands:
                    raise BrokenPromiseError("a run beside messages in hand")
                self.run = ready.hand_out
            else:
                self._begin_all(ready.hand_out)
        for note in ready.notes:
            if type(note) is FailureOutcome:
                self._take_back(note)
        self._check_timer()
        if self.is_broadcast:
            self._take_acks()
        return ready

    def _take_acks(self) -> None:
        """A broadcast consumer's acks are in the process."""
        broker = self.broker
        acked = {offset for offset in range(len(broker.keys)) if offset in self.acked}
        unhandled = acked - broker.handled - broker.skipped - set(range(self.first_wanted))
        if any(not broker.rejected(offset) for offset in unhandled):
            raise BrokenPromiseError(f"acked, but never handled: {unhandled}")
        broker.acked |= acked

    def _take_request(self, request: Any) -> None:
        kind = type(request)
        if kind is CancelHandlers:
            self.must_cancel = True
        elif kind is LeaveTurn:
            self.has_turn = False
        elif self.is_broadcast and kind not in {Read, FindBroker}:
            raise BrokenPromiseError(f"a broker learns of a broadcast consumer: {request}")
        elif kind is FindBroker:
            pass
        else:
            if kind is not ReadWindow and any(type(each) is kind for each in self.calls):
                raise BrokenPromiseError(f"two requests in flight: {request}")
            if kind is PullShared and request.count_max > self.free + self.received:
                raise BrokenPromiseError("more is pulled than free workers can begin")
            if kind is Release and (self.hands or self.run):
                raise BrokenPromiseError("released while a handler has a message")
            if kind is Read and self.empty_read_ms == self.now_ms:
                raise BrokenPromiseError("a read that brought nothing is repeated at once")
            if kind in {Pull, Read} and self.is_paused:
                raise BrokenPromiseError("pulled in a pause")
            if kind is Ack:
                self._check_failing(request)
                self._check_needed(request)
            if kind is SendChanges:
                self._forget_trouble(request)
            self.calls.append(request)

    def _check_failing(self, request: Ack) -> None:
        """An ack names the oldest message that fails or hangs, and none that has ended."""
        named = request.failing
        if named is None and not self.troubled:
            return
        done = {offset for _, offset in self.done}
        troubled = {
            offset
            for offset in self.troubled
            if offset not in done and not self._is_given_up(offset)
        }
        known = (troubled | self.accused | self.redriven_troubled) - done
        if named is not None and named.offset not in known:
            raise BrokenPromiseError(f"{named} is named, and does not fail")
        if self.is_shared or not troubled:
            return
        if named is None or named.source is not None or named.offset > min(troubled):
            raise BrokenPromiseError(f"{named} is named, and {troubled} fail")
        if named.offset in troubled and named.running_ms != self.troubled[named.offset]:
            raise BrokenPromiseError(f"{named} does not run for that long")

    def _forget_trouble(self, request: SendChanges) -> None:
        """What is set aside blocks nothing any more."""
        for change in request.changes:
            if isinstance(change, Park | ParkOrDeadLetter):
                for start, end in change.ranges:
                    for offset in range(start, end):
                        self.troubled.pop(offset, None)

    def _check_needed(self, request: Ack) -> None:
        """While all is acked, and a pull waits at the broker, nothing is renewed."""
        says = request.ranges or request.failed or request.begun or request.held
        says = says or request.promise_ms
        pulls = [each for each in self.calls if type(each) is Pull]
        if (
            not (pulls and self.is_renewal)
            or says
            or self.hands
            or self.run
            or self.session.intake.held
        ):
            return
        if self.session.offsets.cursor >= pulls[0].offset:
            raise BrokenPromiseError("an ack says nothing, while a pull keeps the lock")

    def _is_given_up(self, offset: int) -> bool:
        """True if a message is set aside, although the broker may not know it yet."""
        parks = self.session.parking._unstored_parks()
        ranges = [offset_range for park in parks for offset_range in park.ranges]
        is_waiting = any(start <= offset < end for start, end in ranges)
        return is_waiting or bool(self.broker.where_parked(offset))

    def _check_timer(self) -> None:
        """What is due has a timer."""
        session, slot = self.session, self.session.calls.ack
        if session.tenure.phase is not SessionPhase.SERVING or slot.is_in_flight:
            return
        due_ms = session.acks.due_ms
        is_renewed = not self.is_broadcast
        if is_renewed and (self.hands or not session.calls.pull.is_in_flight):
            due_ms = min(due_ms, session.acks.sent_ms + LEASE_MS // 3)
        due_ms = max(due_ms, slot.not_before_ms)
        if session.tenure.is_acquired and due_ms < self.wait_until_ms:
            raise BrokenPromiseError("an ack is due before the timer")

    def _begin_all(self, messages: list[Message]) -> None:
        """A worker has messages, or a program has several of a key at once."""
        if self.takes_many:
            self.beginning = {message.offset for message in messages}
        for message in messages:
            self._begin(message)
        self.beginning = set()
        self.hands.update(((each.partition_id, each.offset), each) for each in messages)

    def _take_back(self, outcome: FailureOutcome) -> None:
        """What was handed out after a failed message of its key comes back with it."""
        failed = outcome.message
        for message in outcome.returned:
            if self.hands.pop((message.partition_id, message.offset), None) is None:
                raise BrokenPromiseError(f"offset {message.offset} comes back, and was not in hand")
            self.troubled.pop(message.offset, None)
        for other in self.hands.values():
            is_later = other.key == failed.key and other.offset > failed.offset
            if self.takes_many and failed.key and is_later and not self._is_loose(failed.offset):
                raise BrokenPromiseError(f"offset {other.offset} stays in hand without its key")

    def _begin_batch(self, batch: list[Message]) -> None:
        """A handler begins with messages that have one outcome."""
        owners = self.session.redrives.owners
        offsets = [message.offset for message in batch]
        if offsets != sorted(set(offsets)) or len(batch) > self.settings.max_records:
            raise BrokenPromiseError(f"a batch of {offsets}")
        if len({owners.get((each.partition_id, each.offset)) for each in batch}) > 1:
            raise BrokenPromiseError(f"messages of several windows in one batch: {offsets}")
        self.beginning = set(offsets)
        for message in batch:
            self._begin(message)
        self.beginning = set()
        self.batches.append(batch.copy())
        self.hands.update(((each.partition_id, each.offset), each) for each in batch)

    # ── the judge ─────────────────────────────────────────────────────────────────────────────────
    def _begin(self, message: Message) -> None:
        """A handler begins with a message: may it?"""
        offset, key, broker = message.offset, message.key, self.broker
        ref = message.partition_id, offset
        if self.now_ms >= self.lease_until_ms:
            raise BrokenPromiseError(f"offset {offset} begins after the lease")
        if (self.is_stopped or self.is_paused) and not self.is_early:
            raise BrokenPromiseError(f"offset {offset} begins in a pause or a hand-over")
        if self.is_fenced:
            raise BrokenPromiseError(f"offset {offset} begins after a fence")
        if self.is_broadcast and broker.rejected(offset):
            raise BrokenPromiseError(f"row {offset} begins although its original was handled")
        where = broker.where_parked(offset)
        is_early = self.is_early and not where
        if is_early and (offset in self.ever or offset not in broker.acked):
            raise BrokenPromiseError(f"offset {offset} begins twice, or before its ack")
        self.ever.add(offset)
        if ref in self.hands:
            raise BrokenPromiseError(f"offset {offset} is in hand twice")
        if ref in self.done:
            raise BrokenPromiseError(f"offset {offset} begins again after it was handled")
        if is_early:
            return
        if self.is_shared:
            if not where:
                self._begin_shared(offset)
            return
        if offset in broker.acked and offset >= broker.first_offset and not where:
            raise BrokenPromiseError(f"offset {offset} begins although it is acked")
        # The newer half of a batch with one key is a new batch, whose try has the same number.
        is_half = self.in_batches and offset in self.failed
        if not where and message.attempt + is_half <= broker.tries.get(offset, 0):
            raise BrokenPromiseError(f"offset {offset} begins with a try that was counted before")
        if any(broker.parked[each].state is not ParkState.REDRIVING for each in where):
            states = [broker.parked[each] for each in where]
            redriven = self.session.redrives.keys.intersection(where)  # with what joins them
            is_allowed = _is_aside(where) or any(map(is_loose, redriven))
            if not any(each.token == self.own_token for each in states) and not is_allowed:
                raise BrokenPromiseError(f"offset {offset} begins while it is parked")
        if key and not any(is_loose(each) for each in where):
            self._check_order(offset, key)
        self._check_alone(offset)

    def _check_order(self, offset: int, key: bytes) -> None:
        for other in self.hands.values():
            is_beside = other.key == key and other.offset not in self.beginning
            if is_beside and not self._is_loose(other.offset):
                raise BrokenPromiseError(f"offset {offset} begins beside {other.offset} of its key")
        acks_each = self.settings.ack is AckMode.EACH
        for earlier in self.offsets_of[key]:
            if earlier >= offset:
                break
            is_done = (PARTITION_ID, earlier) in self.done
            if acks_each and is_done and earlier not in self.broker.acked:
                raise BrokenPromiseError(
                    f"offset {offset} begins before the ack of {earlier} is stored"
                )
            if earlier in self.beginning:
                continue
            if not (self.broker.is_settled(earlier) or self._goes_aside(earlier)):
                raise BrokenPromiseError(f"offset {offset} begins before {earlier} of its key")

    def _goes_aside(self, offset: int) -> bool:
        """True if the session has given a message up alone, and the broker does not know it yet."""
        return any(
            is_loose(park.key) and any(start <= offset < end for start, end in park.ranges)
            for park in self.session.parking._unstored_parks()
        )

    def _is_loose(self, offset: int) -> bool:
        return any(is_loose(key) for key in self.broker.where_parked(offset))

    def _check_alone(self, offset: int) -> None:
        if offset not in self.suspects or self.now_ms >= self.careful_until_ms:
            return
        if self.broker.where_parked(offset):
            return  # it was set aside, and is redriven
        if offset in self.failed and all(map(self._is_cleared, self.suspects)):
            return  # it has ended no process, and neither has any other one
        if self.hands or len(self.beginning) > 1:
            others = [*self.hands, *self.beginning]
            raise BrokenPromiseError(f"suspect {offset} begins beside {others}")
        if offset in self.failed:
            return  # it has ended no process
        for other in self.suspects:
            if (PARTITION_ID, other) in self.done and other not in self.broker.acked:
                raise BrokenPromiseError(
                    f"suspect {offset} begins before the ack of {other} is stored"
                )
        if offset not in self.recorded:
            raise BrokenPromiseError(f"suspect {offset} begins without a record")
        self.failed.add(offset)

    def _is_cleared(self, offset: int) -> bool:
        """True if a suspect is acked or set aside, or has begun alone and failed."""
        if self.broker.is_settled(offset) or self.broker.where_parked(offset):
            return True
        return offset in self.failed and (PARTITION_ID, offset) not in self.hands

    def _begin_shared(self, offset: int) -> None:
        until_ms = self.in_flight_until_ms.get(offset, 0)
        if self.now_ms >= until_ms - self.settings.in_flight_ms // 3:
            raise BrokenPromiseError(f"offset {offset} begins too late in its time in flight")

    def check_count(self) -> None:
        """The session counts each message that it has once."""
        session = self.session
        lanes = session.lanes
        stored = sum(end - start for each in lanes.stored for start, end in each.ranges)
        releasing = sum(map(len, session.parking.releasing.values()))
        made = len(lanes.opened) + len(lanes.extra) + len(lanes.again) + len(lanes.retries)
        made += sum(len(queue) for queue in lanes.busy.values() if queue)
        made += len(lanes.held_keyless or ())
        early = len(session.acks.awaited) if self.is_early else 0
        if lanes.batches is not None:
            made += sum(len(each.batch.messages) for each in lanes.batches.waiting)
            held = sum(len(lanes.busy[key] or ()) for key in lanes.batches.running)
            if session.tenure.is_live and held != lanes.batches.held:
                raise BrokenPromiseError(f"{lanes.batches.held} messages are held, not {held}")
            if self.is_early:
                early += lanes.batches.count_awaited - len(lanes.batches.awaited)
        suspects = session.suspects
        present = suspects.message if suspects is not None else None
        waits = 0
        if present is not None and suspects.phase.name in {"TURN", "BEGINNING"}:
            waits = 1
        have = stored + releasing + made + lanes.count_in_hand + waits + early
        if session.tenure.is_live and session.intake.held != have:
            raise BrokenPromiseError(
                f"{session.intake.held} messages are counted, and there are {have}"
            )

    # ── actions ───────────────────────────────────────────────────────────────────────────────────
    def send(self) -> None:
        if self.broker.is_sealed or len(self.broker.keys) > 30:
            return
        for _ in range(self.rng.randint(1, 5)):
            key = self.keys[int(self.rng.random() * len(self.keys))]
            self.offsets_of[key].append(len(self.broker.keys))
            self.broker.keys.append(key)

    def answer(self) -> None:
        """The broker answers one request, or does not."""
        if not self.calls:
            return
        request = self.calls.pop(int(self.rng.random() * len(self.calls)))
        dice = 1.0 if self.is_calm else self.rng.random()
        if dice < 0.08 and type(request) is not TakeTurn:  # lost on its way
            self._fail_call(request, UnreachableError("no answer"))
            return
        try:
            event = self._serve(request)
        except KeylaneError as error:
            self._fail_call(request, error)
            return
        if dice < 0.14 and type(request) is not TakeTurn:  # done, but its answer is lost
            self._fail_call(request, UnreachableError("no answer"))
        elif event is not None:
            self.feed(event)

    def _fail_call(self, request: Any, error: KeylaneError) -> None:
        if isinstance(error, FencedError) and type(request) not in {ReadWindow, LeaveAncestor}:
            self.is_fenced = True
        self.feed(CallFailed(request, error))

    def _serve(self, request: Any) -> Any:
        return _SERVE[type(request)](self, request)

    def _serve_acquire(self, _request: Any) -> Any:
        answer = self.broker.acquire(self.own_token)
        if self.is_shared:  # the broker itself hands suspects out alone
            return replace(answer, suspects_upto=0, begun=())
        if self.session.offsets.next_offset < 0:
            accused = {offset for offset, _ in answer.begun}
            self.accused = accused
            self.suspects = {*range(answer.cursor, answer.suspects_upto), *accused}
            self.careful_until_ms = self.now_ms + 30_000
        return answer

    def _serve_pull(self, request: Pull) -> Any:
        self.broker.check_token(self.own_token)
        return self._serve_read(request)

    def _serve_read(self, request: Pull | Read) -> Any:
        rng, start = self.rng, request.offset
        self.broker.pulled_to = max(self.broker.pulled_to, start)
        sizes = self.batch_sizes(rng)
        if start > self.broker.first_offset and rng.random() < 0.3:
            start -= 1  # a batch may begin below what was asked for
        batches = self.broker.batches(start, sizes)
        end = len(self.broker.keys)
        upto = batches[-1].end if batches else request.offset
        has_waited = self.now_ms - self.session.calls.pull.begun_ms > 2_000
        self.empty_read_ms = -1 if batches or has_waited else self.now_ms
        sealed = self.broker.is_sealed and upto == end
        return Pulled(batches, upto, end, sealed, self.broker.version)

    def batch_sizes(self, rng: random.Random) -> list[int]:
        return [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]

    def _serve_shared(self, request: PullShared) -> Any:
        broker, now_ms = self.broker, self.now_ms
        free = [
            offset
            for offset in range(len(broker.keys))
            if offset not in broker.acked and self.in_flight_until_ms.get(offset, 0) <= now_ms
        ][: request.count_max]
        if free and not self.is_calm and self.rng.random() < 0.1:  # another consumer is faster
            broker.acked.add(free[0])
            broker.handled.add(free[0])
            del free[0]
        for offset in free:
            self.in_flight_until_ms[offset] = now_ms + request.in_flight_ms
        batches = broker.batches(broker.first_offset, [len(broker.keys)])
        ranges = tuple((offset, offset + 1) for offset in free)
        tries = tuple((offset, broker.tries[offset]) for offset in free if offset in broker.tries)
        end, sealed = len(broker.keys), broker.is_sealed
        self.received += len(free)
        return FlightsPulled(batches, ranges, now_ms, broker.cursor, end, sealed, (), tries)

    def _serve_ack(self, request: Ack) -> Any:
        answer = self.broker.ack(self.own_token, request.ranges, request.failed, request.begun)
        self.recorded.update(offset for offset, _ in request.begun)
        for start, end in request.held:
            for offset in range(start, end):
                sent_ms = self.session.acks.sent_ms
                until_ms = sent_ms + self.settings.in_flight_ms
                known_ms = self.in_flight_until_ms.get(offset, 0)
                self.in_flight_until_ms[offset] = max(known_ms, until_ms)
        return answer

    def _serve_changes(self, request: SendChanges) -> Any:
        return self.broker.change(self.own_token, request.changes)

    def _serve_list(self, _request: ListParked) -> Any:
        self.broker.check_token(self.own_token)
        is_first = not self.session.tenure.is_acquired
        aside = self.broker.aside() if is_first else ()
        unneeded = self.broker.unneeded_ancestors()
        return KeysListed(self.broker.version, self.broker.rows(), aside, unneeded)

    def _serve_leave(self, request: LeaveAncestor) -> Any:
        """The ancestor's broker, which has a fence of its own."""
        if not self.is_calm and self.rng.random() < 0.1:
            self.refused.add(request.source)
            raise FencedError(token=self.own_token, current_token=self.own_token + 1)
        self.broker.leave(request.source)
        return AncestorLeft(request.source)

    def _serve_window(self, request: ReadWindow) -> Any:
        self.broker.check_token(self.own_token)
        parked = self.broker.parked.get(request.key)
        offsets = [] if parked is None else parked.offsets
        left: list[tuple[int, int]] = []
        if request.ranges:
            ranges = request.ranges
            offsets = [each for each in offsets if any(low <= each < high for low, high in ranges)]
        else:
            limit = dict(request.passed_over).get(PARTITION_ID, 0)
            offsets = [offset for offset in offsets if offset >= limit]
            offsets = offsets[: self.rng.randint(1, 3)]
        keys, first = self.broker.keys, self.broker.first_offset
        unreadable = [each for each in offsets if each >= first and each in self.broker.unreadable]
        if unreadable:
            if unreadable[0] == offsets[0]:
                upto = None if self.is_away else offsets[0] + 1
                return SourceUnreadable(request.number, PARTITION_ID, upto)
            if request.ranges:
                left = [(each, each + 1) for each in offsets if each >= unreadable[0]]
            offsets = [offset for offset in offsets if offset < unreadable[0]]
        gone = [(PARTITION_ID, offset, offset + 1) for offset in offsets if offset < first]
        messages = [
            Message("s", keys[offset], b"", offset, PARTITION_ID, 0)
            for offset in offsets
            if offset >= first
        ]
        return WindowRead(request.number, messages, gone, left)

    def _serve_turn(self, _request: TakeTurn) -> Any:
        self.has_turn = True
        return TurnTaken()

    def _serve_release(self, _request: Release) -> Any:
        return self.broker.release(self.own_token)

    def free_workers(self) -> None:
        """The dispatch counts its free workers."""
        self.free = self.rng.randint(-2, 4) if not self.is_calm else 4
        self.feed(WorkersFree(self.free))

    def want(self) -> None:
        count = len(self.batches if self.in_batches else self.hands)
        if self.run or count >= (6 if self.takes_many else 3) or self.must_cancel:
            return
        run = self.rng.choice((0, 0, 1, 8)) if not self.hands else 0
        if self.takes_many:
            count = self.rng.randint(1, 6)
            self.feed(WorkWanted(count, count, min(run, count), together=True))
            return
        self.feed(WorkWanted(self.rng.randint(1, 2), 1, run))

    def progress_run(self) -> None:
        """The worker goes on with its run: some messages, and perhaps one that waits."""
        run = self.run
        if not run:
            return
        done = self.rng.randint(0, len(run))
        if self.now_ms >= self.lease_until_ms or self.is_stopped or self.is_paused:
            done = 0  # the worker looks at the lease before each message
            has_next = False
        else:
            has_next = done < len(run) and self.rng.random() < 0.7
            if self.takes_many and self.rng.random() < 0.8:
                self._spread_run()
                return
        self.run = []
        for message in run[:done]:
            self._begin(message)
            self._handle(message)
        if has_next:
            message = run[done]
            self._begin(message)
            self.hands[message.partition_id, message.offset] = message
        self.feed(RunEnded(done, has_next))

    def _spread_run(self) -> None:
        """The program has the whole run, and acks or returns its messages one by one."""
        run, self.run = self.run, []
        self._begin_all(run)
        self.feed(RunSpread())

    def put_back(self) -> None:
        """A call was interrupted that would have returned messages."""
        message = self._pick() if self.takes_many else None
        if message is None:
            return
        refs = [ref for ref, other in self.hands.items() if other.key and other.key == message.key]
        later = [self.hands.pop(ref) for ref in refs if ref[1] > message.offset]
        if self.session.tenure.phase is SessionPhase.STOPPING:
            for each in (message, *later):
                self.troubled.pop(each.offset, None)
        self.feed(MessagesReturned([message, *later]))

    def _handle(self, message: Message) -> None:
        self.broker.handled.add(message.offset)
        self.done.add((message.partition_id, message.offset))

    def _pick_batch(self) -> list[Message] | None:
        if not self.batches:
            return None
        batch = self.batches.pop(int(self.rng.random() * len(self.batches)))
        for message in batch:
            del self.hands[message.partition_id, message.offset]
        return batch

    def _pick(self) -> Message | None:
        if not self.hands:
            return None
        refs = list(self.hands)
        return self.hands.pop(refs[int(self.rng.random() * len(refs))])

    def handle(self) -> None:
        if self.in_batches:
            self._handle_batch()
            return
        message = self._pick()
        if message is None:
            return
        self._handle(message)
        handled = [message]
        while self.rng.random() < 0.3 and (other := self._pick()) is not None:
            self._handle(other)
            handled.append(other)
        wanted = self.rng.randint(0, 3) if not self.must_cancel else 0
        self.feed(MessagesHandled(handled, wanted=wanted))

    def _handle_batch(self) -> None:
        batch = self._pick_batch()
        if batch is not None:
            for message in batch:
                self._handle(message)
            wanted = self.rng.randint(0, 1) if not self.must_cancel else 0
            self.feed(MessagesHandled(batch, wanted))

    def fail(self) -> None:
        message = None
        if self.in_batches:
            messages = self._pick_batch() or []
        else:
            message = self._pick()
            messages = [] if message is None else [message]
        if not messages:
            return
        is_asked = self.rng.random() < 0.2
        asked_ms = self.rng.choice((None, 0, 100)) if is_asked else None
        for each in messages:
            self.failed.add(each.offset)
            self._note_trouble(each, None)
        if message is None:
            self.feed(BatchFailed(messages, FAILURE, asked_ms, is_asked))
        else:
            self.feed(MessageFailed(message, FAILURE, asked_ms, is_asked))

    def _note_trouble(self, message: Message, running_ms: int | None) -> None:
        offset = message.offset
        if (message.partition_id, offset) in self.session.redrives.owners:
            self.redriven_troubled.add(offset)
        elif self.is_early and running_ms is None:
            self.troubled.pop(offset, None)  # it is lost
        else:
            self.troubled[offset] = running_ms

    def hang(self) -> None:
        """A handler has run for long."""
        if not self.hands:
            return
        if self.in_batches:
            message = self.batches[int(self.rng.random() * len(self.batches))][0]
        else:
            message = self.rng.choice(list(self.hands.values()))
        running_ms = self.rng.randint(1, 9) * 1_000
        self._note_trouble(message, running_ms)
        self.feed(MessageHangs(message, HANG, running_ms))

    def return_all(self) -> None:
        """Cancelled handlers end."""
        if self.must_cancel and (self.hands or self.run):
            if self.run:
                self.run = []
                self.feed(RunEnded(0))
            messages = list(self.hands.values())
            for message in messages:
                self.troubled.pop(message.offset, None)
            self.hands.clear()
            batches, self.batches = self.batches, []
            if batches:
                for batch in batches:
                    self.feed(MessagesReturned(batch))
            elif messages:
                self.feed(MessagesReturned(messages))

    def pass_time(self) -> None:
        self.now_ms += self.rng.choice((1, 5, 30, 200, 1_000, 4_000))
        self.tick()

    def tick(self) -> None:
        """The shell's timers: none is late."""
        if self.now_ms >= self.wait_until_ms:
            self.feed(Tick())
        elif self.session.tenure.is_live and self.now_ms >= self.lease_until_ms:
            raise BrokenPromiseError("no timer for the end of the lease")

    def pause(self) -> None:
        if not self.is_stopped:
            self.is_paused = not self.is_paused
            self.feed(Paused(self.is_paused))

    def operate(self) -> None:
        """An operator redrives or skips."""
        broker = self.broker
        choices = [
            key
            for key, parked in broker.parked.items()
            if parked.state is not ParkState.REDRIVING and (key is None or isinstance(key, bytes))
        ]
        if not choices:
            return
        key = self.rng.choice(choices)
        parked = broker.parked[key]
        is_handled = parked.token == self.own_token
        is_skip = isinstance(key, bytes) and bool(key) and self.rng.random() < 0.3
        if not is_skip:
            self.change_as_operator(key, is_skip=False)
        elif parked.offsets and not is_handled:
            self.change_as_operator(key, is_skip=True)

    def change_as_operator(self, key: Any, *, is_skip: bool) -> None:
        if is_skip:
            self.broker.skip(key)
        elif (
            is_loose(key)
            and self.rng.random() < 0.5
            and self.broker.parked[key].token != self.own_token
        ):
            self.broker.retry(key)
        else:
            self.broker.redrive(key)

    def remove(self) -> None:
        """Retention removes what is acked, and now and then a little more."""
        broker = self.broker
        if self.rng.random() < 0.3 and not self.is_early:
            beyond = self.rng.randint(0, 2)
            broker.remove(min(len(broker.keys), broker.cursor + beyond))

    def damage(self) -> None:
        """Messages that are independent of others cannot be read, until somebody repairs them."""
        for key, parked in self.broker.parked.items():
            if is_loose(key) and parked.offsets:
                self.broker.unreadable.add(parked.offsets[0])

    def seal(self) -> None:
        self.broker.is_sealed = True

    def stop(self) -> None:
        self.feed(Stopped(self.rng.choice((0, 500))))
        self.is_stopped = True

    def crash(self) -> None:
        """The process ends, and another one takes over after its lease."""
        self.lease_until_ms = 0
        if self.is_broadcast and not self.session.has_ended:
            self.begin_at_the_end()
        for offset in self.in_flight_until_ms:
            self.in_flight_until_ms[offset] = 0
        self.open()

    def begin_at_the_end(self) -> None:
        """Nothing is stored of a broadcast consumer: another process begins with later messages."""
        self.first_wanted = end = len(self.broker.keys)
        self.broker.skipped.update(set(range(end)) - self.broker.handled)
        self.acked = AckedOffsets(end)

    def fence(self) -> None:
        """Another owner has come and gone, without a trace but its token."""
        self.token += 1
        self.broker.fence = self.token
        self.broker.is_released = True
        self.broker.forget_suspects()

    def replace_ended(self) -> None:
        """A session that has ended is followed by another."""
        if self.session.tenure.phase is SessionPhase.STOPPING:
            self.is_stopped = True
        if self.session.tenure.fence is not None and not self.is_fenced:
            raise BrokenPromiseError("handed over without a fence")
        if self.session.has_ended:
            if self.hands or self.run:
                raise BrokenPromiseError("ended while a handler has a message")
            self.crash()

    # ── a whole history ───────────────────────────────────────────────────────────────────────────
    def act(self) -> None:
        """One random action."""
        getattr(self, self.drawn[int(self.rng.random() * len(self.drawn))])()
        self.replace_ended()

    def play(self, count: int) -> None:
        """Random actions, and then the end, at which everything is handled."""
        for _ in range(count):
            self.act()
        self.check_count()
        self.heal()

    def heal(self) -> None:
        """Everything works now: each message must be handled, and nothing is left over."""
        self.is_calm = True
        self.broker.ranges_max = self.broker.keys_max = 1_000
        if self.is_paused:
            self.pause()
        self.free_workers()
        for count in range(400):
            if self.broker.unreadable:
                self._repair(is_late=count > 200)
            self._heal_once()
            if self.broker.is_sealed and self.session.is_drained:
                self.check_count()
                self._check_complete()
                return
            if self._is_done():
                self.seal()
        raise BrokenPromiseError(f"not done: {self._undone()}")

    def _repair(self, *, is_late: bool) -> None:
        """Repair what cannot be read, once nothing waits beside it that can be."""
        broker = self.broker
        waits = any(
            offset not in broker.unreadable and offset not in broker.handled
            for key, parked in broker.parked.items()
            if is_loose(key)
            for offset in parked.offsets
        )
        if self.is_away or not waits:
            broker.unreadable.clear()
        elif is_late:
            raise BrokenPromiseError("messages wait for one that cannot be read")

    def _heal_once(self) -> None:
        """Do all that can be done, and let time pass."""
        self.replace_ended()
        self.is_stopped = self.is_stopped and not self.session.tenure.is_live
        for key, parked in list(self.broker.parked.items()):
            if parked.state is not ParkState.REDRIVING and (key is None or isinstance(key, bytes)):
                self.change_as_operator(key, is_skip=False)
        has_acted = False
        for _ in range(len(self.calls)):
            if self.calls:
                self.answer()
                has_acted = True
        if self.must_cancel:
            self.return_all()
        while self.run or self.hands:
            has_acted = True
            if self.run:
                self.progress_run()
            else:
                self.handle()
        if self.has_more and not self.run:
            before = len(self.broker.handled)
            self.want()
            has_acted = has_acted or bool(self.run or self.hands) or before > 0
        if not has_acted or self.rng.random() < 0.3:
            self.now_ms = max(self.now_ms + 1, min(self.wait_until_ms, self.now_ms + 3_000))
            self.tick()
            if self.session.tenure.is_live and self.now_ms < self.lease_until_ms:
                self.renew()

    def _is_done(self) -> bool:
        """True if all is handled; of a partition that is sealed, its children have the rest."""
        undone = self._undone()
        left = undone["not handled"] or undone["parked"]
        is_at_end = self.session.offsets.cursor == len(self.broker.keys)
        untold = set(self.broker.unneeded_ancestors()) - self.refused
        return is_at_end and not left and not untold

    def _check_complete(self) -> None:
        """Nothing is lost: what no handler has handled is parked, or was skipped."""
        broker = self.broker
        missing = set(range(len(broker.keys))) - broker.handled - broker.skipped
        missing = {offset for offset in missing if not broker.rejected(offset)}
        if self.is_early:
            return
        if lost := {offset for offset in missing if not broker.where_parked(offset)}:
            raise BrokenPromiseError(f"lost: {lost}")

    def _undone(self) -> dict[str, Any]:
        broker = self.broker
        every = set(range(len(broker.keys)))
        return {
            "not handled": every - broker.handled - broker.skipped - broker.acked,
            "not acked": every - broker.acked,
            "parked": broker.parked,
            "phase": self.session.tenure.phase,
            "calls": self.calls,
        }


def _is_rejected(message: Message) -> bool:
    return message.offset % 4 == 1


def _is_aside(where: list[Any]) -> bool:
    return any(isinstance(key, int) for key in where)


_SERVE: dict[type, Callable[[History, Any], Any]] = {
    Acquire: History._serve_acquire,
    AcquireShared: History._serve_acquire,
    Pull: History._serve_pull,
    Read: History._serve_read,
    PullShared: History._serve_shared,
    Ack: History._serve_ack,
    SendChanges: History._serve_changes,
    ListParked: History._serve_list,
    ReadWindow: History._serve_window,
    LeaveAncestor: History._serve_leave,
    TakeTurn: History._serve_turn,
    Release: History._serve_release,
}

ACTIONS: list[tuple[int, Callable[[History], None]]] = [
    (30, History.answer),
    (14, History.want),
    (14, History.progress_run),
    (14, History.handle),
    (7, History.fail),
    (7, History.pass_time),
    (4, History.send),
    (3, History.renew),
    (3, History.operate),
    (3, History.return_all),
    (2, History.hang),
    (2, History.free_workers),
    (1, History.pause),
    (1, History.remove),
    (1, History.seal),
    (1, History.damage),
    (1, History.stop),
    (1, History.crash),
    (1, History.fence),
    (1, History.put_back),
]
MORE: tuple[list[tuple[int, Callable[[History], None]]], ...] = (
    [],
    [],
    [(20, History.fail), (15, History.operate), (10, History.answer), (6, History.damage)],
    [(6, History.crash), (20, History.answer)],
)
"""What some histories have more of."""
IN_BATCHES = [(20, History.fail), (20, History.want), (8, History.pass_time), (4, History.send)]
AT_ONCE = [*IN_BATCHES, (10, History.progress_run), (4, History.put_back), (4, History.operate)]


def _drawn(more: list[tuple[int, Callable[[History], None]]]) -> list[str]:
    return [act.__name__ for weight, act in (*ACTIONS, *more) for _ in range(weight)]


_DRAWN = list(map(_drawn, MORE))
_DRAWN_IN_BATCHES = _drawn(IN_BATCHES)
_DRAWN_AT_ONCE = _drawn(AT_ONCE)
