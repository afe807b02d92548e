"""Features that would break the order are not offered: no call and no frame has a field for
them.
"""

from __future__ import annotations

import inspect

import msgspec

from keylane import Producer
from keylane.protocol.frames import Append, Schedule


def arguments(function) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def fields(frame) -> set[str]:
    return {field.name for field in msgspec.structs.fields(frame)}


def test_time_of_delivery_is_not_offered_for_batches():
    """An append is stored when it comes; a scheduled message is in a frame of its own, without a
    partition.
    """
    assert fields(Append) == {"partition_id"}
    assert "partition_id" not in fields(Schedule)
    for send in (Producer.send_all, Producer.send_arrow):
        assert "deliver_at" not in arguments(send)
