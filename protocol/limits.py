"""Limits on everything that crosses the wire. Pure."""

from __future__ import annotations

LOGICAL_PARTITIONS = 1024
"""The number of logical partitions. It can never be changed, because it determines the partition of
every stored message.
"""

MESSAGE_BYTES_MAX = 1 << 20
"""The maximum total size of the key, value and properties of one message, in bytes. Kafka and NATS
have the same default.
"""

KEY_BYTES_MAX = 1 << 10
MESSAGE_BYTES_MAX_MIN = KEY_BYTES_MAX
"""The lowest limit that a subject may set. The longest key fits into it, and a producer has to
check only larger messages against the subject's limit.
"""
PROPERTIES_BYTES_MAX = 1 << 16
TAGS_WANTED_MAX = 100
"""The maximum number of tags in the filter of one consumer. A broker searches each batch for each
tag.
"""
TAG_BYTES_MAX = 200
FILTER_CHARS_MAX = 400
"""The maximum length of the text of a consumer's filter. All members of a group must have the same
filter.
"""

BATCH_COUNT_MAX = 1 << 16
BATCH_BYTES_MAX = (1 << 20) + (1 << 16) + 4096
"""The maximum size of a batch in bytes. One message of the maximum size fits into it, with its
lengths.
"""

UNPACKED_RATIO_MAX = 64
"""The maximum ratio of a batch's unpacked size to its stored size. It limits how much a reader
unpacks from one response.
"""

FRAME_BYTES_MAX = 4 << 20
"""The maximum size of a frame in bytes. The response to a pull contains several batches in one
frame.
"""

PULL_BYTES_MAX = 2 << 20
PULL_WAIT_MS_MAX = 30_000
PULL_ANSWERS_MAX = 32
"""The maximum number of responses to one pull."""
PART_BYTES_MAX = 4 << 10
"""The maximum size of a response to a pull, in bytes, if another response may follow."""

TTL_MS_MIN = 1_000
"""The minimum ttl. With a shorter one, a busy process whose heartbeats are late would count as
dead.
"""
TTL_MS_DEFAULT = 30_000
TTL_MS_MAX = 600_000

PARTITIONS_MAX = LOGICAL_PARTITIONS

PARTITION_MESSAGES_MAX = 1 << 42
"""The maximum number of messages that a partition can ever have. Logic offsets after a lost
partition are computed as if it had been full.
"""

CONTROL_BYTES_MAX = 1 << 20
"""The maximum size of the JSON body of a control call, in bytes. aiohttp warns about larger
bodies.
"""

POSTED_MESSAGES_MAX = 5_000
"""The maximum number of messages in one HTTP request. That many messages for one partition fit into
a batch.
"""
READ_MESSAGES_MAX = 1_000
"""The maximum number of messages in one HTTP response."""
SCHEDULED_LISTED_MAX = 1_000
"""The maximum number of scheduled messages in one HTTP response."""
IDEMPOTENCY_KEY_CHARS_MAX = 200

IN_FLIGHT_PER_CONNECTION_MAX = 1_024
"""The maximum number of unanswered calls on one connection, not counting pulls. At this limit, the
server stops reading from the connection.
"""
PULLS_PER_CONNECTION_MAX = 4_096
"""The maximum number of unanswered pulls on one connection, most of which are waiting for messages.
Further pulls are refused rather than left unread, which would delay acks.
"""
PULLS_AT_ONCE_MAX = 2_048
"""The maximum number of pulls that a client sends to a broker at a time: twice the number of
partitions of a subject. Further pulls are queued at the client.
"""
CONNECTIONS_MAX = 10_000
HTTP_CONNECTIONS_MAX = 1_000
"""The maximum number of plain HTTP connections to a broker. A metaserver allows more, because each
consumer has one.
"""
PRODUCERS_PER_PARTITION_MAX = 10_000
BATCHES_IN_FLIGHT_MAX = 8
"""The maximum number of unanswered batches of a producer on a partition. The broker recognises
repeats of that many of the most recent batches.
"""
UNREACHED_MAX = 16
"""The maximum number of broker groups that a heartbeat reports as unreachable."""
GROUPS_PER_SUBJECT_MAX = 1_000
"""The maximum number of consumer groups of one subject. A broker stores the progress of each group
on each partition.
"""
GROUPLESS_PARTITIONS_MAX = 256
"""The maximum number of partitions that a broker's report lists as lacking their consumer
groups.
"""
ACK_RANGES_MAX = 10_000
"""The maximum number of ranges of acked messages above a cursor. At this limit, the consumer stops
pulling.
"""

TOKEN_STEP_MAX = 1 << 32
"""The maximum increase from one fencing token to the next. Tokens count grants, so a larger
increase indicates a bug.
"""
IN_FLIGHT_MS_MAX = 3_600_000
"""The maximum time that a message of a shared group is in flight before it is redelivered, in
milliseconds.
"""
IN_FLIGHT_RANGES_MAX = 10_000
"""The maximum number of ranges of one partition that a shared group has in flight. At this limit,
the broker stops handing out messages.
"""
IN_FLIGHT_PER_SESSION_MAX = 100_000
"""The maximum number of messages of one partition that one session has in flight."""
READ_WAIT_MS = 5_000
"""How long a read without a group waits for messages, in milliseconds. A hung or replaced broker is
detected after this time.
"""
READ_GIVE_UP_MS = 10_000
"""How long a reader without a group (a `Reader` or a Spark stream) retries when a broker lacks
messages that it had returned earlier, or when partitions disappear during a lookup, in
milliseconds. The broker may be running on an older copy of its data folder, which is about to be
replaced.
"""
