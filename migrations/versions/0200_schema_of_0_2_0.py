"""The schema of 0.2.0, the first release.

Revision: 0200
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0200"
down_revision = None
branch_labels = None
depends_on = None

_BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""The type of generated ids, which have 64 bits in every database. SQLite generates ids only for
columns whose type is exactly INTEGER.
"""

TABLES = (
    "accepted_folders",
    "access_audit",
    "access_keys",
    "access_name_limits",
    "access_principals",
    "access_quotas",
    "access_state",
    "brokers",
    "deletions",
    "duties",
    "facts",
    "lost_folders",
    "metaservers",
    "publications",
    "refused_brokers",
    "subjects",
    "access_grants",
    "access_tokens",
    "groups",
    "operations",
    "partitions",
    "drained",
    "given_up",
    "heard",
    "leases",
    "live_resets",
    "partition_parents",
    "removals",
    "sessions",
    "starts",
    "steps",
    "suspended_clients",
)
"""All tables; referenced tables come before those that refer to them."""


def upgrade() -> None:
    """Create all tables and indexes."""
    op.create_table(
        "accepted_folders",
        sa.Column("accepted_id", _BIG_ID, autoincrement=True, nullable=False),
        sa.Column("broker_group", sa.String(200), nullable=False),
        sa.Column("opening", sa.String(512), nullable=False),
        sa.Column("log_end", sa.BigInteger(), nullable=False),
        sa.Column("known_opening", sa.String(512), nullable=False),
        sa.Column("known_log_end", sa.BigInteger(), nullable=False),
        sa.Column(
            "fence",
            sa.BigInteger(),
            server_default=sa.text("0"),
            nullable=False,
            comment="highest token that its broker refuses",
        ),
        sa.PrimaryKeyConstraint("accepted_id", name=op.f("pk_accepted_folders")),
        comment="older data folders that an operator has accepted",
    )
    op.create_table(
        "access_audit",
        sa.Column("audit_id", _BIG_ID, autoincrement=True, nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False, comment="calendar of the server"),
        sa.Column("who", sa.String(200), nullable=False, comment="principal; '': not known"),
        sa.Column("remote", sa.String(200), nullable=False),
        sa.Column("did", sa.String(200), nullable=False),
        sa.Column("subject", sa.String(200), nullable=False),
        sa.Column("group", sa.String(200), nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("code", sa.Integer(), nullable=False, comment="0: no error"),
        sa.Column("detail", sa.String(200), nullable=False),
        sa.Column("times", sa.BigInteger(), nullable=False),
        sa.Column("server", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("audit_id", name=op.f("pk_access_audit")),
        comment="names and numbers; never keys, values, tokens",
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_access_audit_at_ms"), "access_audit", ["at_ms"], unique=False)
    op.create_table(
        "access_keys",
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("public", sa.String(128), nullable=False, comment="Ed25519, hexadecimal"),
        sa.Column(
            "ends_at",
            sa.BigInteger(),
            nullable=False,
            comment="end of everything that it signed",
        ),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_access_keys")),
    )
    op.create_table(
        "access_name_limits",
        sa.Column("name", sa.String(201), nullable=False, comment="a subject or pattern"),
        sa.Column("subjects", sa.BigInteger(), nullable=False, comment="0: no limit"),
        sa.Column(
            "scheduled_bytes", sa.BigInteger(), nullable=False, comment="0: no limit; each broker"
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_access_name_limits")),
    )
    op.create_table(
        "access_principals",
        sa.Column("principal", sa.String(200), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False, comment="of its last change"),
        sa.Column(
            "changed_at", sa.BigInteger(), nullable=False, comment="calendar of the metaserver, ms"
        ),
        sa.PrimaryKeyConstraint("principal", name=op.f("pk_access_principals")),
    )
    op.create_table(
        "access_quotas",
        sa.Column("kind", sa.String(16), nullable=False, comment="principal or subject"),
        sa.Column("name", sa.String(201), nullable=False, comment="of a subject a pattern"),
        sa.Column("bytes_per_s", sa.BigInteger(), nullable=False, comment="0: no limit"),
        sa.Column("requests_per_s", sa.BigInteger(), nullable=False, comment="0: no limit"),
        sa.Column("connections", sa.BigInteger(), nullable=False, comment="0: no limit"),
        sa.Column(
            "sessions", sa.BigInteger(), server_default="0", nullable=False, comment="0: no limit"
        ),
        sa.PrimaryKeyConstraint("kind", "name", name=op.f("pk_access_quotas")),
    )
    op.create_table(
        "access_state",
        sa.Column(
            "one", sa.Integer(), autoincrement=False, nullable=False, comment="1: there is one row"
        ),
        sa.Column("cluster", sa.String(64), nullable=False, comment="random: capabilities name it"),
        sa.Column(
            "version", sa.BigInteger(), nullable=False, comment="rises with every change of access"
        ),
        sa.PrimaryKeyConstraint("one", name=op.f("pk_access_state")),
    )
    op.create_table(
        "brokers",
        sa.Column("broker_group", sa.String(200), nullable=False),
        sa.Column("broker_id", sa.String(512), nullable=False),
        sa.Column("address", sa.String(512), nullable=False),
        sa.Column("readable", sa.Boolean(), nullable=False),
        sa.Column("writable", sa.Boolean(), nullable=False),
        sa.Column("seen_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column(
            "cordoned",
            sa.Boolean(),
            server_default=sa.false(),
            nullable=False,
            comment="true: it gets no new partitions",
        ),
        sa.Column(
            "opening",
            sa.String(512),
            server_default="",
            nullable=False,
            comment="newest opening of its data folder; empty: not known",
        ),
        sa.Column(
            "log_end",
            sa.BigInteger(),
            server_default="0",
            nullable=False,
            comment="position at which its log ended, durably, at its last report",
        ),
        sa.Column(
            "hosted",
            sa.BigInteger(),
            server_default="0",
            nullable=False,
            comment="number of partitions that it reported",
        ),
        sa.Column(
            "version",
            sa.String(64),
            server_default="",
            nullable=False,
            comment="version of its program; empty: not reported",
        ),
        sa.Column(
            "problem",
            sa.String(512),
            server_default="",
            nullable=False,
            comment="why it accepts no writes; empty: it accepts them, or the reason is not known",
        ),
        sa.PrimaryKeyConstraint("broker_group", name=op.f("pk_brokers")),
    )
    op.create_table(
        "deletions",
        sa.Column("subject_id", _BIG_ID, autoincrement=False, nullable=False),
        sa.Column(
            "group_id", _BIG_ID, autoincrement=False, nullable=False, comment="0: the whole subject"
        ),
        sa.Column("subject", sa.String(200), nullable=False),
        sa.Column("ended_at", sa.BigInteger()),
        sa.PrimaryKeyConstraint("subject_id", "group_id", name=op.f("pk_deletions")),
        comment="deleted subjects and groups, whose clients must not use later ones of the name",
    )
    op.create_index(op.f("ix_deletions_ended_at"), "deletions", ["ended_at"], unique=False)
    op.create_index(
        op.f("ix_deletions_subject_group_id"), "deletions", ["subject", "group_id"], unique=False
    )
    op.create_table(
        "duties",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("holder", sa.String(128), nullable=False),
        sa.Column("held_until", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_duties")),
        comment="named leases of metaservers, by the database's time",
    )
    op.create_table(
        "facts",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("value", sa.String(512), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_facts")),
        comment="values of the whole database, such as the machine's boot to which its "
        "times belong",
    )
    op.create_table(
        "lost_folders",
        sa.Column("broker_id", sa.String(512), nullable=False),
        sa.Column("broker_group", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("broker_id", name=op.f("pk_lost_folders")),
        comment="data folders whose loss an operator has accepted: they are refused",
    )
    op.create_table(
        "metaservers",
        sa.Column(
            "holder", sa.String(64), nullable=False, comment="random id of the running program"
        ),
        sa.Column("address", sa.String(512), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("holder", name=op.f("pk_metaservers")),
        comment="the running metaservers",
    )
    op.create_table(
        "publications",
        sa.Column("hidden", sa.String(200), nullable=False),
        sa.Column("target", sa.String(200), nullable=False),
        sa.Column("operation_id", sa.BigInteger(), nullable=False),
        sa.Column("replaces", sa.Boolean(), nullable=False),
        sa.Column(
            "subject_id",
            sa.BigInteger(),
            server_default="0",
            nullable=False,
            comment="0: not known",
        ),
        sa.Column("ended_at", sa.BigInteger()),
        sa.PrimaryKeyConstraint("hidden", name=op.f("pk_publications")),
        comment="hidden subjects that were published, so that a repeat changes nothing",
    )
    op.create_index(op.f("ix_publications_ended_at"), "publications", ["ended_at"], unique=False)
    op.create_table(
        "refused_brokers",
        sa.Column("broker_group", sa.String(200), nullable=False),
        sa.Column("address", sa.String(512), nullable=False),
        sa.Column("broker_id", sa.String(512), nullable=False),
        sa.Column(
            "expires_at",
            sa.BigInteger(),
            nullable=False,
            comment="the refusal is shown until then",
        ),
        sa.Column("opening", sa.String(512), server_default="", nullable=False),
        sa.Column("log_end", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("problem", sa.String(1024), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("broker_group", "address", name=op.f("pk_refused_brokers")),
    )
    op.create_table(
        "subjects",
        sa.Column("subject_id", _BIG_ID, autoincrement=True, nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("order_strategy", sa.String(16), nullable=False),
        sa.Column("partitions_wanted", sa.Integer(), nullable=False),
        sa.Column(
            "partitions_named",
            sa.Integer(),
            nullable=False,
            comment="number of partition names used so far",
        ),
        sa.Column("route_version", sa.BigInteger(), nullable=False, comment="0: not open yet"),
        sa.Column(
            "static",
            sa.Boolean(),
            server_default=sa.false(),
            nullable=False,
            comment="it has logic queues",
        ),
        sa.Column("retention", sa.String(16), server_default="acked", nullable=False),
        sa.Column(
            "message_bytes_max",
            sa.Integer(),
            server_default="1048576",
            nullable=False,
            comment="largest size of a message, with key and properties",
        ),
        sa.Column(
            "problem",
            sa.String(1024),
            server_default="",
            nullable=False,
            comment="why its creation failed",
        ),
        sa.Column(
            "deleting",
            sa.Boolean(),
            server_default=sa.false(),
            nullable=False,
            comment="brokers drop its partitions, then its rows are deleted",
        ),
        sa.Column(
            "tokens_above",
            sa.BigInteger(),
            server_default="0",
            nullable=False,
            comment="highest possible token of its deleted groups",
        ),
        sa.Column(
            "hidden_for",
            sa.String(200),
            server_default="",
            nullable=False,
            comment="its target while it is hidden",
        ),
        sa.Column(
            "hidden_since",
            sa.BigInteger(),
            comment="start of a hidden subject's idle time, database time",
        ),
        sa.Column(
            "hidden_messages",
            sa.BigInteger(),
            server_default="0",
            nullable=False,
            comment="number of a hidden subject's messages then",
        ),
        sa.Column(
            "filled_by",
            sa.String(200),
            server_default="",
            nullable=False,
            comment="while it is hidden",
        ),
        sa.PrimaryKeyConstraint("subject_id", name=op.f("pk_subjects")),
        sa.UniqueConstraint("name", name=op.f("uq_subjects_name")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "access_grants",
        sa.Column("principal", sa.String(200), nullable=False),
        sa.Column("right", sa.String(32), nullable=False),
        sa.Column("subject", sa.String(201), nullable=False, comment="a pattern"),
        sa.Column("group", sa.String(201), nullable=False, comment="a pattern"),
        sa.ForeignKeyConstraint(
            ["principal"], ["access_principals.principal"], name=op.f("fk_access_grants_principal")
        ),
        sa.PrimaryKeyConstraint(
            "principal", "right", "subject", "group", name=op.f("pk_access_grants")
        ),
    )
    op.create_table(
        "access_tokens",
        sa.Column("token_id", _BIG_ID, autoincrement=True, nullable=False),
        sa.Column("principal", sa.String(200), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False, comment="SHA-256; the token is not kept"),
        sa.Column("label", sa.String(200), nullable=False),
        sa.Column("made_at", sa.BigInteger(), nullable=False),
        sa.Column("begins_at", sa.BigInteger(), nullable=False),
        sa.Column("ends_at", sa.BigInteger(), nullable=False, comment="0: never"),
        sa.Column(
            "revoked_at",
            sa.BigInteger(),
            server_default="0",
            nullable=False,
            comment="0: it is not",
        ),
        sa.ForeignKeyConstraint(
            ["principal"], ["access_principals.principal"], name=op.f("fk_access_tokens_principal")
        ),
        sa.PrimaryKeyConstraint("token_id", name=op.f("pk_access_tokens")),
        sa.UniqueConstraint("hash", name=op.f("uq_access_tokens_hash")),
        comment="times are the calendar's, in milliseconds",
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_access_tokens_principal"), "access_tokens", ["principal"], unique=False
    )
    op.create_table(
        "groups",
        sa.Column("group_id", _BIG_ID, autoincrement=True, nullable=False),
        sa.Column("subject_id", _BIG_ID, nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("last_token", sa.BigInteger(), nullable=False),
        sa.Column(
            "version", sa.BigInteger(), nullable=False, comment="rises whenever any grant changes"
        ),
        sa.Column("settled", sa.Boolean(), nullable=False),
        sa.Column(
            "route_version",
            sa.BigInteger(),
            nullable=False,
            comment="version with which it was settled",
        ),
        sa.Column("strategy", sa.String(16), server_default="exclusive", nullable=False),
        sa.Column(
            "told",
            sa.Boolean(),
            server_default=sa.false(),
            nullable=False,
            comment="every broker that needs the group knows it",
        ),
        sa.Column(
            "deleting",
            sa.Boolean(),
            server_default=sa.false(),
            nullable=False,
            comment="brokers forget it, then its rows are deleted",
        ),
        sa.Column("on_failure", sa.String(8), comment="null: as the code of each consumer says"),
        sa.Column("tries_max", sa.Integer(), comment="as on_failure"),
        sa.Column("backoff_first_ms", sa.Integer(), comment="as on_failure"),
        sa.Column("backoff_max_ms", sa.Integer(), comment="as on_failure"),
        sa.Column(
            "start_at",
            sa.String(8),
            server_default="earliest",
            nullable=False,
            comment="where it began on the partitions that existed then",
        ),
        sa.Column(
            "start_ms", sa.BigInteger(), comment="milliseconds since 1970, if it began at a time"
        ),
        sa.Column(
            "suspended",
            sa.Boolean(),
            server_default=sa.false(),
            nullable=False,
            comment="an operator has suspended it",
        ),
        sa.Column(
            "idle_since",
            sa.BigInteger(),
            comment="no session since; null: it has one, or was not checked yet",
        ),
        sa.Column(
            "ended_client",
            sa.String(512),
            comment="consumer whose session ended last; null: none",
        ),
        sa.Column(
            "ended_left", sa.Boolean(), comment="true: it left the group; false: its ttl ended"
        ),
        sa.Column("ended_at", sa.BigInteger(), comment="null: not known"),
        sa.ForeignKeyConstraint(
            ["subject_id"], ["subjects.subject_id"], name=op.f("fk_groups_subject_id")
        ),
        sa.PrimaryKeyConstraint("group_id", name=op.f("pk_groups")),
        sa.UniqueConstraint("subject_id", "name", name=op.f("uq_groups_subject_id_name")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "operations",
        sa.Column("operation_id", _BIG_ID, autoincrement=True, nullable=False),
        sa.Column("subject_id", _BIG_ID, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("without_source", sa.Boolean(), nullable=False),
        sa.Column("problem", sa.String(1024), nullable=False, comment="why the operation waits"),
        sa.Column("running", sa.BigInteger(), comment="its subject until the route has changed"),
        sa.Column("driver", sa.String(64), comment="the metaserver that drives it"),
        sa.Column(
            "driven_until",
            sa.BigInteger(),
            nullable=False,
            comment="another may drive it from then on",
        ),
        sa.Column(
            "new_order_strategy",
            sa.String(16),
            comment="of its subject, once the route has changed",
        ),
        sa.Column(
            "new_retention", sa.String(16), comment="of its subject, once the route has changed"
        ),
        sa.Column(
            "new_message_bytes_max",
            sa.Integer(),
            comment="of its subject, once the route has changed",
        ),
        sa.Column(
            "replaces",
            sa.Boolean(),
            server_default=sa.false(),
            nullable=False,
            comment="older partitions expire once the route has changed",
        ),
        sa.Column("ended_at", sa.BigInteger(), comment="see `schema.py`"),
        sa.ForeignKeyConstraint(
            ["subject_id"], ["subjects.subject_id"], name=op.f("fk_operations_subject_id")
        ),
        sa.PrimaryKeyConstraint("operation_id", name=op.f("pk_operations")),
        sa.UniqueConstraint("running", name=op.f("uq_operations_running")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_operations_ended_at"), "operations", ["ended_at"], unique=False)
    op.create_index(op.f("ix_operations_state"), "operations", ["state"], unique=False)
    op.create_index(op.f("ix_operations_subject_id"), "operations", ["subject_id"], unique=False)
    op.create_table(
        "partitions",
        sa.Column("partition_id", _BIG_ID, autoincrement=True, nullable=False),
        sa.Column("subject_id", _BIG_ID, nullable=False),
        sa.Column("name", sa.String(240), nullable=False),
        sa.Column("queue", sa.Integer(), nullable=False),
        sa.Column("range_start", sa.Integer(), nullable=False),
        sa.Column("range_end", sa.Integer(), nullable=False),
        sa.Column("broker_group", sa.String(200), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("end_offset", sa.BigInteger(), comment="none: open, or its end is not known"),
        sa.Column("abandoned", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column(
            "logic_start",
            sa.BigInteger(),
            server_default="0",
            nullable=False,
            comment="logic offset of its first message",
        ),
        sa.Column(
            "lost",
            sa.Boolean(),
            server_default=sa.false(),
            nullable=False,
            comment="expired because the loss of its disk was accepted",
        ),
        sa.ForeignKeyConstraint(
            ["broker_group"], ["brokers.broker_group"], name=op.f("fk_partitions_broker_group")
        ),
        sa.ForeignKeyConstraint(
            ["subject_id"], ["subjects.subject_id"], name=op.f("fk_partitions_subject_id")
        ),
        sa.PrimaryKeyConstraint("partition_id", name=op.f("pk_partitions")),
        sa.UniqueConstraint("subject_id", "name", name=op.f("uq_partitions_subject_id_name")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_partitions_broker_group"), "partitions", ["broker_group"], unique=False
    )
    op.create_index(op.f("ix_partitions_subject_id"), "partitions", ["subject_id"], unique=False)
    op.create_table(
        "drained",
        sa.Column("group_id", _BIG_ID, nullable=False),
        sa.Column("partition_id", _BIG_ID, nullable=False),
        sa.Column(
            "parked",
            sa.Boolean(),
            server_default=sa.false(),
            nullable=False,
            comment="the group had parked messages on it, which its children adopt",
        ),
        sa.ForeignKeyConstraint(
            ["group_id"], ["groups.group_id"], name=op.f("fk_drained_group_id")
        ),
        sa.ForeignKeyConstraint(
            ["partition_id"], ["partitions.partition_id"], name=op.f("fk_drained_partition_id")
        ),
        sa.PrimaryKeyConstraint("group_id", "partition_id", name=op.f("pk_drained")),
    )
    op.create_index(op.f("ix_drained_partition_id"), "drained", ["partition_id"], unique=False)
    op.create_table(
        "given_up",
        sa.Column("group_id", _BIG_ID, nullable=False),
        sa.Column("partition_id", _BIG_ID, nullable=False),
        sa.Column("messages_max", sa.BigInteger(), nullable=True, comment="none: not known"),
        sa.ForeignKeyConstraint(
            ["group_id"], ["groups.group_id"], name=op.f("fk_given_up_group_id")
        ),
        sa.ForeignKeyConstraint(
            ["partition_id"], ["partitions.partition_id"], name=op.f("fk_given_up_partition_id")
        ),
        sa.PrimaryKeyConstraint("group_id", "partition_id", name=op.f("pk_given_up")),
        comment="unread messages of partitions whose loss an operator has accepted",
    )
    op.create_index(op.f("ix_given_up_partition_id"), "given_up", ["partition_id"], unique=False)
    op.create_table(
        "heard",
        sa.Column("group_id", _BIG_ID, autoincrement=False, nullable=False),
        sa.Column("partition_id", _BIG_ID, nullable=False),
        sa.ForeignKeyConstraint(
            ["partition_id"], ["partitions.partition_id"], name=op.f("fk_heard_partition_id")
        ),
        sa.PrimaryKeyConstraint("group_id", "partition_id", name=op.f("pk_heard")),
    )
    op.create_index(op.f("ix_heard_partition_id"), "heard", ["partition_id"], unique=False)
    op.create_table(
        "leases",
        sa.Column("group_id", _BIG_ID, nullable=False),
        sa.Column("partition_id", _BIG_ID, nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("session", sa.String(64), comment="session that holds it; null: it is free"),
        sa.Column("wanted", sa.String(64), comment="session that gets it once it is free"),
        sa.Column("withdrawn", sa.Boolean(), nullable=False),
        sa.Column(
            "previous_client", sa.String(512), comment="member that held it before; null: none"
        ),
        sa.Column(
            "previous_end", sa.String(32), comment="how its lease ended; null with previous_client"
        ),
        sa.ForeignKeyConstraint(["group_id"], ["groups.group_id"], name=op.f("fk_leases_group_id")),
        sa.ForeignKeyConstraint(
            ["partition_id"], ["partitions.partition_id"], name=op.f("fk_leases_partition_id")
        ),
        sa.PrimaryKeyConstraint("group_id", "partition_id", name=op.f("pk_leases")),
    )
    op.create_index(op.f("ix_leases_partition_id"), "leases", ["partition_id"], unique=False)
    op.create_index(op.f("ix_leases_session"), "leases", ["session"], unique=False)
    op.create_table(
        "live_resets",
        sa.Column("reset_id", _BIG_ID, autoincrement=True, nullable=False),
        sa.Column("group_id", _BIG_ID, nullable=False),
        sa.Column("ask", sa.Text(), nullable=False, comment="ResetGroup as JSON"),
        sa.Column(
            "begun",
            sa.Boolean(),
            server_default=sa.false(),
            nullable=False,
            comment="cursors may be set",
        ),
        sa.Column(
            "answer", sa.Text(), comment="GroupReset as JSON; null: the group is granted nothing"
        ),
        sa.ForeignKeyConstraint(
            ["group_id"], ["groups.group_id"], name=op.f("fk_live_resets_group_id")
        ),
        sa.PrimaryKeyConstraint("reset_id", name=op.f("pk_live_resets")),
        sa.UniqueConstraint("group_id", name=op.f("uq_live_resets_group_id")),
        comment="resets of groups with live consumers",
        sqlite_autoincrement=True,
    )
    op.create_table(
        "partition_parents",
        sa.Column("partition_id", _BIG_ID, nullable=False),
        sa.Column("parent_id", _BIG_ID, nullable=False),
        sa.ForeignKeyConstraint(
            ["parent_id"], ["partitions.partition_id"], name=op.f("fk_partition_parents_parent_id")
        ),
        sa.ForeignKeyConstraint(
            ["partition_id"],
            ["partitions.partition_id"],
            name=op.f("fk_partition_parents_partition_id"),
        ),
        sa.PrimaryKeyConstraint("partition_id", "parent_id", name=op.f("pk_partition_parents")),
    )
    op.create_index(
        op.f("ix_partition_parents_parent_id"), "partition_parents", ["parent_id"], unique=False
    )
    op.create_table(
        "removals",
        sa.Column("partition_id", _BIG_ID, nullable=False),
        sa.Column(
            "group_id",
            _BIG_ID,
            autoincrement=False,
            nullable=False,
            comment="the group to forget; 0: drop the whole partition",
        ),
        sa.Column("token", sa.BigInteger(), nullable=False, comment="highest token of the group"),
        sa.ForeignKeyConstraint(
            ["partition_id"], ["partitions.partition_id"], name=op.f("fk_removals_partition_id")
        ),
        sa.PrimaryKeyConstraint("partition_id", "group_id", name=op.f("pk_removals")),
    )
    op.create_table(
        "sessions",
        sa.Column("session", sa.String(64), nullable=False),
        sa.Column("group_id", _BIG_ID, nullable=False),
        sa.Column("client", sa.String(512), nullable=False),
        sa.Column("joined", sa.BigInteger(), nullable=False, comment="rises within the group"),
        sa.Column("ttl_ms", sa.Integer(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("grants_version", sa.BigInteger(), nullable=False),
        sa.Column(
            "suspended",
            sa.Boolean(),
            server_default=sa.false(),
            nullable=False,
            comment="hands over what it holds and gets nothing new",
        ),
        sa.Column(
            "instance",
            sa.String(200),
            server_default="",
            nullable=False,
            comment="the name under which a restarted client takes its place; empty: none",
        ),
        sa.Column(
            "heard",
            sa.Boolean(),
            server_default=sa.false(),
            nullable=False,
            comment="true after a heartbeat, so that the join was no late call of a dead process",
        ),
        sa.Column(
            "predecessors",
            sa.String(2048),
            server_default="",
            nullable=False,
            comment="earlier sessions of its instance, whose late calls do not begin them again",
        ),
        sa.Column(
            "filter",
            sa.String(512),
            server_default="",
            nullable=False,
            comment="filter of the consumer; the same for all sessions of a group",
        ),
        sa.Column(
            "principal",
            sa.String(200),
            server_default="",
            nullable=False,
            comment="owner of the consumer; empty: not known, or without a limit",
        ),
        sa.Column(
            "unreached",
            sa.String(4096),
            server_default="",
            nullable=False,
            comment="broker groups to which it cannot connect, separated by spaces",
        ),
        sa.ForeignKeyConstraint(
            ["group_id"], ["groups.group_id"], name=op.f("fk_sessions_group_id")
        ),
        sa.PrimaryKeyConstraint("session", name=op.f("pk_sessions")),
    )
    op.create_index(op.f("ix_sessions_expires_at"), "sessions", ["expires_at"], unique=False)
    op.create_index(op.f("ix_sessions_group_id"), "sessions", ["group_id"], unique=False)
    op.create_index(op.f("ix_sessions_principal"), "sessions", ["principal"], unique=False)
    op.create_table(
        "starts",
        sa.Column("group_id", _BIG_ID, nullable=False),
        sa.Column("partition_id", _BIG_ID, nullable=False),
        sa.Column("cursor", sa.BigInteger(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["group_id"], ["groups.group_id"], name=op.f("fk_starts_group_id")),
        sa.ForeignKeyConstraint(
            ["partition_id"], ["partitions.partition_id"], name=op.f("fk_starts_partition_id")
        ),
        sa.PrimaryKeyConstraint("group_id", "partition_id", name=op.f("pk_starts")),
        comment="starts of new groups that brokers have not stored yet",
    )
    op.create_index(op.f("ix_starts_partition_id"), "starts", ["partition_id"], unique=False)
    op.create_table(
        "steps",
        sa.Column("operation_id", _BIG_ID, nullable=False),
        sa.Column("partition_id", _BIG_ID, nullable=False),
        sa.Column("action", sa.String(8), nullable=False),
        sa.Column("done", sa.Boolean(), nullable=False),
        sa.Column(
            "given_up",
            sa.Boolean(),
            server_default=sa.false(),
            nullable=False,
            comment="the loss of its disk is accepted",
        ),
        sa.ForeignKeyConstraint(
            ["operation_id"], ["operations.operation_id"], name=op.f("fk_steps_operation_id")
        ),
        sa.ForeignKeyConstraint(
            ["partition_id"], ["partitions.partition_id"], name=op.f("fk_steps_partition_id")
        ),
        sa.PrimaryKeyConstraint("operation_id", "partition_id", name=op.f("pk_steps")),
    )
    op.create_index(op.f("ix_steps_partition_id"), "steps", ["partition_id"], unique=False)
    op.create_table(
        "suspended_clients",
        sa.Column("group_id", _BIG_ID, nullable=False),
        sa.Column("client", sa.String(512), nullable=False),
        sa.ForeignKeyConstraint(
            ["group_id"], ["groups.group_id"], name=op.f("fk_suspended_clients_group_id")
        ),
        sa.PrimaryKeyConstraint("group_id", "client", name=op.f("pk_suspended_clients")),
        comment="members that an operator has suspended by name",
    )


def downgrade() -> None:
    """Drop all tables with their indexes."""
    for table in reversed(TABLES):
        op.drop_table(table)
