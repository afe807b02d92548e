"""Limits of everything that crosses the wire, each with its reason.  Pure."""

from __future__ import annotations

LOGICAL_PARTITIONS = 1024
"""Never changes: the partition of every stored message depends on it."""

MESSAGE_BYTES_MAX = 1 << 20
"""Key + value + properties of one message.  Kafka and NATS have the same default."""

KEY_BYTES_MAX = 1 << 10
MESSAGE_BYTES_MAX_MIN = KEY_BYTES_MAX
"""The lowest limit that a subject may have: the longest key fits, and a producer looks at larger
messages only.
"""
PROPERTIES_BYTES_MAX = 1 << 16
TAGS_WANTED_MAX = 100
"""Tags that one consumer wants; a broker looks for each of them in each batch."""
TAG_BYTES_MAX = 200
FILTER_CHARS_MAX = 400
"""What a consumer says of its filter, for the comparison with the other members of its group."""

BATCH_COUNT_MAX = 1 << 16
BATCH_BYTES_MAX = (1 << 20) + (1 << 16) + 4096
"""A message of the largest size fits into a batch, with its lengths."""

UNPACKED_RATIO_MAX = 64
"""How often the stored length of a batch its unpacked length may be: it bounds what a reader
unpacks from one answer.
"""

FRAME_BYTES_MAX = 4 << 20
"""The answer to a pull has several batches in one frame."""

PULL_BYTES_MAX = 2 << 20
PULL_WAIT_MS_MAX = 30_000
PULL_ANSWERS_MAX = 32
"""Answers that one pull may have."""
PART_BYTES_MAX = 4 << 10
"""A larger answer ends its pull."""

TTL_MS_MIN = 1_000
"""A shorter ttl would count a busy interpreter, whose heartbeats are late, as dead."""
TTL_MS_DEFAULT = 30_000
TTL_MS_MAX = 600_000

PARTITIONS_MAX = LOGICAL_PARTITIONS

PARTITION_MESSAGES_MAX = 1 << 42
"""Messages that a partition takes in its life.  Logic offsets behind a lost partition assume that
it was full.
"""

CONTROL_BYTES_MAX = 1 << 20
"""Body of one JSON control call.  aiohttp warns of larger bodies that are given as bytes."""

POSTED_MESSAGES_MAX = 5_000
"""Messages in one HTTP request.  As many of one partition fit into a batch, whatever their
sizes.
"""
READ_MESSAGES_MAX = 1_000
"""Messages in one HTTP answer."""
SCHEDULED_LISTED_MAX = 1_000
"""Scheduled messages in one HTTP answer."""
IDEMPOTENCY_KEY_CHARS_MAX = 200

IN_FLIGHT_PER_CONNECTION_MAX = 1_024
"""Unanswered calls of one connection, pulls apart.  At the limit no further call is read."""
PULLS_PER_CONNECTION_MAX = 4_096
"""Unanswered pulls of one connection, most of which wait for messages.  More are refused, so that
no ack waits behind them.
"""
PULLS_AT_ONCE_MAX = 2_048
"""Pulls that a client has at a broker at a time; others wait their turn.  Twice the partitions of a
subject.
"""
CONNECTIONS_MAX = 10_000
HTTP_CONNECTIONS_MAX = 1_000
"""Plain HTTP connections of a broker.  A metaserver allows more: each consumer has one."""
PRODUCERS_PER_PARTITION_MAX = 10_000
BATCHES_IN_FLIGHT_MAX = 8
"""Unanswered batches of a producer at a partition.  The broker recognises repeats of the last
batches up to this number.
"""
UNREACHED_MAX = 16
"""Broker groups that a heartbeat names as not reached; each is a name of at most 200 characters."""
GROUPS_PER_SUBJECT_MAX = 1_000
"""Consumer groups of one subject.  A broker keeps the progress of each group on each partition."""
UNTOLD_MAX = 256
"""Partitions in one report of a broker that was never told their consumer groups."""
ACK_RANGES_MAX = 10_000
"""Ranges of acked messages above one cursor.  At this limit the consumer stops pulling."""

TOKEN_STEP_MAX = 1 << 32
"""The most by which a fencing token exceeds the last one.  Tokens count grants, so a larger step is
a mistake.
"""
IN_FLIGHT_MS_MAX = 3_600_000
"""How long a message of a shared group may be in flight before it is redelivered."""
IN_FLIGHT_RANGES_MAX = 10_000
"""Ranges of one partition that a shared group has in flight.  At this limit no more messages are
handed out.
"""
IN_FLIGHT_PER_SESSION_MAX = 100_000
"""Messages of one partition that one session may have in flight."""
READ_WAIT_MS = 5_000
"""As long as a read without a group waits for messages.  A hung broker, or a former one, is noticed
so much later.
"""
READ_GIVE_UP_MS = 10_000
"""
How long who reads without a group, a `Reader` or a stream of Spark, waits for a broker that lacks
what was read from it, or for partitions that go while it looks: the broker's folder may be an older
copy that is about to be replaced.
"""
