"""The consumer for programs without an event loop, on real servers."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from operator import methodcaller
from typing import Any

import pytest

from keylane import ClosedError, ConsumerSettings, InvalidRequestError, JsonCodec
from keylane.errors import Reason
from keylane.sync import Consumer, Producer, loop_thread
from support.cluster import Cluster
from support.raising import raises


def fill(cluster: Cluster, subject: str, count: int) -> None:
    asyncio.run(cluster.create(subject, partitions=1))
    with Producer(cluster.meta) as producer:
        producer.send_all(subject, [(b"k%d" % (at % 2), b"%d" % at) for at in range(count)])


def test_loop_acks_and_gives_back_without_an_event_loop(shared_cluster: Cluster):
    """A body may take longer than the lease; a message given back comes again before later ones of
    its key.
    """
    fill(shared_cluster, "sync-loop", 8)
    settings = ConsumerSettings(ttl_ms=1_000)
    seen: list[tuple[bytes, int]] = []
    with Consumer(
        shared_cluster.meta, subject="sync-loop", group="g", settings=settings
    ) as consumer:
        with raises(Reason.ALREADY_OPEN):
            consumer.open()
        for message in consumer:
            if not seen:
                time.sleep(1.5)
            seen.append((message.value, message.attempt))
            if message.value == b"2" and message.attempt == 1:
                message.nack()
                continue
            message.ack()
            message.ack()
            if len(seen) == 9:
                break
        assert [each.partition_id for each in consumer.assignment] == [message.partition_id]
    assert [each for each in seen if int(each[0]) % 2 == 0] == [
        (b"0", 1),
        (b"2", 1),
        (b"2", 2),
        (b"4", 1),
        (b"6", 1),
    ]
    with pytest.raises(ClosedError):
        message.ack()
    consumer.close()


def test_many_messages_are_taken_at_once_and_a_close_ends_the_loop(shared_cluster: Cluster):
    fill(shared_cluster, "sync-many", 6)
    with Consumer(shared_cluster.meta, subject="sync-many", group="g") as consumer:
        taken = []
        while len(taken) < 6:
            messages = consumer.getmany(timeout_ms=1_000)
            taken += messages
            consumer.nack(messages[:0])
            consumer.ack(messages)
        assert sorted(int(message.value) for message in taken) == list(range(6))
        with pytest.raises(InvalidRequestError):
            taken[0].nack()
    with Consumer(shared_cluster.meta, subject="sync-many", group="g") as consumer:
        threading.Timer(0.3, consumer.close).start()
        assert list(consumer) == [], "all was acked, and another thread closed it"


def test_failing_key_is_parked_and_partitions_are_paused_without_an_event_loop(
    shared_cluster: Cluster,
):
    """`tries_max` nacks set a key aside; `pause`, `position`, `lag` and `seek` are those of the
    other consumer.
    """
    fill(shared_cluster, "sync-parked", 8)
    with Consumer(
        shared_cluster.meta, subject="sync-parked", group="g", on_failure="park", tries_max=2
    ) as consumer:
        handled = []
        for message in consumer:
            if message.key == b"k0":
                message.nack()
                continue
            with pytest.raises(InvalidRequestError, match="a list of messages"):
                consumer.ack(message)
            message.ack()
            handled.append(message.value)
            if len(handled) == 4:
                break
        assert handled == [b"1", b"3", b"5", b"7"]
        with raises(Reason.SEEK_IN_GROUP):
            consumer.seek(0)
        with raises(Reason.SEEK_IN_GROUP):
            consumer.seek_to_time("-1h")
        consumer.pause()
        assert [each.paused for each in consumer.assignment] == [True]
        consumer.resume()
        assert [each.paused for each in consumer.assignment] == [False]
        deadline = time.monotonic() + 30
        while consumer.lag.messages and time.monotonic() < deadline:
            time.sleep(0.05)
        assert consumer.lag.messages == 0
        assert [each.end_offset for each in consumer.position.values()] == [8]


def test_batches_of_arrow_data_are_acked_and_given_back(shared_cluster: Cluster):
    """The next batch comes once one is acked; what is left is there for the next consumer, and the
    loop ends at the close.
    """
    subject = "sync-arrow"
    fill(shared_cluster, subject, 40)
    made = {"subject": subject, "group": "g", "settings": ConsumerSettings(pull_bytes=500)}
    offsets: list[int] = []
    with Consumer(shared_cluster.meta, **made) as consumer:
        batches = consumer.batches()
        first = next(batches)
        first.nack()
        again = next(batches)
        assert (again.start_offset, again.attempt, len(again)) == (0, 2, first.next_offset)
        with raises(Reason.MIXED_USE):
            next(consumer)
        again.ack()
        offsets += again.record_batch["offset"].to_pylist()
    assert list(batches) == []
    with pytest.raises(ClosedError):
        again.ack()
    with Producer(shared_cluster.meta) as producer:
        producer.send_all(subject, [(b"k", b"%d" % at) for at in range(40, 60)])
    with Consumer(shared_cluster.meta, **made) as consumer:
        for batch in consumer.batches():
            assert (batch.start_offset, batch.attempt) == (len(offsets), 1)
            assert batch.partition_id == again.partition_id
            assert batch.fencing_token > again.fencing_token
            values = batch.record_batch["value"].to_pylist()
            offsets += range(batch.start_offset, batch.next_offset)
            assert values == [b"%d" % at for at in range(batch.start_offset, batch.next_offset)]
            batch.ack()
            if len(offsets) == 60:
                break
    assert offsets == list(range(60))


def test_message_is_worked_on_by_a_pool_of_processes(shared_cluster: Cluster):
    """It was refused by pickle; its copy there decodes, and is acked here alone."""
    asyncio.run(shared_cluster.create("sync-pool", partitions=1))
    with Producer(shared_cluster.meta, codec=JsonCodec()) as producer:
        producer.send("sync-pool", {"amount": 3}, key=b"k", tags=["eu"]).result()
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        Consumer(
            shared_cluster.meta, subject="sync-pool", group="g", codec=JsonCodec()
        ) as consumer,
    ):
        message = next(consumer)
        assert pool.submit(methodcaller("decode"), message).result(60) == {"amount": 3}
        carried = pool.submit(copy.copy, message).result(60)
        for each in (message, carried):
            assert (each.tags, each.group, each.queue, each.logic_offset) == (("eu",), "g", 0, 0)
        for call in (carried.ack, carried.nack):
            with pytest.raises(ClosedError, match="is a copy of message 0"):
                call()
        for call in (consumer.ack, consumer.nack):
            with pytest.raises(ClosedError, match="is a copy of message 0"):
                call([carried])
        assert copy.deepcopy(message) is message
        message.ack()


def test_loop_over_a_consumer_that_was_never_open_is_refused():
    consumer = Consumer("127.0.0.1:1", subject="s", group="g")
    with pytest.raises(ClosedError):
        next(iter(consumer))
    with pytest.raises(ClosedError):
        next(consumer.batches())


def interrupt_once_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Ctrl-C come at the next call once, when its work is done and the caller has not got the
    result.
    """
    wait = loop_thread._LoopRun.wait

    def waited(*args: Any) -> bool:
        monkeypatch.undo()
        assert wait(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop_thread._LoopRun, "wait", waited)


