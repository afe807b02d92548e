"""In seeds from FIRST_SEED on users have a database with an outbox, and two programs that write to
it and send.

It draws from generators of its own. Programs die before any statement of theirs, before a commit
and after it, and are frozen with the lease in their hands. What was committed is sent in the order
of the commits, each once; what was rolled back never.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.pool import NullPool

from keylane.checker.events import Sent, Settled
from keylane.outbox import Outbox, OutboxSettings
from keylane.outbox.tables import OutboxTables
from keylane.protocol.errors import KeylaneError
from keylane.rpc.environment import Environment
from keylane.testing.machines.disk import Crashed
from keylane.testing.machines.loop import SimLoop
from keylane.testing.machines.network import SimNetwork
from sim.actors.clients import SUBJECT
from sim.actors.hosts import Host
from sim.actors.losing import is_losing
from sim.actors.users import Identities
from sim.copies import is_copied

if TYPE_CHECKING:
    from sim.world import World

FIRST_SEED = 10**9
PROGRAMS = 2
STEPS = 14
"""Of a transaction, at most, as far as programs die at them."""
TABLES = OutboxTables()
_numbers = itertools.count()


def has_outbox(seed: int) -> bool:
    """Whether users have an outbox in a seed; where disks are lost or are older copies, messages
    are lost.
    """
    return seed >= FIRST_SEED and not (is_losing(seed) or is_copied(seed))


class UserDatabase:
    """The users' database; it outlives their programs. Its time is the world's."""

    def __init__(self, loop: SimLoop, record: Callable[[Any], None]) -> None:
        address = f"file:/users{next(_numbers)}?vfs=memdb"

        def connect() -> sqlite3.Connection:
            raw = sqlite3.connect(address, uri=True, check_same_thread=False)
            raw.create_function("julianday", 1, lambda _now: 2_451_545.0 + loop.now / 86_400)
            return raw

        self._raw = connect()
        self._record = record
        # A program that dies takes its connection with it.
        self._engine = sa.create_engine("sqlite://", creator=connect, poolclass=NullPool)
        self._step: Callable[[], None] | None = None
        self.committed: list[bytes] = []
        self._last_id = 0
        with self._engine.begin() as connection:
            TABLES.create(connection)
        for step in ("before_cursor_execute", "commit"):
            event.listen(self._engine, step, self._before_step)

    def _before_step(self, *_args: Any) -> None:
        if self._step is not None:
            self._step()

    def transact(
        self, step: Callable[[], None], work: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a transaction; `step` is called before each statement and before the commit."""
        self._step = step
        try:
            with self._engine.begin() as connection:
                result = work(connection, *args, **kwargs)
        finally:
            self._step = None
        self._note_commit()
        return result

    def _note_commit(self) -> None:
        """What was committed counts as sent, in this order."""
        ask = "SELECT id, order_key, value FROM keylane_outbox WHERE id > ? ORDER BY id"
        for row_id, key, value in self._raw.execute(ask, (self._last_id,)).fetchall():
            self._last_id = row_id
            self._record(Sent(value, key, "outbox", len(self.committed), strict=True))
            self.committed.append(value)

    @property
    def empty(self) -> bool:
        return self._raw.execute("SELECT 1 FROM keylane_outbox").fetchone() is None

    def close(self) -> None:
        self._raw.close()


