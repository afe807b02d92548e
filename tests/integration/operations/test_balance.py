"""`keylane cluster balance` and the metaservers that balance by themselves, with real processes."""

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from keylane import Producer
from keylane.admin import Admin, BalancePlan, BrokerView, PartitionState
from keylane.cli.commands.cluster.balance import _Moves
from keylane.protocol.errors import InvalidRequestError, Reason
from support.cluster import ALERT, Cluster, Program, pause, resume
from support.load import Load
from support.raising import raises
from support.server_process import run_keylane

pytestmark = pytest.mark.cluster(brokers=3, meta_settings=ALERT)
BY_ITSELF = f"{ALERT}balance = true\nbalance_interval_ms = 200\n"


async def balance(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        run_keylane, "cluster", "balance", *words, "--meta", cluster.meta, timeout_s=180
    )


async def balanced(cluster: Cluster, *words: str) -> Any:
    done = await balance(cluster, *words, "--output", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    end = asyncio.get_running_loop().time() + 60
    while not await condition():
        assert asyncio.get_running_loop().time() < end, what
        await asyncio.sleep(0.05)


async def see(admin: Admin, group: str, seen: Callable[[BrokerView], bool]) -> None:
    """Wait until the metaserver says something of a broker group."""

    async def is_seen() -> bool:
        brokers = (await admin.list_brokers()).brokers
        return any(each.broker_group == group and seen(each) for each in brokers)

    await until(is_seen, f"{group} is not seen so")


async def join(cluster: Cluster, folder: Path, group: str) -> None:
    """Start one more broker and wait until the metaserver knows it."""
    data = str(folder / group)
    broker = Program("keylane.broker", "--group", group, "--data", data, "--meta", cluster.meta)
    cluster.brokers.append(broker.ready())
    async with Admin(cluster.meta) as admin:
        await see(admin, group, lambda broker: broker.available)


async def open_ids(admin: Admin, subject: str) -> list[int]:
    partitions = (await admin.describe_subject(subject)).partitions
    return [each.partition_id for each in partitions if each.state is PartitionState.OPEN]


async def gather(admin: Admin, subject: str, group: str) -> None:
    """Move all open partitions of a subject to one broker group."""
    await admin.wait(await admin.move(await open_ids(admin, subject), to=group))


async def counts(admin: Admin, subject: str) -> Counter[str]:
    """How many open partitions of a subject each broker group has."""
    partitions = (await admin.describe_subject(subject)).partitions
    return Counter(each.broker_group for each in partitions if each.state is PartitionState.OPEN)


def spread(counts: Counter[str], groups: Iterable[str]) -> int:
    figures = [counts[group] for group in groups]
    return max(figures) - min(figures)


def reasons(plan: BalancePlan) -> dict[str, str]:
    return {each.name: each.reason for each in (*plan.left_out_groups, *plan.left_out_subjects)}


async def test_balance_under_load_keeps_the_order_when_a_broker_joins(
    cluster: Cluster, tmp_path: Path
):
    """Three brokers at work, a fourth joins: messages of a key stay in order, nothing is lost or
    handled twice, and the open partitions are even afterwards.
    """
    groups = ("g1", "g2", "g3", "g4")
    await cluster.create("keyed", partitions=9)
    await cluster.create("queued", partitions=6, static=True)
    await cluster.create("small", partitions=2)
    async with (
        Load(cluster.meta, "keyed", groups=("a", "b"), keys=100) as load,
        Load(cluster.meta, "queued", keys=50) as queue_load,
        Admin(cluster.meta) as admin,
    ):
        await load.progress(500)
        await queue_load.progress(500)
        await join(cluster, tmp_path, "g4")
        planned = await balanced(cluster, "--dry-run")
        assert planned["done"] == []
        assert {move["target"] for move in planned["plan"]["moves"]} == {"g4"}
        assert (await counts(admin, "keyed"))["g4"] == 0

        done = await balanced(cluster, "--yes", "--at-once", "4")
        assert done["left"] == []
        assert len(done["done"]) == len(done["plan"]["moves"]) >= 4
        await load.progress(500)
        await queue_load.progress(500)
        totals: Counter[str] = Counter()
        for subject in ("keyed", "queued", "small"):
            places = await counts(admin, subject)
            assert spread(places, groups) <= 1
            totals += places
        assert spread(totals, groups) <= 1
        await load.finish()
        await queue_load.finish()
    load.check()
    queue_load.check()
    await cluster.check_history("keyed", load.sent)
    await cluster.check_history("queued", queue_load.sent)

    again = await balance(cluster, "--yes")
    assert again.returncode == 0
    assert again.stdout == "nothing to balance: g1, g2, g3, g4 are even\n"


async def test_plan_is_a_table_when_it_is_a_dry_run(cluster: Cluster):
    await cluster.create("shown", partitions=3)
    async with Admin(cluster.meta) as admin:
        await gather(admin, "shown", "g1")
        shown = await balance(cluster, "--dry-run", "--exclude", "g3")
        assert shown.returncode == 0, shown.stderr
        assert "1 move between g1, g2" in shown.stdout
        assert "g1 has 3 of the subject's partitions, g2 has 0" in shown.stdout
        assert "broker group g3 is left out: it is excluded" in shown.stdout
        asked = await balance(cluster, "--exclude", "g3")  # its standard input is no terminal
        assert asked.returncode == 1
        assert "--yes" in asked.stderr
        assert await counts(admin, "shown") == {"g1": 3}
        done = await balance(cluster, "--yes", "--exclude", "g3")
        assert re.search(r"partition \d+ of shown is on g2; 0 left", done.stdout)
        assert "the broker groups are balanced" in done.stdout
        assert await counts(admin, "shown") == {"g1": 2, "g2": 1}


async def test_subject_is_left_out_when_an_operation_on_it_is_running(cluster: Cluster):
    await cluster.create("busy", partitions=3)
    await cluster.create("idle", partitions=3)
    async with Admin(cluster.meta) as admin:
        for subject in ("busy", "idle"):
            await gather(admin, subject, "g1")
        ids = await open_ids(admin, "busy")
        pause(cluster.brokers[2].process.pid)  # the resize waits for it, before anything is sealed
        try:
            operation = await admin.resize("busy", 6)
            plan = await admin.plan_balance()
            running = f"operation {operation.operation_id} on it is running"
            assert reasons(plan)["busy"] == running
            assert {move.subject for move in plan.moves} == {"idle"}
            assert await open_ids(admin, "busy") == ids
        finally:
            resume(cluster.brokers[2].process.pid)
        await admin.wait(operation)


async def test_move_is_left_and_named_when_a_resize_comes_after_the_plan(cluster: Cluster):
    await cluster.create("raced", partitions=3)
    async with Admin(cluster.meta) as admin:
        await gather(admin, "raced", "g1")
        plan = await admin.plan_balance()
        assert len(plan.moves) == 2
        await admin.wait(await admin.resize("raced", 5))
        ids = await open_ids(admin, "raced")
        work = _Moves(plan.moves, as_table=False)
        await work.run(admin, 1)
        assert [left.move for left in work.left] == list(plan.moves)
        assert all("is not an open partition" in left.reason for left in work.left)
        assert (work.done, work.pending_count) == ([], 0)
        assert await open_ids(admin, "raced") == ids


async def test_unknown_broker_group_is_refused_when_it_is_excluded(shared_cluster: Cluster):
    await shared_cluster.create("unknown", partitions=1)  # waits for the brokers
    async with Admin(shared_cluster.meta) as admin:
        with raises(Reason.BROKER_GROUP_UNKNOWN, match="g1, g2"):
            await admin.plan_balance(exclude=["nowhere"])
        with pytest.raises(InvalidRequestError):
            await admin.plan_balance(exclude=["no/name"])
    refused = await balance(shared_cluster, "--exclude", "nowhere", "--yes", "--output", "json")
    assert refused.returncode == 1
    assert "nowhere" in json.loads(refused.stderr)["message"]


async def test_plan_has_nothing_to_balance_when_one_broker_group_is_left(shared_cluster: Cluster):
    await shared_cluster.create("alone", partitions=1)  # waits for the brokers
    done = await balance(shared_cluster, "--exclude", "g1", "--yes")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("nothing to balance: only g2 can get partitions\n")


async def test_broker_gets_nothing_when_it_is_evacuated_or_silent(cluster: Cluster):
    await cluster.create("careful", partitions=3)
    async with Admin(cluster.meta) as admin:
        for operation in (await admin.evacuate("g2")).operations:
            await admin.wait(operation)
        await gather(admin, "careful", "g1")
        plan = await admin.plan_balance()
        assert reasons(plan) == {"g2": "it is cordoned"}
        assert {move.target for move in plan.moves} == {"g3"}
        pause(cluster.brokers[2].process.pid)
        try:
            await see(admin, "g3", lambda broker: not broker.available)
            plan = await admin.plan_balance()
        finally:
            resume(cluster.brokers[2].process.pid)
        assert (plan.moves, plan.broker_groups) == ((), ("g1",))
        assert reasons(plan)["g3"].startswith("it is silent for ")


async def test_command_goes_on_when_it_was_interrupted(cluster: Cluster):
    """Ctrl-C after the first move: the metaserver completes what has begun, and another call does
    the rest; the order holds.
    """
    await cluster.create("cut", partitions=24)
    async with Load(cluster.meta, "cut", keys=100) as load, Admin(cluster.meta) as admin:
        await gather(admin, "cut", "g1")
        await load.progress(300)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "keylane.cli", "cluster", "balance", "--yes"),
            *("--meta", cluster.meta),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(60):
            assert process.stdout is not None
            while b" is on g" not in await process.stdout.readline():
                pass
            process.send_signal(signal.SIGINT)
            _, errors = await process.communicate()
        assert process.returncode == 130
        left = re.search(
            rb"(\d+) of 16 moves left; .* To continue: keylane cluster balance", errors
        )
        assert left is not None, errors
        assert 0 < int(left[1]) < 16
        assert (await counts(admin, "cut")).total() == 24

        async def is_idle() -> bool:
            states = [each.state.value for each in await admin.list_operations("cut")]
            return set(states) == {"done"}

        await until(is_idle, "an operation is still running")
        done = await balanced(cluster, "--yes")
        assert len(done["done"]) in {int(left[1]), int(left[1]) - 1}
        assert await counts(admin, "cut") == {"g1": 8, "g2": 8, "g3": 8}
        await load.progress(300)
        await load.finish()
    load.check()
    await cluster.check_history("cut", load.sent)


