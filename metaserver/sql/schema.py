"""Defines the tables of the database.

    subjects ─┬─ partitions ─── partition_parents
              ├─ removals                   what brokers must drop or forget; cluster/removals.py
              ├─ operations ─── steps       journaled changes of the partitions
              └─ groups ─┬─ live_resets     resets under live consumers
                         ├─ sessions        one consumer each; alive while expires_at > now
                         ├─ heard           partitions whose brokers have stored the group
                         ├─ leases          one row for each partition that was ever granted
                         ├─ starts          starts that brokers have not stored; starts/rows.py
                         ├─ suspended_clients
                         └─ drained         sealed partitions that the group has acked to the end

Invariants
    Ids of subjects, partitions, operations and groups are never reused, not even after a deletion.
    `groups.last_token` never decreases, and every grant takes the next token, so no two grants of a
    group have the same one.
    `expires_at` is in milliseconds on the database's clock, and is only compared with that clock.

`name_limits` stores limits shared by all subjects that match a name or pattern; see
`access/quota_rows.py` and `cluster/subjects.py`.

`deletions` and `publications` form the history. Their rows, and those of finished operations, are
deleted after some time. `ended_at` is the age of the history, as counted in a fact, at the time
when the end of a row was noticed; NULL until then. See `retention/history.py`.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)

from ...protocol.limits import MESSAGE_BYTES_MAX

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

# SQLite generates ids only if the column type is exactly INTEGER, which also has 64 bits.
BigId = BigInteger().with_variant(Integer(), "sqlite")

facts = Table(
    "facts",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", String(512), nullable=False),
    comment="values of the whole database, such as the machine's boot to which its times belong",
)

duties = Table(
    "duties",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("holder", String(128), nullable=False),
    Column("held_until", BigInteger, nullable=False),
    comment="named leases of metaservers, by the database's time",
)

brokers = Table(
    "brokers",
    metadata,
    Column("broker_group", String(200), primary_key=True),
    Column("broker_id", String(512), nullable=False),
    Column("address", String(512), nullable=False),
    Column("readable", Boolean, nullable=False),
    Column("writable", Boolean, nullable=False),
    Column("seen_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column(
        "cordoned",
        Boolean,
        nullable=False,
        server_default=false(),
        comment="true: it gets no new partitions",
    ),
    Column(
        "opening",
        String(512),
        nullable=False,
        server_default="",
        comment="newest opening of its data folder; empty: not known",
    ),
    Column(
        "log_end",
        BigInteger,
        nullable=False,
        server_default="0",
        comment="position at which its log ended, durably, at its last report",
    ),
    Column(
        "hosted",
        BigInteger,
        nullable=False,
        server_default="0",
        comment="number of partitions that it reported",
    ),
    Column(
        "version",
        String(64),
        nullable=False,
        server_default="",
        comment="version of its program; empty: not reported",
    ),
    Column(
        "problem",
        String(512),
        nullable=False,
        server_default="",
        comment="why it accepts no writes; empty: it accepts them, or the reason is not known",
    ),
    Column(
        "refusing_since",
        BigInteger,
        comment="calendar of the database, ms; none: it accepts writes",
    ),
)

metaservers = Table(
    "metaservers",
    metadata,
    Column("holder", String(64), primary_key=True, comment="random id of the running program"),
    Column("address", String(512), nullable=False),
    Column("version", String(64), nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    comment="the running metaservers",
)

refused_brokers = Table(
    "refused_brokers",
    metadata,
    Column("broker_group", String(200), primary_key=True),
    Column("address", String(512), primary_key=True),
    Column("broker_id", String(512), nullable=False),
    Column("expires_at", BigInteger, nullable=False, comment="the refusal is shown until then"),
    Column("opening", String(512), nullable=False, server_default=""),
    Column("log_end", BigInteger, nullable=False, server_default="0"),
    Column("problem", String(1024), nullable=False, server_default=""),
)

copy_sets = Table(
    "copy_sets",
    metadata,
    Column("broker_group", String(200), primary_key=True),
    Column(
        "wanted",
        Integer,
        nullable=False,
        comment="number of data folders, with the broker's own",
    ),
    Column(
        "least",
        Integer,
        nullable=False,
        server_default="1",
        comment="number of folders that must have what is acked",
    ),
    Column(
        "members",
        String(1024),
        nullable=False,
        comment="JSON: ids of the copies that acks wait for",
    ),
    Column("term", BigInteger, nullable=False, comment="number of promotions"),
    Column("version", BigInteger, nullable=False, comment="number of changes"),
    Column(
        "promoted",
        String(64),
        nullable=False,
        comment="copy that was promoted last, until a broker serves again",
    ),
    Column("durable_end", BigInteger, nullable=False, comment="end of the durable log, in bytes"),
    Column("handing_to", String(64), nullable=True, comment="copy that may take the place now"),
    Column("handing_until", BigInteger, nullable=True, comment="time of the database, ms"),
    Column(
        "may_share_machine",
        Boolean,
        nullable=False,
        server_default=false(),
        comment="copies on one machine may count",
    ),
    Column(
        "quarantine",
        String(512),
        nullable=False,
        server_default="",
        comment="why the set may be an older one",
    ),
    comment="copies of broker groups",
)

accepted_folders = Table(
    "accepted_folders",
    metadata,
    Column("accepted_id", BigId, primary_key=True, autoincrement=True),
    Column("broker_group", String(200), nullable=False),
    Column("opening", String(512), nullable=False),
    Column("log_end", BigInteger, nullable=False),
    Column("known_opening", String(512), nullable=False),
    Column("known_log_end", BigInteger, nullable=False),
    Column(
        "fence",
        BigInteger,
        nullable=False,
        server_default=text("0"),
        comment="highest token that its broker refuses",
    ),
    comment="older data folders that an operator has accepted",
)

lost_folders = Table(
    "lost_folders",
    metadata,
    Column("broker_id", String(512), primary_key=True),
    Column("broker_group", String(200), nullable=False),
    comment="data folders whose loss an operator has accepted: they are refused",
)

subjects = Table(
    "subjects",
    metadata,
    Column("subject_id", BigId, primary_key=True, autoincrement=True),
    Column("name", String(200), nullable=False, unique=True),
    Column("order_strategy", String(16), nullable=False),
    Column("partitions_wanted", Integer, nullable=False),
    Column(
        "partitions_named", Integer, nullable=False, comment="number of partition names used so far"
    ),
    Column("route_version", BigInteger, nullable=False, comment="0: not open yet"),
    Column(
        "static", Boolean, nullable=False, server_default=false(), comment="it has logic queues"
    ),
    Column("retention", String(16), nullable=False, server_default="acked"),
    Column(
        "message_bytes_max",
        Integer,
        nullable=False,
        server_default=str(MESSAGE_BYTES_MAX),
        comment="largest size of a message, with key and properties",
    ),
    Column(
        "problem",
        String(1024),
        nullable=False,
        server_default="",
        comment="why its creation failed",
    ),
    Column(
        "deleting",
        Boolean,
        nullable=False,
        server_default=false(),
        comment="brokers drop its partitions, then its rows are deleted",
    ),
    Column(
        "tokens_above",
        BigInteger,
        nullable=False,
        server_default="0",
        comment="highest possible token of its deleted groups",
    ),
    Column(
        "hidden_for",
        String(200),
        nullable=False,
        server_default="",
        comment="its target while it is hidden",
    ),
    Column(
        "hidden_since",
        BigInteger,
        comment="start of a hidden subject's idle time, database time",
    ),
    Column(
        "hidden_messages",
        BigInteger,
        nullable=False,
        server_default="0",
        comment="number of a hidden subject's messages then",
    ),
    Column(
        "filled_by", String(200), nullable=False, server_default="", comment="while it is hidden"
    ),
    sqlite_autoincrement=True,  # ids are never reused
)

partitions = Table(
    "partitions",
    metadata,
    Column("partition_id", BigId, primary_key=True, autoincrement=True),
    Column("subject_id", ForeignKey("subjects.subject_id"), nullable=False, index=True),
    Column("name", String(240), nullable=False),
    Column("queue", Integer, nullable=False),
    Column("range_start", Integer, nullable=False),
    Column("range_end", Integer, nullable=False),
    Column("broker_group", ForeignKey(brokers.c.broker_group), nullable=False, index=True),
    Column("state", String(16), nullable=False),
    Column("end_offset", BigInteger, comment="none: open, or its end is not known"),
    Column("abandoned", Boolean, nullable=False, server_default=false()),
    Column(
        "logic_start",
        BigInteger,
        nullable=False,
        server_default="0",
        comment="logic offset of its first message",
    ),
    Column(
        "lost",
        Boolean,
        nullable=False,
        server_default=false(),
        comment="expired because the loss of its disk was accepted",
    ),
    Column("opened_at", BigInteger, comment="calendar of the database, ms; none: not known"),
    UniqueConstraint("subject_id", "name"),
    sqlite_autoincrement=True,  # ids are never reused
)

partition_parents = Table(
    "partition_parents",
    metadata,
    Column("partition_id", ForeignKey(partitions.c.partition_id), primary_key=True),
    Column("parent_id", ForeignKey(partitions.c.partition_id), primary_key=True, index=True),
)

operations = Table(
    "operations",
    metadata,
    Column("operation_id", BigId, primary_key=True, autoincrement=True),
    Column("subject_id", ForeignKey("subjects.subject_id"), nullable=False, index=True),
    Column("kind", String(16), nullable=False),
    Column("state", String(8), nullable=False, index=True),
    Column("without_source", Boolean, nullable=False),
    Column("problem", String(1024), nullable=False, comment="why the operation waits"),
    Column(
        "waiting_since", BigInteger, comment="calendar of the database, ms; none: does not wait"
    ),
    Column("running", BigInteger, unique=True, comment="its subject until the route has changed"),
    Column("driver", String(64), comment="the metaserver that drives it"),
    Column("driven_until", BigInteger, nullable=False, comment="another may drive it from then on"),
    Column("new_order_strategy", String(16), comment="of its subject, once the route has changed"),
    Column("new_retention", String(16), comment="of its subject, once the route has changed"),
    Column("new_message_bytes_max", Integer, comment="of its subject, once the route has changed"),
    Column(
        "replaces",
        Boolean,
        nullable=False,
        server_default=false(),
        comment="older partitions expire once the route has changed",
    ),
    Column("ended_at", BigInteger, index=True, comment="see `schema.py`"),
    sqlite_autoincrement=True,  # ids are never reused
)

steps = Table(
    "steps",
    metadata,
    Column("operation_id", ForeignKey(operations.c.operation_id), primary_key=True),
    Column("partition_id", ForeignKey(partitions.c.partition_id), primary_key=True, index=True),
    Column("action", String(8), nullable=False),
    Column("done", Boolean, nullable=False),
    Column(
        "given_up",
        Boolean,
        nullable=False,
        server_default=false(),
        comment="the loss of its disk is accepted",
    ),
)

groups = Table(
    "groups",
    metadata,
    Column("group_id", BigId, primary_key=True, autoincrement=True),
    Column("subject_id", ForeignKey("subjects.subject_id"), nullable=False),
    Column("name", String(200), nullable=False),
    Column("last_token", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False, comment="rises whenever any grant changes"),
    Column("settled", Boolean, nullable=False),
    Column(
        "route_version", BigInteger, nullable=False, comment="version with which it was settled"
    ),
    Column("strategy", String(16), nullable=False, server_default="exclusive"),
    Column(
        "told",
        Boolean,
        nullable=False,
        server_default=false(),
        comment="every broker that needs the group knows it",
    ),
    Column(
        "deleting",
        Boolean,
        nullable=False,
        server_default=false(),
        comment="brokers forget it, then its rows are deleted",
    ),
    Column("on_failure", String(8), comment="null: as the code of each consumer says"),
    Column("tries_max", Integer, comment="as on_failure"),
    Column("backoff_first_ms", Integer, comment="as on_failure"),
    Column("backoff_max_ms", Integer, comment="as on_failure"),
    Column(
        "start_at",
        String(8),
        nullable=False,
        server_default="earliest",
        comment="where it began on the partitions that existed then",
    ),
    Column("start_ms", BigInteger, comment="milliseconds since 1970, if it began at a time"),
    Column(
        "suspended",
        Boolean,
        nullable=False,
        server_default=false(),
        comment="an operator has suspended it",
    ),
    Column("suspended_since", BigInteger, comment="calendar of the database, ms; none: not known"),
    Column(
        "idle_since",
        BigInteger,
        comment="no session since; null: it has one, or was not checked yet",
    ),
    Column("ended_client", String(512), comment="consumer whose session ended last; null: none"),
    Column("ended_left", Boolean, comment="true: it left the group; false: its ttl ended"),
    Column("ended_at", BigInteger, comment="null: not known"),
    Column(
        "ended_heard_at", BigInteger, comment="last heartbeat of that consumer; null: not known"
    ),
    UniqueConstraint("subject_id", "name"),
    sqlite_autoincrement=True,  # ids are never reused
)

sessions = Table(
    "sessions",
    metadata,
    Column("session", String(64), primary_key=True),
    Column("group_id", ForeignKey(groups.c.group_id), nullable=False, index=True),
    Column("client", String(512), nullable=False),
    Column("joined", BigInteger, nullable=False, comment="rises within the group"),
    Column("ttl_ms", Integer, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("grants_version", BigInteger, nullable=False),
    Column(
        "suspended",
        Boolean,
        nullable=False,
        server_default=false(),
        comment="hands over what it holds and gets nothing new",
    ),
    Column(
        "instance",
        String(200),
        nullable=False,
        server_default="",
        comment="the name under which a restarted client takes its place; empty: none",
    ),
    Column(
        "heard",
        Boolean,
        nullable=False,
        server_default=false(),
        comment="true after a heartbeat, so that the join was no late call of a dead process",
    ),
    Column(
        "predecessors",
        String(2_048),
        nullable=False,
        server_default="",
        comment="earlier sessions of its instance, whose late calls do not begin them again",
    ),
    Column(
        "filter",
        String(512),
        nullable=False,
        server_default="",
        comment="filter of the consumer; the same for all sessions of a group",
    ),
    Column(
        "principal",
        String(200),
        nullable=False,
        server_default="",
        index=True,
        comment="owner of the consumer; empty: not known, or without a limit",
    ),
    Column(
        "unreached",
        String(4_096),
        nullable=False,
        server_default="",
        comment="broker groups to which it cannot connect, separated by spaces",
    ),
    Column(
        "unreached_since",
        String(4_096),
        nullable=False,
        server_default="",
        comment="for each of these the calendar of the database, ms, separated by spaces",
    ),
    Index(None, "expires_at"),
)

leases = Table(
    "leases",
    metadata,
    Column("group_id", ForeignKey(groups.c.group_id), primary_key=True),
    Column("partition_id", ForeignKey(partitions.c.partition_id), primary_key=True, index=True),
    Column("token", BigInteger, nullable=False),
    Column("session", String(64), comment="session that holds it; null: it is free"),
    Column("wanted", String(64), comment="session that gets it once it is free"),
    Column("withdrawn", Boolean, nullable=False),
    Column("previous_client", String(512), comment="member that held it before; null: none"),
    Column("previous_end", String(32), comment="how its lease ended; null with previous_client"),
    Index(None, "session"),
)

drained = Table(
    "drained",
    metadata,
    Column("group_id", ForeignKey(groups.c.group_id), primary_key=True),
    Column("partition_id", ForeignKey(partitions.c.partition_id), primary_key=True, index=True),
    Column(
        "parked",
        Boolean,
        nullable=False,
        server_default=false(),
        comment="the group had parked messages on it, which its children adopt",
    ),
)

heard = Table(
    "heard",
    metadata,
    # There is no foreign key, because an operation must not wait for a lock on the group's row.
    Column("group_id", BigId, primary_key=True, autoincrement=False),
    Column("partition_id", ForeignKey(partitions.c.partition_id), primary_key=True, index=True),
)

given_up = Table(
    "given_up",
    metadata,
    Column("group_id", ForeignKey(groups.c.group_id), primary_key=True),
    Column("partition_id", ForeignKey(partitions.c.partition_id), primary_key=True, index=True),
    Column("messages_max", BigInteger, comment="none: not known"),
    comment="unread messages of partitions whose loss an operator has accepted",
)

starts = Table(
    "starts",
    metadata,
    Column("group_id", ForeignKey(groups.c.group_id), primary_key=True),
    Column("partition_id", ForeignKey(partitions.c.partition_id), primary_key=True, index=True),
    Column("cursor", BigInteger, nullable=False),
    Column("token", BigInteger, nullable=False),
    comment="starts of new groups that brokers have not stored yet",
)

suspended_clients = Table(
    "suspended_clients",
    metadata,
    Column("group_id", ForeignKey(groups.c.group_id), primary_key=True),
    Column("client", String(512), primary_key=True),
    Column("since", BigInteger, comment="calendar of the database, ms; none: not known"),
    comment="members that an operator has suspended by name",
)

live_resets = Table(
    "live_resets",
    metadata,
    Column("reset_id", BigId, primary_key=True, autoincrement=True),
    Column("group_id", ForeignKey(groups.c.group_id), nullable=False, unique=True),
    Column("ask", Text, nullable=False, comment="ResetGroup as JSON"),
    Column("begun", Boolean, nullable=False, server_default=false(), comment="cursors may be set"),
    Column(
        "answer",
        Text,
        comment="GroupReset as JSON; null: the group is granted nothing",
    ),
    Column("asked_at", BigInteger, comment="calendar of the database, ms; none: not known"),
    sqlite_autoincrement=True,
    comment="resets of groups with live consumers",
)

removals = Table(
    "removals",
    metadata,
    Column("partition_id", ForeignKey(partitions.c.partition_id), primary_key=True),
    Column(
        "group_id",
        BigId,
        primary_key=True,
        autoincrement=False,
        comment="the group to forget; 0: drop the whole partition",
    ),
    Column("token", BigInteger, nullable=False, comment="highest token of the group"),
)

access_state = Table(
    "access_state",
    metadata,
    Column("one", Integer, primary_key=True, autoincrement=False, comment="1: there is one row"),
    Column("cluster", String(64), nullable=False, comment="random: capabilities name it"),
    Column("version", BigInteger, nullable=False, comment="rises with every change of access"),
)

access_principals = Table(
    "access_principals",
    metadata,
    Column("principal", String(200), primary_key=True),
    Column("version", BigInteger, nullable=False, comment="of its last change"),
    Column("changed_at", BigInteger, nullable=False, comment="calendar of the metaserver, ms"),
)

access_tokens = Table(
    "access_tokens",
    metadata,
    Column("token_id", BigId, primary_key=True, autoincrement=True),
    Column("principal", ForeignKey(access_principals.c.principal), nullable=False, index=True),
    Column(
        "hash", String(64), nullable=False, unique=True, comment="SHA-256; the token is not kept"
    ),
    Column("label", String(200), nullable=False),
    Column("made_at", BigInteger, nullable=False),
    Column("begins_at", BigInteger, nullable=False),
    Column("ends_at", BigInteger, nullable=False, comment="0: never"),
    Column("revoked_at", BigInteger, nullable=False, server_default="0", comment="0: it is not"),
    sqlite_autoincrement=True,
    comment="times are the calendar's, in milliseconds",
)

access_grants = Table(
    "access_grants",
    metadata,
    Column("principal", ForeignKey(access_principals.c.principal), primary_key=True),
    Column("right", String(32), primary_key=True),
    Column("subject", String(201), primary_key=True, comment="a pattern"),
    Column("group", String(201), primary_key=True, comment="a pattern"),
)

access_keys = Table(
    "access_keys",
    metadata,
    Column("key_id", String(64), primary_key=True),
    Column("public", String(128), nullable=False, comment="Ed25519, hexadecimal"),
    Column("ends_at", BigInteger, nullable=False, comment="end of everything that it signed"),
)

access_quotas = Table(
    "access_quotas",
    metadata,
    Column("kind", String(16), primary_key=True, comment="principal or subject"),
    Column("name", String(201), primary_key=True, comment="of a subject a pattern"),
    Column("bytes_per_s", BigInteger, nullable=False, comment="0: no limit"),
    Column("requests_per_s", BigInteger, nullable=False, comment="0: no limit"),
    Column("connections", BigInteger, nullable=False, comment="0: no limit"),
    Column("sessions", BigInteger, nullable=False, server_default="0", comment="0: no limit"),
)

access_audit = Table(
    "access_audit",
    metadata,
    Column("audit_id", BigId, primary_key=True, autoincrement=True),
    Column("at_ms", BigInteger, nullable=False, index=True, comment="calendar of the server"),
    Column("who", String(200), nullable=False, comment="principal; '': not known"),
    Column("remote", String(200), nullable=False),
    Column("did", String(200), nullable=False),
    Column("subject", String(200), nullable=False),
    Column("group", String(200), nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("code", Integer, nullable=False, comment="0: no error"),
    Column("detail", String(200), nullable=False),
    Column("times", BigInteger, nullable=False),
    Column("server", String(200), nullable=False),
    sqlite_autoincrement=True,
    comment="names and numbers; never keys, values, tokens",
)


name_limits = Table(
    "access_name_limits",
    metadata,
    Column("name", String(201), primary_key=True, comment="a subject or pattern"),
    Column("subjects", BigInteger, nullable=False, comment="0: no limit"),
    Column("scheduled_bytes", BigInteger, nullable=False, comment="0: no limit; each broker"),
)


publications = Table(
    "publications",
    metadata,
    Column("hidden", String(200), primary_key=True),
    Column("target", String(200), nullable=False),
    Column("operation_id", BigInteger, nullable=False),
    Column("replaces", Boolean, nullable=False),
    Column("subject_id", BigInteger, nullable=False, server_default="0", comment="0: not known"),
    Column("ended_at", BigInteger, index=True),
    comment="hidden subjects that were published, so that a repeat changes nothing",
)

deletions = Table(
    "deletions",
    metadata,
    Column("subject_id", BigId, primary_key=True, autoincrement=False),
    Column(
        "group_id", BigId, primary_key=True, autoincrement=False, comment="0: the whole subject"
    ),
    Column("subject", String(200), nullable=False),
    Column("ended_at", BigInteger, index=True),
    Index(None, "subject", "group_id"),
    comment="deleted subjects and groups, whose clients must not use later ones of the name",
)
