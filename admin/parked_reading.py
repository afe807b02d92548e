"""Reads parked messages by offset, from the brokers that have them."""

from __future__ import annotations

from collections.abc import Callable

from ..protocol.batch import batch_starts, columns
from ..protocol.errors import KeylaneError
from ..protocol.frames import Batches, Read
from ..protocol.message import Message
from ..protocol.routing import Partition
from ..rpc.client import BrokerClient
from .parked_views import ParkedMessage

READ_BYTES = 1 << 16


class ParkedReader:
    """Reads messages by offset; those that came with the ones before are not read again."""

    def __init__(
        self,
        subject: str,
        served: dict[int, Partition],
        broker_of: Callable[[Partition], BrokerClient],
    ) -> None:
        self._broker_of = broker_of
        self._subject = subject
        self._served = served
        self._read: dict[int, Message[bytes]] = {}
        self._source = 0

    async def read(self, source: int, offset: int) -> ParkedMessage:
        """A message, or why there is none."""
        problem = ""
        if source != self._source or offset not in self._read:
            self._source, self._read = source, {}
            try:
                await self._fetch(source, offset)
            except KeylaneError as error:
                problem = error.message
        message = self._read.get(offset)
        if message is None and not problem:
            problem = "it is not stored any more"
        return ParkedMessage(partition_id=source, offset=offset, message=message, problem=problem)

    async def _fetch(self, source: int, offset: int) -> None:
        partition = self._served.get(source)
        if partition is None:
            return
        broker = self._broker_of(partition)
        answer, payload = await broker.call(Read(source, offset, READ_BYTES))
        assert isinstance(answer, Batches)
        for message in _messages(self._subject, source, bytes(payload)):
            self._read[message.offset] = message


def _messages(subject: str, partition_id: int, payload: bytes) -> list[Message[bytes]]:
    messages = []
    for start, header in batch_starts(payload):
        cut = columns(payload, header, start)
        for index in range(header.count):
            key, value, packed = (
                bytes(cut.blob[edges[index] : edges[index + 1]])
                for edges in (cut.key_edges, cut.value_edges, cut.property_edges)
            )
            messages.append(
                Message(
                    subject,
                    key,
                    value,
                    header.base_offset + index,
                    partition_id,
                    cut.sent_at_ns[index],
                    packed_properties=packed,
                )
            )
    return messages
