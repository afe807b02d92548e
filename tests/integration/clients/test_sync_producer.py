"""The producer for programs without an event loop: scripts, notebooks, threads, forks, Ctrl-C; on
real servers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

import keylane
from keylane import (
    ClosedError,
    GivenUpError,
    InvalidRequestError,
    JsonCodec,
    NotSentError,
    ProducerSettings,
    SubjectUnknownError,
)
from keylane.errors import Reason, UsageError
from keylane.protocol import endpoints
from keylane.sync import Producer
from support.cluster import Cluster
from support.forked import Child
from support.raising import raises

numbers = itertools.count()


@pytest.fixture
def subject(shared_cluster: Cluster) -> str:
    """A subject of two partitions."""
    name = f"sync-{next(numbers)}"
    asyncio.run(shared_cluster.create(name, partitions=2))
    return name


def stored(cluster: Cluster, subject: str, sent: dict[bytes, list[bytes]]) -> None:
    asyncio.run(cluster.check_history(subject, sent))


def test_script_gets_receipts_and_stores_everything(shared_cluster: Cluster, subject: str):
    """Results may be asked for at once, later, and after the end of the block."""
    values = [b"%d" % number for number in range(200)]
    with keylane.sync.Producer(shared_cluster.meta) as producer:
        first = producer.send(subject, values[0], key=b"k", tags=["paid"]).result(30)
        assert first.durable == "fsync"
        later = [producer.send(subject, value, key=b"k") for value in values[1:]]
        assert repr(producer) == f"<sync Producer at {shared_cluster.meta}, open>"
    assert [sent.result().offset for sent in later] == list(range(1, 200))
    assert all(sent.done() for sent in later)
    stored(shared_cluster, subject, {b"k": values})


def test_block_stores_what_was_sent_when_it_raises(shared_cluster: Cluster, subject: str):
    """Also after the exception of Ctrl-C; the producer is closed."""
    values = [b"%d" % number for number in range(200)]
    producer = Producer(shared_cluster.meta)

    def send_and_fail() -> None:
        with producer:
            for value in values:
                producer.send(subject, value, key=b"k")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        send_and_fail()
    assert repr(producer).endswith("closed>")
    stored(shared_cluster, subject, {b"k": values})


def test_result_takes_the_time_out_of_concurrent_futures(shared_cluster: Cluster, subject: str):
    """Under its name there, `timeout`, or under `timeout_s`; a message is not canceled."""
    with Producer(shared_cluster.meta) as producer:
        sent = producer.send(subject, b"v", key=b"k")
        assert sent.result(timeout=30) == sent.result(timeout_s=30) == sent.result(30)
        with pytest.raises(InvalidRequestError, match="another name"):
            sent.result(1, timeout=1)
        with pytest.raises(InvalidRequestError):
            sent.result(timeout=-1)
        assert not hasattr(sent, "cancel")


def test_message_is_kept_until_its_time_or_canceled(shared_cluster: Cluster, subject: str):
    """Its receipt may be asked for after the end of the block; a key and a time that has passed are
    refused.
    """
    now_ms = time.time_ns() // 1_000_000
    with Producer(shared_cluster.meta, codec=JsonCodec(int)) as producer:
        far = producer.send(subject, 1, deliver_at=now_ms + 600_000)
        assert repr(far).startswith("<ScheduledMessage ")
        receipt = far.result(30)
        assert (receipt.subject, receipt.deliver_at_ms) == (subject, now_ms + 600_000)
        for _ in range(2):
            assert producer.cancel(receipt) is keylane.admin.CancelOutcome.CANCELED
        due = datetime.now(UTC) + timedelta(seconds=1)
        soon = producer.send(subject, 2, deliver_at=due, tags=["later"])
        with raises(keylane.errors.Reason.DELIVER_AT_KEY):
            producer.send(subject, 3, key=b"k", deliver_at=due)
        with raises(keylane.errors.Reason.DELIVER_AT):
            producer.send(subject, 3, deliver_at=1)
        with raises(keylane.errors.Reason.SCHEDULED_UNKNOWN):
            producer.cancel(msgspec.structs.replace(receipt, scheduled_id="00" * 16))
        with pytest.raises(InvalidRequestError):
            producer.cancel("receipt")
    assert soon.done()
    assert soon.result().durable == "fsync"
    with pytest.raises(ClosedError):
        producer.cancel(receipt)
    until = time.monotonic() + 30
    while not (values := _values(shared_cluster, subject)):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert values == [b"2"]


def test_scheduled_message_that_is_not_awaited_is_told_by_close(shared_cluster: Cluster):
    with pytest.raises(GivenUpError, match="1 scheduled message was given up"):
        with Producer(shared_cluster.meta) as producer:
            producer.send("nowhere-at-all", b"v", deliver_at=time.time_ns() // 1_000_000 + 60_000)


def test_send_waits_while_scheduled_messages_fill_the_queue(shared_cluster: Cluster, subject: str):
    settings = ProducerSettings(queue_bytes=1 << 20)
    at_ms = time.time_ns() // 1_000_000 + 600_000
    with Producer(shared_cluster.meta, settings=settings) as producer:
        sent = [producer.send(subject, bytes(400_000), deliver_at=at_ms) for _ in range(12)]
        for each in sent:
            producer.cancel(each.result(30))


def _values(cluster: Cluster, subject: str) -> list[bytes]:
    async def ask() -> list[bytes]:
        async with keylane.Admin(cluster.meta) as admin:
            route = (await admin._metaserver_client.call(endpoints.SUBJECT, subject=subject)).route
        return [each.value for part in (await cluster.log(route)).values() for each in part]

    return asyncio.run(ask())


def test_send_all_sends_what_the_caller_iterates(shared_cluster: Cluster, subject: str):
    """In the caller's thread; an error of the iteration tells how many are queued, and they are
    stored.
    """
    thread = threading.get_ident()

    def pairs(count: int) -> Iterator[tuple[bytes, bytes]]:
        for number in range(count):
            assert threading.get_ident() == thread
            yield b"k%d" % (number % 7), b"%d" % number
        if count == 2_500:
            raise OSError("the file ends here")

    with Producer(shared_cluster.meta) as producer:
        assert producer.send_all(subject, []) == 0
        assert producer.send_all(subject, pairs(2_000)) == 2_000
        assert producer.stats.acked == 2_000
        with raises(Reason.PARTLY_QUEUED, match="the file ends here") as told:
            producer.send_all(subject, pairs(2_500))
        assert told.value.queued == 2_500
        with raises(Reason.PARTLY_QUEUED) as told:
            producer.send_all(subject, [*pairs(1_100), (b"k", "text")])
        assert (told.value.queued, type(told.value.__cause__)) == (1_100, InvalidRequestError)
        producer.flush()
        assert producer.stats.acked == 5_600
        assert producer.waiting().messages == 0


def test_notebook_sends_beside_its_own_event_loop(shared_cluster: Cluster, subject: str):
    """A cell of Jupyter runs in a loop; the producer is opened in one cell and closed in
    another.
    """

    async def first_cell() -> Producer[object]:
        producer = Producer(shared_cluster.meta, codec=JsonCodec()).open()
        assert producer.send(subject, {"cell": 1}, key=b"k").result().durable == "fsync"
        return producer

    async def second_cell(producer: Producer[object]) -> None:
        producer.send(subject, {"cell": 2}, key=b"k")
        producer.close()
        producer.close()

    producer = asyncio.run(first_cell())
    asyncio.run(second_cell(producer))
    stored(shared_cluster, subject, {b"k": [b'{"cell":1}', b'{"cell":2}']})


def test_threads_send_each_in_its_order(shared_cluster: Cluster, subject: str):
    def send(name: int) -> None:
        for number in range(300):
            producer.send(subject, b"%d" % number, key=b"%d" % name)

    with Producer(shared_cluster.meta) as producer, ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(8)))
    values = [b"%d" % number for number in range(300)]
    stored(shared_cluster, subject, {b"%d" % name: values for name in range(8)})


def test_errors_are_raised_where_the_program_asks(shared_cluster: Cluster, subject: str):
    with Producer(shared_cluster.meta) as producer:
        with pytest.raises(InvalidRequestError, match=r"value.encode\(\)"):
            producer.send(subject, "v", key="text")  # type: ignore[arg-type]  # that is the test
        with pytest.raises(SubjectUnknownError):
            producer.send("never-created", b"v").result()
        producer.send("never-created", b"v")
        with pytest.raises(GivenUpError) as told:
            producer.flush()
        assert told.value.messages == 1
        with raises(Reason.ALREADY_OPEN):
            producer.open()
        producer.send(subject, b"v", key=b"k")
    with pytest.raises(ClosedError, match=r"the producer is not open \["):
        producer.send(subject, b"v")
    with pytest.raises(InvalidRequestError, match="neither copied nor pickled"):
        pickle.dumps(producer)
    with pytest.raises(NotSentError):
        Producer("127.0.0.1:1").open()
    with producer:
        producer.send(subject, b"again", key=b"k")
    stored(shared_cluster, subject, {b"k": [b"v", b"again"]})


def test_send_is_refused_when_a_partitioner_calls_it(shared_cluster: Cluster, subject: str):
    """It runs on the producer's own loop, which would wait for itself."""
    refused = []

    def place(key: bytes) -> int:
        try:
            producer.send(subject, b"inner")
        except UsageError as error:
            refused.append(error.message)
        return 7

    with Producer(shared_cluster.meta, partitioner=place) as producer:
        producer.send(subject, b"outer").result()
    assert refused == ["the producer is called on its own event loop"]


