"""A cluster is upgraded under load, program by program: nothing is lost, late or out of order, and
clients hardly wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from keylane.admin import Admin, ClusterView
from keylane.errors import StorageError
from keylane.protocol.membership.versions import OWN, parse_version
from proof.actor import Actor
from proof.recording import boot_ns
from proof.upgrade_stage import UpgradeStage
from support.cluster import eventually
from support.postgres import running_postgres
from support.releases import MIGRATED, Releases, minor_version

pytestmark = [pytest.mark.crash, pytest.mark.timeout(600)]

OLD, NEW, LATER = minor_version(0), minor_version(1), minor_version(2)
PAUSE_P99_MS_MAX = 5_000.0
"""A stall; `make bench-hosts` measures how long clients wait on a machine by itself."""


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Releases:
    return Releases(tmp_path_factory.mktemp("releases"))


async def refusal(actor: Actor) -> str:
    """The last words of a program that does not start."""
    actor.spawn()
    with pytest.raises(AssertionError) as caught:
        await actor.ready()
    await actor.kill()
    return str(caught.value)


async def broker_problem(stage: UpgradeStage, version: str, problem: str) -> None:
    """A broker of that version, with a folder of its own, is kept out with these words."""
    actor = stage.server("b0", version)
    for name, value in (("--port", "0"), ("--data", str(stage.folder / f"b-{version}"))):
        actor.command[actor.command.index(name) + 1] = value
    actor.command[actor.command.index("--record") + 1] = str(stage.folder / "unused")
    actor.command[actor.command.index("--group") + 1] = "g9"
    log = stage.folder / f"b0-{version}.log"
    await actor.start()
    await eventually(lambda: problem in log.read_text(), what=problem)
    await actor.stop()


async def described(admin: Admin) -> ClusterView:
    """The cluster, once the database has answered the metaserver that is asked."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(StorageError):
                return await admin.describe_cluster()
            await asyncio.sleep(0.1)


async def test_cluster_is_upgraded_under_load_while_old_and_new_clients_work(
    tmp_path: Path, releases: Releases, record_property: Callable[[str, object], None]
) -> None:
    upgraded = parse_version(NEW)
    with running_postgres() as postgres:
        async with UpgradeStage(tmp_path, releases, postgres) as stage:
            await stage.open(OLD, NEW)
            view = await stage.admin.describe_cluster()
            assert view.version == str(OWN)
            assert "VersionError 1362" in await refusal(stage.server("m0", LATER, "--port", "0"))
            await broker_problem(stage, LATER, "upgrade the server")
            await asyncio.sleep(2.0)
            began_ns = boot_ns()
            for name in ("m0", "b0", "m1", "b1"):
                before = await described(stage.admin)
                assert before.version == view.version, "one member is still of the old version"
                await stage.upgrade(name, NEW)
                if name == "m0":
                    assert stage.execute("SELECT version_num FROM alembic_version") == [(MIGRATED,)]
                    await stage.upgrade("m1", OLD)  # it starts again on the schema of the new one
                await asyncio.sleep(2.0)
            ended_ns = boot_ns()
            async with asyncio.timeout(60):
                while (await stage.admin.describe_cluster()).version != str(upgraded):
                    await asyncio.sleep(0.2)
            assert "VersionError 1363" in await refusal(stage.server("m0", OLD, "--port", "0"))
            await broker_problem(stage, OLD, f"the cluster is at {upgraded} already")
            findings, events = await stage.judge()
            waits = stage.waits_ms(began_ns, ended_ns)
    assert not findings.total, findings.examples
    counts = Counter(type(event).__name__ for event in events)
    assert counts["Settled"] == counts["Sent"] > 500
    assert {"consumer-old", "consumer-new"} <= {path.stem for path in tmp_path.glob("*.events")}
    p99_ms, worst_ms = waits[int(len(waits) * 0.99)], waits[-1]
    record_property("upgrade_pause_p99_ms", round(p99_ms, 1))
    record_property("upgrade_pause_longest_ms", round(worst_ms, 1))
    assert p99_ms <= PAUSE_P99_MS_MAX
