"""Bugs of leases that outlive the database."""

from __future__ import annotations

from typing import Any

from keylane.broker import service as broker_service
from keylane.broker.partition import pull_lock
from keylane.broker.store import store as broker_store
from keylane.consumer.session import calls
from keylane.consumer.session.offsets import NEVER
from keylane.consumer.session.state import Tenure
from keylane.metaserver.sql import clock_restart
from sim.actors import hosts
from sim.mutants.mutant import Breaks, Patches


def consumers_ask_for_no_promise(patches: Patches) -> None:
    """A lease ends at the consumer when its heartbeats fail."""
    patches.set(calls, "_promise_due_ms", lambda session: NEVER)


def no_time_is_given_back(patches: Patches) -> None:
    """Sessions end while no metaserver could renew them."""

    def give(connection: Any, *, away_ms: int | None, broker_ttl_ms: int) -> int:
        return 0

    patches.set(hosts, "give_time_back", give)


def each_start_gives_time_back_in_full(patches: Patches) -> None:
    """A metaserver that is started again and again keeps dead sessions and brokers."""

    def store(connection: Any, table: Any, row: dict[str, Any]) -> None:
        if row["name"] != clock_restart.GIVEN_BACK:
            real(connection, table, row)

    real = patches.set(clock_restart, "insert_or_replace", store)


def promised_owners_are_passed_over(patches: Patches) -> None:
    """A higher token is let in at once, though the owner has a promise."""

    def left(lock: Any, *, now_ms: int, opened_ms: int) -> int:
        return 0

    patches.set(broker_store, "promise_left_ms", left)


def starts_forget_promises(patches: Patches) -> None:
    """A broker that was started again lets anybody in."""

    def left(lock: Any, *, now_ms: int, opened_ms: int) -> int:
        return 0 if lock.released else max(0, lock.promised_until_ms - now_ms)

    patches.set(broker_store, "promise_left_ms", left)


def waiting_tokens_end_no_promise(patches: Patches) -> None:
    """An owner that no metaserver hears keeps its partitions for ever."""

    def decide(lock: Any, *, token: int, wanted_ms: int, now_ms: int) -> int:
        lock.waiting_token = 0
        return real(lock, token=token, wanted_ms=wanted_ms, now_ms=now_ms)

    real = pull_lock.decide_promise
    patches.set(broker_service, "decide_promise", decide)


def promises_revive_leases(patches: Patches) -> None:
    """A promise whose answer was late extends a lease that has ended."""

    def extend(self: Any, until_ms: int, now_ms: int) -> None:
        self.until_ms = max(self.until_ms, until_ms, now_ms + 500)

    patches.set(Tenure, "extend", extend)


BREAKS: tuple[Breaks, ...] = (
    consumers_ask_for_no_promise,
    no_time_is_given_back,
    each_start_gives_time_back_in_full,
    promised_owners_are_passed_over,
    starts_forget_promises,
    waiting_tokens_end_no_promise,
    promises_revive_leases,
)