def test_forked_producer_refuses_calls_and_the_parent_sends(shared_cluster: Cluster, subject: str):
    def in_child() -> list[str]:
        told = []
        for call in (
            lambda: producer.send(subject, b"child"),
            producer.flush,
            producer.open,
            lambda: producer.stats,
        ):
            try:
                call()
            except UsageError as error:
                told.append(error.reason.name)
        producer.close()
        with Producer(shared_cluster.meta) as own:
            own.send(subject, b"own", key=b"child").result()
        return told

    with Producer(shared_cluster.meta) as producer:
        producer.send(subject, b"1", key=b"k").result()
        assert Child(in_child).result() == ["FORKED"] * 4
        producer.send(subject, b"2", key=b"k").result()
    stored(shared_cluster, subject, {b"k": [b"1", b"2"], b"child": [b"own"]})


def test_send_waits_while_the_queue_is_full(cluster: Cluster):
    """With its broker stopped, it waits; it is stored once the broker serves again, and a time-out
    is the caller's alone.
    """
    asyncio.run(cluster.create("full", partitions=1))
    settings = ProducerSettings(queue_bytes=1 << 20, batch_bytes=1 << 16)
    values = [bytes([number]) * 60_000 for number in range(40)]
    with Producer(cluster.meta, settings=settings) as producer:
        producer.send("full", values[0], key=b"k").result()
        for broker in cluster.brokers:
            broker.process.send_signal(signal.SIGSTOP)

        def serve_again() -> None:
            for broker in cluster.brokers:
                broker.process.send_signal(signal.SIGCONT)

        timer = threading.Timer(1.5, serve_again)
        began = time.monotonic()
        timer.start()
        waiting = producer.send("full", values[1], key=b"k")
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        for value in values[2:]:
            producer.send("full", value, key=b"k")
        assert time.monotonic() - began > 1
        waiting.result()
    asyncio.run(cluster.check_history("full", {b"k": values}))


