"""
A broker is killed after any step of a move, the parent's or the child's: the move is completed and
the order holds.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from keylane.protocol import endpoints
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import ALERT, Cluster, begun, done_operation, eventually, silent
from support.load import Load

PLACES = {"parent": "g1", "child": "g2"}
NEEDED = {("planned", "parent"), ("planned", "child"), ("hosted", "parent"), ("sealing", "parent")}
"""Where a move cannot come to its end before the broker is back."""
pytestmark = pytest.mark.cluster(meta_settings=ALERT)


@pytest.mark.crash
@pytest.mark.parametrize("victim", PLACES)
@pytest.mark.parametrize("step", ["planned", "hosted", "sealing", "opened"])
async def test_broker_killed_after_any_step(cluster: Cluster, step: str, victim: str):
    """Stop the metaserver at a step and kill the broker there; restart both, the broker last."""
    subject = f"{step}-{victim}"
    route = await cluster.create(subject, partitions=2)
    (source,) = (
        partition for partition in route.partitions if partition.broker_group == PLACES["parent"]
    )
    move = Reshape(
        kind=OperationKind.MOVE,
        partition_ids=(source.partition_id,),
        broker_group=PLACES["child"],
    )
    program = cluster.meta_program
    broker = cluster.brokers[list(PLACES).index(victim)]
    network = HttpNetwork()
    meta = MetaClient(network, [cluster.meta])
    async with Load(cluster.meta, subject, keys=20) as load:
        await load.progress(100)
        program.restart_to_die_after(step)
        await begun(meta, move)
        await program.died()
        broker.kill()
        program.restart()
        (view,) = (await meta.call(endpoints.OPERATIONS, subject=subject)).operations
        if (step, victim) in NEEDED:
            await silent(meta, PLACES[victim])
            while PLACES[victim] not in view.problem:
                await asyncio.sleep(0.05)
                (view,) = (await meta.call(endpoints.OPERATIONS, subject=subject)).operations
            assert view.state in {OperationState.PLAN, OperationState.SEAL}
        broker.restart()
        await done_operation(meta, view)
        await load.progress(100)
        await load.finish()
        sent = Counter({key: len(values) for key, values in load.sent.items()})
        await eventually(
            lambda: Counter({key: len(values) for key, values in handled(load).items()}) == sent,
            seconds=60,
            what="every message handled",
        )
    await network.close()
    assert handled(load) == load.sent
    await cluster.check_history(subject, load.sent)


def handled(load: Load) -> dict[bytes, list[bytes]]:
    """Handled values by key, in the order of the first handling: messages not acked at the kill may
    come again.
    """
    by_key: dict[bytes, dict[bytes, None]] = {}
    for message in load.handled["audit"]:
        by_key.setdefault(message.key, {})[message.value] = None
    return {key: list(values) for key, values in by_key.items()}
