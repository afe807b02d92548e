"""Counts the anomalies that are found in a run. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

ANOMALIES = (
    "lost",
    "phantom",
    "duplicate",
    "inversion",
    "skip",
    "nonmonotonic",
    "stale effect",
    "late start",
    "duplicate token",
    "two grants",
    "starvation",
    "silent loss",
)
ORDER_ANOMALIES = ("inversion", "skip", "nonmonotonic", "duplicate token", "two grants")
EXAMPLES_MAX = 5
"""The maximum number of examples of each anomaly."""


@dataclass(slots=True)
class Findings:
    """The number of occurrences of each anomaly, with a few examples."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ANOMALIES, 0))
    examples: list[str] = field(default_factory=list)

    def note(self, anomaly: str, example: str, *, count: int = 1) -> None:
        """Count an anomaly, and keep its first EXAMPLES_MAX examples."""
        if self.counts[anomaly] < EXAMPLES_MAX:
            self.examples.append(f"{anomaly}: {example}")
        self.counts[anomaly] += count

    @property
    def total(self) -> int:
        """The total number of anomalies."""
        return sum(self.counts.values())

    @property
    def order_violations(self) -> int:
        """The number of anomalies that violate the order of messages."""
        return sum(self.counts[anomaly] for anomaly in ORDER_ANOMALIES)
