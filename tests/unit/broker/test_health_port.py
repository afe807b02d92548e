"""The port of probes and scrapes: what it answers, and to whom."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from keylane.broker.app import running_broker
from keylane.broker.settings import BrokerSettings
from keylane.protocol.errors import ConfigError
from support.ports import free_port


def settings_of(data: Path, **values: object) -> BrokerSettings:
    given = {"group": "g1", "data": data, "meta": ("127.0.0.1:1",), **values}
    return BrokerSettings(**given)  # type: ignore[arg-type]


async def test_health_port_answers_probes_and_scrapes_and_nothing_else(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, health_port=free_port())
    async with running_broker(settings) as broker, aiohttp.ClientSession() as session:
        statuses = {}
        for path in ("/health/live", "/health/ready", "/metrics", "/v1/partitions", "/v1/data"):
            async with session.get(f"http://127.0.0.1:{settings.health_port}{path}") as response:
                statuses[path] = response.status
                text = await response.text()
            if path == "/metrics":
                assert "keylane_broker_partitions 0.0" in text
        assert statuses == {
            "/health/live": 200,
            "/health/ready": 503,  # no metaserver has registered it
            "/metrics": 200,
            "/v1/partitions": 404,
            "/v1/data": 404,
        }
        assert not broker.address.endswith(f":{settings.health_port}")


@pytest.mark.parametrize("port", [-1, 65_536, 7100])
def test_health_port_is_refused_when_it_cannot_be_used(tmp_path: Path, port: int) -> None:
    with pytest.raises(ConfigError, match="health_port"):
        settings_of(tmp_path, port=7100, health_port=port)