class UserHost(Host):
    """A program with an outbox: it writes bursts in transactions of its own, and sends what any
    program committed.
    """

    def __init__(
        self,
        *args: Any,
        database: UserDatabase,
        meta: list[str],
        keys: int,
        settings: dict[str, Any],
        count: int,
    ) -> None:
        super().__init__(*args)
        self._database = database
        self._meta = meta
        self._keys = [b"o%d" % number for number in range(keys)]
        self._settings = settings
        self._left = count
        """How many more messages it writes, in all its lives."""
        self._number = 0
        self._outbox: Outbox | None = None
        self.dies_at = 0
        """The step of a later transaction that is its last; 0: none."""

    @property
    def busy(self) -> bool:
        return self._left > 0

    @property
    def sends(self) -> bool:
        """True while it believes to have the lease."""
        drainer = None if self._outbox is None or not self.running else self._outbox._drainer
        return drainer is not None and drainer.token is not None

    @property
    def is_sending(self) -> bool:
        """True while it believes to have the lease, and batches are on their way."""
        drainer = None if self._outbox is None else self._outbox._drainer
        senders = [] if drainer is None else drainer.senders.values()
        return self.sends and any(sender.batches for sender in senders)

    def start(self) -> None:
        process = self.new_process()
        self.spawn(self._run(), process.context.copy())

    # ── the database ──────────────────────────────────────────────────────────────────────────────
    async def run(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        """See `keylane.outbox.database.Transactions`."""
        await self._wait()
        result = self._transact(work, *args, **kwargs)
        await self._wait()
        return result

    async def close(self) -> None:
        """See `keylane.outbox.database.Transactions`."""

    async def _wait(self) -> None:
        await asyncio.sleep(0.02 * self.rng.random() if self.rng.random() < 0.3 else 0)

    def _transact(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        left, self.dies_at = self.dies_at, 0

        def step() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._die()

        result = self._database.transact(step, work, *args, **kwargs)
        if left > 0:
            self._die()  # after the commit
        return result

    def _die(self) -> None:
        self.end(machine_down=False)
        raise Crashed("at a statement")

    # ── the user ──────────────────────────────────────────────────────────────────────────────────
    async def _run(self) -> None:
        identities = Identities(random.Random(self.rng.getrandbits(64)))
        outbox = self._outbox = Outbox(
            self._meta,
            "sqlite://",
            settings=OutboxSettings(**self._settings),
            _environment=Environment(
                network=SimNetwork(self.internet, self.process),
                clock=self.machine,
                rng=random.Random(self.rng.getrandbits(64)),
                draw_identity=identities,
            ),
            _database=self,
        )
        await outbox.__aenter__()
        rng = self.rng
        while True:
            if self._left > 0:
                await self._write(outbox)
            if rng.random() < 0.03:
                await outbox.close()
                await asyncio.sleep(rng.random())
                await outbox.__aenter__()
            await asyncio.sleep(rng.choice((0, 0.01, 0.1, 0.5, 1.0)) * rng.random())

    async def _write(self, outbox: Outbox) -> None:
        rng = self.rng
        if rng.random() < 0.2:
            with contextlib.suppress(KeylaneError, TimeoutError):
                async with asyncio.timeout(3.0):
                    await outbox.send(SUBJECT, self._value(), key=rng.choice(self._keys))
            self._left -= 1
            return
        count = rng.choice((1, 1, 2, 5, 20))
        rolled_back = rng.random() < 0.2

        def add(connection: sa.Connection) -> None:
            for _ in range(count):
                key = rng.choice(self._keys) if rng.random() < 0.97 else b""
                outbox.add_sync(connection, SUBJECT, self._value(), key=key)
            if rolled_back:
                connection.rollback()

        self._transact(add)
        self._left -= count

    def _value(self) -> bytes:
        self._number += 1
        return b"%s/%d" % (self.name.encode(), self._number)


class Outboxes:
    """The programs of a seed and what befalls them; none in seeds without an outbox."""

    def __init__(self, world: World, meta: list[str], *, present: bool) -> None:
        self._world = world
        self.hosts: list[UserHost] = []
        if not present:
            return
        self._rng = rng = random.Random(f"outboxes {world.seed}")
        self._database = UserDatabase(world.loop, world.record)
        settings = {
            "rescan_ms": rng.choice((50, 300)),
            "lease_ms": rng.choice((500, 2_000)),
            "batch_count": rng.choice((1, 2, 5, 100)),
            "in_flight_max": rng.choice((1, 2, 5, 8)),
            "read_rows": rng.choice((1, 7, 100)),
            "call_timeout_ms": rng.choice((300, 1_000)),
        }
        keys = rng.choice((1, 3, 12))
        for number in range(PROGRAMS):
            self.hosts.append(
                UserHost(
                    world.internet,
                    world._machine(f"u{number}"),
                    f"u{number}",
                    random.Random(rng.getrandbits(64)),
                    database=self._database,
                    meta=meta,
                    keys=keys,
                    settings=settings,
                    count=rng.choice((20, 60, 120)),
                )
            )

    @property
    def drained(self) -> bool:
        """Everything is written, and sent."""
        return not self.hosts or (
            not any(host.busy for host in self.hosts) and self._database.empty
        )

    async def work(self) -> None:
        """Deaths and long pauses, until the world is healed."""
        rng, loop, faults = self._rng, self._world.loop, self._world.faults
        while True:
            await asyncio.sleep(rng.choice((0.1, 0.5, 2.0)) * rng.random())
            if faults.healed:
                return
            host = rng.choice(self.hosts)
            if not host.running:
                continue
            faults.done += 1
            kind = rng.choice(("dies", "dies", "dies", "killed", "frozen", "frozen"))
            self._world.trace(f"{host.name} {kind}")
            if kind == "dies":
                host.dies_at = rng.randint(1, STEPS)
                loop.after(1.0 + rng.random(), faults.restart, host)
            elif kind == "killed":
                host.end(machine_down=rng.random() < 0.3)
                loop.after(rng.random(), faults.restart, host)
            else:
                sender = next((each for each in self.hosts if each.sends), host)
                sender.process.paused = True
                loop.after(0.3 + 4.0 * rng.random() ** 2, loop.resume, sender.process)

    def settle(self) -> None:
        """At the end every committed message is stored."""
        if self.hosts:
            for value in self._database.committed:
                self._world.record(Settled(value, "flushed"))

    def close(self) -> None:
        if self.hosts:
            self._database.close()
