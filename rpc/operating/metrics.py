"""The metrics of a server, in Prometheus's text format.

    parts of the program ─▶ collectors ─┐
    refusals, connections, event loop ──┼─▶ GET /metrics
    process: memory, CPU, open files ───┘

Labels have few values, such as error codes, subjects and groups, but never keys. If a collector has
more than SERIES_MAX subjects or groups, it reports the largest ones, and the sum of the rest.

There are also metrics for access control: waits for quotas, connections per principal, and the
audit log.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/ and the naming rules on that
site.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ...protocol.errors import KeylaneError
from ...protocol.http.endpoint import Endpoint
from ..access.audit_events import AuditBuffer
from ..access.guard import Guard
from .histogram import Histogram

if TYPE_CHECKING:
    from prometheus_client import Metric


log = logging.getLogger("keylane.rpc")

SERIES_MAX = 2_000
OTHER = "(other)"
"""The label value for the sum of the smallest samples. No name of a subject or group contains
parentheses.
"""
LOOP_PROBE_S = 0.5

Collector = Callable[[], Awaitable[Iterable["Metric"]]]


class ServerMetrics:
    """
    Collects the metrics of one server.

    Args:
        program: "broker" or "metaserver".
        boot_ns: returns the time since boot in nanoseconds.
    """

    def __init__(self, program: str, boot_ns: Callable[[], int]) -> None:
        self._program = program
        self._boot_ns = boot_ns
        self._collectors: list[Collector] = []
        self.refusal_counts: Counter[tuple[str, int]] = Counter()
        """The number of refusals by class and code of the error."""
        self._calls: dict[str, Histogram] = {}
        """Maps the method and path of each HTTP call to the durations until its answer."""
        self.loop_delay = Histogram()
        self.connections: Callable[[], int] = lambda: 0
        """Returns the number of open data-plane connections."""
        self.connections_max = 0
        """The limit for data-plane connections; 0 if this server has no data plane."""

    def add(self, collector: Collector) -> None:
        """Register a collector, which is called on each scrape."""
        self._collectors.append(collector)

    def count_refusal(self, error: KeylaneError) -> None:
        """Count a request that was answered with an error."""
        self.refusal_counts[type(error).__name__, error.code] += 1

    def time_call(self, endpoint: Endpoint[Any]) -> Callable[[], None]:
        """Begin to time an HTTP call. Return the function to call when it is answered."""
        began_ns = self._boot_ns()

        def end() -> None:
            call = f"{endpoint.method} {endpoint.path}"
            self._calls.setdefault(call, Histogram()).observe(self._boot_ns() - began_ns)

        return end

    async def watch_loop(self) -> None:
        """Measure how late the event loop calls a timer, until cancelled."""
        while True:
            due_ns = self._boot_ns() + round(LOOP_PROBE_S * 1e9)
            await asyncio.sleep(LOOP_PROBE_S)
            self.loop_delay.observe(self._boot_ns() - due_ns)

    async def exposition(self) -> str:
        """Return all metrics as text. A collector that fails is logged, counted and skipped."""
        await asyncio.to_thread(import_module, "prometheus_client")  # 50 ms on the first scrape
        from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

        families = [*self._own_metrics()]
        failed = 0
        for collector in self._collectors:
            try:
                families += await collector()
            except Exception:
                log.exception("a collector of metrics failed")
                failed += 1
        families.append(
            gauge("keylane_metrics_failed_collectors", "Collectors that failed.", failed)
        )
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_FixedFamilies(families))
        ProcessCollector(registry=registry)
        return generate_latest(registry).decode()

    def _own_metrics(self) -> Iterable[Metric]:
        build = {"program": self._program, "version": _version()}
        yield labelled(
            "keylane_build_info", "The program and its version.", {tuple(build.items()): 1}
        )
        yield labelled(
            "keylane_refusals_total",
            "Requests that were answered with an error, by its class and code.",
            {
                (("error", name), ("code", str(code))): count
                for (name, code), count in self.refusal_counts.items()
            },
            counts=True,
        )
        yield histograms(
            "keylane_http_request_seconds",
            "How long HTTP calls were handled; without calls that wait for a change.",
            {(("call", call),): values for call, values in sorted(self._calls.items())},
        )
        yield gauge(
            "keylane_connections", "Open connections of the data plane.", self.connections()
        )
        if self.connections_max:
            yield gauge(
                "keylane_connections_max",
                "Limit of connections of the data plane.",
                self.connections_max,
            )
        yield histogram(
            "keylane_event_loop_delay_seconds",
            "Delay with which the event loop calls timers.",
            self.loop_delay,
        )


class _FixedFamilies:
    """A collector for prometheus-client that returns the given metric families."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the metric families."""
        return self._families


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a metric with a single value that can rise and fall."""
    return labelled(name, text, {(): value})


def counter(name: str, text: str, value: float) -> Metric:
    """Return a metric with a single value that only rises. `name` must end with "_total"."""
    return labelled(name, text, {(): value}, counts=True)


Labels = tuple[tuple[str, str], ...]
"""Pairs of a label and its value. All samples of a metric have the same labels in the same
order.
"""


def labelled(
    name: str, text: str, samples: Mapping[Labels, float], *, counts: bool = False
) -> Metric:
    """Return a metric with a sample for each combination of labels. It is a counter if `counts` is
    set, otherwise a gauge.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if counts else GaugeMetricFamily
    names = [label for label, _ in next(iter(samples), ())]
    family = kind(name, text, labels=names)
    for labels, value in samples.items():
        family.add_metric([label_value for _, label_value in labels], value)
    return family