def test_program_goes_on_when_its_log_is_sent_through_an_outage(cluster: Cluster):
    """Its handler waited for the event loop, and the event loop, which logged the outage, for the
    handler's lock.
    """
    asyncio.run(cluster.create("logs", partitions=1))
    settings = ProducerSettings(queue_bytes=1 << 20, batch_bytes=1 << 16, call_timeout_ms=300)
    sent = b"x" * 20_000
    outage = threading.Event()

    class Notice(logging.Handler):
        def emit(self, _record: logging.LogRecord) -> None:
            outage.set()

    class SendingHandler(logging.Handler):
        def emit(self, _record: logging.LogRecord) -> None:
            producer.send("logs", sent, key=b"k")

    def serve_again() -> None:
        assert outage.wait(60)
        time.sleep(0.5)
        for broker in cluster.brokers:
            broker.process.send_signal(signal.SIGCONT)

    root, ours = logging.getLogger(), logging.getLogger("keylane")
    notice, sender = Notice(), SendingHandler()
    with Producer(cluster.meta, settings=settings) as producer:
        producer.send("logs", sent, key=b"k").result()
        root.addHandler(sender)
        ours.addHandler(notice)
        for broker in cluster.brokers:
            broker.process.send_signal(signal.SIGSTOP)
        timer = threading.Thread(target=serve_again)
        timer.start()
        try:
            for _ in range(200):
                logging.getLogger("program").warning("a line")
        finally:
            root.removeHandler(sender)
            ours.removeHandler(notice)
            timer.join(60)
        assert outage.is_set()
        producer.flush(60)


