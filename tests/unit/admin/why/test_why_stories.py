"""Why nothing arrives: each cause is made on purpose in a cluster, and named first."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta

import pytest

from keylane import Consumer, ConsumerSettings, Message, Producer
from keylane.admin import Admin, Explanation
from keylane.admin.why.asking import ask_why
from keylane.errors import (
    ConflictError,
    GroupUnknownError,
    InvalidRequestError,
    OverloadedError,
    SubjectUnknownError,
)
from keylane.metaserver.why import AT_ONCE_MAX
from keylane.protocol import endpoints
from keylane.protocol.copies import TakeOver
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.environment import environment_of
from keylane.testing import ClientProgram, VirtualCluster

SUBJECT, GROUP = "orders", "billing"


async def send(cluster: VirtualCluster, *keys: str) -> None:
    async with Producer(cluster.address) as producer:
        for key in keys:
            await producer.send(SUBJECT, b"1", key=key)


async def fail(_message: Message) -> None:
    raise ValueError("no such customer")


async def hang(_message: Message) -> None:
    await asyncio.Event().wait()


async def accept(_message: Message) -> None:
    return


def consume(cluster: VirtualCluster, handler=accept, **options) -> ClientProgram:
    async def work() -> None:
        consumer = Consumer(
            cluster.address, subject=SUBJECT, group=GROUP, handler=handler, **options
        )
        await consumer.run()

    return cluster.start(work)


def first(explanation: Explanation) -> str:
    return explanation.causes[0].text


async def why(cluster: VirtualCluster, key: str | None = None) -> Explanation:
    async with Admin(cluster.address) as admin:
        return await admin.why(SUBJECT, GROUP, key=key)


async def until_first(cluster: VirtualCluster, code: str, key: str | None = None) -> Explanation:
    async def named() -> Explanation | None:
        explanation = await why(cluster, key)
        return explanation if explanation.causes[0].code == code else None

    found = await cluster.until(named, every_s=1)
    assert isinstance(found, Explanation)
    return found


async def join_group(cluster: VirtualCluster) -> None:
    """Wait until the group exists."""

    async def exists() -> bool:
        async with Admin(cluster.address) as admin:
            return bool(await admin.list_groups(SUBJECT))

    await cluster.until(exists)


async def join(cluster: VirtualCluster, **options) -> ClientProgram:
    """A consumer that has acked a message."""
    program = consume(cluster, **options)
    await send(cluster, "first")

    async def acked() -> bool:
        try:
            return await cluster.lag(SUBJECT, GROUP) == 0
        except GroupUnknownError:
            return False

    await cluster.until(acked)
    return program


async def test_why_names_a_group_that_has_no_consumer(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    program = await join(keylane_cluster)
    await program.stop()
    await send(keylane_cluster, "a")
    found = await until_first(keylane_cluster, "no_consumer")
    assert "left" in found.causes[0].text


async def test_why_names_a_consumer_that_died_until_its_lease_has_ended(
    keylane_cluster: VirtualCluster,
):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    program = await join(keylane_cluster)
    program.kill()
    await send(keylane_cluster, "a")
    await asyncio.sleep(17)
    found = await until_first(keylane_cluster, "owner_unheard")
    assert "may move to another consumer in" in found.causes[0].text
    found = await until_first(keylane_cluster, "no_consumer")
    assert re.search(r"was last heard (3\d) s ago, and its leases ended \d", first(found))


async def test_why_names_the_error_of_a_handler(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    consume(keylane_cluster, fail)
    await send(keylane_cluster, "a")
    found = await until_first(keylane_cluster, "handler_fails", "a")
    assert "ValueError: no such customer" in found.causes[0].text
    assert "later messages of its key wait" in found.causes[0].text


async def test_why_names_a_message_that_hangs(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    consume(keylane_cluster, hang)
    await send(keylane_cluster, "a")
    found = await until_first(keylane_cluster, "handler_hangs", "a")
    assert "offset 0 of partition" in found.causes[0].text


async def test_why_names_a_parked_key_and_not_that_of_another(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    consume(keylane_cluster, fail, on_failure="park", tries_max=1)
    await send(keylane_cluster, "a")
    found = await until_first(keylane_cluster, "parked", "a")
    assert "ValueError: no such customer" in found.causes[0].text
    assert "keylane parked redrive orders billing" in found.causes[0].step
    assert [each.code for each in (await why(keylane_cluster, "b")).causes] == ["key_not_stored"]


async def test_why_names_a_suspended_group(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    await join(keylane_cluster)
    async with Admin(keylane_cluster.address) as admin:
        await admin.suspend_group(SUBJECT, GROUP)
    await send(keylane_cluster, "a")
    found = await until_first(keylane_cluster, "group_suspended")
    assert re.match(r"an operator suspended billing \d.* ago", first(found))


async def test_why_names_a_silent_broker(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    await join(keylane_cluster)
    keylane_cluster.brokers[0].crash()
    await asyncio.sleep(60)
    found = await until_first(keylane_cluster, "broker_silent")
    assert "keylane broker list" in found.causes[0].step
    assert found.unknown


def no_take_over(explanation: Explanation) -> str:
    """Why no copy takes the place of a broker; it comes after the broker itself."""
    place = [each.code for each in explanation.causes].index("no_take_over")
    assert explanation.causes[place - 1].code in {"broker_silent", "broker_gone"}
    return explanation.causes[place].text


@pytest.mark.keylane(copies=2)
async def test_why_names_the_copy_that_does_not_ask_for_the_place_of_its_broker(
    keylane_cluster: VirtualCluster,
):
    """It follows without failover."""
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    await join(keylane_cluster)
    async with Admin(keylane_cluster.address) as admin:
        (copy_id,) = (await admin.copies("g0")).members
    keylane_cluster.brokers[0].kill()
    found = await until_first(keylane_cluster, "broker_silent")
    assert no_take_over(found).startswith(
        f"copy {copy_id} of broker group g0 has everything that was acked, and does not ask"
    )


@pytest.mark.keylane(copies=2)
async def test_why_names_what_a_copy_lacks_that_was_refused_the_place_of_its_broker(
    keylane_cluster: VirtualCluster,
):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    await join(keylane_cluster)
    (broker,) = keylane_cluster.brokers
    health = await BrokerClient(environment_of(None).network, broker.address).health()
    keylane_cluster.copies[0].kill()
    async with Admin(keylane_cluster.address) as admin:

        async def is_left_out() -> bool:
            return not (await admin.copies("g0")).members

        await send(keylane_cluster, "a")
        await keylane_cluster.until(is_left_out)
    broker.kill()
    found = await until_first(keylane_cluster, "broker_silent")
    assert "acks waited for none when it was last heard" in no_take_over(found)
    meta = MetaClient(environment_of(None).network, [keylane_cluster.address])
    request = TakeOver(copy_id="c" * 32, broker_id=health.details["broker_id"], log_end=64)
    with pytest.raises(ConflictError):
        await meta.call(endpoints.TAKE_OVER, request, group="g0")
    text = no_take_over(await why(keylane_cluster))
    assert text.startswith(
        f"no copy takes the place of broker group g0: copy {'c' * 32} was refused, because the copy"
    )
    assert "it may lack acked messages" in text


async def test_silent_broker_hangs_only_while_its_process_is_there(
    keylane_cluster: VirtualCluster,
):
    broker = keylane_cluster.brokers[0]
    async with Admin(keylane_cluster.address) as admin:
        assert await admin.find_hanging(await admin.list_brokers()) == set(), "it is not silent"
        broker.pause()
        await asyncio.sleep(60)
        silent = await admin.list_brokers()
        assert await admin.find_hanging(silent) == {"g0"}
        broker.crash()
        began_s = keylane_cluster.now_s
        assert await admin.find_hanging(silent) == set()
        assert keylane_cluster.now_s - began_s <= 0.3


async def test_why_answers_though_a_broker_hangs(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    await join(keylane_cluster)
    keylane_cluster.brokers[0].pause()
    began_s = keylane_cluster.now_s
    found = await why(keylane_cluster)
    assert keylane_cluster.now_s - began_s < 1
    assert found.unknown == ("what broker group g0 knows: it has not answered within 0.6 s",)


async def test_why_names_a_full_disk(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    await join(keylane_cluster)
    keylane_cluster.brokers[0].fill_disk()
    async with Producer(keylane_cluster.address) as producer:
        waiting = producer.send(SUBJECT, b"2", key="a")
        await until_first(keylane_cluster, "broker_refuses")

        async def is_told_to_the_metaserver() -> bool:
            text = first(await why(keylane_cluster))
            return re.search(r"has taken no messages for \d.*: the disk is", text) is not None

        await keylane_cluster.until(is_told_to_the_metaserver, every_s=1)
        keylane_cluster.brokers[0].empty_disk()
        await keylane_cluster.until(waiting.done, within_s=300)


async def test_why_names_the_parent_that_fails_before_the_child_that_waits(
    keylane_cluster: VirtualCluster,
):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    consume(keylane_cluster, fail)
    await send(keylane_cluster, "a")
    async with Admin(keylane_cluster.address) as admin:
        await admin.wait(await admin.resize(SUBJECT, 2))
    await send(keylane_cluster, "a")
    found = await until_first(keylane_cluster, "handler_fails", "a")
    assert [each.code for each in found.causes][1] == "parent_unread"
    assert "waits until partition 1" in found.causes[1].text
    assert ", opened " in found.causes[1].text


async def test_why_says_that_nothing_was_stored(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    consume(keylane_cluster)
    await asyncio.sleep(5)
    await until_first(keylane_cluster, "nothing_stored", "a")


async def test_why_says_that_everything_was_acked(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    await join(keylane_cluster)
    found = await until_first(keylane_cluster, "all_acked")
    assert "left out by a filter" in found.causes[0].text


async def test_why_says_that_a_busy_group_is_behind(keylane_cluster: VirtualCluster):
    async def handle(_message: Message) -> None:
        await asyncio.sleep(2)

    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    consume(keylane_cluster, handle)
    await send(keylane_cluster, *["a"] * 20)
    found = await until_first(keylane_cluster, "behind")
    assert "billing has not acked" in found.causes[0].text


async def test_why_refuses_what_does_not_exist(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject(SUBJECT)
    async with Admin(keylane_cluster.address) as admin:
        with pytest.raises(SubjectUnknownError):
            await admin.why("nothing", GROUP)
        with pytest.raises(GroupUnknownError) as raised:
            await admin.why(SUBJECT, "nobody")
    assert "keylane group list orders shows all groups" in raised.value.hint
    assert "keylane group create orders nobody" in raised.value.hint


async def test_why_says_that_no_consumer_has_joined_a_group_that_an_operator_made(
    keylane_cluster: VirtualCluster,
):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    async with Admin(keylane_cluster.address) as admin:
        await admin.create_group(SUBJECT, GROUP)
    assert first(await why(keylane_cluster)) == "no consumer has joined group billing yet"


async def test_why_names_a_consumer_that_cannot_reach_a_broker(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    program = await join(keylane_cluster)
    keylane_cluster.cut(program, keylane_cluster.brokers[0])
    await send(keylane_cluster, "a")
    await asyncio.sleep(40)
    found = await until_first(keylane_cluster, "owner_cut_off", "a")
    assert "cannot connect to broker group g0, which the cluster still reports" in first(found)
    assert re.search(r"it has got nothing of partition 1 for \d", first(found))


async def test_why_names_the_promise_to_an_owner_that_reaches_no_metaserver(
    keylane_cluster: VirtualCluster,
):
    async def take_long(_message: Message) -> None:
        await asyncio.sleep(1_000)

    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    owner = consume(keylane_cluster, take_long)
    await send(keylane_cluster, "a")
    await until_first(keylane_cluster, "handler_hangs")
    consume(keylane_cluster)
    keylane_cluster.cut(owner, keylane_cluster.metaserver)

    async def is_named() -> bool:
        return "promised" in {each.code for each in (await why(keylane_cluster)).causes}

    await keylane_cluster.until(is_named, every_s=0.5)
    explained = await why(keylane_cluster)
    codes = [each.code for each in explained.causes]
    [cause] = [each for each in explained.causes if each.code == "promised"]
    assert re.match(
        r"consumer \S+ waits for partition 1: broker group g0 has promised the owner before, "
        r"\S+, which cannot reach a metaserver, that nobody else gets it for \d+(\.\d)? s; ",
        cause.text,
    )
    assert "not_read" not in codes
    keylane_cluster.heal()


async def test_why_names_a_producer_that_cannot_reach_a_broker(keylane_cluster: VirtualCluster):
    async def produce() -> None:
        async with Producer(keylane_cluster.address) as producer:
            await producer.send(SUBJECT, b"1", key="a")
            begun.set()
            await cut.wait()
            await producer.send(SUBJECT, b"2", key="a")

    begun, cut = asyncio.Event(), asyncio.Event()
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    await join(keylane_cluster)
    program = keylane_cluster.start(produce)
    await begun.wait()
    keylane_cluster.cut(program, keylane_cluster.brokers[0])
    cut.set()
    found = await until_first(keylane_cluster, "producer_waits", "a")
    assert "has 1 message that is not stored yet" in first(found)
    assert "it has waited for broker group g0" in first(found)
    keylane_cluster.heal()
    await keylane_cluster.until(lambda: program.running is False, within_s=60)
    await until_first(keylane_cluster, "all_acked", "a")


async def test_why_names_messages_that_the_tags_of_a_group_leave_out(
    keylane_cluster: VirtualCluster,
):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    await join(keylane_cluster, settings=ConsumerSettings(tags=["eu", "uk"]))
    async with Producer(keylane_cluster.address) as producer:
        await producer.send(SUBJECT, b"1", key="a", tags=["us"])
        await producer.send(SUBJECT, b"1", key="b", tags=["eu"])
    found = await until_first(keylane_cluster, "filtered_out", "a")
    assert "has the tags us, and billing leaves it out: it handles only tags eu, uk" in first(found)
    found = await until_first(keylane_cluster, "filtered_out", "b")
    assert "billing has handled it or left it out" in first(found)


async def test_why_names_the_parent_whose_messages_are_not_handled_yet(
    keylane_cluster: VirtualCluster,
):
    async def handle(_message: Message) -> None:
        await asyncio.sleep(5)

    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    consume(keylane_cluster, handle)
    await send(keylane_cluster, *["a"] * 9)
    async with Admin(keylane_cluster.address) as admin:
        await admin.wait(await admin.resize(SUBJECT, 2))
    await send(keylane_cluster, "a")
    found = await until_first(keylane_cluster, "parent_unread", "a")
    assert "waits until partition 1, which" in first(found)
    assert "messages left, from offset" in first(found)


async def test_why_says_where_the_newest_message_of_a_key_is(keylane_cluster: VirtualCluster):
    async def handle(_message: Message) -> None:
        await asyncio.sleep(0.01)

    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    await send(keylane_cluster, *["a"] * 500)
    consume(keylane_cluster, handle)
    await join_group(keylane_cluster)
    found = await until_first(keylane_cluster, "behind", "a")
    assert "of partition 1, from offset" in first(found)
    assert ", the newest of the key at offset 499, stored" in first(found)
    assert "a second are acked: at this rate it has caught up in" in first(found)


async def test_why_says_that_a_key_has_no_message_though_others_are_handled(
    keylane_cluster: VirtualCluster,
):
    async def handle(_message: Message) -> None:
        await asyncio.sleep(2)

    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    consume(keylane_cluster, handle)
    await send(keylane_cluster, *["other"] * 9)
    found = await until_first(keylane_cluster, "key_not_stored", "a")
    assert first(found) == ("no message of the key is stored in partition 1, where the key belongs")
    assert [each.code for each in (await why(keylane_cluster, "other")).causes] == ["behind"]


async def test_why_does_not_blame_a_key_that_fails_for_another(keylane_cluster: VirtualCluster):
    async def handle(message: Message) -> None:
        if message.key == b"poison":
            raise ValueError("no such customer")
        await asyncio.sleep(2)

    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    consume(keylane_cluster, handle)
    await send(keylane_cluster, "poison", *["a"] * 9)
    await until_first(keylane_cluster, "handler_fails")
    found = await until_first(keylane_cluster, "behind", "a")
    assert [each.code for each in found.causes] == ["behind", "handler_fails"]
    assert found.causes[1].text.endswith("it has another key, for which this key does not wait")


async def test_why_names_each_key_that_fails_by_its_own_message(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    consume(keylane_cluster, fail)
    await send(keylane_cluster, "a", "b", "c", "d", "e", "f")

    async def names_all() -> bool:
        text = first(await why(keylane_cluster))
        return "5 more messages of the partition fail or hang, newest error first" in text

    await keylane_cluster.until(names_all)

    async def names_its_own() -> bool:
        return "(this key), first " in first(await why(keylane_cluster, "f"))

    await keylane_cluster.until(names_its_own)


async def test_why_names_scheduled_messages(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    await join(keylane_cluster)
    async with Producer(keylane_cluster.address) as producer:
        await producer.send(SUBJECT, b"1", deliver_at=keylane_cluster.now() + timedelta(seconds=90))
    found = await until_first(keylane_cluster, "scheduled")
    assert first(found).startswith(
        "1 message of orders waits for its delivery time; the first comes in 8"
    )


async def test_why_names_retried_messages_with_their_error(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject(SUBJECT, partitions=1, order_strategy="best_tried")
    consume(keylane_cluster, fail, on_failure="retry")
    await join_group(keylane_cluster)
    await send(keylane_cluster, "a")
    found = await until_first(keylane_cluster, "retried")
    assert "will be tried again" in first(found)
    assert "was ValueError: no such customer" in first(found)


async def test_why_names_a_reset_that_waits(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    consume(keylane_cluster, hang, settings=ConsumerSettings(name="worker-1"))
    await join_group(keylane_cluster)
    await send(keylane_cluster, "a")
    await until_first(keylane_cluster, "handler_hangs")

    async def reset() -> None:
        async with Admin(keylane_cluster.address) as admin:
            await admin.reset_group(SUBJECT, GROUP, to="latest", live=True)

    task = asyncio.create_task(reset())
    found = await until_first(keylane_cluster, "reset_pending")
    assert re.search(r"asked for \d.* ago .*it waits for worker-1 to hand over", first(found))
    task.cancel()
    await asyncio.wait([task])


class DyingMetaserver:
    """The metaserver of an admin client, which ends after it has told the group."""

    def __init__(self, cluster: VirtualCluster, client: MetaClient) -> None:
        self._cluster = cluster
        self._client = client

    async def call(self, endpoint, **options):
        answer = await self._client.call(endpoint, **options)
        self._cluster.metaserver.crash()
        return answer


async def test_why_tells_what_brokers_know_when_the_metaserver_ends_in_between(
    keylane_cluster: VirtualCluster,
):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    consume(keylane_cluster, fail)
    await send(keylane_cluster, "a")
    await until_first(keylane_cluster, "handler_fails", "a")
    async with Admin(keylane_cluster.address) as admin:
        found = await ask_why(
            SUBJECT,
            GROUP,
            b"a",
            meta=DyingMetaserver(keylane_cluster, admin._metaserver_client),
            broker_at=admin._connections.broker_at,
            now_ms=lambda: int(keylane_cluster.now().timestamp() * 1000),
        )
    assert found.causes[0].code == "handler_fails"
    unknown = " ".join(found.unknown)
    assert "the list of brokers: the metaserver has not answered within 0.6 s" in unknown


class SlowSearches:
    """A broker that answers all but searches for keys."""

    def __init__(self, client: BrokerClient) -> None:
        self._client = client

    async def control(self, endpoint, **options):
        if endpoint is endpoints.NEWEST_MESSAGE:
            await asyncio.sleep(60)
        return await self._client.control(endpoint, **options)


async def test_why_does_not_call_a_broker_silent_that_is_late_with_one_answer(
    keylane_cluster: VirtualCluster,
):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    consume(keylane_cluster, fail)
    await send(keylane_cluster, "a")
    await until_first(keylane_cluster, "handler_fails", "a")
    async with Admin(keylane_cluster.address) as admin:
        found = await ask_why(
            SUBJECT,
            GROUP,
            b"a",
            meta=admin._metaserver_client,
            broker_at=lambda address: SlowSearches(admin._connections.broker_at(address)),
            now_ms=lambda: int(keylane_cluster.now().timestamp() * 1000),
        )
    assert [each.code for each in found.causes] == ["handler_fails"]
    late = "the newest message of the key in partition 1: broker group g0 has not answered within"
    assert found.unknown == (f"{late} 0.6 s",)


class RefusingBroker:
    """A broker that refuses to tell the state of its partitions."""

    def __init__(self, client: BrokerClient) -> None:
        self._client = client

    async def control(self, endpoint, **options):
        if endpoint is endpoints.PARTITION:
            raise OverloadedError("too many calls")
        return await self._client.control(endpoint, **options)


async def test_why_names_partitions_together_that_a_broker_refuses_alike(
    keylane_cluster: VirtualCluster,
):
    await keylane_cluster.create_subject(SUBJECT, partitions=40)
    async with Admin(keylane_cluster.address) as admin:
        await admin.create_group(SUBJECT, GROUP)
        found = await ask_why(
            SUBJECT,
            GROUP,
            None,
            meta=admin._metaserver_client,
            broker_at=lambda address: RefusingBroker(admin._connections.broker_at(address)),
            now_ms=lambda: int(keylane_cluster.now().timestamp() * 1000),
        )
    (unknown,) = found.unknown
    assert unknown.startswith("the state of partitions 1, 2, 3, ")
    assert unknown.endswith(" more: too many calls")


async def test_metaserver_gives_the_same_answer_over_http(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    consume(keylane_cluster, fail, on_failure="park", tries_max=1)
    await send(keylane_cluster, "a")
    own = await until_first(keylane_cluster, "parked", "a")
    async with Admin(keylane_cluster.address) as admin:
        told = await admin._metaserver_client.call(
            endpoints.WHY, query={"key": "a"}, subject=SUBJECT, group=GROUP
        )
        assert told == own
        with pytest.raises(GroupUnknownError):
            await admin._metaserver_client.call(endpoints.WHY, subject=SUBJECT, group="nobody")
        with pytest.raises(InvalidRequestError):
            await admin._metaserver_client.call(
                endpoints.WHY,
                query={"key": "a", "key_base64": "YQ=="},
                subject=SUBJECT,
                group=GROUP,
            )


async def test_metaserver_refuses_more_questions_than_its_limit(keylane_cluster: VirtualCluster):
    await keylane_cluster.create_subject(SUBJECT, partitions=1)
    await join(keylane_cluster)
    keylane_cluster.brokers[0].pause()
    async with Admin(keylane_cluster.address) as admin:
        answers = await asyncio.gather(
            *(
                admin._metaserver_client.call(endpoints.WHY, subject=SUBJECT, group=GROUP)
                for _ in range(AT_ONCE_MAX + 3)
            ),
            return_exceptions=True,
        )
        assert sum(isinstance(each, OverloadedError) for each in answers) == 3
        later = await admin._metaserver_client.call(endpoints.WHY, subject=SUBJECT, group=GROUP)
    assert later.causes[0].code in {"broker_hangs", "broker_silent"}
