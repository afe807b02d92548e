"""The addresses that a network remembers are limited, because brokers may return at others."""

from __future__ import annotations

from keylane.rpc import http_network
from keylane.rpc.http_network import HttpNetwork


async def test_network_knows_the_addresses_that_answered_last_when_servers_come_back_at_others(
    monkeypatch,
):
    monkeypatch.setattr(http_network, "ADDRESSES_KNOWN_MAX", 5)
    network = HttpNetwork()
    try:
        for number in range(100):
            network._record_response("10.0.0.1:7000")
            network._disconnected_addresses.add(f"10.1.0.{number}:8000")
            network._record_response(f"10.2.0.{number}:8000")
        assert len(network._answering_addresses) == len(network._disconnected_addresses) == 5
        assert "10.0.0.1:7000" in network._answering_addresses
    finally:
        await network.close()
