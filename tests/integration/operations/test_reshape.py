"""Resize, split, merge, move and evacuate against real processes: order, nothing lost, nothing
twice.
"""

import asyncio
import contextlib
import json
import time
from collections import Counter
from pathlib import Path

import pytest

from keylane.protocol import endpoints
from keylane.protocol.errors import (
    BusyError,
    InvalidRequestError,
    PartitionUnknownError,
    Reason,
    UnavailableError,
)
from keylane.protocol.operations import (
    Cordon,
    OperationKind,
    OperationState,
    OperationView,
    Reshape,
)
from keylane.protocol.routing import PartitionState
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import ALERT, Cluster, begun, done_operation, meta_of, pause, silent
from support.load import Load
from support.postgres import Postgres
from support.raising import raises

pytestmark = pytest.mark.cluster(brokers=3, meta_settings=ALERT)


def resize(subject: str, count: int) -> Reshape:
    return Reshape(kind=OperationKind.RESIZE, subject=subject, partitions=count)


async def test_resizes_under_load_keep_the_order(shared_cluster: Cluster):
    """2 → 4 → 8 → 3 partitions under load: both groups handle each message once, in the order of
    its key.
    """
    await shared_cluster.create("sizes", partitions=2)
    async with Load(shared_cluster.meta, "sizes", groups=("a", "b"), keys=200) as load:
        for count in (4, 8, 3):
            await load.progress(1_000)
            await shared_cluster.reshape(resize("sizes", count))
        await load.progress(1_000)
        await load.finish()
    load.check()
    await shared_cluster.check_history("sizes", load.sent)


async def test_group_reads_parents_first_when_it_joins_after_a_resize(shared_cluster: Cluster):
    """A group whose first consumer joins after a resize gets every message ever sent, in the order
    of its key.
    """
    await shared_cluster.create("later", partitions=3)
    async with Load(shared_cluster.meta, "later", keys=50) as load:
        await load.progress(500)
        await shared_cluster.reshape(resize("later", 5))
        await load.progress(500)
        await shared_cluster.reshape(resize("later", 2))
        await load.join("late")
        await load.finish()
    load.check()


async def test_split_and_merge_under_load(shared_cluster: Cluster):
    """One partition is split, its children are merged again: the order holds."""
    route = await shared_cluster.create("cut", partitions=2)
    async with Load(shared_cluster.meta, "cut", keys=50) as load:
        await load.progress(500)
        partition_id = route.partitions[0].partition_id
        (done,) = await shared_cluster.reshape(
            Reshape(kind=OperationKind.SPLIT, partition_ids=(partition_id,))
        )
        await load.progress(500)
        halves = tuple(int(child.partition_id) for child in done.children)
        (done,) = await shared_cluster.reshape(
            Reshape(kind=OperationKind.MERGE, partition_ids=halves)
        )
        await load.finish()
    load.check()
    await shared_cluster.check_history("cut", load.sent)
    (child,) = done.children
    assert (child.range_start, child.range_end, child.parents) == (0, 512, halves)


async def test_empty_partition_is_drained_by_every_group(shared_cluster: Cluster):
    """Groups that acked all messages, and a later group, get the children of empty partitions."""
    await shared_cluster.create("empty", partitions=1)
    async with Load(shared_cluster.meta, "empty", groups=("idle",), keys=1) as load:
        await load.progress(10)
        for count in (4, 2):
            await shared_cluster.reshape(resize("empty", count))
        await load.join("late")
        await load.finish()
    load.check()


async def test_bad_requests_have_typed_errors(shared_cluster: Cluster):
    """Impossible changes are refused by error over the wire, and the route stays."""
    route = await shared_cluster.create("bad", partitions=2)
    asks = [
        (resize("bad", 0), InvalidRequestError),
        (resize("bad", 1_025), InvalidRequestError),
        (Reshape(kind=OperationKind.SPLIT, partition_ids=(10**6,)), PartitionUnknownError),
        (
            Reshape(
                kind=OperationKind.MOVE,
                partition_ids=(int(route.partitions[0].partition_id),),
                broker_group="nowhere",
            ),
            Reason.BROKER_GROUP_UNKNOWN,
        ),
    ]
    async with meta_of(shared_cluster) as meta:
        for ask, error in asks:
            with raises(error):
                await meta.call(endpoints.RESHAPE, ask)
        assert (await meta.call(endpoints.SUBJECT, subject="bad")).route.version == route.version


