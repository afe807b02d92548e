"""The anomalies that a run can show, and how often each was found.  Pure."""

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
"""Examples kept of each anomaly."""


@dataclass(slots=True)
class Findings:
    """How often each anomaly was found, and a few examples."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ANOMALIES, 0))
    examples: list[str] = field(default_factory=list)

    def note(self, anomaly: str, example: str, *, count: int = 1) -> None:
        """Count an anomaly; its first EXAMPLES_MAX examples are kept."""
        if self.counts[anomaly] < EXAMPLES_MAX:
            self.examples.append(f"{anomaly}: {example}")
        self.counts[anomaly] += count

    @property
    def total(self) -> int:
        """Anomalies of every kind."""
        return sum(self.counts.values())

    @property
    def order_violations(self) -> int:
        """Anomalies of order."""
        return sum(self.counts[anomaly] for anomaly in ORDER_ANOMALIES)
