"""Control bodies: limits are in their types, and JSON of another shape is refused."""

from __future__ import annotations

import msgspec
import pytest

from keylane.protocol.control import (
    CreateSubject,
    ErrorBody,
    Heartbeat,
    HostPartition,
    Join,
    PartitionStatus,
)
from keylane.protocol.errors import Fate
from keylane.protocol.http.bodies import encode_json
from keylane.protocol.limits import PARTITIONS_MAX, PULL_WAIT_MS_MAX, TTL_MS_MAX, TTL_MS_MIN
from keylane.protocol.routing import Partition, PartitionState

SESSION = "0123456789abcdef"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CreateSubject, {"subject": "s", "partitions": 0}),
        (CreateSubject, {"subject": "s", "partitions": PARTITIONS_MAX + 1}),
        (CreateSubject, {"subject": "s", "partitions": "4"}),
        (CreateSubject, {"subject": "s", "order_strategy": "loose"}),
        (CreateSubject, {"partitions": 4}),
        (Join, {"subject": "s", "group": "g", "session": SESSION, "ttl_ms": TTL_MS_MIN - 1}),
        (Join, {"subject": "s", "group": "g", "session": SESSION, "ttl_ms": TTL_MS_MAX + 1}),
        (Join, {"subject": "s", "group": "g", "session": "short"}),
        (Join, {"subject": "s", "group": "g", "session": SESSION.upper()}),
        (Join, {"subject": "s", "group": "g", "session": SESSION * 5}),
        (Join, {"subject": "s", "group": "g", "session": SESSION, "client": "x" * 513}),
        (Heartbeat, {"session": SESSION, "wait_ms": PULL_WAIT_MS_MAX + 1}),
        (Heartbeat, {"session": SESSION, "wait_ms": -1}),
        (Heartbeat, {"session": SESSION, "drained": ["1"]}),
        (HostPartition, {"subject": "s", "partition": {"partition_id": 1}}),
        (Join, []),
        (Join, None),
    ],
    ids=range(17),
)
def test_body_outside_its_limits_is_refused(kind, body):
    """What a type forbids never reaches a handler."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(body), type=kind)


def test_bodies_come_back_as_they_were_sent():
    """A nested body is the same on the other side, with its enums and tuples."""
    partition = Partition(
        partition_id=7,
        name="p7",
        queue=0,
        range_start=0,
        range_end=1024,
        broker_group="g0",
        state=PartitionState.SEALED,
        parents=(3, 4),
    )
    for body in (
        HostPartition(subject="s", partition=partition),
        Heartbeat(session=SESSION, known_version=3, drained=(3, 4), wait_ms=10),
        PartitionStatus(
            partition_id=7,
            subject="s",
            name="p7",
            state=PartitionState.OPEN,
            first_offset=0,
            next_offset=2**40,
        ),
    ):
        assert msgspec.json.decode(encode_json(body), type=type(body)) == body


def test_error_body_with_nothing_but_a_code_and_a_text_is_enough():
    """Another implementation may leave out hint, fate and details."""
    body = msgspec.json.decode(
        b'{"code":1110,"name":"SubjectUnknownError","message":"no such subject","newer":[1]}',
        type=ErrorBody,
    )
    error = body.error()
    assert (error.code, error.fate, error.details) == (1110, Fate.NOT_DONE, {})
