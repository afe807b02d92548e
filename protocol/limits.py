"""The largest of everything that crosses the wire, and why.  Pure."""

from __future__ import annotations

LOGICAL_PARTITIONS = 1024
"""Fixed for ever: it is in the hash of every message already stored."""

MESSAGE_BYTES_MAX = 1 << 20
"""Key + value + properties of one message. Kafka's and NATS's default as well."""

KEY_BYTES_MAX = 1 << 10
PROPERTIES_BYTES_MAX = 1 << 16

BATCH_COUNT_MAX = 1 << 16
BATCH_BYTES_MAX = (1 << 20) + (1 << 16) + 4096
"""A batch holds at least one largest message with its lengths."""

FRAME_BYTES_MAX = 4 << 20
"""A pull answers several batches in one frame."""

PULL_BYTES_MAX = 2 << 20
PULL_WAIT_MS_MAX = 30_000

TTL_MS_MIN = 1_000
"""Below this the heartbeat of a busy interpreter cannot be told from a dead one."""
TTL_MS_DEFAULT = 30_000
TTL_MS_MAX = 600_000

PARTITIONS_MAX = LOGICAL_PARTITIONS

PARTITION_MESSAGES_MAX = 1 << 42
"""Messages that a partition takes in its life.  A logic queue continues behind a lost partition as if that were full."""

CONTROL_BYTES_MAX = 1 << 20
"""Body of one JSON control call; aiohttp sends larger ones badly."""

IN_FLIGHT_PER_CONNECTION_MAX = 1_024
"""Calls of one connection that are no pulls; further ones are read when there is room."""
PULLS_PER_CONNECTION_MAX = 4_096
"""Pulls of one connection, most of them waiting for messages; more are refused, so that no ack waits behind them."""
PULLS_AT_ONCE_MAX = 2_048
"""Pulls of one client at one broker; more take turns.  Twice the partitions of a subject."""
CONNECTIONS_MAX = 10_000
HTTP_CONNECTIONS_MAX = 1_000
"""Plain HTTP connections of a broker; a metaserver has one for each consumer, and so more."""
PRODUCERS_PER_PARTITION_MAX = 10_000
BATCHES_IN_FLIGHT_MAX = 8
"""Unanswered batches of a producer at a partition; the broker recognises a repeat among as many."""
GROUPS_PER_SUBJECT_MAX = 1_000
"""Consumer groups of one subject; every broker of the subject keeps each of them for each partition."""
UNTOLD_MAX = 256
"""Partitions that one report of a broker names because it was never told their consumer groups."""
ACK_RANGES_MAX = 10_000
"""Ranges of acked messages above one cursor; at this limit the consumer stops pulling."""

TOKEN_STEP_MAX = 1 << 32
"""A fencing token this far above the last one is no grant's: tokens count grants."""
HOLD_MS_MAX = 3_600_000
"""How long a message of a shared group may be in flight before it is redelivered."""
IN_FLIGHT_RANGES_MAX = 10_000
"""Ranges of one partition that a shared group has in flight; nothing more is handed out above it."""
IN_FLIGHT_PER_SESSION_MAX = 100_000
"""Messages of one partition that one session may have in flight."""
