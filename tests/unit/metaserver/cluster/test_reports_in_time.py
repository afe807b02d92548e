"""A broker's report in time does not change routes; a late one does."""

from __future__ import annotations

from keylane.metaserver.cluster.brokers import renew_broker, store_report
from keylane.metaserver.cluster.subjects import read_route
from keylane.protocol.control import BrokerHeartbeat
from support.sql.rows import Rows

TTL_MS = 1_000
HERE = BrokerHeartbeat(broker_group="g1", broker_id="g1", address="g1:1")


def test_late_report_raises_the_route_version():
    """A concurrent reader may have seen the broker silent, and would never get its address."""
    rows = Rows()
    rows.report("g1")
    rows.create("s", 2)
    rows.run(store_report, HERE, ttl_ms=TTL_MS)
    version = rows.run(read_route, "s").version
    rows.clock.advance(TTL_MS // 2)
    assert rows.run(renew_broker, HERE, ttl_ms=TTL_MS)
    assert not rows.run(store_report, HERE, ttl_ms=TTL_MS)
    assert rows.run(read_route, "s").version == version
    rows.clock.advance(TTL_MS - 1)
    assert all(
        partition.address == HERE.address for partition in rows.run(read_route, "s").partitions
    )
    assert not rows.run(renew_broker, HERE, ttl_ms=TTL_MS)
    assert len(rows.run(store_report, HERE, ttl_ms=TTL_MS)) == 1
    assert rows.run(read_route, "s").version == version + 1
