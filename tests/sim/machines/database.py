"""The metaserver's database in a simulation: SQLite in memory, the real SQL functions run in place.

A call waits, runs whole, and waits again: between the two the process may die, so that what is
committed is never told. What was committed without a sync (renewals) may be lost with the machine.
After every transaction the leases are compared with those before it: each new grant goes into the
history.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from keylane.checker.events import AcceptedLost, Granted, Replaced
from keylane.metaserver.groups.sessions import RenewalResult
from keylane.testing.machines.database import shared_connection
from keylane.testing.machines.machine import Machine
from sim.machines.promises import Claims
from support.sql.grants import Leases


class Shelf:
    """One database, used by all metaserver processes of a machine; it outlives them."""

    def __init__(
        self, machine: Machine, record: Callable[[Granted | AcceptedLost | Replaced], None]
    ) -> None:
        self._connection, self._raw, clock, empty = shared_connection()
        clock.machine = machine
        self._clock = clock
        self._machine = machine
        self._record = record
        self._raw.deserialize(empty)
        self.claims = Claims()
        self.watched = False
        """Whether the claims of consumer groups are kept."""
        self.watches_losses = False
        self.lost: set[int] = set()
        """Partitions whose loss was accepted, if `watches_losses`."""
        self.instances: dict[str, tuple[str, str, int]] | None = None
        """Session → instance, client and the end of its ttl, as the last transaction left them;
        None: they are not watched.
        """
        self.replaced_by: dict[str, str] = {}
        """Session → the one that took its place, if that began then for the first time."""
        self._begun: set[str] = set()
        """Every session with an instance that ever began."""
        self.silent: set[str] = set()
        """Clients with an instance whose session ended otherwise: it left, or was not heard for its
        ttl.
        """
        self.problems: list[str] = []
        """Grants that should not be."""
        self.boot = 0
        """The boot that the times in it belong to."""
        self._durable: bytes | None = None
        """The last durable image while there are renewals after it."""
        self._leases: Leases | None = None
        """As the last transaction left them; None if they were not read since."""

    def run(self, work: Callable[..., Any], args: Any, kwargs: Any, *, durable: bool) -> Any:
        if not durable and self._durable is None:
            self._durable = self._raw.serialize()
        raw = self._raw
        before = self._leases or Leases.read(raw.execute)
        changes = raw.total_changes
        result = self.look(work, args, kwargs)
        if durable:
            self._durable = None
        if raw.total_changes != changes:
            self._leases = Leases.read(raw.execute)
            if self.instances is not None:
                self._note_replaced(self.instances)
            for event in before.given(self._leases, now_ms=self._clock.boot_ms()):
                self._record(event)
                self._check_able(event)
        if self.watched:
            self.claims.note(raw.execute)
        if self.watches_losses:
            for (partition_id,) in raw.execute("SELECT partition_id FROM partitions WHERE lost"):
                if partition_id not in self.lost:
                    self.lost.add(partition_id)
                    self._record(AcceptedLost(partition_id))
        return result

    def _note_replaced(self, before: dict[str, tuple[str, str, int]]) -> None:
        """Note the sessions in whose place others of the same instance have come, and the clients
        of those that ended otherwise.
        """
        ask = (
            "SELECT session, instance, client, expires_at FROM sessions WHERE instance != '' "
            "ORDER BY session"
        )
        after = self.instances = {row[0]: row[1:] for row in self._raw.execute(ask)}
        come = {after[session][0]: session for session in sorted(after.keys() - before.keys())}
        for session, (instance, client, expires_at) in before.items():
            if session in after:
                continue
            if instance in come:
                self._record(Replaced(session))
                if come[instance] not in self._begun:
                    self.replaced_by[session] = come[instance]
            if instance not in come or expires_at <= self._clock.boot_ms():
                self.silent.add(client)  # the join may be the first to see that it was not heard
        self._begun.update(come.values())

    def renew(self, work: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a transaction that need not be durable; it is a fault if it renews a session that had
        ended.
        """
        asked = args[0] if isinstance(args[0], list) else []
        ended = [session for session in asked if self.left_ms(session) == 0]
        result = self.run(work, args, kwargs, durable=False)
        rows = result.rows if isinstance(result, RenewalResult) else result
        for session in ended:
            if session in rows:
                said = f"session {session[:8]} was renewed after its end"
                self._machine.loop.faults.append(said)
        return result

    def look(self, work: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._connection.begin():
            return work(self._connection, *args, **kwargs)

    def _check_able(self, event: Granted) -> None:
        """A session that is suspended is granted nothing."""
        ask = "SELECT suspended FROM sessions WHERE session = ?"
        if any(suspended for (suspended,) in self._raw.execute(ask, (event.session,))):
            self.problems.append(f"{event} goes to a suspended session")

    def ask(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """The rows of a query, as the last transaction left them."""
        return list(self._raw.execute(statement, values))

    def uneven_shares(self) -> list[str]:
        """The groups of which one live member has two leases more than another one."""
        rows = self._raw.execute(
            "SELECT g.name, COUNT(l.partition_id) FROM sessions s JOIN groups g USING (group_id) "
            "LEFT JOIN leases l ON l.group_id = s.group_id AND l.session = s.session "
            "WHERE s.expires_at > ? AND NOT s.suspended GROUP BY s.session ORDER BY g.group_id",
            (self._clock.boot_ms(),),
        )
        shares: dict[str, list[int]] = {}
        for group, share in rows:
            shares.setdefault(group, []).append(share)
        return [
            f"members of {group} have {sorted(each)} partitions"
            for group, each in shares.items()
            if max(each) - min(each) > 1
        ]

    def left_ms(self, session: str) -> int | None:
        """What a session has left; 0 if it is gone, None while the database's time has no
        meaning.
        """
        if self.boot != self._machine.boots:
            return None
        ask = "SELECT expires_at FROM sessions WHERE session = ?"
        row = self._raw.execute(ask, (session,)).fetchone()
        return 0 if row is None else max(0, row[0] - self._clock.boot_ms())

    def held_by(self, client: str) -> dict[int, str]:
        """Partition → the session of a client that has its lease."""
        ask = (
            "SELECT partition_id, session FROM leases JOIN sessions USING "
            "(session) WHERE client = ?"
        )
        return dict(self._raw.execute(ask, (client,)).fetchall())

    @property
    def drained_partitions(self) -> set[int]:
        """Partitions that some group has drained."""
        return {row[0] for row in self._raw.execute("SELECT partition_id FROM drained")}

    @property
    def pending_resets(self) -> int:
        """Live resets that have no answer yet."""
        ask = "SELECT count(*) FROM live_resets WHERE answer IS NULL"
        (count,) = self._raw.execute(ask).fetchone()
        return int(count)

    @property
    def last_reset(self) -> int:
        """The latest live reset, by number; 0: there was none."""
        (reset_id,) = self._raw.execute("SELECT max(reset_id) FROM live_resets").fetchone()
        return reset_id or 0

    @property
    def last_reset_ask(self) -> str:
        """What the latest live reset was asked to do, as JSON; "" if there was none."""
        rows = self._raw.execute("SELECT ask FROM live_resets ORDER BY reset_id DESC LIMIT 1")
        (ask,) = rows.fetchone() or ("",)
        return str(ask)

    def lose_power(self) -> None:
        """Back to what was synced."""
        if self._durable is not None:
            self._raw.deserialize(self._durable)
            self._durable = self._leases = None


class SimDatabase:
    """One metaserver process's way to the database; see
    `keylane.metaserver.sql.database.Database`.
    """

    def __init__(
        self,
        shelf: Shelf,
        rng: random.Random,
        *,
        after_commit: Callable[[], None],
        slow_s: float,
    ) -> None:
        self._shelf = shelf
        self._rng = rng
        self._after_commit = after_commit
        self._slow_s = slow_s

    async def _wait(self) -> None:
        await asyncio.sleep(self._slow_s * self._rng.random() if self._rng.random() < 0.3 else 0)

    async def write(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        await self._wait()
        result = self._shelf.run(work, args, kwargs, durable=True)
        self._after_commit()
        await self._wait()
        return result

    write_urgent = write

    async def renew(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        await self._wait()
        result = self._shelf.renew(work, args, kwargs)
        self._after_commit()
        await self._wait()
        return result

    async def read(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        await self._wait()
        result = self._shelf.look(work, args, kwargs)
        await self._wait()
        return result