@pytest.mark.crash
@pytest.mark.parametrize("step", ["planned", "hosted", "sealing", "opened"])
async def test_operation_ends_when_the_metaserver_is_killed_after_any_step(
    cluster: Cluster, step: str
):
    """The operation continues in its state; meanwhile a second one is refused; the order holds."""
    await cluster.create("steps", partitions=2)
    meta_program = cluster.meta_program
    async with Load(cluster.meta, "steps", keys=50) as load, meta_of(cluster) as meta:
        await load.progress(300)
        meta_program.restart_to_die_after(step)
        await begun(meta, resize("steps", 5))
        await meta_program.died()
        meta_program.restart()
        (view,) = (await meta.call(endpoints.OPERATIONS, subject="steps")).operations
        if view.state is not OperationState.DONE:
            # It may come to its end just now; then brokers have yet to report themselves for a
            # second one.
            with contextlib.suppress(BusyError, UnavailableError):
                (second,) = (await meta.call(endpoints.RESHAPE, resize("steps", 3))).operations
                (_, view) = (
                    await meta.call(endpoints.OPERATIONS, subject="steps")
                ).operations  # the latest first
                assert view.state is OperationState.DONE, "a second one began beside it"
                await done_operation(meta, second)
        await done_operation(meta, view)
        await load.progress(300)
        await load.finish()
    load.check()
    await cluster.check_history("steps", load.sent)


@pytest.mark.crash
async def test_operation_ends_when_its_metaserver_is_killed_for_good(
    tmp_path: Path, postgres: Postgres
):
    """Two metaservers on one PostgreSQL: the driving one is killed for good, the other one
    continues.
    """
    settings = f"operation_lease_ms = 2000\ndatabase_url = {json.dumps(postgres.url())}\n"
    cluster = Cluster(tmp_path, 2, meta_settings=settings, metas=2)
    network = HttpNetwork()
    first, second = (MetaClient(network, [address]) for address in cluster.addresses)
    try:
        await cluster.create("passed", partitions=2)
        async with Load(cluster.addresses, "passed", keys=50) as load:
            await load.progress(300)
            cluster.meta_program.restart_to_die_after("sealing")
            await begun(first, resize("passed", 5))
            await cluster.meta_program.died()
            (view,) = (await second.call(endpoints.OPERATIONS, subject="passed")).operations
            await done_operation(second, view)
            await load.progress(300)
            await load.finish()
        load.check()
        cluster.meta_program = cluster.metas[1]
        await cluster.check_history("passed", load.sent)
    finally:
        await network.close()
        cluster.stop()


@pytest.mark.crash
async def test_operation_waits_when_a_broker_is_killed_in_seal(cluster: Cluster):
    """The operation waits, says for what, and continues when the broker is back."""
    await cluster.create("stuck", partitions=3)
    async with Load(cluster.meta, "stuck", keys=50) as load, meta_of(cluster) as meta:
        await load.progress(300)
        route = (await meta.call(endpoints.SUBJECT, subject="stuck")).route
        source = next(partition for partition in route.partitions if partition.broker_group == "g1")
        pause(cluster.brokers[0].process.pid)
        (view,) = (
            await meta.call(
                endpoints.RESHAPE,
                Reshape(
                    kind=OperationKind.MOVE,
                    partition_ids=(int(source.partition_id),),
                    broker_group="g2",
                ),
            )
        ).operations
        while not view.problem:
            await asyncio.sleep(0.05)
            (view,) = (await meta.call(endpoints.OPERATIONS, subject="stuck")).operations
        assert view.state in {OperationState.SEAL, OperationState.PLAN}
        assert "g1" in view.problem
        cluster.brokers[0].kill()
        cluster.brokers[0].restart()
        await done_operation(meta, view)
        await load.progress(300)
        await load.finish()
    load.check()
    await cluster.check_history("stuck", load.sent)


@pytest.mark.crash
async def test_order_holds_when_brokers_are_killed_between_resizes(cluster: Cluster):
    """Each broker in turn is killed in the middle of a resize: nothing is lost, nothing stored
    twice.
    """
    await cluster.create("killed", partitions=2)
    async with (
        Load(cluster.meta, "killed", groups=("a", "b"), keys=100) as load,
        meta_of(cluster) as meta,
    ):
        for broker, count in zip(cluster.brokers, (4, 8, 3), strict=True):
            await load.progress(300)
            (view,) = (await meta.call(endpoints.RESHAPE, resize("killed", count))).operations
            broker.kill()
            broker.restart()
            await done_operation(meta, view)
        await load.progress(300)
        await load.finish()
    load.check()
    await cluster.check_history("killed", load.sent)


async def test_evacuation_under_load_keeps_the_order(cluster: Cluster):
    """Afterwards no subject has an open partition there; the order holds and the other brokers
    share the load.
    """
    await cluster.create("one", partitions=6)
    await cluster.create("two", partitions=3)
    async with Load(cluster.meta, "one", keys=50) as load:
        await load.progress(300)
        done = await cluster.reshape(Reshape(kind=OperationKind.EVACUATE, broker_group="g2"))
        assert {view.subject for view in done} == {"one", "two"}
        await load.progress(300)
        await load.finish()
    load.check()
    await cluster.check_history("one", load.sent)
    async with meta_of(cluster) as meta:
        for subject in ("one", "two"):
            route = (await meta.call(endpoints.SUBJECT, subject=subject)).route
            places = Counter(partition.broker_group for partition in route.open_partitions())
            assert "g2" not in places
            assert max(places.values()) - min(places.values()) <= 1


