"""Names of attributes, as OpenTelemetry's conventions for messaging have them. Pure.

The conventions are those of version 1.41. Their constants are in a package that is not stable, and
so are the conventions.
"""

from __future__ import annotations

Attributes = dict[str, str | int | bool]
SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.0"
BATCH_MESSAGE_COUNT = "messaging.batch.message_count"
CONSUMER_GROUP = "messaging.consumer.group.name"
DESTINATION = "messaging.destination.name"
ERROR_TYPE = "error.type"
MESSAGE_ID = "messaging.message.id"
"""For keylane, this is "partition id:offset", which no other message of a cluster has."""
OPERATION_NAME = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
PARTITION_ID = "messaging.destination.partition.id"
SYSTEM = "messaging.system"

ATTEMPT = "messaging.keylane.message.attempt"
OFFSET = "messaging.keylane.message.offset"
RETRIED = "messaging.keylane.retried"
"""True if the handler has asked for another attempt, which is no error."""
STORED = "keylane.stored"
"""The event that a broker has stored a batch of several messages; its offset is the last one's."""


def of_operation(name: str, operation_type: str, subject: str, group: str = "") -> Attributes:
    """Return the attributes that every span has. `group` is "" outside of a consumer group."""
    attributes: Attributes = {
        SYSTEM: "keylane",
        DESTINATION: subject,
        OPERATION_NAME: name,
        OPERATION_TYPE: operation_type,
    }
    if group:
        attributes[CONSUMER_GROUP] = group
    return attributes


def message_id(partition_id: int, offset: int) -> str:
    """Return what identifies a message."""
    return f"{partition_id}:{offset}"


def error_type(error: BaseException) -> str:
    """Return the class of an error, as `error.type` has it."""
    return type(error).__qualname__
