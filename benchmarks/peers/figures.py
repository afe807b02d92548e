"""The figures of `make bench-peers`: what they are, medians, which peers count, ratios. Pure."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from peers.durability import Durability

OURS = "keylane"
Medians = Mapping[str, Mapping[str, float]]
"""System → figure → median."""


class Against(enum.StrEnum):
    """What an aim is compared with."""

    ANY = "any"
    """The best peer with the same or weaker durability."""
    SAME = "same"
    """The best peer with the same durability."""
    ITSELF = "itself"
    """The figure itself."""


@dataclass(frozen=True)
class Figure:
    """What is measured, and what it should reach; ratios are above 1 where keylane is ahead."""

    what: str
    unit: str = ""
    lower: bool = False
    """True if a lower value is better."""
    peer: str = ""
    """The figure of peers that it is compared with; "": the same one."""
    aim: float | None = None
    against: Against = Against.ANY
    compared: bool = True
    """False for a ratio of a system's own figures, which says nothing of who is faster."""

    def ahead(self, value: float, other: float) -> float:
        """Return the ratio by which a value is better than another; above 1 if it is better."""
        better, worse = (other, value) if self.lower else (value, other)
        return better / worse if worse else float("inf")


A_SECOND, MS, US, MB, MB_S, S = "a second", "ms", "µs", "MB", "MB/s", "s"

FIGURES = {
    "sent_per_s": Figure("sent, every receipt awaited", A_SECOND, aim=2.5),
    "sent_all_per_s": Figure("sent, `send_all`", A_SECOND, peer="sent_per_s", aim=2.5),
    "sent_arrow_per_s": Figure("sent, Arrow batches (`send_arrow`)", A_SECOND, peer="sent_per_s"),
    "handled_per_s": Figure("handled, a coroutine a message", A_SECOND, aim=0.65),
    "handled_batch_per_s": Figure(
        "handled, a batch handler (`max_records=500`)", A_SECOND, peer="handled_per_s", aim=1
    ),
    "handled_arrow_per_s": Figure("handled, Arrow batches", A_SECOND, peer="handled_per_s"),
    "both_per_s": Figure("sent and handled at once", A_SECOND, aim=2),
    "producer_cpu_us": Figure("producer, processor time a message", US, lower=True),
    "producer_all_cpu_us": Figure("producer, `send_all`", US, lower=True, peer="producer_cpu_us"),
    "producer_arrow_cpu_us": Figure(
        "producer, Arrow batches", US, lower=True, peer="producer_cpu_us"
    ),
    "send_broker_cpu_us": Figure("servers while sending, a message", US, lower=True),
    "consumer_cpu_us": Figure("consumer, a coroutine a message", US, lower=True),
    "consumer_batch_cpu_us": Figure(
        "consumer, a batch handler", US, lower=True, peer="consumer_cpu_us", aim=1
    ),
    "consumer_arrow_cpu_us": Figure(
        "consumer, Arrow batches", US, lower=True, peer="consumer_cpu_us"
    ),
    "handle_broker_cpu_us": Figure("servers while handling, a message", US, lower=True),
    "single_p50_ms": Figure(
        "a single send to its ack, p50", MS, lower=True, aim=1, against=Against.SAME
    ),
    "single_p99_ms": Figure("a single send to its ack, p99", MS, lower=True),
    "steady_5000_p50_ms": Figure(
        "send to handler at 5,000/s, p50", MS, lower=True, aim=1, against=Against.SAME
    ),
    "steady_5000_p99_ms": Figure(
        "send to handler at 5,000/s, p99", MS, lower=True, aim=1, against=Against.SAME
    ),
    "steady_5000_cpu_us": Figure(
        "processor time a message of all processes, 5,000/s",
        US,
        lower=True,
        aim=100,
        against=Against.ITSELF,
    ),
    "steady_500_p50_ms": Figure("send to handler at 500/s, p50", MS, lower=True),
    "steady_500_p99_ms": Figure("send to handler at 500/s, p99", MS, lower=True),
    "steady_500_cpu_us": Figure(
        "processor time a message of all processes, 500/s",
        US,
        lower=True,
        aim=1,
        against=Against.SAME,
    ),
    "kib_sent_mb_s": Figure("values of 1 KiB, sent", MB_S),
    "kib_handled_mb_s": Figure("values of 1 KiB, handled", MB_S),
    "partitions_sent_per_s": Figure("64 partitions, sent", A_SECOND),
    "partitions_handled_per_s": Figure("64 partitions, handled, a coroutine a message", A_SECOND),
    "partitions_sent_ratio": Figure(
        "64 partitions by 4, sent", aim=0.8, against=Against.ITSELF, compared=False
    ),
    "partitions_handled_ratio": Figure(
        "64 partitions by 4, handled", aim=0.8, against=Against.ITSELF, compared=False
    ),
    "producers_per_s": Figure("4 producers together, sent", A_SECOND),
    "producers_ratio": Figure(
        "4 producers together by one", aim=0.9, against=Against.ITSELF, compared=False
    ),
    "failover_gap_ms": Figure(
        "a leading server is killed: longest time without an ack", MS, lower=True
    ),
    "load_s": Figure("load of the client's library, once for a program", S, lower=True),
    "start_s": Figure(
        "start of 50 consumers, one after the other", S, lower=True, aim=0.5, against=Against.ITSELF
    ),
    "broker_mb": Figure("servers, peak memory", MB, lower=True),
    "producer_mb": Figure("producer, peak memory", MB, lower=True),
    "consumer_mb": Figure("consumer, peak memory", MB, lower=True),
}
"""The figures in the order of the table."""


