"""What the clients of a process have counted never falls."""

from __future__ import annotations

import gc

from keylane.rpc.operating.client_counts import ConsumerCounts, CountedClients, ProducerCounts


class Share:
    """A consumer with three partitions."""

    load = (3, 7)


def test_counts_of_a_closed_client_stay_in_the_sum() -> None:
    clients: CountedClients[str, ConsumerCounts] = CountedClients(ConsumerCounts)
    first, second = ConsumerCounts(), ConsumerCounts()
    for counts in (first, second):
        clients.begin("billing", counts)
        counts.add_batch(5, 100)
        counts.handling.observe(2_000_000)
    clients.end(first)
    clients.end(first)
    second.lost_leases += 1
    ((key, each),) = clients
    total = ConsumerCounts()
    for counts in each:
        total.add(counts)
    assert (key, total.messages, total.bytes, total.lost_leases) == ("billing", 10, 200, 1)
    assert (total.handling.count, total.handling.sum_ns) == (2, 4_000_000)


def test_latency_of_a_closed_producer_stays_in_the_sum() -> None:
    clients: CountedClients[tuple[()], ProducerCounts] = CountedClients(ProducerCounts)
    for duration_ns in (1_000_000, 2_000_000):
        counts = ProducerCounts()
        clients.begin((), counts)
        counts.latency.observe(duration_ns)
        clients.end(counts)
    ((_, (total,)),) = clients
    assert (total.latency.count, total.latency.sum_ns) == (2, 3_000_000)


def test_counts_do_not_keep_a_client_that_was_never_closed() -> None:
    share = Share()
    counts = ConsumerCounts(share)
    assert counts.load == (3, 7)
    del share
    gc.collect()
    assert counts.load == (0, 0)
