"""The HTTP side, without a cluster: an order and its event are one transaction."""

import asyncio
import os
from pathlib import Path

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session


def test_order_is_stored_with_its_event(tmp_path: Path) -> None:
    os.environ["DATABASE_URL"] = f"sqlite:///{tmp_path / 'shop.db'}"
    from fastapi.testclient import TestClient

    import api
    from shop import create_tables

    asyncio.run(create_tables(api.engine))
    client = TestClient(api.app)  # without its lifespan, in which the outbox sends
    assert client.post("/orders", json={"customer": "ada", "cents": 7}).json() == {"id": 1}
    assert client.post("/orders", json={"customer": "ada", "cents": -7}).status_code == 422
    with Session(create_engine(os.environ["DATABASE_URL"])) as session:
        assert session.execute(text("SELECT count(*) FROM orders")).scalar() == 1
        assert session.execute(text("SELECT count(*) FROM keylane_outbox")).scalar() == 1
    assert client.get("/customers/ada/bills").json() == {"count": 0, "cents": 0}
