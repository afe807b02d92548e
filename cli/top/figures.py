"""The figures that the screen takes from a server's metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[str, ...]
_LABELS: Mapping[str, tuple[str, ...]] = {
    "keylane_broker_stored_messages_total": ("subject",),
    "keylane_broker_stored_bytes_total": ("subject",),
    "keylane_broker_handed_messages_total": ("subject",),
    "keylane_broker_copy_lag_bytes": ("copy",),
    "keylane_broker_disk_bytes": (),
    "keylane_broker_disk_free_bytes": (),
    "keylane_broker_partitions": (),
    "keylane_group_lag_messages": ("subject", "group"),
    "keylane_group_lag_seconds": ("subject", "group"),
    "keylane_group_parked_messages": ("subject", "group"),
    "keylane_group_sessions": ("subject", "group"),
}
"""Maps each metric that is taken to the labels that are kept of it."""
_PREFIXES = tuple(_LABELS)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one server has said at one moment."""

    at_s: float
    """The time of this machine, by a clock that never goes back."""
    values: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)
    """Maps the name of each metric to its values by labels."""

    def of(self, name: str) -> Mapping[Labels, float]:
        """Return a metric's values by labels."""
        return self.values.get(name, {})

    def one(self, name: str) -> float | None:
        """Return the value of a metric without labels; None if there is none."""
        return self.of(name).get(())


def read_figures(text: str, *, at_s: float) -> Figures:
    """Return the figures in the text of a server's metrics. Raises ValueError."""
    values: dict[str, dict[Labels, float]] = {}
    # The parser takes a millisecond for 50 lines, of which most are of no use here.
    wanted = "\n".join(line for line in text.splitlines() if line.startswith(_PREFIXES))
    for family in text_string_to_metric_families(f"{wanted}\n"):
        for sample in family.samples:
            labels = _LABELS.get(sample.name)
            if labels is not None:
                key = tuple(sample.labels.get(label, "") for label in labels)
                values.setdefault(sample.name, {})[key] = sample.value
    return Figures(at_s, values)