async def evacuate_dead_source(cluster: Cluster, meta: MetaClient, subject: str) -> OperationView:
    """Kill the first broker and have it evacuated; the operation, as soon as it tells what it waits
    for.
    """
    cluster.brokers[0].kill()
    await silent(meta, "g1")
    ask = Reshape(kind=OperationKind.EVACUATE, broker_group="g1", without_source=True)
    (view,) = (await meta.call(endpoints.RESHAPE, ask)).operations
    while not view.problem:
        await asyncio.sleep(0.05)
        (view,) = (await meta.call(endpoints.OPERATIONS, subject=subject)).operations
    return view


@pytest.mark.crash
async def test_strict_subject_waits_for_a_dead_source(cluster: Cluster):
    """No child opens before the source is back and sealed; then the order is whole."""
    await cluster.create("strict", partitions=3)
    async with Load(cluster.meta, "strict", keys=50) as load, meta_of(cluster) as meta:
        await load.progress(300)
        view = await evacuate_dead_source(cluster, meta, "strict")
        assert "g1" in view.problem
        cluster.brokers[0].restart()
        assert (await done_operation(meta, view)).reordered == ()
        await load.progress(300)
        await load.finish()
    load.check()
    await cluster.check_history("strict", load.sent)


@pytest.mark.crash
async def test_operation_waiting_in_plan_is_canceled(cluster: Cluster):
    """
    A strict subject that waits for a dead source is free again after a cancel; the returned broker
    serves as before.
    """
    await cluster.create("canceled", partitions=3)
    async with Load(cluster.meta, "canceled", keys=50) as load, meta_of(cluster) as meta:
        await load.progress(300)
        view = await evacuate_dead_source(cluster, meta, "canceled")
        for _ in range(2):
            canceled = await meta.call(endpoints.CANCEL_OPERATION, id=view.operation_id)
            assert canceled.state is OperationState.CANCELED
        cluster.brokers[0].restart()
        await load.progress(300)
        (gone,) = canceled.children
        network = HttpNetwork()
        broker = BrokerClient(network, gone.address)
        until = time.monotonic() + 60
        while (
            await broker.control(endpoints.PARTITION, id=gone.partition_id)
        ).state is not PartitionState.SEALED:
            assert time.monotonic() < until, "the hosted child is never sealed"
            await asyncio.sleep(0.05)
        await network.close()
        route = (await meta.call(endpoints.SUBJECT, subject="canceled")).route
        there = next(
            partition for partition in route.open_partitions() if partition.broker_group != "g1"
        )
        back = Reshape(
            kind=OperationKind.MOVE, partition_ids=(there.partition_id,), broker_group="g1"
        )
        with raises(Reason.BROKER_CORDONED):
            await meta.call(endpoints.RESHAPE, back)
        assert not (await meta.call(endpoints.CORDON, Cordon(cordoned=False), group="g1")).cordoned
        (done,) = (await meta.call(endpoints.RESHAPE, resize("canceled", 4))).operations
        await done_operation(meta, done)
        with raises(Reason.OPERATION_FORWARD):
            await meta.call(endpoints.CANCEL_OPERATION, id=done.operation_id)
        await load.progress(300)
        await load.finish()
        assert [
            check for check in (await meta.call(endpoints.VERIFY)).checks if check.violations
        ] == []
    load.check()
    await cluster.check_history("canceled", load.sent)


@pytest.mark.crash
async def test_best_tried_subject_loses_nothing_and_declares_a_dead_source(
    cluster: Cluster,
):
    """The children open at once; the source is sealed when it is back, and its remaining messages
    are handled then.
    """
    await cluster.create("tried", partitions=3, strategy="best_tried")
    async with meta_of(cluster) as meta:
        async with Load(cluster.meta, "tried", keys=50) as load:
            await load.progress(300)
        cluster.brokers[0].kill()
        await silent(meta, "g1")
        ask = Reshape(kind=OperationKind.EVACUATE, broker_group="g1", without_source=True)
        (view,) = (await meta.call(endpoints.RESHAPE, ask)).operations
        while view.state is not OperationState.FENCE:
            await asyncio.sleep(0.05)
            (view,) = (await meta.call(endpoints.OPERATIONS, subject="tried")).operations
        assert view.reordered == view.sealed
        before = load.count
        async with Load(cluster.meta, "tried", groups=("late",), keys=50) as more:
            await more.progress(300)
            cluster.brokers[0].restart()
            await done_operation(meta, view)
            more.count += before
            await more.finish()