@pytest.mark.cluster(brokers=2, meta_settings=BY_ITSELF)
async def test_metaserver_balances_by_itself_until_it_is_stopped(cluster: Cluster, tmp_path: Path):
    groups = ("g1", "g2", "g3")
    await cluster.create("slow", partitions=6)
    async with Load(cluster.meta, "slow", keys=50) as load, Admin(cluster.meta) as admin:
        await load.progress(300)
        await join(cluster, tmp_path, "g3")

        async def is_even() -> bool:
            return spread(await counts(admin, "slow"), groups) == 0

        await until(is_even, "the metaserver does not balance")
        moves = [each for each in await admin.list_operations("slow") if each.kind == "move"]
        assert [len(each.sealed) for each in moves] == [1, 1]  # no more than needed, one by one

        stopped = await balance(cluster, "--stop")
        assert stopped.stdout == (
            "metaservers do not balance by themselves until: keylane cluster balance --start\n"
        )
        await gather(admin, "slow", "g1")
        await asyncio.sleep(2)  # ten intervals
        assert await counts(admin, "slow") == {"g1": 6}
        assert (await admin.plan_balance()).stopped
        assert (await balanced(cluster, "--start"))["plan"]["automatic"]
        await until(is_even, "the metaserver does not go on")
        await load.finish()
    load.check()
    await cluster.check_history("slow", load.sent)