SIGNALLED = """
import random, signal, sys
from keylane import ClosedError
from keylane.sync import Producer

sent = 0
signals = 0

def handle(number, _frame):
    global sent, signals
    signals += 1
    try:
        if signals % 2:
            producer.send(sys.argv[2], b"%d" % signals, key=b"handler")
            sent += 1
        else:
            producer.close()
    except ClosedError:
        pass

signal.signal(signal.SIGALRM, handle)
for turn in range(200):
    producer = Producer(sys.argv[1])
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.03))
    try:
        with producer:
            while signals <= turn:
                producer.send(sys.argv[2], b"%d" % turn, key=b"k")
                sent += 1
    except ClosedError:
        pass
    while signals <= turn:
        signal.pause()
print("ended", signals)
"""


def test_producer_called_in_a_signal_handler_never_stands_still(
    shared_cluster: Cluster, subject: str
):
    """`close` or `send` at 200 moments of other calls: two of twenty programs never ended."""
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, shared_cluster.meta, subject],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("ended 200\n", 0), done.stderr


SCRIPT = """
import sys, time
from keylane.sync import Producer
producer = Producer(sys.argv[1]).open()
for number in range(500):
    producer.send(sys.argv[2], b"%d" % number, key=b"k")
print("sent", flush=True)
if sys.argv[3] == "raises":
    raise RuntimeError("the script fails")
if sys.argv[3] == "waits":
    producer.send("never-created", b"v")
    with Producer(sys.argv[1]) as other:
        try:
            while True:
                other.send(sys.argv[2], b"x").result()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
"""


@pytest.mark.parametrize("end", ["returns", "raises"])
def test_messages_are_stored_when_a_script_ends_without_closing(
    shared_cluster: Cluster, subject: str, end: str
):
    command = [sys.executable, "-c", SCRIPT, shared_cluster.meta, subject, end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (int(end == "raises"), "sent\n")
    stored(shared_cluster, subject, {b"k": [b"%d" % number for number in range(500)]})


def _send_without_closing(meta: str, subject: str) -> None:
    producer = Producer(meta, settings=ProducerSettings(linger_ms=500)).open()
    for number in range(500):
        producer.send(subject, b"%d" % number, key=b"k")


def test_messages_are_stored_when_a_forked_child_ends_without_closing(
    shared_cluster: Cluster, subject: str
):
    """Its end calls nothing of atexit before Python 3.13."""
    words = (shared_cluster.meta, subject)
    child = multiprocessing.get_context("fork").Process(target=_send_without_closing, args=words)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    stored(shared_cluster, subject, {b"k": [b"%d" % number for number in range(500)]})


@pytest.mark.cluster(brokers=1, broker_settings='advertised_host = "localhost"\n')
def test_messages_are_stored_when_a_script_ends_and_the_broker_is_known_by_name(cluster: Cluster):
    """No thread is left for the lookup of the name."""
    asyncio.run(cluster.create("named", partitions=2))
    meta = cluster.meta.replace("127.0.0.1", "localhost")
    command = [sys.executable, "-c", SCRIPT, meta, "named", "returns"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "sent\n", "")
    stored(cluster, "named", {b"k": [b"%d" % number for number in range(500)]})


def test_ctrl_c_interrupts_a_waiting_call_and_what_was_sent_is_told(
    shared_cluster: Cluster, subject: str
):
    """The call raises KeyboardInterrupt; the end of the script stores the rest, and says what was
    given up.
    """
    command = [sys.executable, "-c", SCRIPT, shared_cluster.meta, subject, "waits"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "sent\n"
        time.sleep(1)
        os.kill(script.pid, signal.SIGINT)
        out, err = script.communicate(timeout=60)
    assert out == "interrupted\n"
    assert "1 message was given up" in err
