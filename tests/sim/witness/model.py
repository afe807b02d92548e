"""A small model of leases that outlive the database: SQL orders the owners of one partition, and
its broker witnesses that an owner still lives. Nothing here is the product's code.

    OrderingSql        sessions, one lease with a token; a copy's standing; may be away
    WitnessFolder      a data folder: a log, what of it is synced, and what its master knows
    WitnessedConsumer  heartbeats, acquires, asks for promises, handles until its time is over

A walk is a chain of steps of STEP_MS: messages are delayed and lost, clocks drift, processes are
paused, killed and restarted, the database goes away, and a copy is promoted beside a broker that
does not know of it. After the chaos all faults end, and the walk has an ending, whose
time is judged: the owner dies, is cut off, or the database goes away.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

STEP_MS = 10
TTL_MS = 1_000
MARGIN_MS = TTL_MS // 10
HEARTBEAT_MS = TTL_MS // 4
PROMISE_MS = TTL_MS // 2
ASK_MS = TTL_MS // 6
"""How often a consumer asks for a promise once three tenths of a ttl are left of its lease."""
RETRY_MS = 100
HANDLER_MS = 60
OUTAGE_MS = TTL_MS // 4
"""A database that nobody has reached for longer than this was away."""
CHAOS_MS = 12_000
SETTLE_MS = 5 * TTL_MS
SLACK_MS = 700
"""For sweeps, retries, the network and handlers that end."""
DRIFT_PER_MILLE = 40
FAULTS_PER_STEP = 0.03
_FAULTS = (
    "database",
    "cut",
    "owner cut from SQL",
    "pause",
    "consumer",
    "broker",
    "promotion",
    "rebalance",
    "owner cut from brokers",
    "heal",
)
_NARROW = (0, 0, 4, 0, 0, 0, 0, 0, 3, 4)
"""Weights of faults after which promises run out."""  # fmt: skip
_PATHS = (
    ("c0", "sql"), ("c1", "sql"), ("sql", "brokers"), ("f0", "f1"),
    ("c0", "f0"), ("c0", "f1"), ("c1", "f0"), ("c1", "f1"),
)  # fmt: skip

MUTANTS = {
    "waiting token does not end the promise": "late",
    "waiting token is let in at once": "two owners",
    "start lets anybody in": "two owners",
    "promotion lets anybody in": "two owners",
    "promise counts from the receipt of the answer": "two owners",
    "promise is given before the copies have it": "two owners",
    "promise is answered though a higher token came in": "two owners",
    "late answer revives a lease that has ended": "two owners",
    "lock is released while a handler runs": "two owners",
    "waiting token is not let in when the promise has run out": "late",
    "nobody gets a whole ttl when the database is back": "changed hands",
    "each reconnection gives a whole ttl": "late",
    "consumer asks for no promise": "gap",
}
"""The rules that can be left out, and how each one shows."""


class FoundError(Exception):
    """A walk that broke a promise: the kind, and what was seen."""


@dataclass
class DriftingClock:
    """A boot clock that drifts within bounds."""

    rate: int
    offset: int

    def at(self, now_ms: int) -> int:
        """Return its time."""
        return self.offset + now_ms * self.rate // 1_000


@dataclass
class FenceOnDisk:
    """The fence of the group: a token, its session, and the promise of this record, or 0."""

    token: int
    session: str
    promise_ms: int = 0


@dataclass
class SessionAtSql:
    """A session at SQL."""

    consumer: int
    expires: int


class OrderingSql:
    """Orders the owners. Everything here is one database that all metaservers share."""

    def __init__(self, world: WitnessWorld) -> None:
        self.world = world
        self.clock = world.draw_clock()
        self.sessions: dict[str, SessionAtSql] = {}
        self.owner: str | None = None
        self.token = 0
        self.wanted: str | None = None
        self.version = 0
        self.away = False
        self.queued: list[tuple[Any, ...]] = []
        self.seen_ms = 0
        self.term, self.master, self.copies = 1, 0, {0, 1}

    def begin(self) -> None:
        """What each transaction does first: notice that the database was away."""
        now = self.clock.at(self.world.now)
        gap = now - self.seen_ms
        is_each = self.world.mutant == "each reconnection gives a whole ttl"
        is_back = gap > OUTAGE_MS or (is_each and self.world.rng.random() < 0.01)
        if is_back and self.world.mutant != "nobody gets a whole ttl when the database is back":
            for session in self.sessions.values():
                whole = now + TTL_MS
                session.expires = whole if is_each else min(whole, session.expires + 2 * gap)
        self.seen_ms = now

    def settle(self) -> None:
        """Free the leases of silent sessions, and grant what is free."""
        now = self.clock.at(self.world.now)
        for name in [name for name, each in self.sessions.items() if each.expires <= now]:
            del self.sessions[name]
        if self.owner not in self.sessions:
            self.owner = None
        if self.wanted not in self.sessions:
            self.wanted = None
        if self.owner is None and self.sessions:
            self.owner = self.wanted or next(iter(self.sessions))
            self.wanted = None
            self.token += 1
            self.version += 1

    def on_heartbeat(
        self, consumer: int, name: str, sent: int, joins: bool, known: int, holds: int
    ) -> None:
        """Renew or begin a session."""
        self.begin()
        now = self.clock.at(self.world.now)
        session = self.sessions.get(name)
        if session is None and joins:
            session = self.sessions[name] = SessionAtSql(consumer, now + TTL_MS)
        elif session is not None and session.expires > now:
            session.expires = now + TTL_MS
        else:
            session = None
        is_told = self.wanted is not None and known == self.version
        if session is not None and name == self.owner and is_told and holds != self.token:
            self.owner = None  # it was withdrawn before it arrived
        self.settle()
        mine = self.token if name == self.owner and self.wanted is None else 0
        self.world.send(
            ("sql", f"c{consumer}"), consumer, "on_grants", name, sent, session is not None, mine,
            self.master, self.version,
        )  # fmt: skip

    def on_release(self, name: str, token: int) -> None:
        """A lease was handed over."""
        self.begin()
        if self.owner == name and self.token == token:
            self.owner = None
        self.settle()


class WitnessFolder:
    """A data folder and its broker, as master or as copy."""

    def __init__(self, world: WitnessWorld, number: int) -> None:
        self.world, self.number = world, number
        self.clock = world.draw_clock()
        self.log: list[FenceOnDisk] = []
        self.synced = 0
        self.alive = True
        self.paused_until = 0
        self.is_master = number == 0
        self.term = 1
        self.forget()

    def forget(self) -> None:
        """What a start forgets."""
        self.released = False
        self.waiting = 0
        self.promised_until = 0
        self.waiters: list[tuple[int, Callable[[], None]]] = []
        self.copies = {0, 1}
        self.confirmed = 0
        self.asked_to_drop = -1

    def start(self, *, promoted: bool = False) -> None:
        """Open the folder: what was not synced is gone."""
        mutant = self.world.mutant
        del self.log[self.synced :]
        self.forget()
        self.copies = {self.number} if promoted else set(self.world.sql.copies)
        lets_in = mutant == ("promotion lets anybody in" if promoted else "start lets anybody in")
        if self.log and self.log[-1].promise_ms and not lets_in:
            self.promised_until = self.clock.at(self.world.now) + self.log[-1].promise_ms

    @property
    def fence(self) -> FenceOnDisk:
        """The newest fence, durable or not."""
        return self.log[-1] if self.log else FenceOnDisk(0, "")

    def append(self, record: FenceOnDisk, then: Callable[[], None]) -> None:
        """Append a record; `then` is called once it is durable on all copies that count."""
        self.log.append(record)
        self.waiters.append((len(self.log), then))

    def tick(self) -> None:
        """Sync, repeat to the copy, and answer what is durable."""
        rng, world = self.world.rng, self.world
        if rng.random() < world.diligence:
            self.synced = len(self.log)
        if not self.is_master:
            return
        other = 1 - self.number
        if rng.random() < world.diligence:
            world.send(("f0", "f1"), ("folder", other), "on_follow", self.term,
                       [FenceOnDisk(**vars(each)) for each in self.log], self.number)  # fmt: skip
        durable = self.synced
        if other in self.copies:
            durable = min(durable, self.confirmed)
        due = [then for end, then in self.waiters if end <= durable]
        self.waiters = [(end, then) for end, then in self.waiters if end > durable]
        for then in due:
            then()
        # A copy that lags is left out, and joins again, both by SQL.
        if self.waiters and other in self.copies and rng.random() < 0.02:
            world.send(("sql", "brokers"), "sql", "on_set", self.number, self.term, {self.number})
        elif other not in self.copies and self.confirmed == len(self.log) and rng.random() < 0.05:
            self.copies = {0, 1}  # counts from the proposal on
            world.send(("sql", "brokers"), "sql", "on_set", self.number, self.term, {0, 1})

    def on_follow(self, term: int, log: list[FenceOnDisk], master: int) -> None:
        """Take the log of a master, unless a newer term is known."""
        if self.is_master or term < self.term:
            return
        self.term = term
        same = 0
        while same < min(len(log), len(self.log)) and vars(log[same]) == vars(self.log[same]):
            same += 1
        self.synced = min(self.synced, same)
        self.log = log
        if self.synced == len(log):
            self.world.send(("f0", "f1"), ("folder", master), "on_confirmed", len(log))

    def on_confirmed(self, end: int) -> None:
        """The copy has synced the log up to `end`."""
        self.confirmed = min(end, len(self.log))

    def on_set_stored(self, copies: set[int]) -> None:
        """SQL has stored a smaller or larger set."""
        self.copies = set(copies)

    def on_acquire(self, consumer: int, token: int, name: str, sent: int) -> None:
        """Let a token in, or let it wait for the end of a promise."""
        world, mutant, fence = self.world, self.world.mutant, self.fence
        now = self.clock.at(world.now)
        reply = (f"f{self.number}", f"c{consumer}")
        if (
            not self.is_master
            or token < fence.token
            or (token == fence.token and name != fence.session)
        ):
            return
        if token == fence.token:
            self.answer_when_durable(
                lambda: world.send(reply, consumer, "on_acquired", token, name)
            )
            return
        is_promised = now < self.promised_until and not self.released
        if mutant == "waiting token is not let in when the promise has run out":
            is_promised = bool(self.promised_until) and not self.released
        if is_promised and mutant != "waiting token is let in at once":
            self.waiting = max(self.waiting, token)
            return
        self.released, self.promised_until = False, 0
        self.append(
            FenceOnDisk(token, name),
            lambda: world.send(reply, consumer, "on_acquired", token, name),
        )

    def answer_when_durable(self, then: Callable[[], None]) -> None:
        """Call `then` once all that is in the log is durable."""
        self.waiters.append((len(self.log), then))

    def on_ask(self, consumer: int, token: int, name: str, sent: int) -> None:
        """Promise the owner that nobody is let in, unless a higher token waits."""
        world, mutant, fence = self.world, self.world.mutant, self.fence
        reply = (f"f{self.number}", f"c{consumer}")
        if not self.is_master or (token, name) != (fence.token, fence.session) or self.released:
            return
        if self.waiting > token and mutant != "waiting token does not end the promise":
            world.send(reply, consumer, "on_wanted", token)
            return
        self.promised_until = max(self.promised_until, self.clock.at(world.now) + PROMISE_MS)
        if mutant == "promise is answered though a higher token came in":
            self.promised_until = 0

        def answer() -> None:
            world.send(reply, consumer, "on_promised", token, name, sent)

        if mutant == "promise is given before the copies have it":
            answer()
        else:
            self.append(FenceOnDisk(token, name, PROMISE_MS), answer)

    def on_release(self, token: int, name: str) -> None:
        """The owner has stopped."""
        if (token, name) == (self.fence.token, self.fence.session):
            self.released = True


class WitnessedConsumer:
    """A member of the group."""

    def __init__(self, world: WitnessWorld, number: int) -> None:
        self.world, self.number = world, number
        self.clock = world.draw_clock()
        self.alive = True
        self.paused_until = 0
        self.lives = 0
        self.begin()

    def begin(self) -> None:
        """A new process."""
        self.lives += 1
        self.sessions = 0
        self.next_session()
        self.master = 0
        self.drop()
        self.heartbeat_at = self.retry_at = self.ask_at = 0

    def next_session(self) -> None:
        """Draw another session."""
        self.sessions += 1
        self.name = f"{self.number}.{self.lives}.{self.sessions}"
        self.is_joined = False
        self.known = -1

    def drop(self) -> None:
        """Have no partition."""
        self.token = 0
        self.is_serving = False
        self.sql_until = self.promise_until = 0
        self.stops_at: int | None = None

    @property
    def until(self) -> int:
        """When its handlers have to have ended, on its own clock."""
        return max(self.sql_until, self.promise_until)

    def is_handling(self) -> bool:
        """Return True if a handler may be running now."""
        now = self.clock.at(self.world.now)
        is_up = self.alive and self.world.now >= self.paused_until
        return is_up and self.is_serving and now < self.until

    def tick(self) -> None:
        """Send what is due."""
        world = self.world
        now = self.clock.at(world.now)
        if self.token and self.until and now >= self.until:
            self.end()
        if self.stops_at is not None and now >= self.stops_at:
            self.end()
        if now >= self.heartbeat_at:
            self.heartbeat_at = now + HEARTBEAT_MS
            world.send((f"c{self.number}", "sql"), "sql", "on_heartbeat", self.number, self.name, now,
                       not self.is_joined, self.known, self.token)  # fmt: skip
        if self.token and not self.is_serving and now >= self.retry_at:
            self.retry_at = now + RETRY_MS
            self.call("on_acquire", now)
        asks = self.is_serving and self.stops_at is None and self.sql_until - now < TTL_MS * 3 // 10
        if asks and now >= self.ask_at and world.mutant != "consumer asks for no promise":
            self.ask_at = now + ASK_MS
            self.call("on_ask", now)

    def call(self, what: str, sent: int) -> None:
        """Call the broker."""
        self.world.send((f"c{self.number}", f"f{self.master}"), ("folder", self.master), what, self.number,
                        self.token, self.name, sent)  # fmt: skip

    def on_grants(
        self, name: str, sent: int, is_known: bool, token: int, master: int, version: int
    ) -> None:
        """SQL has answered a heartbeat."""
        if name != self.name:
            return
        if not is_known:
            if self.is_joined:
                self.stop(is_lost=True)
            self.next_session()
            return
        self.is_joined = True
        self.master, self.known = master, version
        if token != self.token:
            self.stop()
            if token and token <= self.retired:  # the report of its release was lost
                path = (f"c{self.number}", "sql")
                self.world.send(path, "sql", "on_release", self.name, token)
                return
            if self.token or not token:
                return
            self.token, self.sql_until = token, 0
        now = self.clock.at(self.world.now)
        is_late = self.sql_until and now >= self.until
        if self.stops_at is None and self.token and not is_late:
            self.sql_until = sent + TTL_MS - MARGIN_MS

    retired = 0

    def stop(self, *, is_lost: bool = False) -> None:
        """Hand over: no handler begins, and the running one ends."""
        if self.token and self.stops_at is None:
            self.stops_at = self.clock.at(self.world.now) + self.world.rng.randrange(HANDLER_MS)
            if self.world.mutant == "lock is released while a handler runs":
                self.release()
                self.stops_at += 2 * HANDLER_MS

    def release(self) -> None:
        """Tell broker and SQL."""
        world = self.world
        folder = ("folder", self.master)
        world.send(
            (f"c{self.number}", f"f{self.master}"), folder, "on_release", self.token, self.name
        )
        world.send((f"c{self.number}", "sql"), "sql", "on_release", self.name, self.token)

    def end(self) -> None:
        """No handler runs."""
        self.retired = max(self.retired, self.token)
        self.release()
        self.drop()

    def on_acquired(self, token: int, name: str) -> None:
        """The broker has let this token in."""
        if (token, name) == (self.token, self.name):
            self.is_serving = True

    def on_wanted(self, token: int) -> None:
        """A higher token waits."""
        if token == self.token:
            self.stop()

    def on_promised(self, token: int, name: str, sent: int) -> None:
        """Nobody else is let in for PROMISE_MS from `sent` on."""
        if (token, name) != (self.token, self.name) or not self.is_serving:
            return
        now = self.clock.at(self.world.now)
        mutant = self.world.mutant
        if mutant == "promise counts from the receipt of the answer":
            sent = now
        revives = mutant == "late answer revives a lease that has ended"
        if now < self.until or revives:
            self.promise_until = max(self.promise_until, sent + PROMISE_MS - MARGIN_MS)
            if revives:
                self.promise_until = max(self.promise_until, now + PROMISE_MS)


@dataclass
class MessageOnItsWay:
    """A message on its way."""

    at: int
    path: tuple[Any, Any]
    to: Any
    what: str
    args: tuple[Any, ...]


class WitnessWorld:
    """One walk."""

    def __init__(self, seed: int, mutant: str = "") -> None:
        self.rng = random.Random(seed)
        self.mutant = mutant
        self.now = 0
        self.messages: list[MessageOnItsWay] = []
        self.cuts: set[frozenset[Any]] = set()
        self.loss = 0.0
        self.slow = 0.0
        self.slow_ms = 2 * TTL_MS
        self.diligence = 0.6
        """How often disks sync, and copies follow, in a step."""
        self.weights = [self.rng.choice((0, 1, 4)) for _ in _FAULTS[:-1]] + [2]
        if self.rng.random() < 0.4:
            self.weights = list(_NARROW)
        self.sql = OrderingSql(self)
        self.folders = [WitnessFolder(self, 0), WitnessFolder(self, 1)]
        self.consumers = [WitnessedConsumer(self, 0), WitnessedConsumer(self, 1)]
        self.handled_steps = 0
        self.promises = self.promotions = self.outages = 0

    def draw_clock(self) -> DriftingClock:
        """Draw a clock."""
        drift = self.rng.randint(-DRIFT_PER_MILLE, DRIFT_PER_MILLE)
        return DriftingClock(1_000 + drift, self.rng.randrange(10**6))

    def send(self, path: tuple[Any, Any], to: Any, what: str, *args: Any) -> None:
        """Send a message, which may be lost or late."""
        rng = self.rng
        if frozenset(path) in self.cuts or rng.random() < self.loss:
            return
        delay = rng.randrange(5, 30)
        if rng.random() < self.slow:
            delay += rng.randrange(self.slow_ms)
        self.promises += what == "on_promised"
        self.messages.append(MessageOnItsWay(self.now + delay, path, to, what, args))

    # ── faults ────────────────────────────────────────────────────────────────────────────────────
    def disturb(self) -> None:
        """Begin or end a fault now and then."""
        rng, sql = self.rng, self.sql
        if rng.random() > FAULTS_PER_STEP:
            return
        fault = rng.choices(_FAULTS, self.weights)[0]
        if fault == "database":
            sql.away = not sql.away
            self.outages += sql.away
        elif fault == "cut":
            self.cuts ^= {frozenset(rng.choice(_PATHS))}
        elif fault == "owner cut from SQL":
            self.cuts |= {
                frozenset((f"c{each.number}", "sql")) for each in self.consumers if each.is_serving
            }
        elif fault == "owner cut from brokers":
            self.cuts |= {
                frozenset((f"c{each.number}", f"f{folder.number}"))
                for each in self.consumers
                for folder in self.folders
                if each.is_serving
            }
        elif fault == "pause":
            nodes = [*self.consumers, *self.folders]
            rng.choice(nodes).paused_until = self.now + rng.randrange(3 * TTL_MS)
        elif fault == "consumer":
            consumer = rng.choice(self.consumers)
            consumer.alive = not consumer.alive
            if consumer.alive:
                consumer.begin()
        elif fault == "broker":
            folder = rng.choice(self.folders)
            folder.alive = True
            folder.paused_until = self.now + rng.randrange(TTL_MS // 4)
            folder.start()
        elif fault == "promotion":
            self.promote()
        elif fault == "rebalance" and sql.owner is not None and not sql.away:
            others = [name for name in sql.sessions if name != sql.owner]
            if others:
                sql.wanted = rng.choice(others)
                sql.version += 1
        elif fault == "heal":
            self.cuts.clear()
            sql.away = False

    def promote(self) -> None:
        """Promote the copy, if SQL names it, although the broker may live and know nothing."""
        sql = self.sql
        copy = 1 - sql.master
        folder = self.folders[copy]
        if sql.away or copy not in sql.copies or not folder.alive or self.now < folder.paused_until:
            return
        if folder.synced < len(folder.log):
            return
        self.promotions += 1
        sql.term += 1
        sql.master, sql.copies = copy, {copy}
        folder.is_master, folder.term = True, sql.term
        folder.start(promoted=True)

    def demote(self) -> None:
        """A broker that learns of a newer term becomes a copy with the log of the other."""
        for folder in self.folders:
            is_old = folder.is_master and folder.term < self.sql.term
            is_cut = self.sql.away or frozenset(("sql", "brokers")) in self.cuts
            if is_old and folder.alive and not is_cut and self.rng.random() < 0.02:
                folder.is_master = False
                folder.forget()
                folder.log, folder.synced = [], 0

    # ── steps ─────────────────────────────────────────────────────────────────────────────────────
    def step(self) -> None:
        """Take one step, and judge it."""
        self.now += STEP_MS
        due = [each for each in self.messages if each.at <= self.now]
        self.messages = [each for each in self.messages if each.at > self.now]
        for message in due:
            self.deliver(message)
        if not self.sql.away:
            queued, self.sql.queued = self.sql.queued, []
            for what, args in queued:
                self.call_sql(what, args)
            self.sql.begin()
            self.sql.settle()
        self.demote()
        for node in (*self.folders, *self.consumers):
            if node.alive and self.now >= node.paused_until:
                node.tick()
        handling = [each.number for each in self.consumers if each.is_handling()]
        if len(handling) > 1:
            raise FoundError("two owners", f"{handling} at {self.now}")
        self.handled_steps += len(handling)

    def call_sql(self, what: str, args: tuple[Any, ...]) -> None:
        """Run a transaction."""
        sql = self.sql
        if what != "on_set":
            getattr(sql, what)(*args)
            return
        number, term, copies = args
        if (number, term) == (sql.master, sql.term):
            sql.copies = copies
            path = ("sql", "brokers")
            self.send(path, ("folder", number), "on_set_stored", copies)

    def deliver(self, message: MessageOnItsWay) -> None:
        """Give a message to its receiver."""
        if frozenset(message.path) in self.cuts:
            return
        if message.to == "sql":
            if not self.sql.away:
                self.call_sql(message.what, message.args)
            elif self.rng.random() < 0.5:  # a frozen database runs it when it is back
                self.sql.queued.append((message.what, message.args))
            return
        node: Any
        if isinstance(message.to, tuple):
            node = self.folders[message.to[1]]
        else:
            node = self.consumers[message.to]
        if not node.alive:
            return
        if self.now < node.paused_until:
            message.at = node.paused_until
            self.messages.append(message)
            return
        if message.what in {"on_acquire", "on_ask", "on_release"} and not node.is_master:
            return
        getattr(node, message.what)(*message.args)

    def heal(self) -> None:
        """End all faults."""
        self.cuts.clear()
        self.loss = self.slow = 0.0
        self.diligence = 1.0
        self.sql.away = False
        for consumer in self.consumers:
            consumer.paused_until = 0
            if not consumer.alive:
                consumer.alive = True
                consumer.begin()
        for folder in self.folders:
            folder.paused_until = 0
            if not folder.alive:
                folder.alive = True
                folder.start()

    def run_for(self, time_ms: int) -> Iterator[list[int]]:
        """Take steps, and yield who handles after each."""
        for _ in range(time_ms // STEP_MS):
            self.step()
            yield [each.number for each in self.consumers if each.is_handling()]


def walk(seed: int, mutant: str = "") -> WitnessWorld:
    """Take one walk. Raises FoundError."""
    world = WitnessWorld(seed, mutant)
    rng = world.rng
    if rng.random() < 0.7:
        world.loss, world.slow = rng.choice([0.0, 0.02, 0.2]), rng.choice([0.0, 0.05, 0.3])
    for _ in range(CHAOS_MS // STEP_MS):
        world.disturb()
        world.step()
    world.heal()
    owner: list[int] = []
    for owner in world.run_for(SETTLE_MS):  # noqa: B007  the last one counts
        pass
    if not owner:
        raise FoundError("late", f"nobody handles {SETTLE_MS} ms after the last fault")
    _ENDINGS[seed % len(_ENDINGS)](world, owner[0])
    return world


def end_with_death(world: WitnessWorld, owner: int) -> None:
    """The owner dies, and the other one handles as soon as without a witness."""
    world.consumers[owner].alive = False
    _wait_for(world, 1 - owner, TTL_MS + SLACK_MS, "the owner died")


def end_with_cut(world: WitnessWorld, owner: int) -> None:
    """The owner is cut off from SQL alone, and loses the partition all the same."""
    world.cuts.add(frozenset((f"c{owner}", "sql")))
    _wait_for(world, 1 - owner, TTL_MS + ASK_MS + SLACK_MS, "the owner was cut off from SQL")
    world.cuts.clear()


def end_with_death_after_cut(world: WitnessWorld, owner: int) -> None:
    """The owner is cut off from SQL, and dies while it lives on promises."""
    world.cuts.add(frozenset((f"c{owner}", "sql")))
    for _ in world.run_for(world.rng.randrange(TTL_MS)):
        pass
    world.consumers[owner].alive = False
    _wait_for(world, 1 - owner, TTL_MS + SLACK_MS, "the owner died while it was cut off")


def end_with_lonely_owner(world: WitnessWorld, owner: int) -> None:
    """The owner is cut off from SQL, and then from its broker, which is started again, or replaced
    by its copy: the next owner may not come too early.
    """
    rng, folder = world.rng, world.folders[world.sql.master]
    world.cuts.add(frozenset((f"c{owner}", "sql")))
    world.slow, world.slow_ms = rng.choice((0.0, 0.5)), PROMISE_MS
    for _ in world.run_for(rng.randrange(TTL_MS * 8 // 10, TTL_MS * 12 // 10)):
        pass
    world.cuts |= {frozenset((f"c{owner}", f"f{number}")) for number in (0, 1)}
    world.slow = 0.0
    what = rng.randrange(3)
    if what == 1:
        folder.start()
    elif what == 2:
        world.promote()
    _wait_for(world, 1 - owner, TTL_MS + PROMISE_MS + SLACK_MS, "the owner was left alone")


def end_with_outage(world: WitnessWorld, owner: int) -> None:
    """The database goes away, and the owner handles on, also when it is back."""
    token, gap = world.consumers[owner].token, 0
    world.sql.away = True
    for handling in world.run_for(5 * TTL_MS):
        gap = 0 if owner in handling else gap + STEP_MS
        if gap > TTL_MS // 10:
            raise FoundError("gap", f"nobody handled for {gap} ms while the database was away")
    world.sql.away = False
    for _ in world.run_for(2 * TTL_MS):
        if world.consumers[owner].token != token:
            raise FoundError("changed hands", "the owner lost its lease though it was alive")


def _wait_for(world: WitnessWorld, consumer: int, limit_ms: int, why: str) -> None:
    for handling in world.run_for(limit_ms):
        if consumer in handling:
            return
    raise FoundError("late", f"{limit_ms} ms after {why} the other one does not handle")


_ENDINGS = (
    end_with_death,
    end_with_cut,
    end_with_death_after_cut,
    end_with_lonely_owner,
    end_with_outage,
)
