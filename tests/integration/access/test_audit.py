"""The audit log in SQL: who did what to subjects, rights and messages, and who was refused; never
with values.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from keylane import Producer, Reader
from keylane.metaserver.running import running_metaserver
from keylane.metaserver.settings import RELOADED, MetaserverSettings
from keylane.protocol.access.tokens import make_token, token_hash
from keylane.protocol.errors import AccessDeniedError
from keylane.protocol.http.access import AuditRow
from keylane.rpc.operating.reloading import ReloadableSettings
from support.access.guarded import GuardedCluster, capabilities, figures_of, refusal_of
from support.server_process import run_keylane

SECRET = "the-value-that-is-written-nowhere"
SUBJECT = "audited"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedCluster]:
    with GuardedCluster(tmp_path_factory.mktemp("audited")) as cluster:
        asyncio.run(cluster.made(SUBJECT))
        yield cluster


async def rows_of(guarded: GuardedCluster, **search: object) -> list[AuditRow]:
    async with guarded.admin() as admin:
        # names of the test
        return (await admin.list_audit(limit=500, **search)).rows  # type: ignore[arg-type]


async def until_noted(guarded: GuardedCluster, count: int = 1, **search: object) -> list[AuditRow]:
    async with asyncio.timeout(30):
        while len(rows := await rows_of(guarded, **search)) < count:
            await asyncio.sleep(0.1)
    return rows


async def test_changes_and_reads_are_listed_with_who_and_never_with_values(guarded: GuardedCluster):
    token = await guarded.principal("reader", "read", "produce", subject=SUBJECT)
    async with Producer(guarded.meta, token=token) as producer:
        await producer.send(SUBJECT, SECRET.encode(), key=SECRET.encode())
    async with Reader(guarded.meta, SUBJECT, token=token) as reader:
        assert [message.value async for message in reader] == [SECRET.encode()]
    (made,) = await rows_of(guarded, subject=SUBJECT, who="admin")
    assert (made.event.did, made.event.outcome) == ("POST /v1/subjects", "done")
    read = await until_noted(guarded, who="reader", subject=SUBJECT)
    assert {(row.event.did, row.event.server) for row in read} == {("Read", "g1")}
    given = [row.event.detail for row in await rows_of(guarded, who="admin")]
    assert f"reader: read {SUBJECT}, group *" in given
    written = json.dumps([str(row) for row in await rows_of(guarded)])
    assert SECRET not in written
    assert token not in written
    assert guarded.admin_token not in written


async def test_refusals_of_servers_are_listed_and_repeats_are_counted(guarded: GuardedCluster):
    broker = guarded.brokers[0].address
    token = await guarded.principal("narrow", "produce", subject="other.*")
    async with Producer(guarded.meta, token=token) as producer:
        with pytest.raises(AccessDeniedError):
            await producer.send(SUBJECT, b"1", key=b"k")
    for _ in range(50):
        await refusal_of(broker, "/v1/partitions")
    refused = await until_noted(guarded, outcome="refused", who="narrow")
    assert {row.event.code for row in refused} == {AccessDeniedError.code}
    async with asyncio.timeout(30):
        while True:
            unknown = [
                row.event
                for row in await rows_of(guarded, outcome="refused", who="")
                if row.event.server == "g1"
            ]
            if sum(event.times for event in unknown) >= 50:
                break
            await asyncio.sleep(0.1)
    assert len(unknown) < 50
    assert "keylane_audit_lost_total 0" in await figures_of(broker)


async def test_refusals_are_listed_when_one_before_them_named_a_subject_with_a_nul(
    guarded: GuardedCluster,
) -> None:
    broker = guarded.brokers[0].address
    token = await guarded.principal("curious", "read", subject="other.*")
    bearer = (await capabilities(guarded.meta, token))["bearer"]
    for name in ("a%00b", "a%01b", "after"):
        await refusal_of(broker, f"/v1/subjects/{name}/messages", token=bearer)
    rows = await until_noted(guarded, 2, outcome="refused", who="curious")
    assert sorted(row.event.subject for row in rows)[-2:] == [r"a\x01b", "after"]


async def test_only_administrators_see_the_audit_log_and_only_servers_add_to_it(
    guarded: GuardedCluster,
):
    token = await guarded.principal("curious", "read", "produce", "consume")
    assert await refusal_of(guarded.meta, "/v1/access/audit", token=token) == 1351
    forged = {"method": "POST", "json": {"events": []}}
    for given in (token, guarded.admin_token):
        assert await refusal_of(guarded.meta, "/v1/access/audit", token=given, **forged) == 1351


def test_commands_show_the_audit_log_and_set_quotas(guarded: GuardedCluster, tmp_path: Path):
    (tmp_path / "token").write_text(guarded.admin_token)
    environment = os.environ | {
        "KEYLANE_META": guarded.meta,
        "KEYLANE_TOKEN_FILE": str(tmp_path / "token"),
    }

    def keylane(*arguments: str, status: int = 0) -> str:
        done = run_keylane("access", *arguments, environment=environment)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    keylane("quota", "set", "shop", "--bytes", "1000000", "--connections", "3")
    together = ("--subjects", "30", "--scheduled-bytes", "4000000")
    keylane("quota", "set", "audited.*", "--for-subjects", *together)
    (row,) = json.loads(keylane("quota", "list", "--output", "json"))["quotas"][1:]
    assert (row["bytes_per_s"], row["subjects"], row["scheduled_bytes"]) == (0, 30, 4_000_000)
    assert "not of a principal" in keylane("quota", "set", "shop", *together, status=1)
    keylane("quota", "set", "audited.*", "--for-subjects", "--bytes", "2000000")
    listed = json.loads(keylane("quota", "list", "--output", "json"))["quotas"]
    assert [(row["subjects"], row["scheduled_bytes"]) for row in listed] == [(0, 0)] * 2
    assert [(row["kind"], row["name"], row["bytes_per_s"]) for row in listed] == [
        ("principal", "shop", 1_000_000),
        ("subject", "audited.*", 2_000_000),
    ]
    assert "shop" in keylane("quota", "list")
    keylane("quota", "unset", "shop")
    keylane("quota", "unset", "audited.*", "--for-subjects")
    assert json.loads(keylane("quota", "list", "--output", "json"))["quotas"] == []
    assert "InvalidRequestError" in keylane("quota", "set", "shop", "--bytes", "5", status=1)
    shown = json.loads(keylane("audit", "--who", "admin", "-n", "3", "--output", "json"))
    assert len(shown["rows"]) == 3
    assert shown["before"]
    details = [row["event"]["detail"] for row in shown["rows"]]
    assert "principal shop" in " ".join(details)
    assert "audit log" in keylane("audit", "-n", "2")


async def test_bounds_of_the_log_change_while_the_metaserver_runs(tmp_path: Path):
    hashed = token_hash(make_token(secrets.randbits))
    settings = MetaserverSettings(
        data=tmp_path,
        port=0,
        access="on",
        admin_token_hash=hashed,
        broker_token_hashes=(f"b1:{hashed}",),
    )
    async with running_metaserver(settings) as metaserver:
        audit = metaserver._access.audit  # type: ignore[union-attr]
        read = [replace(settings, audit_retention_ms=60_000, audit_rows_max=1_000)]
        ReloadableSettings(settings, read.pop, RELOADED, metaserver.apply_settings).reload()
        assert (audit.retention_ms, audit.rows_max) == (60_000, 1_000)


def test_audit_command_takes_a_time_ago_and_refuses_what_is_no_time_or_outcome(
    guarded: GuardedCluster,
):
    """As `keylane read` does; a misspelt outcome is no empty log."""
    environment = {**os.environ, "KEYLANE_META": guarded.meta, "KEYLANE_TOKEN": guarded.admin_token}

    def audit(*arguments: str) -> tuple[int, str]:
        done = run_keylane(
            "access", "audit", "--output", "json", *arguments, environment=environment
        )
        return done.returncode, done.stdout + done.stderr

    status, told = audit("--since", "-1h")
    assert status == 0, told
    assert json.loads(told)["rows"]
    for wrong in (("--since", "-1"), ("--since", f"-{10**17}d"), ("--outcome", "refuse")):
        status, told = audit(*wrong)
        assert (status, json.loads(told)["name"]) == (1, "ConfigError")


@pytest.mark.parametrize(
    "ends", ["2090-01-01T12:00:00", "2090-01-01T12:00:00Z", "2090-01-01T14:00:00+02:00"]
)
def test_token_ends_at_the_time_of_its_zone_when_one_is_given(guarded: GuardedCluster, ends: str):
    """Without a zone it is UTC, as of all other commands, wherever the command runs."""
    environment = {**os.environ, "KEYLANE_META": guarded.meta, "KEYLANE_TOKEN": guarded.admin_token}
    environment["TZ"] = "America/New_York"
    made = run_keylane(
        "access", "token", "create", "ending", "--ends", ends, environment=environment
    )
    assert made.returncode == 0, made.stderr
    listed = run_keylane(
        "access", "token", "list", "ending", "--output", "json", environment=environment
    )
    last = json.loads(listed.stdout)["tokens"][-1]
    assert last["ends_at_ms"] == 3_786_955_200_000
