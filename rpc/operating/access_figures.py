"""The metrics of access control: waits for quotas, connections of principals, and the audit log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from ..access.audit_buffer import AuditBuffer
from ..access.guard import Guard
from .metrics import Labels, counter, gauge, labelled, largest

if TYPE_CHECKING:
    from prometheus_client import Metric


def access_figures(guard: Guard, audit: AuditBuffer) -> Callable[[], Awaitable[Iterable[Metric]]]:
    """Return a collector of the metrics of one server's access control."""

    async def collect() -> Iterable[Metric]:
        pacing = guard.pacing
        waited: dict[Labels, float] = {
            (("principal", name),): ms / 1000 for name, ms in pacing.waited_ms.items()
        }
        open_now: dict[Labels, float] = {
            (("principal", name),): n for name, n in pacing.connections.items()
        }
        return [
            labelled(
                "keylane_throttled_seconds_total",
                "Seconds that calls of a principal have waited for its quota.",
                largest(waited),
                counts=True,
            ),
            labelled(
                "keylane_principal_connections",
                "Open connections of the data plane by principal.",
                largest(open_now),
            ),
            gauge("keylane_audit_waiting", "Events of the audit log not stored yet.", len(audit)),
            counter(
                "keylane_audit_lost_total", "Events of the audit log without room.", audit.lost
            ),
            counter(
                "keylane_audit_left_out_total",
                "Refusals and reads without a line in the audit log, because there are too many.",
                guard.refusals.left_out + guard.reads.left_out,
            ),
        ]

    return collect
