"""What `send` returns, as an asyncio user expects it of a future."""

import asyncio
import copy
import pickle

import pytest

from keylane import KeylaneError, Receipt, SendFuture
from keylane.protocol.errors import InvalidRequestError
from support.scripted_network import ScriptedNetwork, producer_on


async def test_future_has_its_result_when_it_is_done():
    async with producer_on(ScriptedNetwork()) as producer:
        future = producer.send("s", b"v", key=b"k")
        assert not future.done()
        assert repr(future) == "<SendFuture pending>"
        with pytest.raises(asyncio.InvalidStateError):
            future.result()
        receipt = await future
        assert future.done()
        assert repr(future) == "<SendFuture done>"
        assert future.result() == receipt


async def test_cancel_is_not_there_and_says_what_there_is_instead():
    """`asyncio.wait_for` ends the wait alone: the message is stored."""
    async with producer_on(ScriptedNetwork()) as producer:
        future = producer.send("s", b"v", key=b"k")
        assert not hasattr(future, "cancel")
        with pytest.raises(AttributeError, match="timeout_ms"):
            future.cancel()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future, 0)
        assert (await future).durable


async def test_future_says_what_is_copied_in_its_place_when_it_is_copied_or_pickled():
    async with producer_on(ScriptedNetwork()) as producer:
        future = producer.send("s", b"v", key=b"k")
        for take in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(InvalidRequestError, match="Receipt"):
                take(future)
        receipt = await future
        assert pickle.loads(pickle.dumps(receipt)) == copy.deepcopy(receipt) == receipt


async def test_result_raises_when_the_message_was_given_up():
    """`flush` does not tell again what a `result` has told."""
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        await producer.send("s", b"v", key=b"k")
        network.refusal = InvalidRequestError("not that")
        future = producer.send("s", b"v", key=b"k")
        told: list[KeylaneError] = []

        def note(done: SendFuture) -> None:
            try:
                done.result()
            except KeylaneError as error:
                told.append(error)

        future.add_done_callback(note)
        await producer.flush()
        assert [error.message for error in told] == ["not that"]


async def test_callbacks_are_called_once_each_when_messages_of_a_batch_settle_apart():
    """Messages sent before the first route share a batch; one of them times out long before the
    others are stored.
    """
    network = ScriptedNetwork()
    network.lost.add(1)
    async with producer_on(network) as producer:
        called: list[tuple[int, bool]] = []
        futures = [
            producer.send("s", b"%d" % number, key=b"k%d" % number, timeout_ms=timeout_ms)
            for number, timeout_ms in enumerate((None, 50, None))
        ]
        for number, future in enumerate(futures):
            future.add_done_callback(
                lambda done, number=number: called.append((number, done.done()))
            )
        await asyncio.wait([asyncio.ensure_future(futures[1])])
        await asyncio.sleep(0)
        assert called == [(1, True)]
        network.lost.clear()
        assert isinstance(await futures[0], Receipt)
        await futures[2]
        await asyncio.sleep(0)
        assert sorted(called) == [(0, True), (1, True), (2, True)]
        futures[0].add_done_callback(lambda done: called.append((9, done.done())))
        assert len(called) == 3
        await asyncio.sleep(0)
        assert called[-1] == (9, True)


async def test_wait_of_asyncio_takes_futures_of_messages_when_some_fail():
    """As it takes tasks: until all are done, or one has an error; its callbacks are removed."""
    network = ScriptedNetwork()
    async with producer_on(network) as producer:
        futures = {producer.send("s", b"v", key=b"%d" % number) for number in range(100)}
        done, pending = await asyncio.wait(futures)
        assert (done, pending) == (futures, set())
        assert not any(future.exception() or future.cancelled() for future in done)
        network.refusal = InvalidRequestError("not that")
        refused = producer.send("s", b"v", key=b"k")
        done, _ = await asyncio.wait({refused}, return_when=asyncio.FIRST_EXCEPTION)
        error = refused.exception()
        assert done == {refused}
        assert isinstance(error, InvalidRequestError)


async def test_removed_callback_is_not_called_when_the_message_is_stored():
    async with producer_on(ScriptedNetwork()) as producer:
        called: list[SendFuture] = []
        future = producer.send("s", b"v", key=b"k")
        future.add_done_callback(called.append)
        future.add_done_callback(called.append)
        assert future.remove_done_callback(called.append) == 2
        assert future.remove_done_callback(called.append) == 0
        await future
        await asyncio.sleep(0)
        assert not called


async def test_wait_of_asyncio_is_quick_when_it_has_50_000_futures():
    """Each callback is removed by itself, not looked for among all."""
    async with producer_on(ScriptedNetwork()) as producer:
        futures = [producer.send("s", b"v", key=b"%d" % number) for number in range(50_000)]
        async with asyncio.timeout(20):
            done, _ = await asyncio.wait(futures)
        assert len(done) == 50_000


async def test_cancelled_wait_leaves_the_message_and_other_waits_alone():
    """Each wait has a future of its own: cancelling one cancels neither the batch nor the other
    waits.
    """
    async with producer_on(ScriptedNetwork()) as producer:
        await producer.send("s", b"v", key=b"k")
        future = producer.send("s", b"v", key=b"k")

        async def wait() -> Receipt:
            return await future

        first, second = asyncio.create_task(wait()), asyncio.create_task(wait())
        await asyncio.sleep(0)
        first.cancel()
        receipts = await asyncio.gather(first, second, return_exceptions=True)
        assert isinstance(receipts[0], asyncio.CancelledError)
        assert receipts[1] == await future
        assert not future._batch.waiters
