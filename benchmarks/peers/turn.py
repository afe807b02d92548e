"""The takes of a system in a round, with servers of its own on an empty folder."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.child import Child
from peers.measure import busy_and_stolen_seconds, cpu_seconds, forget_peak, peak_mb
from peers.systems.base import System

Figures = dict[str, float]
TAKES = ("send", "handle", "both", "single", "steady", "kib", "partitions", "producers", "start")
COPIED_TAKES = ("failover",)
"""Takes of systems with copies only, the last ones of a turn."""
PARTITIONS = 4
MANY_PARTITIONS = 64
PRODUCERS = 4
CONSUMERS = 50
KIB = 1024
RATES = (5_000, 500)
"""Messages a second of the steady take."""
FAILOVER_S = 30.0
LOG_CHARS = 3_000


@dataclass(frozen=True)
class Sizes:
    """How large the takes are."""

    seconds: float = 4.0
    """About as long as a take of sending."""
    steady_s: float = 8.0
    singles: int = 1_000
    warm_s: float = 2.0
    """What compilers and caches see before, in seconds of sending."""


QUICK = Sizes(seconds=0.5, steady_s=4.0, singles=300, warm_s=0.5)


class Turn:
    """A started system."""

    def __init__(self, system: System, sizes: Sizes) -> None:
        self._system, self._sizes = system, sizes
        self._count = max(1, int(system.sends_per_second * sizes.seconds))
        self._children: list[Child] = []
        self._partitions: dict[str, int] = {}
        self._figures: Figures = {}

    def create(self, *topics: str, partitions: int = PARTITIONS) -> None:
        """Make topics."""
        self._system.create(topics, partitions)
        self._partitions |= dict.fromkeys(topics, partitions)

    def child(self, role: str, topic: str, count: int, **job: Any) -> Child:
        """Start a client, and return once it is connected."""
        partitions = self._partitions[topic]
        child = Child(self._system, role, topic=topic, count=count, partitions=partitions, **job)
        self._children.append(child)
        child.line()
        return child

    def warm(self) -> None:
        """Let compilers and caches see the work."""
        self.create("warm")
        count = max(1, int(self._system.sends_per_second * self._sizes.warm_s))
        self.child("send", "warm", count).end()
        self.child("consume", "warm", count + 1).end()

    def take(self, name: str) -> Figures:
        """Return the figures of one measurement."""
        pids = self._system.pids()
        forget_peak(pids)
        busy, stolen = busy_and_stolen_seconds()
        began = time.monotonic()
        figures: Figures = getattr(self, name)()
        wall_s = time.monotonic() - began
        busy_after, stolen_after = busy_and_stolen_seconds()
        figures["broker_mb"] = max(peak_mb(self._system.pids()), self._figures.get("broker_mb", 0))
        figures[f"{name}_busy_cores"] = (busy_after - busy) / wall_s
        figures[f"{name}_stolen_cores"] = (stolen_after - stolen) / wall_s
        self._figures |= figures
        return figures

    def end(self) -> None:
        """End all of it."""
        for child in self._children:
            child.kill()
        self._system.stop()

    # ── takes ──
    def _measure_send(self, topic: str, count: int, **job: Any) -> dict[str, Any]:
        """Return a producer's figures, with the processor time per message of the producer and the
        servers.
        """
        pids = self._system.pids()
        used = cpu_seconds(pids)
        sent = self.child("send", topic, count, **job).end()
        sent["broker_us"] = (cpu_seconds(pids) - used) / count * 1e6
        return sent | {
            "per_s": count / (sent["ended"] - sent["began"]),
            "us": sent["cpu"] / count * 1e6,
        }

    def _measure_handle(self, topic: str, count: int, **job: Any) -> dict[str, Any]:
        """Return a consumer's figures, as `_sent` does; the producer's first message is not
        counted.
        """
        pids = self._system.pids()
        used = cpu_seconds(pids)
        handled = self.child("consume", topic, count + 1, **job).end()
        handled["broker_us"] = (cpu_seconds(pids) - used) / count * 1e6
        return handled | {
            "per_s": count / (handled["last"] - handled["first"]),
            "us": handled["cpu"] / count * 1e6,
        }

    def send(self) -> Figures:
        """First send to last ack, in each way that the system has."""
        figures: Figures = {}
        for sender in self._system.senders:
            suffix = "" if sender == "each" else f"_{sender}"
            topic = "apart" if sender == "each" else f"apart-{sender}"
            self.create(topic)
            sent = self._measure_send(topic, self._count, sender=sender)
            figures |= {
                f"sent{suffix}_per_s": sent["per_s"],
                f"producer{suffix}_cpu_us": sent["us"],
                f"send{suffix}_broker_cpu_us": sent["broker_us"],
                f"producer{suffix}_mb": sent["peak_mb"],
            }
        return figures

    def handle(self) -> Figures:
        """Measure the handling of a backlog, in each way that the system has."""
        if "apart" not in self._partitions:
            self.send()
        figures: Figures = {}
        for handler in self._system.handlers:
            handled = self._measure_handle("apart", self._count, handler=handler)
            suffix = "" if handler == "each" else f"_{handler}"
            figures |= {
                f"handled{suffix}_per_s": handled["per_s"],
                f"consumer{suffix}_cpu_us": handled["us"],
                f"handle{suffix}_broker_cpu_us": handled["broker_us"],
                f"consumer{suffix}_mb": handled["peak_mb"],
            }
        return figures

    def both(self) -> Figures:
        """First send to last message handled, at once."""
        self.create("both")
        consumer = self.child("consume", "both", self._count + 1)
        time.sleep(1)  # it waits for messages
        sent = self.child("send", "both", self._count).end()
        handled = consumer.end()
        return {"both_per_s": self._count / (handled["last"] - sent["began"])}

    def single(self) -> Figures:
        """Send to ack, each after the one before."""
        self.create("single")
        took = self.child("single", "single", self._sizes.singles).end()
        return {"single_p50_ms": took["p50_ms"], "single_p99_ms": took["p99_ms"]}

    def steady(self) -> Figures:
        """Send to handler at a fixed rate, and the processor time of all processes."""
        figures: Figures = {}
        for asked in RATES:
            name, topic = f"steady_{asked}", f"steady-{asked}"
            self.create(topic)
            rate = min(asked, self._system.sends_per_second // 2)
            count = int(rate * self._sizes.steady_s)
            consumer = self.child("consume", topic, count + 1, rate=rate)
            time.sleep(1)
            pids = self._system.pids()
            used = cpu_seconds(pids)
            sent = self.child("steady", topic, count, rate=rate).end()
            handled = consumer.end()
            spent = sent["cpu"] + handled["cpu"] + cpu_seconds(pids) - used
            figures |= {
                f"{name}_p50_ms": handled["p50_ms"],
                f"{name}_p99_ms": handled["p99_ms"],
                f"{name}_cpu_us": spent / count * 1e6,
                f"{name}_rate": rate,
                f"{name}_late_s": sent["late_s"],
            }
        return figures

    def kib(self) -> Figures:
        """Values of 1 KiB."""
        self.create("kib")
        count = max(1, self._count // 4)
        sent = self._measure_send("kib", count, size=KIB)
        handled = self._measure_handle("kib", count, size=KIB)
        mb = KIB / 1e6
        return {
            "kib_sent_mb_s": sent["per_s"] * mb,
            "kib_handled_mb_s": handled["per_s"] * mb,
            "kib_producer_cpu_us": sent["us"],
            "kib_broker_cpu_us": sent["broker_us"],
        }

    def partitions(self) -> Figures:
        """64 partitions, by the rates of 4 in the same turn."""
        four = self._figures if "sent_per_s" in self._figures else self.send()
        if "handled_per_s" not in four:
            four = four | self.handle()
        self.create("many", partitions=MANY_PARTITIONS)
        sent = self._measure_send("many", self._count)
        handled = self._measure_handle("many", self._count)
        return {
            "partitions_sent_per_s": sent["per_s"],
            "partitions_handled_per_s": handled["per_s"],
            "partitions_sent_ratio": sent["per_s"] / four["sent_per_s"],
            "partitions_handled_ratio": handled["per_s"] / four["handled_per_s"],
        }

    def producers(self) -> Figures:
        """Measure 4 producers together, and one producer in the same turn."""
        alone = self._figures if "sent_per_s" in self._figures else self.send()
        self.create("together")
        share = max(1, self._count // PRODUCERS)
        children = [self.child("send", "together", share, gated=True) for _ in range(PRODUCERS)]
        for child in children:
            child.open_gate()
        sent = [child.end() for child in children]
        began, ended = min(each["began"] for each in sent), max(each["ended"] for each in sent)
        per_s = share * PRODUCERS / (ended - began)
        return {"producers_per_s": per_s, "producers_ratio": per_s / alone["sent_per_s"]}

    def failover(self) -> Figures:
        """Kill the server that leads a part of the topic while one message after another is sent.
        Nothing starts it again.
        """
        self.create("failover")
        producer = self.child("watch", "failover", 0, seconds=FAILOVER_S)
        time.sleep(FAILOVER_S / 8)
        self._system.kill_leader("failover")
        watched = producer.end()
        return {"failover_gap_ms": watched["gap_ms"], "failover_errors": watched["errors"]}

    def start(self) -> Figures:
        """50 consumers of a process, each of its own topic and group, opened one after the
        other.
        """
        topics = [f"start-{number}" for number in range(CONSUMERS)]
        self.create(*topics)
        started = self.child("start", topics[0], 0, topics=topics).end()
        return {
            "load_s": started["load"],
            "start_s": started["seconds"],
            "start_cpu_s": started["cpu"],
        }


def turn_of(
    system: System, takes: tuple[str, ...], sizes: Sizes, data: str | None
) -> tuple[Figures, dict[str, str]]:
    """Return the figures of a system's turn, and the failures; a failed measurement does not stop
    the others.
    """
    figures: Figures = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(
        prefix="peers-", dir=data, ignore_cleanup_errors=True
    ) as folder:
        turn = Turn(system, sizes)
        try:
            system.start(Path(folder))
            turn.warm()
            for take in takes:
                try:
                    figures |= turn.take(take)
                except Exception as error:  # noqa: BLE001 - told, and the others go on
                    failed[take] = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - told, and the others go on
            failed["start"] = f"{type(error).__name__}: {error}"
            for log in Path(folder).glob("*.log"):
                print(log.name, log.read_text(errors="replace")[-LOG_CHARS:], file=sys.stderr)
        finally:
            turn.end()
    return figures, failed
