"""Two processes that grant leases on one SQLite file at the same time.

Run as a program, this file is one of the two: it plays consumers with the metaserver's own SQL and
prints what it was granted, one JSON line per grant.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import sqlalchemy as sa

from keylane.metaserver.cluster.subjects import open_subject, plan_subject
from keylane.metaserver.groups.lease_rows import read_grants, release_leases
from keylane.metaserver.groups.sessions import join_group, leave_group, renew_sessions
from keylane.metaserver.sql.dialect import prepare_sqlite
from keylane.metaserver.sql.migrate import migrate
from keylane.metaserver.sql.schema import brokers, groups, leases
from keylane.protocol.clock import SystemClock
from keylane.protocol.control import CreateSubject, Join, ReleaseGrant
from keylane.protocol.errors import TokenUnknownError
from support.sql.told_groups import settle_group

PROCESSES = 2
ROUNDS = 15
PARTITIONS = 5


def open_engine(folder: Path) -> sa.Engine:
    engine = sa.create_engine(f"sqlite:///{folder / 'meta.db'}")
    prepare_sqlite(engine, SystemClock(), durable=False)
    return engine


def play(folder: Path, number: int) -> None:
    """Join, wait for a grant, hand over what is withdrawn, leave; repeat."""
    engine = open_engine(folder)
    sys.stdin.readline()  # all begin at once
    for round_ in range(ROUNDS):
        session = f"{number:08x}{round_:08x}"
        with engine.begin() as connection:
            row = join_group(
                connection, Join(subject="s", group="g", session=session), sessions_max=10
            )
        for _ in range(2_000):
            if look(engine, row.group_id, session):
                break
            time.sleep(0.003)  # SQLite's lock is not fair: let the other one have it
        look(engine, row.group_id, session)
        with engine.begin() as connection:
            leave_group(connection, session)
    engine.dispose()


def look(engine: sa.Engine, group_id: int, session: str) -> int:
    """Settle, note grants, release withdrawn leases; returns the number of grants."""
    with engine.begin() as connection:
        settle_group(connection, group_id)
    with engine.begin() as connection:
        assert renew_sessions(connection, [session])
        grants = read_grants(connection, session).grants
        asked_back = sa.select(leases).where(leases.c.session == session, leases.c.withdrawn)
        withdrawn = connection.execute(asked_back).all()
    for grant in grants:
        told = [session, grant.partition.partition_id, grant.token]
        sys.stdout.write(json.dumps(told) + "\n")
    for lease in withdrawn:
        ask = ReleaseGrant(session=session, partition_id=lease.partition_id, token=lease.token)
        with engine.begin() as connection:
            assert not release_leases(connection, [ask]).errors
    return len(grants)


def create(folder: Path) -> None:
    engine = open_engine(folder)
    with engine.begin() as connection:
        migrate(connection)
        seen = {"seen_at": 0, "expires_at": 2**62, "readable": True, "writable": True}
        row = sa.insert(brokers).values(broker_group="b", broker_id="b", address="b:1", **seen)
        connection.execute(row)
        plan_subject(connection, CreateSubject(subject="s", partitions=PARTITIONS), subjects_max=9)
        open_subject(connection, "s")
    engine.dispose()


def test_two_processes_never_grant_a_token_twice(tmp_path: Path) -> None:
    """A token of a partition belongs to one session, and tokens only rise."""
    create(tmp_path)
    players = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for number in range(PROCESSES)
    ]
    for player in players:
        assert player.stdin is not None
        player.stdin.write("go\n")
        player.stdin.flush()
    told = []
    for player in players:
        out, _ = player.communicate(timeout=100)
        assert player.returncode == 0
        mine = [json.loads(line) for line in out.splitlines()]
        for partition in range(1, PARTITIONS + 1):
            tokens = [token for _, key, token in mine if key == partition]
            assert tokens == sorted(tokens)
        told += mine
    owners: dict[int, set[tuple[str, int]]] = {}
    for session, partition, token in told:
        owners.setdefault(token, set()).add((session, partition))
    assert all(len(sessions) == 1 for sessions in owners.values())
    sessions = {session for session, _, _ in told}
    assert len(sessions) == ROUNDS * PROCESSES  # each was granted something
    engine = open_engine(tmp_path)
    with engine.begin() as connection:
        last = connection.execute(sa.select(groups.c.last_token)).scalar_one()
    engine.dispose()
    assert last >= max(owners)


if __name__ == "__main__":
    try:
        play(Path(sys.argv[1]), int(sys.argv[2]))
    except TokenUnknownError as error:
        sys.exit(str(error))
