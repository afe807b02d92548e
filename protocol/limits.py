"""Limits on everything that crosses the wire. Pure."""

from __future__ import annotations

LOGICAL_PARTITIONS = 1024
"""Number of logical partitions. It can never change, because it determines the partition of every
stored message.
"""

MESSAGE_BYTES_MAX = 1 << 20
"""Maximum bytes of key, value and properties of one message; the default of Kafka and NATS too."""

KEY_BYTES_MAX = 1 << 10
MESSAGE_BYTES_MAX_MIN = KEY_BYTES_MAX
"""Lowest limit that a subject may set. The longest key fits, and a producer needs to check only
larger messages against the subject's limit.
"""
PROPERTIES_BYTES_MAX = 1 << 16
TAGS_WANTED_MAX = 100
"""Maximum number of tags in the filter of one consumer. A broker searches each batch for each
tag.
"""
TAG_BYTES_MAX = 200
FILTER_CHARS_MAX = 400
"""Maximum length of the text of a consumer's filter, which must equal that of other members."""

BATCH_COUNT_MAX = 1 << 16
BATCH_BYTES_MAX = (1 << 20) + (1 << 16) + 4096
"""Maximum bytes of a batch. One message of the largest size fits in, with its lengths."""

UNPACKED_RATIO_MAX = 64
"""Maximum ratio of a batch's unpacked size to its stored size. It limits how much a reader unpacks
from one response.
"""

FRAME_BYTES_MAX = 4 << 20
"""Maximum bytes of a frame. The response to a pull has several batches in one frame."""

PULL_BYTES_MAX = 2 << 20
PULL_WAIT_MS_MAX = 30_000
PULL_ANSWERS_MAX = 32
"""Maximum number of responses to one pull."""
PART_BYTES_MAX = 4 << 10
"""Maximum bytes of a response to a pull that may be followed by a further response."""

TTL_MS_MIN = 1_000
"""Minimum ttl. With a shorter one, a busy interpreter whose heartbeats are late would count as
dead.
"""
TTL_MS_DEFAULT = 30_000
TTL_MS_MAX = 600_000

PARTITIONS_MAX = LOGICAL_PARTITIONS

PARTITION_MESSAGES_MAX = 1 << 42
"""Maximum number of messages in a partition over its lifetime. Logic offsets after a lost partition
assume that it was full.
"""

CONTROL_BYTES_MAX = 1 << 20
"""Maximum bytes of the JSON body of a control call. aiohttp warns about larger bodies."""

POSTED_MESSAGES_MAX = 5_000
"""Maximum number of messages in one HTTP request. That many messages of one partition fit into a
batch.
"""
READ_MESSAGES_MAX = 1_000
"""Maximum number of messages in one HTTP response."""
SCHEDULED_LISTED_MAX = 1_000
"""Maximum number of scheduled messages in one HTTP response."""
IDEMPOTENCY_KEY_CHARS_MAX = 200

IN_FLIGHT_PER_CONNECTION_MAX = 1_024
"""Maximum number of unanswered calls on one connection, not counting pulls. At the limit, the
server stops reading from the connection.
"""
PULLS_PER_CONNECTION_MAX = 4_096
"""Maximum number of unanswered pulls on one connection; most of them wait for messages. Further
pulls are refused rather than left unread, which would delay acks.
"""
PULLS_AT_ONCE_MAX = 2_048
"""Maximum number of pulls that a client sends to a broker at a time: twice the partitions of a
subject. Further pulls queue at the client.
"""
CONNECTIONS_MAX = 10_000
HTTP_CONNECTIONS_MAX = 1_000
"""Maximum number of plain HTTP connections of a broker. A metaserver allows more, because each
consumer has one.
"""
PRODUCERS_PER_PARTITION_MAX = 10_000
BATCHES_IN_FLIGHT_MAX = 8
"""Maximum number of unanswered batches of a producer on a partition. The broker recognises repeats
of as many of the last batches.
"""
UNREACHED_MAX = 16
"""Maximum number of broker groups that a heartbeat reports as unreachable."""
GROUPS_PER_SUBJECT_MAX = 1_000
"""Maximum number of consumer groups of one subject. A broker stores the progress of each on each
partition.
"""
GROUPLESS_PARTITIONS_MAX = 256
"""Maximum number of partitions that a broker's report lists as lacking their consumer groups."""
ACK_RANGES_MAX = 10_000
"""Maximum number of ranges of acked messages above a cursor. At this limit the consumer stops
pulling.
"""

TOKEN_STEP_MAX = 1 << 32
"""Maximum increase of a fencing token over the previous one. Tokens count grants, so a larger
increase is a bug.
"""
IN_FLIGHT_MS_MAX = 3_600_000
"""Maximum milliseconds for which a message of a shared group is in flight before it is
redelivered.
"""
IN_FLIGHT_RANGES_MAX = 10_000
"""Maximum number of ranges of one partition that a shared group has in flight. At this limit the
broker hands out no more messages.
"""
IN_FLIGHT_PER_SESSION_MAX = 100_000
"""Maximum number of messages of one partition that one session has in flight."""
READ_WAIT_MS = 5_000
"""Milliseconds for which a read without a group waits for messages. A hung or replaced broker is
detected after this time.
"""
READ_GIVE_UP_MS = 10_000
"""Milliseconds for which a reader without a group (a `Reader` or a Spark stream) retries when a
broker lacks messages that it had returned earlier, or when partitions disappear during a lookup.
The broker may run on an older copy of its data folder, which is about to be replaced.
"""
