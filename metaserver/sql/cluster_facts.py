"""Stores the identity and the name of the cluster to which a database belongs, and the cluster's
version. Runs SQL synchronously.

Invariants
    The id is drawn when the database is created, and never changes. A backup contains it, and
    brokers store it with their partitions, so a restored or rebuilt database has the same one.
    The name is written by the first metaserver that has one in its settings, and never changes.
    The version never decreases. A program that is incompatible with it changes nothing, not even
    the schema.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.errors import ConflictError, Reason
from ...protocol.membership.versions import FIRST_RELEASE, Version, check_member, parse_version
from .dialect import insert_new, insert_or_replace
from .migrate import lock_schema, migrate
from .schema import facts

CLUSTER, CLUSTER_ID, CLUSTER_VERSION = "cluster", "cluster id", "cluster version"
OF_CLUSTER = (CLUSTER, CLUSTER_VERSION)
"""Names of the facts that store the cluster's name and version."""
cluster_id_query = sa.select(facts.c.value).where(facts.c.name == CLUSTER_ID)
_facts_query = sa.select(facts.c.name, facts.c.value).where(facts.c.name.in_(OF_CLUSTER))


class ClusterFacts(NamedTuple):
    """The cluster's name and version, as stored in a database."""

    name: str
    """The cluster's name; "" if no metaserver has ever had one in its settings."""
    version: Version


def read_facts(connection: Connection) -> ClusterFacts:
    """Return the cluster's name and version."""
    return build_facts({row.name: row.value for row in connection.execute(_facts_query)})


def build_facts(values: Mapping[str, str]) -> ClusterFacts:
    """Build the cluster's name and version from stored facts, given as a dict from names to
    values.
    """
    version = values.get(CLUSTER_VERSION)
    cluster_version = parse_version(version) if version else FIRST_RELEASE
    return ClusterFacts(values.get(CLUSTER, ""), cluster_version)


def open_cluster(
    connection: Connection,
    *,
    program: str,
    cluster: str,
    before: Callable[[Connection], None] = lambda _connection: None,
) -> None:
    """
    Check that a program may use the database and bring its schema up to date.

    Args:
        program: the version of keylane that opens the database.
        cluster: the cluster's name in its settings; "" accepts any.
        before: called if the database already exists, before anything is changed.

    Raises:
        ConflictError: the database belongs to another cluster.
        VersionError: the program is incompatible with the cluster's version.
        ConfigError: the database was written by a newer version of keylane and cannot be used by
            this one.
    """
    lock_schema(connection)
    is_new = not sa.inspect(connection).has_table(facts.name)
    if not is_new:
        stored_facts = read_facts(connection)
        check_cluster(cluster, stored_facts.name, "the database")
        check_member(program, stored_facts.version, "this program")
        before(connection)
    migrate(connection, program=program)
    if is_new:
        raise_version(connection, parse_version(program))
    store_cluster_id(connection, secrets.token_hex(16))
    if cluster:
        insert_new(connection, facts, {"name": CLUSTER, "value": cluster})


def store_cluster_id(connection: Connection, cluster_id: str) -> None:
    """Store the cluster's id, unless the database has one."""
    insert_new(connection, facts, {"name": CLUSTER_ID, "value": cluster_id})


def read_cluster_id(connection: Connection) -> str:
    """Return the cluster's id; "" if the database was not opened as that of a cluster."""
    return connection.execute(cluster_id_query).scalar_one_or_none() or ""


def check_cluster(expected: str, actual: str, location: str) -> None:
    """Check that two names of the cluster are equal, if both are known. Raises ConflictError.

    Args:
        location: where the actual name was read, for the error message.
    """
    if expected and actual and expected != actual:
        raise ConflictError(
            Reason.OTHER_CLUSTER,
            f"{location} belongs to the cluster {actual!r:.80}, but the settings name "
            f"{expected!r:.80}",
            expected=expected,
            actual=actual,
        )


def raise_version(connection: Connection, version: Version) -> None:
    """Store a new value of the cluster's version."""
    insert_or_replace(connection, facts, {"name": CLUSTER_VERSION, "value": str(version)})
