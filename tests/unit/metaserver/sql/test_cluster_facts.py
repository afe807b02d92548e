"""A program may open a database of its own cluster, if the cluster's version allows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from keylane.metaserver.sql.cluster_facts import (
    ClusterFacts,
    open_cluster,
    raise_version,
    read_cluster_id,
    read_facts,
)
from keylane.metaserver.sql.migrate import migrate
from keylane.protocol.errors import Reason
from keylane.protocol.membership.versions import Version
from support.raising import raises


@pytest.fixture
def engine() -> Iterator[sa.Engine]:
    engine = sa.create_engine("sqlite://", poolclass=StaticPool)
    yield engine
    engine.dispose()


def opened(engine: sa.Engine, program: str, cluster: str = "") -> ClusterFacts:
    with engine.begin() as connection:
        open_cluster(connection, program=program, cluster=cluster)
        return read_facts(connection)


def content(engine: sa.Engine) -> list[object]:
    with engine.connect() as connection:
        return [*connection.connection.driver_connection.iterdump()]  # type: ignore[union-attr]


def test_new_database_gets_the_version_and_the_cluster_of_its_first_program(engine) -> None:
    assert opened(engine, "0.4.2", "north") == ClusterFacts("north", Version(0, 4))
    assert opened(engine, "0.5.0") == ClusterFacts("north", Version(0, 4))


def test_database_keeps_the_random_id_of_its_cluster_for_ever(engine) -> None:
    opened(engine, "0.4.2")
    with engine.connect() as connection:
        first = read_cluster_id(connection)
    opened(engine, "0.5.0", "north")
    with engine.connect() as connection:
        assert read_cluster_id(connection) == first
    other = sa.create_engine("sqlite://", poolclass=StaticPool)
    opened(other, "0.4.2")
    with other.connect() as connection:
        assert read_cluster_id(connection) not in {"", first}
    other.dispose()


def test_database_without_a_name_takes_the_first_one_for_ever(engine) -> None:
    assert opened(engine, "0.4.2").name == ""
    assert opened(engine, "0.4.2", "north").name == "north"
    with raises(Reason.OTHER_CLUSTER, match=r"'north'.*'south'") as caught:
        opened(engine, "0.4.2", "south")
    assert (caught.value.expected, caught.value.actual) == ("south", "north")
    assert opened(engine, "0.4.2", "").name == "north"


@pytest.mark.parametrize(
    ("program", "error"), [("0.6.0", Reason.UPGRADE_SKIPPED), ("0.3.9", Reason.MEMBER_TOO_OLD)]
)
def test_program_that_the_cluster_does_not_allow_changes_nothing(engine, program, error) -> None:
    opened(engine, "0.4.0")
    before = content(engine)
    with raises(error):
        opened(engine, program)
    assert content(engine) == before


def test_database_that_says_no_version_is_of_the_first_release(engine) -> None:
    with engine.begin() as connection:
        migrate(connection)
    with raises(Reason.UPGRADE_SKIPPED):
        opened(engine, "0.4.0")
    assert opened(engine, "0.3.0").version == Version(0, 2)


def test_version_is_written_down(engine) -> None:
    opened(engine, "0.4.0")
    with engine.begin() as connection:
        raise_version(connection, Version(0, 5))
        assert read_facts(connection).version == Version(0, 5)
