"""Metrics of the producers and consumers of a program, for prometheus-client.

    from keylane import metrics

    metrics.register()  # once, in each process; the program serves its registry as it always does

The figures are read at each scrape, from counts that clients keep for each batch. They are those of
all clients in this process, also of closed ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .protocol.errors import MissingExtraError
from .rpc.operating.client_counts import CONSUMERS, PRODUCERS, ConsumerCounts, ProducerCounts
from .rpc.operating.metrics import Labels, counter, gauge, histogram, histograms, labelled

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

__all__ = ["ClientCollector", "register"]
_CONSUMER_COUNTS = (
    ("received_messages", "messages", "Messages that were pulled."),
    ("received_bytes", "bytes", "Bytes of the pulled batches."),
    ("failed_tries", "failed_tries", "Tries of messages that failed in the handler."),
    ("lost_leases", "lost_leases", "Partitions that were lost without a hand-over."),
)
"""(name of the metric, field of ConsumerCounts, text) of each count."""


class ClientCollector:
    """A collector for a registry of prometheus-client; most programs call `register`."""

    def collect(self) -> Iterable[Metric]:
        """Return the metric families. May be called in any thread."""
        yield from _collect_producers()
        yield from _collect_consumers()

    def describe(self) -> Iterable[Metric]:
        """Return the same families, so that a registry refuses a second collector."""
        return self.collect()


def register(registry: CollectorRegistry | None = None) -> ClientCollector:
    """
    Add the metrics of this process's producers and consumers to a registry.

    Args:
        registry: None: the default registry of prometheus-client.

    Returns:
        The collector, for `registry.unregister`.

    Raises:
        MissingExtraError: prometheus-client is not installed.
        ValueError: the registry has these metrics already.
    """
    try:
        from prometheus_client import REGISTRY
    except ModuleNotFoundError as error:
        raise MissingExtraError.of(error, "keylane.metrics", "metrics") from error
    collector = ClientCollector()
    (REGISTRY if registry is None else registry).register(collector)
    return collector


def _collect_producers() -> Iterable[Metric]:
    total, waiting, waiting_bytes = ProducerCounts(), 0, 0
    for _, each in PRODUCERS:
        for counts in each:
            total.add(counts)
            messages, size_bytes = counts.waiting
            waiting += messages
            waiting_bytes += size_bytes
    yield counter(
        "keylane_producer_acked_messages_total",
        "Messages that brokers have confirmed as stored.",
        total.acked,
    )
    yield counter(
        "keylane_producer_failed_messages_total", "Messages that were given up.", total.failed
    )
    yield counter(
        "keylane_producer_retries_total", "Times that batches were sent again.", total.retries
    )
    yield histogram(
        "keylane_producer_ack_seconds",
        "From the send of the first message of a batch to its ack.",
        total.latency,
    )
    yield gauge(
        "keylane_producer_waiting_messages", "Messages that are queued or in flight.", waiting
    )
    yield gauge("keylane_producer_waiting_bytes", "Memory of these messages.", waiting_bytes)


def _collect_consumers() -> Iterable[Metric]:
    totals: dict[Labels, ConsumerCounts] = {}
    partitions: dict[Labels, float] = {}
    lags: dict[Labels, float] = {}
    for (subject, group), each in CONSUMERS:
        labels = (("subject", subject), ("group", group))
        total = totals[labels] = ConsumerCounts()
        loads = [counts.load for counts in each]
        partitions[labels] = sum(count for count, _ in loads)
        lags[labels] = sum(lag for _, lag in loads)
        for counts in each:
            total.add(counts)
    for name, field, text in _CONSUMER_COUNTS:
        values = {labels: getattr(total, field) for labels, total in totals.items()}
        yield labelled(f"keylane_consumer_{name}_total", text, values, counts=True)
    yield histograms(
        "keylane_consumer_handler_seconds",
        "How long a call of the handler took, also one that failed.",
        {labels: total.handling for labels, total in totals.items()},
    )
    yield labelled("keylane_consumer_partitions", "Partitions that the consumers have.", partitions)
    yield labelled(
        "keylane_consumer_lag_messages", "Messages of these partitions from the cursors on.", lags
    )
