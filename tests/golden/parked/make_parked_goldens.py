"""Writes the golden bytes of parked messages anew: `python
tests/golden/parked/make_parked_goldens.py`.

A change of a golden file is a change of what is stored on disks and spoken on wires: a decision,
never a repair of a test.
"""

from __future__ import annotations

import json
from pathlib import Path

from keylane.broker.partition.parked import Parked
from keylane.broker.partition.records import CursorBody, ParkedBody, encode_body
from keylane.protocol.parked import (
    Adopt,
    AdoptedKey,
    AncestorNotified,
    AncestorReleased,
    Clear,
    DeadLetterKey,
    Edit,
    EditedMessage,
    FailAgain,
    Failure,
    FailureMark,
    Fault,
    Free,
    Freeze,
    Park,
    ParkChange,
    ParkedKeyRow,
    ParkState,
    Redrive,
    Shift,
    Unpark,
    encode_parked,
)

HERE = Path(__file__).parent

FAILURE = Failure("ValueError", "no such aircraft", "host-1:consumer", 1_800_000_000_123, 5)
EDITED = EditedMessage(7, 3, b"mended", b"\x81\xa1a\xa1b")
FAULT = Fault("ValueError", "no such aircraft", "host-1:consumer", 5)
MARK = FailureMark(5, 1, 9, 1_800_000_000_456, 1_800_000_000_123, 0, 1_800_000_060_000)
CHANGES: tuple[ParkChange, ...] = (
    Park(b"N14228", ((3, 5), (9, 2**40)), FAILURE),
    Park(b"", ((6, 7),)),
    Park(None, ((7, 8),), FAILURE),
    Unpark(b"N14228", 7, ((3, 4),)),
    Free(b"N24211"),
    Redrive(b"N14228"),
    Adopt(3, (AdoptedKey(b"N24211", ParkState.PARKED, 99, FAILURE, ((3, 1, 2),)),), last=True),
    Freeze(),
    Clear(),
    AncestorReleased(0, 512, includes_loose=True),
    AncestorNotified(3),
    Edit(b"N14228", EDITED),
    Shift(4, -5, 3, ((7, 8),)),
    Shift(-5, None, 3, ((7, 8),), FAILURE),
    DeadLetterKey(b"N24211", ((11, 12),), FAILURE),
    FailAgain(None, 3, ((7, 8), (9, 12)), FAILURE),
    Adopt(
        5,
        (AdoptedKey(None, ParkState.PARKED, 99, FAILURE, ((5, 1, 9),), (), (FAULT,), (MARK,)),),
        last=False,
        sources=(4,),
    ),
    Park(b"N14228", (), FAILURE, 5),
    Adopt(0, (AdoptedKey(b"N14228", ParkState.PARKED, 99, FAILURE, (), token=5),), last=False),
    Adopt(
        0, (), last=False, sources=(3,), passed=((-1, 7), (512, 3)), children_notify_ancestors=True
    ),
    Clear((3, 5)),
    Adopt(
        5,
        (AdoptedKey(b"N24211", ParkState.PARKED, 99, None, ((5, 4, 6),), is_displaced=True),),
        last=True,
    ),
)
KEY_ROWS = [
    ParkedKeyRow(b"N14228", ParkState.PARKED, 2),
    ParkedKeyRow(None, ParkState.REDRIVING, 1),
]
BODIES = {
    "parked": ParkedBody("audit", 5, 1_800_000_000_456, CHANGES),
    "parked, with next tries": ParkedBody(
        "audit",
        5,
        1_800_000_000_456,
        (Park(2, ((5, 6),), FAILURE),),
        ((2, 7, 5, 1_800_000_060_000),),
    ),
    "cursor": CursorBody("audit", 5, 3, [(5, 6)], 0, [(4, 7)]),
    "cursor with crashes": CursorBody("audit", 5, 3, [(5, 6)], 0, [], [(3, 2)]),
}


def parked() -> Parked:
    """Two keys: one of the partition and an ancestor, and dead letters; the messages of parent 3
    are adopted.
    """
    state = Parked(7)
    for change in (CHANGES[0], CHANGES[2], CHANGES[6], Park(b"N24211", ((20, 22),))):
        state.apply(change, at_ms=1_800_000_000_456)
    return state


def golden_bytes() -> dict[str, str]:
    """What it is → its bytes, in hex."""
    records = {name: encode_body(7, body).hex() for name, body in BODIES.items()}
    rows = {"key rows": encode_parked(KEY_ROWS).hex()}
    edited = parked()
    edited.apply(Edit(b"N14228", EDITED), at_ms=1_800_000_000_456)
    handled = parked()
    handled.apply(Park(b"N14228", (), FAILURE, 5), at_ms=1_800_000_000_456)
    retrying = Parked(7)
    retrying.apply(Park(2, ((5, 6),), FAILURE), at_ms=1_800_000_000_456)
    retrying.set_retry_times([(2, 7, 5, 1_800_000_060_000)])
    taking = parked()
    taking.apply(CHANGES[16], at_ms=1_800_000_000_456)
    reset = parked()
    for change in (Clear(), CHANGES[19]):
        reset.apply(change, at_ms=1_800_000_000_456)
    merged = parked()
    merged.apply(CHANGES[21], at_ms=1_800_000_000_456)
    images = {
        "image": parked().image().hex(),
        "image with an edit": edited.image().hex(),
        "image with a next try": retrying.image().hex(),
        "image with a token": handled.image().hex(),
        "image while a parent is taken over": taking.image().hex(),
        "image behind a reset that children are left out of": reset.image().hex(),
        "image with displaced messages": merged.image().hex(),
    }
    return {**records, **rows, **images}


if __name__ == "__main__":
    (HERE / "parked_v1.json").write_text(json.dumps(golden_bytes(), indent=1) + "\n")