@pytest.mark.parametrize("manner", ["getmany", "next", "batches"])
def test_messages_come_again_in_order_when_ctrl_c_keeps_them_from_the_program(
    shared_cluster: Cluster, monkeypatch: pytest.MonkeyPatch, manner: str
):
    """They were held until the close, and with them all later ones of their keys."""
    subject = f"sync-interrupted-{manner}"
    fill(shared_cluster, subject, 6)
    with Consumer(shared_cluster.meta, subject=subject, group="g") as consumer:
        taken: list[int] = []
        batches = consumer.batches()

        def take() -> None:
            if manner == "getmany":
                messages = consumer.getmany(max_records=4, timeout_ms=5_000)
                assert all(message.attempt == 1 for message in messages)
                taken.extend(message.offset for message in messages)
                consumer.ack(messages)
            elif manner == "next":
                message = next(consumer)
                assert message.attempt == 1
                taken.append(message.offset)
                message.ack()
            else:
                batch = next(batches)  # of the iterator that was interrupted
                assert batch.attempt == 1
                taken.extend(range(batch.start_offset, batch.next_offset))
                batch.ack()

        for _ in range(2):
            interrupt_once_done(monkeypatch)
            with pytest.raises(KeyboardInterrupt):
                take()
        while len(taken) < 6:
            take()
        assert len(taken) == 6
        assert [[at for at in taken if at % 2 == key] for key in (0, 1)] == [[0, 2, 4], [1, 3, 5]]
