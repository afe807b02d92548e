"""The limits of everything that crosses the wire, each with its reason. Pure."""

from __future__ import annotations

LOGICAL_PARTITIONS = 1024
"""Number of logical partitions; it never changes, because the partition of every stored message
depends on it.
"""

MESSAGE_BYTES_MAX = 1 << 20
"""Bytes of key, value and properties of one message. Kafka and NATS have the same default."""

KEY_BYTES_MAX = 1 << 10
MESSAGE_BYTES_MAX_MIN = KEY_BYTES_MAX
"""Lowest limit that a subject may have: the longest key fits, and a producer only looks at larger
messages.
"""
PROPERTIES_BYTES_MAX = 1 << 16
TAGS_WANTED_MAX = 100
"""Most tags that one consumer may want, because a broker looks for each of them in each batch."""
TAG_BYTES_MAX = 200
FILTER_CHARS_MAX = 400
"""Length of the text of a consumer's filter, which is compared with those of other members."""

BATCH_COUNT_MAX = 1 << 16
BATCH_BYTES_MAX = (1 << 20) + (1 << 16) + 4096
"""Longest batch: one message of the largest size fits into it, with its lengths."""

UNPACKED_RATIO_MAX = 64
"""Largest ratio of a batch's unpacked length to its stored length; it limits what a
reader unpacks from one answer.
"""

FRAME_BYTES_MAX = 4 << 20
"""Longest frame: the answer to a pull has several batches in one frame."""

PULL_BYTES_MAX = 2 << 20
PULL_WAIT_MS_MAX = 30_000
PULL_ANSWERS_MAX = 32
"""Most answers that one pull may have."""
PART_BYTES_MAX = 4 << 10
"""Largest answer that may be followed by another one of the same pull."""

TTL_MS_MIN = 1_000
"""Shortest ttl; with a shorter one a busy interpreter, whose heartbeats are late, would count as
dead.
"""
TTL_MS_DEFAULT = 30_000
TTL_MS_MAX = 600_000

PARTITIONS_MAX = LOGICAL_PARTITIONS

PARTITION_MESSAGES_MAX = 1 << 42
"""Most messages that a partition takes in its life. Logic offsets after a lost partition assume
that it was full.
"""

CONTROL_BYTES_MAX = 1 << 20
"""Longest body of a JSON control call. aiohttp warns of larger bodies that are given as bytes."""

POSTED_MESSAGES_MAX = 5_000
"""Most messages in one HTTP request. That many of one partition fit into a batch, whatever their
sizes.
"""
READ_MESSAGES_MAX = 1_000
"""Most messages in one HTTP answer."""
SCHEDULED_LISTED_MAX = 1_000
"""Most scheduled messages in one HTTP answer."""
IDEMPOTENCY_KEY_CHARS_MAX = 200

IN_FLIGHT_PER_CONNECTION_MAX = 1_024
"""Most unanswered calls of one connection, not counting pulls. At the limit no further call is
read.
"""
PULLS_PER_CONNECTION_MAX = 4_096
"""Most unanswered pulls of one connection, most of which wait for messages. Further pulls are
refused, so that no ack waits for them.
"""
PULLS_AT_ONCE_MAX = 2_048
"""Most pulls that a client has at a broker at a time, twice the partitions of a subject; others
wait their turn.
"""
CONNECTIONS_MAX = 10_000
HTTP_CONNECTIONS_MAX = 1_000
"""Plain HTTP connections of a broker. A metaserver allows more, because each consumer has one."""
PRODUCERS_PER_PARTITION_MAX = 10_000
BATCHES_IN_FLIGHT_MAX = 8
"""Most unanswered batches of a producer at a partition, and number of the last batches whose
repeats the broker recognises.
"""
UNREACHED_MAX = 16
"""Most broker groups that a heartbeat reports as not reached; each name has at most 200 characters.
"""
GROUPS_PER_SUBJECT_MAX = 1_000
"""Most consumer groups of one subject; a broker keeps the progress of each on each partition."""
UNTOLD_MAX = 256
"""Most partitions without known consumer groups that one report of a broker names."""
ACK_RANGES_MAX = 10_000
"""Most ranges of acked messages above one cursor. At this limit the consumer stops pulling."""

TOKEN_STEP_MAX = 1 << 32
"""Largest step of a fencing token above the last one. Tokens count grants, so a larger step is
a mistake.
"""
IN_FLIGHT_MS_MAX = 3_600_000
"""Longest time that a message of a shared group may be in flight before it is redelivered."""
IN_FLIGHT_RANGES_MAX = 10_000
"""Most ranges of one partition that a shared group has in flight. At this limit no more messages
are handed out.
"""
IN_FLIGHT_PER_SESSION_MAX = 100_000
"""Most messages of one partition that one session may have in flight."""
READ_WAIT_MS = 5_000
"""Milliseconds that a read without a group waits for messages, and after which a hung or replaced
broker is noticed.
"""
READ_GIVE_UP_MS = 10_000
"""
Milliseconds that a reader without a group, a `Reader` or a stream of Spark, waits for a broker that
lacks messages which it returned earlier, or for partitions that disappear during a look-up: the
broker's folder may be an older copy that is about to be replaced.
"""
