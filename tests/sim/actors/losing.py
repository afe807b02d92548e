"""In some seeds a broker's disk is lost for good: an operator accepts the loss, and an empty broker
takes its place.

The loser draws from a generator of its own. Messages that only the lost disk had need not be
handled any more from the moment at which the database says that their partition is lost; until then
the partition's children wait for it. The database may say so only of partitions that were on the
lost disk. Everything else is judged as in other seeds: messages of the disk count as stored once,
at their place; the order of messages before and behind them holds; a producer is told of each
message that may have been on the disk, and of no other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from keylane.broker.store.store import Store
from keylane.protocol import endpoints
from keylane.protocol.errors import DeliveryError, KeylaneError
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.rpc.client import MetaClient
from keylane.testing.machines.loop import Process
from sim.actors.clients import SUBJECT
from sim.actors.hosts import BrokerHost
from sim.actors.operators import uncordon, uncordon_all_but
from sim.swarm import Swarm

if TYPE_CHECKING:
    from sim.world import World

ENDED = {OperationState.DONE, OperationState.CANCELED}


def is_losing(seed: int) -> bool:
    """Whether a disk is lost in a seed."""
    return seed % 16 == 12


def for_losses(swarm: Swarm) -> Swarm:
    """The plan of such a seed: longer, and not of a static subject."""
    return replace(swarm, static=False, fault_s=max(14.0, swarm.fault_s))


class Loser:
    """Loses one disk, accepts the loss, and starts an empty broker in its place."""

    def __init__(self, world: World, meta: MetaClient) -> None:
        self._world = world
        self._meta = meta
        self._rng = random.Random(f"losses {world.seed}")
        self.idle = True
        """No action that it began is under way."""

    async def work(self) -> None:
        """Lose the disk, accept the loss, start the new broker."""
        world, rng = self._world, self._rng
        await asyncio.sleep(world.swarm.fault_s * (0.2 + 0.6 * rng.random()))
        broker = rng.choice(world.brokers)
        self.idle = False
        self._lose(broker)
        await self._accept(broker)
        await asyncio.sleep(2 * rng.random())
        world.trace(f"{broker.name} begins anew")
        broker.gone = False
        world.faults.restart(broker)
        await uncordon(broker.group, self._meta)
        self.idle = True

    def _lose(self, broker: BrokerHost) -> None:
        world = self._world
        world.faults.done += 1
        world.trace(f"{broker.name} loses its disk")
        silent = self._rng.random() < 0.5
        if broker.running:
            broker.lose_power() if silent else broker.end(machine_down=False)
        broker.machine.up = not silent
        if broker.store is not None:
            world.service.lost(broker.store.state.partitions.values())
        broker.gone = True
        broker.replace_disk()

    async def _accept(self, broker: BrokerHost) -> None:
        """Accept losses again until nothing of the broker group is left to give up."""
        ask = Reshape(kind=OperationKind.EVACUATE, broker_group=broker.group, accept_loss=True)
        while True:
            await asyncio.sleep(0.2 + 0.8 * self._rng.random())
            try:
                await uncordon_all_but(self._world.brokers, broker, self._meta)
                answer = await self._meta.call(endpoints.RESHAPE, ask)
                self._world.trace(f"loss: {answer!r}")
                for busy in answer.busy:
                    if "cancel it" in busy.problem:
                        await self._meta.call(endpoints.CANCEL_OPERATION, id=busy.operation_id)
                if not answer.busy and not answer.operations and await self._nothing_runs():
                    return
            except (
                KeylaneError
            ) as error:  # the broker is not silent for long enough yet, or no metaserver answers
                self._world.trace(f"not accepted: {error!r}")

    async def _nothing_runs(self) -> bool:
        return all(
            operation.state in ENDED
            for operation in (
                await self._meta.call(endpoints.OPERATIONS, subject=SUBJECT)
            ).operations
        )

    # ── what the database says ────────────────────────────────────────────────────────────────────
    def check_lost(self, disks: Iterable[Store]) -> None:
        """Check that the database marks only partitions of the lost disk as lost."""
        hosted = {int(partition_id) for disk in disks for partition_id in disk.state.partitions}
        self._world.loop.faults += [
            f"partition {partition_id} counts as lost, and was on no lost disk"
            for partition_id in sorted(self._world.shelf.lost - hosted)
        ]

    # ── what producers are told ───────────────────────────────────────────────────────────────────
    def check_registered(self, error: DeliveryError, sender: Process, sent_at_s: float) -> None:
        """Check that a message told as possibly lost was sent to the lost disk."""
        partition_id = error.partition_id or 0
        if partition_id not in self._world.shelf.lost:
            self._world.loop.faults.append(
                f"told as lost with partition {partition_id}, which is not"
            )
        elif self._world.calls.appends.get((sender, partition_id), -1.0) < sent_at_s:
            self._world.loop.faults.append("told as lost, and was never sent there")