@pytest.mark.cluster(brokers=2, meta_settings=ALERT)
async def test_hot_partitions_are_exchanged_when_one_broker_has_them_all(cluster: Cluster):
    """The broker groups have two partitions each, and all bytes go to those of one of them."""
    await cluster.create("warm", partitions=4)
    async with Admin(cluster.meta) as admin, Producer(cluster.meta) as producer:
        places = {
            each.partition_id: each.broker_group
            for each in (await admin.describe_subject("warm")).partitions
        }
        keys = [b"%d" % number for number in range(64)]
        receipts = await asyncio.gather(*[producer.send("warm", b"", key=key) for key in keys])
        by_partition = {
            receipt.partition_id: key for receipt, key in zip(receipts, keys, strict=True)
        }
        hot = [partition_id for partition_id in places if places[partition_id] == "g1"]
        value = random.Random(1).randbytes(10_000)  # cannot be compressed
        for _ in range(20):
            sends = [
                producer.send("warm", value, key=by_partition[partition_id])
                for partition_id in hot
                for _ in range(100)
            ]
            await asyncio.gather(*sends)
        plan = await admin.plan_balance()
        assert sorted(move.source for move in plan.moves) == ["g1", "g2"]
        assert all(re.fullmatch("g1 stores .*B/s, g2 .*B/s", each.reason) for each in plan.moves)
        assert len({move.partition_id for move in plan.moves} & set(hot)) == 1
        done = await balanced(cluster, "--yes")
        assert done["left"] == []
        assert await counts(admin, "warm") == {"g1": 2, "g2": 2}
        assert (await admin.plan_balance()).moves == ()
