"""A server's metrics in the format of Prometheus, read back by its own parser."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from keylane.protocol.clock import SystemClock
from keylane.rpc.operating.histogram import Histogram
from keylane.rpc.operating.metrics import (
    LOOP_PROBE_S,
    OTHER,
    ServerMetrics,
    counter,
    histogram,
    labelled,
    largest,
)


def samples_of(text):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_exposition_has_the_families_of_every_collector():
    """The server's own metrics follow: refusals, connections, event loop, process."""
    metrics = ServerMetrics("broker", SystemClock.boot_ns)
    metrics.refusal_counts["FencedError", 1130] += 2
    durations = Histogram()
    durations.observe(2_000_000)

    async def collect():
        return [
            counter("keylane_x_total", "Things.", 5),
            histogram("keylane_y_seconds", "Durations.", durations),
        ]

    metrics.add(collect)
    samples = samples_of(await metrics.exposition())
    assert samples["keylane_x_total", ()] == 5
    assert samples["keylane_y_seconds_count", ()] == 1
    assert samples["keylane_y_seconds_bucket", (("le", "0.0025"),)] == 1
    assert samples["keylane_refusals_total", (("code", "1130"), ("error", "FencedError"))] == 2
    assert samples["keylane_metrics_failed_collectors", ()] == 0
    assert samples["process_open_fds", ()] > 0


async def test_exposition_goes_on_when_a_collector_fails(caplog):
    """The failure is counted, and logged."""
    metrics = ServerMetrics("broker", SystemClock.boot_ns)

    async def collect():
        raise OSError("no disk")

    metrics.add(collect)
    assert samples_of(await metrics.exposition())["keylane_metrics_failed_collectors", ()] == 1
    assert "no disk" in caplog.text


def test_largest_sums_what_it_leaves_out():
    """The label value of the sum is not a valid name of a subject or group."""
    samples = {(("subject", f"s{n}"), ("group", "g")): float(n) for n in range(10)}
    kept = largest(samples, 3)
    assert kept == {
        (("subject", "s9"), ("group", "g")): 9,
        (("subject", "s8"), ("group", "g")): 8,
        (("subject", "s7"), ("group", "g")): 7,
        (("subject", OTHER), ("group", OTHER)): 21,
    }
    assert largest({}, 3) == {}


def test_largest_adds_what_it_leaves_out_to_a_sum_that_is_one_of_the_largest():
    samples = {
        (("subject", name),): value for name, value in ((OTHER, 9.0), ("a", 5.0), ("b", 1.0))
    }
    assert largest(samples, 2) == {(("subject", OTHER),): 10, (("subject", "a"),): 5}


async def test_labels_are_escaped():
    """A quotation mark or a line break in a label does not break the format."""
    metrics = ServerMetrics("broker", SystemClock.boot_ns)

    async def collect():
        return [labelled("keylane_z", "Z.", {(("problem", 'a "b"\nc\\'),): 1.0})]

    metrics.add(collect)
    assert samples_of(await metrics.exposition())["keylane_z", (("problem", 'a "b"\nc\\'),)] == 1


async def test_loop_delay_is_measured():
    """An event loop that is blocked for 0.1 s is measured as late."""
    import time

    metrics = ServerMetrics("broker", SystemClock.boot_ns)
    watching = asyncio.create_task(metrics.watch_loop())
    await asyncio.sleep(LOOP_PROBE_S - 0.05)
    time.sleep(0.15)
    await asyncio.sleep(0.05)
    watching.cancel()
    assert metrics.loop_delay.count == 1
    assert metrics.loop_delay.sum_ns > 50_000_000
