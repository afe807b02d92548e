"""Boards of `keylane top` that know made-up answers."""

from __future__ import annotations

from keylane.admin import BrokerList, BrokerView
from keylane.cli.top.board import Board
from keylane.cli.top.figures import Figures

META = "127.0.0.1:7000"
ADDRESSES = ("127.0.0.1:7101", "127.0.0.1:7102")


def brokers(*, silent: bool = False) -> BrokerList:
    """Two broker groups, of which the second may be silent."""
    return BrokerList(
        brokers=[
            BrokerView(broker_group="g1", address=ADDRESSES[0], available=True, silent_ms=0),
            BrokerView(
                broker_group="g2",
                address=ADDRESSES[1],
                available=not silent,
                silent_ms=12_000 * silent,
            ),
        ],
        refused=[],
    )


def figures(at_s: float, *, stored: float = 0, lag: float = 0, lag_s: float = 0) -> Figures:
    """What a broker says: messages of `orders`, and the lag of `billing` on it."""
    return Figures(
        at_s,
        {
            "keylane_broker_stored_messages_total": {("orders",): stored},
            "keylane_broker_stored_bytes_total": {("orders",): stored * 100},
            "keylane_broker_handed_messages_total": {("orders",): stored / 2},
            "keylane_broker_disk_bytes": {(): 100e9},
            "keylane_broker_disk_free_bytes": {(): 70e9},
            "keylane_broker_partitions": {(): 2.0},
            "keylane_group_lag_messages": {("orders", "billing"): lag},
            "keylane_group_lag_seconds": {("orders", "billing"): lag_s},
        },
    )


def board(*, seconds: int = 0, lag: float = 0, rises: float = 0) -> Board:
    """A board that has asked two brokers each second, which store 50 messages a second each."""
    made = Board(META)
    for second in range(seconds + 1):
        made.note_brokers(brokers(), float(second))
        for address in ADDRESSES:
            made.note_figures(
                address,
                figures(
                    float(second),
                    stored=50.0 * second,
                    lag=lag + rises * second,
                    lag_s=float(second),
                ),
            )
    return made
