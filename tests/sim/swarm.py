"""What a seed draws before it begins: the cluster's size, settings, and its own subset of faults.
Pure.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

FAULTS = (
    "consumer_crash",
    "consumer_leave",
    "consumer_suspend",
    "consumer_pause",
    "consumer_join",
    "producer_crash",
    "producer_close",
    "producer_pause",
    "broker_crash",
    "broker_power",
    "broker_torn",
    "broker_commit",
    "broker_pause",
    "broker_stall",
    "broker_flush",
    "broker_full",
    "broker_moves",
    "meta_crash",
    "meta_commit",
    "meta_power",
    "meta_pause",
    "cut_consumer_meta",
    "lost_lease",
    "cut_consumer_broker",
    "cut_broker_meta",
    "cut_producer",
    "one_way",
    "reset",
    "loss",
    "late",
    "twice",
    "ghosts",
    "wall_jump",
    "drift",
    "resize",
    "move",
    "split",
    "merge",
    "evacuate",
    "cancel",
    "cordon",
    "meta_step",
)


BAD_KEYS = 0.3
"""The number of consumers that fail at every second key until all is healed."""


@dataclass(frozen=True, kw_only=True)
class Swarm:
    """One seed's plan."""

    faults: frozenset[str]
    strict: bool
    static: bool
    """Its partitions are logic queues."""
    partitions: int
    groups: int
    consumers: int
    """Of each group."""
    producers: int
    metaservers: int
    keys: int
    messages: int
    """Of each producer."""
    pace: float
    """How long a producer waits between bursts, as a multiple: some are done early, some work to
    the end.
    """
    padding_bytes: int
    """How much longer a value may be than its name."""
    ttl_ms: int
    fault_s: float
    """How long the faulty phase lasts."""
    gap_s: float
    """Between two faults, on average."""
    delay_s: float
    disk_s: float
    """How long a broker's disk takes at most."""
    queued_bytes: int
    """What may wait for a broker's disk before it takes no more."""
    manners: dict[str, float] = field(hash=False)
    producer: dict[str, Any] = field(hash=False)
    consumer: dict[str, Any] = field(hash=False)
    broker: dict[str, Any] = field(hash=False)
    habits: frozenset[str] = frozenset()
    """What its users do; see `users.HABITS`."""


TWINS_EVERY = 6


def has_twins(seed: int) -> bool:
    """In some seeds the producers' first ids are the same: brokers have to tell them apart by what
    they send.
    """
    return seed % TWINS_EVERY == 1


COMPANY_EVERY = 7
COMPANY_SEEDS = range(1_000, 10**9)
"""Others are what they were before: mutants are known by the first, and the last ones have outboxes
or a feature.
"""


def has_company(seed: int) -> bool:
    """In some seeds a second consumer, of another group, is in each consumer's process."""
    return seed in COMPANY_SEEDS and seed % COMPANY_EVERY == 3


KEYLESS_EVERY = 13


def keyed_share(seed: int) -> float:
    """The share of messages with a key: in some seeds so small that most batches have messages
    without one too.
    """
    return 0.7 if seed in COMPANY_SEEDS and seed % KEYLESS_EVERY == 7 else 0.97


def draw(rng: random.Random) -> Swarm:
    """A plan; a quarter of all seeds have few faults, so that quiet runs are seen as well."""
    share = rng.choice((0.1, 0.3, 0.5, 0.8))
    faults = frozenset(name for name in FAULTS if rng.random() < share)
    return Swarm(
        faults=faults,
        strict=rng.random() < 0.75,
        static=rng.random() < 0.2,
        partitions=rng.choice((1, 2, 3, 4)),
        groups=rng.choice((1, 1, 1, 2)),
        consumers=rng.choice((1, 2, 2, 3)),
        producers=rng.choice((1, 1, 2)),
        metaservers=rng.choice((1, 1, 2)),
        keys=rng.choice((1, 3, 6, 12)),
        messages=rng.choice((40, 80, 120)),
        pace=rng.choice((1.0, 3.0, 6.0)),
        padding_bytes=rng.choice((0, 0, 300, 3_000)),
        ttl_ms=rng.choice((1_000, 2_000, 3_000)),
        fault_s=rng.choice((8.0, 12.0, 20.0)),
        gap_s=rng.choice((0.4, 1.0, 2.0)),
        delay_s=rng.choice((0.0005, 0.002, 0.01)),
        disk_s=rng.choice((0.004, 0.004, 0.05, 0.2)),
        manners={
            "slow": rng.choice((0.0, 0.02, 0.1)),
            "fails": rng.choice((0.0, 0.0, 0.05)),
            "by_hand": rng.choice((0.0, 0.0, 0.5)),
            "quick": rng.choice((0.0, 0.3)),
            "bad_keys": BAD_KEYS,
        },
        producer={
            "batch_count": rng.choice((1, 2, 5, 100)),
            "in_flight_max": rng.choice((1, 2, 5)),
            "linger_ms": rng.choice((0, 0, 20)),
            "call_timeout_ms": rng.choice((300, 1_000)),
            "leave_after_ms": rng.choice((300, 2_000)),
            "tries_min": rng.choice((2, 5, 10)),
            "give_up_after_ms": 4_000,
        },
        consumer={
            "concurrency": rng.choice((1, 4, 16)),
            "buffer_messages": rng.choice((4, 50, 10_000)),
            "ack_linger_ms": rng.choice((0, 20, 100)),
            "pull_bytes": rng.choice((200, 1 << 20)),
        },
        broker={
            "segment_bytes": rng.choice((4_096, 1 << 16, 1 << 20)),
            "cache_bytes": rng.choice((0, 4_096, 1 << 20)),
            "snapshot_bytes": rng.choice((4_096, 1 << 15, 1 << 28)),
        },
        queued_bytes=rng.choice((1_500, 1 << 25, 1 << 25)),
    )
