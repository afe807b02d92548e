"""The anomalies a run can show, by name, and how often they were found.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

ANOMALIES = (
    "lost", "phantom", "duplicate", "inversion", "skip", "nonmonotonic", "stale effect",
    "late start", "duplicate token", "two grants", "starvation", "silent loss",
)  # fmt: skip
ORDER_ANOMALIES = ("inversion", "skip", "nonmonotonic", "duplicate token", "two grants")
EXAMPLES_MAX = 5
"""Examples kept of each anomaly: enough to start looking, never a flood."""


@dataclass(slots=True)
class Findings:
    """How often each anomaly was found, and a few examples."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ANOMALIES, 0))
    examples: list[str] = field(default_factory=list)

    def note(self, anomaly: str, example: str, *, count: int = 1) -> None:
        """Count an anomaly and keep its example if there are few of its kind so far."""
        if self.counts[anomaly] < EXAMPLES_MAX:
            self.examples.append(f"{anomaly}: {example}")
        self.counts[anomaly] += count

    @property
    def total(self) -> int:
        """All of them together."""
        return sum(self.counts.values())

    @property
    def order_violations(self) -> int:
        """Anomalies of order, all kinds together."""
        return sum(self.counts[anomaly] for anomaly in ORDER_ANOMALIES)