def medians_of(turns: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the median of each figure over the turns that have it, by system."""
    medians: dict[str, dict[str, float]] = {}
    for system, rounds in turns.items():
        names = dict.fromkeys(name for figures in rounds for name in figures)
        medians[system] = {
            name: statistics.median(figures[name] for figures in rounds if name in figures)
            for name in names
        }
    return medians


def spreads_of(
    turns: Mapping[str, Sequence[Mapping[str, float]]],
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the lowest and the highest value of each figure, by system."""
    spreads: dict[str, dict[str, tuple[float, float]]] = {}
    for system, rounds in turns.items():
        names = dict.fromkeys(name for figures in rounds for name in figures)
        spreads[system] = {}
        for name in names:
            values = [figures[name] for figures in rounds if name in figures]
            spreads[system][name] = min(values), max(values)
    return spreads


def peers_to_compare(
    system: str, durabilities: Mapping[str, Durability], against: Against
) -> list[str]:
    """Return the peers that a system is compared with: those with the same or weaker durability;
    for SAME, only those with the same.
    """
    ours = durabilities[system]
    return [
        peer
        for peer, durability in durabilities.items()
        if not peer.startswith(OURS)
        and (durability == ours if against is Against.SAME else durability <= ours)
    ]


def has_full_rate(name: str, figures: Mapping[str, float]) -> bool:
    """Return False if a steady figure was measured below its requested rate, about which it says
    nothing.
    """
    words = name.split("_")
    return words[0] != "steady" or figures.get(f"steady_{words[1]}_rate", 0) >= int(words[1])


@dataclass(frozen=True)
class Best:
    """Return the best peer in a figure, and the ratio by which a system is ahead of it."""

    peer: str
    value: float
    ratio: float


def value_of(name: str, system: str, medians: Medians) -> float | None:
    """Return a system's figure; for a peer with only one way to send or handle, the figure of that
    way.
    """
    figures = medians.get(system, {})
    shown = name if system.startswith(OURS) else FIGURES[name].peer or name
    return figures.get(shown) if has_full_rate(name, figures) else None


def best_of(name: str, system: str, medians: Medians, peers: Iterable[str]) -> Best | None:
    """Return the peer that is furthest ahead in a figure; None if the system or all peers lack the
    figure.
    """
    figure = FIGURES[name]
    ours = value_of(name, system, medians)
    if ours is None:
        return None
    bests = [
        Best(peer, value, figure.ahead(ours, value))
        for peer in peers
        if (value := value_of(name, peer, medians)) is not None
    ]
    return min(bests, key=lambda best: best.ratio, default=None)


def ratios_of(
    medians: Medians, durabilities: Mapping[str, Durability], system: str = OURS
) -> dict[str, dict[str, Best]]:
    """Return the best peer for each figure, for ANY and for SAME durability."""
    if system not in durabilities:
        return {}
    ratios: dict[str, dict[str, Best]] = {}
    for name, figure in FIGURES.items():
        if not figure.compared:
            continue
        bests = {
            against.value: best
            for against in (Against.ANY, Against.SAME)
            if (
                best := best_of(
                    name, system, medians, peers_to_compare(system, durabilities, against)
                )
            )
        }
        if bests:
            ratios[name] = bests
    return ratios


def is_reached(
    name: str, medians: Medians, ratios: Mapping[str, Mapping[str, Best]]
) -> bool | None:
    """Return whether keylane reaches a figure's aim; None if there is no aim, or a value was not
    measured.
    """
    figure = FIGURES[name]
    if figure.aim is None:
        return None
    if figure.against is Against.ITSELF:
        value = medians.get(OURS, {}).get(name)
        if value is None:
            return None
        return value <= figure.aim if figure.lower else value >= figure.aim
    best = ratios.get(name, {}).get(figure.against.value)
    return None if best is None else best.ratio >= figure.aim
