"""Which of the messages that were pulled are parked behind earlier ones of their keys."""

from __future__ import annotations

import pytest

from keylane.consumer import ConsumerSettings
from keylane.consumer.pulling.pull_client import PullClient
from keylane.protocol.message import Message
from support.pulling import NotingOwner, ScriptedBroker, opened


@pytest.mark.parametrize("more", [0, 90], ids=["many parked", "few parked"])
@pytest.mark.parametrize(
    "offsets",
    [range(10, 16), (10, 12, 13, 14, 20, 21), (13, 11, 14, 12, 15, 10)],
    ids=["whole batch", "gaps", "unsorted"],
)
async def test_messages_of_parked_keys_are_taken_out_wherever_they_are(offsets, more):
    keys = [b"bad", b"good", b"good", b"bad", b"worse", b"good", *[b"good"] * more]
    offsets = [*offsets, *range(max(offsets) + 1, max(offsets) + 1 + more)]
    async with opened(PullClient, ScriptedBroker(), NotingOwner(), ConsumerSettings()) as client:
        parking = client.parking
        parking.keys.update((b"bad", b"worse"))
        messages = [
            Message("s", key, b"", offset, 1, 0) for key, offset in zip(keys, offsets, strict=True)
        ]
        others = parking.park_later_messages(messages)
        assert others == [message for message in messages if message.key == b"good"]
        assert len(messages) == 6 + more, "the list that was given is left as it was"
        assert parking.busy
        assert parking.park_later_messages(others) is others
