"""Puts the four versions through the same trial, and prints what happened as a table.

`make compared` runs it: two workers, of which one is killed (SIGKILL) and one stands still for
longer than its lease (SIGSTOP); a customer whose orders cannot be billed until an operator repairs
something; a deploy (SIGTERM) under load. At the end every order has to be billed once, and those of
a customer in order.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from peers.systems.base import System
from peers.systems.kafka import Kafka
from peers.systems.redis import Redis

from keylane import Admin
from support.cluster import Cluster
from support.postgres import Postgres, running_postgres

HERE = Path(__file__).parent
POISON = "customer-3"
POISON_NUMBER = 5
"""The order of that customer whose currency has no rate."""
LIMIT_S = 120
STANDS_STILL_S = 15
"""Longer than the lease of 10 s that every version asks for."""


@dataclass(frozen=True)
class Size:
    """How many customers there are, and how many orders each of them places."""

    customers: int = 40
    orders: int = 25

    @property
    def total(self) -> int:
        return self.customers * self.orders

    @property
    def held_back(self) -> int:
        """The orders that wait until the operator has repaired something."""
        return self.orders - POISON_NUMBER + 1

    def lines(self, poison: str = "XAU") -> str:
        """The orders, customers in turn, as the programs read them."""
        return "".join(
            json.dumps(
                [name, number, poison if (name, number) == (POISON, POISON_NUMBER) else "EUR"]
            )
            + "\n"
            for number in range(1, self.orders + 1)
            for name in (f"customer-{each}" for each in range(self.customers))
        )


@dataclass(frozen=True)
class Outcome:
    """What a version did in the trial."""

    placed: int
    billed: int
    twice: int
    out_of_order: int
    after_kill_s: float
    """From SIGKILL of a worker until every order is billed that is not held back."""
    after_stop_s: float
    """The same from SIGSTOP of a worker."""
    parked: int
    exit_s: float
    """From SIGTERM under load until the worker has ended."""
    exit_status: int


class Version:
    """A version of the service, with its servers."""

    script: str
    has_relay = True
    python = str(HERE.parents[1] / "build" / "compared" / "bin" / "python")
    operator = "by_hand.py"

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = os.environ | environment
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a program of it, with a group of processes of its own."""
        process = subprocess.Popen(
            [self.python, *words],
            cwd=HERE,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def run(self, *words: str, text: str = "") -> str:
        """Run a command of it to its end, and return what it prints."""
        done = subprocess.run(
            [self.python, *words],
            cwd=HERE,
            env=self._environment,
            input=text,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=LIMIT_S,
        )
        return done.stdout

    def make_tables(self) -> None:
        self.run(self.operator, "tables")

    def work(self) -> subprocess.Popen[bytes]:
        return self.start(self.script, "work")

    def place(self, lines: str) -> None:
        """Place orders, while everything else runs."""
        process = self.start(self.operator, "place")
        assert process.stdin is not None
        process.stdin.write(lines.encode())
        process.stdin.close()

    def count_parked(self) -> int:
        return len(self.run(self.operator, "parked", POISON).splitlines())

    def redrive(self) -> None:
        self.run(self.operator, "redrive", POISON)

    def stop(self) -> None:
        """End what still runs."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()


class WithKeylane(Version):
    script = operator = "with_keylane.py"
    has_relay = False
    python = sys.executable

    def make_tables(self) -> None:
        super().make_tables()
        self._keylane("subject", "create", "orders", "--partitions", "4")

    def count_parked(self) -> int:
        async def read() -> int:
            async with Admin(self._environment["KEYLANE_META"]) as admin:
                return sum([key.messages async for key in admin.parked("orders", "billing")])

        return asyncio.run(read())

    def redrive(self) -> None:
        self._keylane("parked", "redrive", "orders", "billing", "--key", POISON)

    def _keylane(self, *words: str) -> None:
        self.run("-m", "keylane.cli", *words)


class WithAiokafka(Version):
    script = "with_aiokafka.py"


class WithFastStream(Version):
    script = "with_faststream.py"


class WithCelery(Version):
    script = "with_celery.py"


@contextlib.contextmanager
def keylane_server(folder: Path, _home: Path) -> Iterator[dict[str, str]]:
    with Cluster(folder) as cluster:
        yield {"KEYLANE_META": cluster.meta}


def _peer_server(
    kind: type[System], environment: Callable[[System], dict[str, str]]
) -> Callable[[Path, Path], contextlib.AbstractContextManager[dict[str, str]]]:
    @contextlib.contextmanager
    def running(folder: Path, home: Path) -> Iterator[dict[str, str]]:
        system = kind(home)
        try:
            system.start(folder)
            yield environment(system)
        finally:
            system.stop()

    return running


kafka_server = _peer_server(Kafka, lambda system: {"KAFKA": system.where["servers"]})
redis_server = _peer_server(
    Redis, lambda system: {"REDIS": f"redis://127.0.0.1:{system.where['port']}/0"}
)

VERSIONS = {
    "keylane": (WithKeylane, keylane_server),
    "aiokafka": (WithAiokafka, kafka_server),
    "FastStream": (WithFastStream, kafka_server),
    "Celery": (WithCelery, redis_server),
}


def run_trial(name: str, home: Path, folder: Path, size: Size) -> Outcome:
    """Put a version through the trial."""
    kind, server = VERSIONS[name]
    with running_postgres() as postgres, server(folder, home) as environment:
        url = postgres.url()
        database = url.partition("?")[0].rpartition("/")[2]
        if kind is not WithKeylane:
            url = url.replace("+asyncpg", "+psycopg")
        bank = folder / "bank"
        bank.mkdir()
        version = kind(environment | {"DATABASE_URL": url, "BANK": str(bank)})
        try:
            return _run(version, postgres, database, size)
        finally:
            version.stop()


def _run(version: Version, postgres: Postgres, database: str, size: Size) -> Outcome:
    def ask(statement: str) -> list[tuple[str, int]]:
        return [tuple(row) for row in postgres.execute(statement, database=database)]

    def wait_until_billed(count: int) -> None:
        until = time.monotonic() + LIMIT_S
        while (seen := ask("SELECT 'bills', count(*) FROM bills")[0][1]) < count:
            assert time.monotonic() < until, f"{seen} of {count} orders are billed"
            time.sleep(0.05)

    version.make_tables()
    ask("INSERT INTO rates VALUES ('EUR', 100)")
    if version.has_relay:
        version.start(version.script, "relay")
    first, second = version.work(), version.work()

    version.place(size.lines())
    wait_until_billed(size.total // 4)
    os.killpg(first.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    third = version.work()
    wait_until_billed(size.total - size.held_back)
    after_kill_s = time.monotonic() - killed_at
    until = time.monotonic() + LIMIT_S
    while (parked := version.count_parked()) < size.held_back:
        assert time.monotonic() < until, f"{parked} orders are parked"
        time.sleep(0.2)
    ask("INSERT INTO rates VALUES ('XAU', 7)")
    version.redrive()
    wait_until_billed(size.total)

    version.place(size.lines("EUR"))
    wait_until_billed(size.total + size.total // 4)
    os.killpg(second.pid, signal.SIGSTOP)
    stopped_at = time.monotonic()
    time.sleep(STANDS_STILL_S)
    os.killpg(second.pid, signal.SIGCONT)
    wait_until_billed(2 * size.total)
    after_stop_s = time.monotonic() - stopped_at

    version.place(size.lines("EUR"))
    wait_until_billed(2 * size.total + size.total // 4)
    ended_at = time.monotonic()
    third.send_signal(signal.SIGTERM)
    exit_status = third.wait(LIMIT_S)
    exit_s = time.monotonic() - ended_at
    wait_until_billed(3 * size.total)

    time.sleep(1)  # what would be billed twice has its chance
    bills = ask("SELECT customer, number FROM bills ORDER BY id")
    times = Counter(bills)
    last: Counter[str] = Counter()
    out_of_order = 0
    for customer, number in bills:
        out_of_order += number < last[customer]
        last[customer] = max(number, last[customer])
    return Outcome(
        placed=3 * size.total,
        billed=len(times),
        twice=sum(times.values()) - len(times),
        out_of_order=out_of_order,
        after_kill_s=round(after_kill_s, 1),
        after_stop_s=round(after_stop_s, 1),
        parked=parked,
        exit_s=round(exit_s, 1),
        exit_status=exit_status,
    )


def table_of(outcomes: dict[str, Outcome]) -> str:
    """The outcomes as a table of Markdown."""
    columns = "| | billed | twice | out of order | SIGKILL | SIGSTOP | parked, redriven | SIGTERM |"
    rows = [columns, "| --- " * 8 + "|"]
    for name, seen in outcomes.items():
        rows.append(
            f"| {name} | {seen.billed} of {seen.placed} | {seen.twice} | {seen.out_of_order} |"
            f" {seen.after_kill_s} s | {seen.after_stop_s} s | {seen.parked} |"
            f" status {seen.exit_status}, {seen.exit_s} s |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--versions", default=",".join(VERSIONS))
    options = parser.parse_args()
    outcomes = {}
    for name in options.versions.split(","):
        with tempfile.TemporaryDirectory() as folder:
            outcomes[name] = run_trial(name, options.home, Path(folder), Size())
        print(f"{name}: {outcomes[name]}", file=sys.stderr, flush=True)
    print(table_of(outcomes))


if __name__ == "__main__":
    main()