def largest(samples: Mapping[Labels, float], most: int = SERIES_MAX) -> dict[Labels, float]:
    """Return the `most` largest samples, and the sum of the rest with OTHER as the value of every
    label.
    """
    if len(samples) <= most:
        return dict(samples)
    ordered = sorted(samples.items(), key=lambda pair: -pair[1])
    result = dict(ordered[:most])
    others = tuple((name, OTHER) for name, _ in ordered[0][0])
    result[others] = result.get(others, 0) + sum(value for _, value in ordered[most:])
    return result


def histogram(name: str, text: str, values: Histogram) -> Metric:
    """Return a histogram metric, in seconds."""
    return histograms(name, text, {(): values})


def histograms(name: str, text: str, samples: Mapping[Labels, Histogram]) -> Metric:
    """Return a metric with a histogram for each combination of labels, in seconds."""
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(
        name, text, labels=[label for label, _ in next(iter(samples), ())]
    )
    for labels, values in samples.items():
        family.add_metric(
            [label_value for _, label_value in labels], values.cumulative(), values.sum_ns / 1e9
        )
    return family


def _version() -> str:
    try:
        return version("keylane")
    except PackageNotFoundError:  # when run from a checkout that is not installed
        return "unknown"


def access_metrics(guard: Guard, audit: AuditBuffer) -> Callable[[], Awaitable[Iterable[Metric]]]:
    """Return a collector for a server's access control metrics."""

    async def collect() -> Iterable[Metric]:
        pacing = guard.pacing
        waited: dict[Labels, float] = {
            (("principal", name),): ms / 1000 for name, ms in pacing.waited_ms.items()
        }
        connections: dict[Labels, float] = {
            (("principal", name),): count for name, count in pacing.connections.items()
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
                largest(connections),
            ),
            gauge("keylane_audit_waiting", "Events of the audit log not stored yet.", len(audit)),
            counter(
                "keylane_audit_lost_total",
                "Events of the audit log without room.",
                audit.dropped_count,
            ),
            counter(
                "keylane_audit_left_out_total",
                "Refusals and reads without a line in the audit log, because there are too many.",
                guard.refusals.left_out + guard.reads.left_out,
            ),
        ]

    return collect
