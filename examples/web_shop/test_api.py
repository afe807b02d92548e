"""The HTTP side, without a cluster: an order and its event are one transaction."""

import asyncio
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import create_engine, text

import api
from shop import create_tables


def test_order_is_stored_with_its_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    monkeypatch.setattr(api, "engine", engine)
    asyncio.run(create_tables(engine))
    client = TestClient(api.app)  # without its lifespan, in which the outbox sends
    assert client.post("/orders", json={"customer": "ada", "cents": 7}).json() == {"id": 1}
    assert client.post("/orders", json={"customer": "ada", "cents": -7}).status_code == 422
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM orders")).scalar() == 1
        assert connection.execute(text("SELECT count(*) FROM keylane_outbox")).scalar() == 1
    assert client.get("/customers/ada/bills").json() == {"count": 0, "cents": 0}
    engine.dispose()
