"""A consumer that gets no connection to a broker leaves its partitions there to others; a broker
that is down moves nothing.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from keylane import Admin, Consumer, Message, Producer
from keylane.errors import GroupUnknownError
from keylane.testing import VirtualCluster, run
from keylane.testing.programs import StoryProgram

SUBJECT, GROUP = "orders", "billing"
PARTITIONS = 6
PATIENCE_S = 30.0
"""The ttl of a consumer, as it is by default."""
DETECTION_S = 45.0
"""Until a pull that waits ends, the consumer looks at its partitions, and a hand-over to an
unreached broker is given up.
"""


class TwoConsumers:
    """Two consumers of one group, and what each has handled."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self.cluster = cluster
        self.handled: defaultdict[str, list[bytes]] = defaultdict(list)
        self.sent = 0

    async def work(self, name: str) -> None:
        async def handle(message: Message) -> None:
            self.handled[name].append(message.value)

        await Consumer(self.cluster.address, subject=SUBJECT, group=GROUP, handler=handle).run()

    async def begin(self) -> list[StoryProgram]:
        """Two consumers, each with partitions at both brokers."""
        await self.cluster.create_subject(SUBJECT, partitions=PARTITIONS)
        programs: list[StoryProgram] = []
        for name in ("a", "b"):
            programs.append(self.cluster.start(self.work, name))
            await self.cluster.until(lambda: self.is_owned_by(len(programs)))
        await self.send()
        return programs

    async def owners(self) -> dict[int, str]:
        """Partition → session."""
        async with Admin(self.cluster.address) as admin:
            try:
                described = await admin.describe_group(SUBJECT, GROUP)
            except GroupUnknownError:
                return {}
        return {each.partition_id: each.session for each in described.partitions if each.session}

    async def is_owned_by(self, sessions: int) -> bool:
        owners = await self.owners()
        return len(owners) == PARTITIONS and len(set(owners.values())) == sessions

    async def send(self) -> None:
        """Messages for every partition."""
        async with Producer(self.cluster.address) as producer:
            for number in range(self.sent, self.sent + 60):
                producer.send(SUBJECT, b"%d" % number, key=b"%d" % number)
            await producer.flush()
        self.sent += 60

    async def all_handled(self, within_s: float) -> None:
        def handled() -> bool:
            values = {value for values in self.handled.values() for value in values}
            return len(values) == self.sent

        await self.cluster.until(handled, within_s=within_s)


def test_partitions_go_to_another_consumer_when_one_is_cut_off_from_their_broker() -> None:
    async def story(cluster: VirtualCluster) -> None:
        shop = TwoConsumers(cluster)
        first, _ = await shop.begin()
        await shop.all_handled(5)
        before = await shop.owners()
        cluster.cut(first, cluster.brokers[0])
        await shop.send()
        await shop.all_handled(PATIENCE_S + DETECTION_S)
        # Its partitions at the other broker are its own as before.
        after = await shop.owners()
        assert len(set(after.values())) == 2
        moved = {key for key, owner in before.items() if after[key] != owner}
        assert len(moved) < PARTITIONS / 2
        # It stays so for as long as the cut lasts.
        for _ in range(60):
            await asyncio.sleep(PATIENCE_S / 6)
            assert await shop.owners() == after
        cluster.heal()

        async def is_balanced() -> bool:
            sessions = list((await shop.owners()).values())
            return all(sessions.count(each) == PARTITIONS / 2 for each in sessions)

        await cluster.until(is_balanced, within_s=2 * PATIENCE_S)
        await shop.send()
        await shop.all_handled(10)

    run(story, brokers=2)


def test_partitions_stay_when_no_consumer_gets_at_a_broker() -> None:
    async def story(cluster: VirtualCluster) -> None:
        shop = TwoConsumers(cluster)
        consumers = await shop.begin()
        await shop.all_handled(5)
        before = await shop.owners()
        for program in consumers:
            cluster.cut(program, cluster.brokers[0])
        await asyncio.sleep(PATIENCE_S + 2 * DETECTION_S)
        middle = await shop.owners()
        for _ in range(60):
            await asyncio.sleep(PATIENCE_S / 6)
            assert await shop.owners() == middle
        assert len(set(middle.values())) == 2
        assert len({key for key in before if before[key] != middle[key]}) <= PARTITIONS / 2
        cluster.heal()
        await shop.send()
        await shop.all_handled(2 * PATIENCE_S)

    run(story, brokers=2)


def test_partitions_stay_when_brokers_are_down_for_longer_than_the_ttl() -> None:
    async def story(cluster: VirtualCluster) -> None:
        shop = TwoConsumers(cluster)
        await shop.begin()
        await shop.all_handled(5)
        before = await shop.owners()
        for broker in cluster.brokers:  # one after another, as in a rolling restart
            await broker.stop()
            await asyncio.sleep(3 * PATIENCE_S)
            assert await shop.owners() == before
            broker.start()
            await asyncio.sleep(PATIENCE_S)
            assert await shop.owners() == before
        await shop.send()
        await shop.all_handled(10)
        assert await shop.owners() == before

    run(story, brokers=2)
