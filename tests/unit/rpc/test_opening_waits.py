"""`wait_s`: how long a client that is opened waits for metaservers that are still starting."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time

import pytest

from keylane import Admin, Consumer, Message, Producer, QueueReader
from keylane.protocol.control import Health, Join
from keylane.protocol.errors import (
    ClosedError,
    ConfigError,
    ForeignServerError,
    InvalidRequestError,
    KeylaneError,
    NotSentError,
    OutcomeUnknownError,
    SubjectUnknownError,
)
from keylane.rpc.client import MetaClient
from keylane.rpc.connections import wait_until_ready
from keylane.rpc.environment import Environment
from support.cluster import eventually

READY = Health(program="metaserver", ready=True)
ADDRESS = "127.0.0.1:7000"


class StartingNetwork:
    """A metaserver that gives one answer after the other to calls for its health; the last one
    stays.
    """

    def __init__(self, *answers: Health | KeylaneError | None) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def control(self, _method, _address, _path, answer, **_more):
        assert answer is Health, "nothing else is asked while it starts"
        self.asked += 1
        said = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if said is None:
            await asyncio.Event().wait()
        if isinstance(said, KeylaneError):
            raise said
        return said

    async def close(self) -> None:
        pass


async def waited(network: StartingNetwork, wait_s: float) -> list[str]:
    """Wait, and return the reasons for it."""
    reasons: list[str] = []
    await wait_until_ready(MetaClient(network, [ADDRESS]), wait_s, reasons.append)
    return reasons


async def test_wait_ends_when_a_metaserver_is_ready():
    """It may refuse connections first, then answer nothing, then have no database yet."""
    starting = Health(program="metaserver", ready=False, reason="no database")
    network = StartingNetwork(NotSentError("refused"), OutcomeUnknownError("cut"), starting, READY)
    reasons = await asyncio.wait_for(waited(network, 60), 30)
    assert network.asked == 4
    assert reasons == ["refused", "cut", "it is not ready: no database"]


async def test_last_failure_is_raised_when_the_wait_is_over():
    """The error is that of the last try, not a time-out."""
    network = StartingNetwork(OutcomeUnknownError("first"), NotSentError("last"))
    started = time.monotonic()
    with pytest.raises(NotSentError, match="last"):
        await waited(network, 0.3)
    assert 0.3 <= time.monotonic() - started < 10
    assert network.asked > 1


async def test_metaserver_without_an_answer_is_told_when_the_wait_is_over():
    """A call that hangs is cut off at the end of the wait."""
    with pytest.raises(OutcomeUnknownError, match=r"within 0\.2 s"):
        await asyncio.wait_for(waited(StartingNetwork(None), 0.2), 30)


async def test_opening_continues_when_the_metaserver_answers_and_is_not_ready():
    """What the client asks next says why."""
    await waited(StartingNetwork(Health(program="metaserver", ready=False, reason="empty")), 0.2)


@pytest.mark.parametrize("answer", [ForeignServerError(), Health(program="broker", ready=True)])
async def test_wait_ends_at_once_when_another_program_answers(answer):
    """Waiting makes no metaserver of it."""
    network = StartingNetwork(answer)
    with pytest.raises((ForeignServerError, InvalidRequestError)):
        await asyncio.wait_for(waited(network, 3_600), 30)
    assert network.asked == 1


def clients(network: StartingNetwork, wait_s: float):
    """One of each kind but for the admin, whose network is always real."""
    environment = Environment(network=network)
    return [
        Producer(ADDRESS, wait_s=wait_s, _environment=environment),
        Consumer(ADDRESS, subject="s", group="g", wait_s=wait_s, _environment=environment),
        QueueReader(ADDRESS, subject="s", wait_s=wait_s, _environment=environment),
    ]


@pytest.mark.parametrize("index", range(3))
async def test_wait_is_logged_once_when_no_metaserver_answers(caplog, index):
    network = StartingNetwork(NotSentError("connection refused"))
    client = clients(network, 0.5)[index]
    caplog.set_level("INFO", "keylane")
    with pytest.raises(NotSentError) as raised:
        await client.__aenter__()
    assert network.asked > 2
    kind = ("producer", "consumer", "reader")[index]
    assert caplog.messages == [f"the {kind} waits up to 0.5 s for a metaserver: connection refused"]
    assert "wait_s" not in raised.value.hint


@pytest.mark.parametrize("index", range(2))
async def test_hint_names_the_wait_when_none_was_set(caplog, index):
    client = clients(UnreachedNetwork(), 0)[index]
    with pytest.raises(NotSentError) as raised:
        await client.__aenter__()
    assert raised.value.hint.startswith(NotSentError.hint)
    assert raised.value.hint.endswith(
        " wait_s=60 (keylane --wait-s 60) waits for a metaserver that is still starting."
    )
    assert caplog.messages == []


class UnreachedNetwork(StartingNetwork):
    """A metaserver that accepts no connection."""

    def __init__(self) -> None:
        super().__init__(READY)

    async def control(self, *_arguments, **_more):
        raise NotSentError("connection refused")


class EndingNetwork(StartingNetwork):
    """A metaserver that is ready, ends before it answers the first joins, and then lacks the
    subject.
    """

    def __init__(self, failures: int) -> None:
        super().__init__(READY)
        self.sessions: list[str] = []
        self._failures = failures

    async def control(self, method, address, path, answer, *, body=None, **more):
        if answer is Health:
            return await super().control(method, address, path, answer, **more)
        assert isinstance(body, Join), "a consumer that has not joined asks nothing else"
        self.sessions.append(body.session)
        if len(self.sessions) <= self._failures:
            raise OutcomeUnknownError("the connection ended")
        raise SubjectUnknownError(subject="s")


async def test_join_is_sent_again_when_the_metaserver_ends_before_its_answer():
    """With the same session, because the first join may have been done."""
    network = EndingNetwork(3)
    consumer = clients(network, 60)[1]
    with pytest.raises(SubjectUnknownError):
        await asyncio.wait_for(consumer.__aenter__(), 30)
    assert len(network.sessions) == 4
    assert len(set(network.sessions)) == 1


@pytest.mark.parametrize(("wait_s", "least"), [(0, 1), (0.4, 2)])
async def test_last_failure_of_a_join_is_raised_when_the_wait_is_over(wait_s, least):
    """Without a wait it is sent once."""
    network = EndingNetwork(1_000)
    consumer = clients(network, wait_s)[1]
    with pytest.raises(OutcomeUnknownError, match="the connection ended"):
        await asyncio.wait_for(consumer.__aenter__(), 30)
    assert least <= len(network.sessions) <= 5 * least
    assert "closed" in repr(consumer)


@pytest.mark.parametrize("index", range(3))
async def test_client_is_closed_when_its_wait_was_in_vain(index):
    """It may be opened again, which raises the same."""
    client = clients(StartingNetwork(NotSentError()), 0.05)[index]
    for _ in range(2):
        with pytest.raises(NotSentError):
            await client.__aenter__()
        assert "closed" in repr(client)


async def test_admin_is_closed_when_its_wait_was_in_vain():
    """Nothing listens on port 1."""
    admin = Admin("127.0.0.1:1", wait_s=0.05)
    with pytest.raises(NotSentError):
        await admin.__aenter__()
    assert "closed" in repr(admin)


@pytest.mark.parametrize("index", range(3))
async def test_client_is_closed_when_its_wait_is_cancelled(index):
    """As by a time-out of the caller."""
    network = StartingNetwork(NotSentError())
    client = clients(network, 3_600)[index]
    opening = asyncio.create_task(client.__aenter__())
    await eventually(lambda: network.asked)
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert "closed" in repr(client)


async def test_run_returns_when_a_signal_comes_during_the_wait():
    """The consumer was never opened, so nothing is handed over."""
    network = StartingNetwork(NotSentError())
    handled: list[Message] = []
    consumer = Consumer(
        ADDRESS,
        subject="s",
        group="g",
        handler=handled.append,
        wait_s=3_600,
        _environment=Environment(network=network),
    )
    earlier = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        running = asyncio.create_task(consumer.run())
        await eventually(lambda: network.asked)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, 30)
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert "closed" in repr(consumer)


@pytest.mark.parametrize("several", [False, True])
async def test_run_returns_when_the_consumer_is_closed_during_the_wait(several):
    """The close does not last as long as the wait."""
    network = StartingNetwork(NotSentError())
    consumer = Consumer(
        ADDRESS,
        subject=None if several else "s",
        group=None if several else "g",
        handler=None if several else print,
        wait_s=3_600,
        _environment=Environment(network=network),
    )
    if several:
        consumer.on("s", group="g")(print)
    running = asyncio.create_task(consumer.run())
    await eventually(lambda: network.asked)
    await asyncio.wait_for(consumer.close(), 10)
    await asyncio.wait_for(running, 10)
    assert "closed" in repr(consumer)


@pytest.mark.parametrize("index", range(2))
async def test_opening_ends_when_the_client_is_closed_during_the_wait(index):
    """It raises, so the body of its block does not begin."""
    network = StartingNetwork(NotSentError())
    client = clients(network, 3_600)[index]
    opening = asyncio.create_task(client.__aenter__())
    await eventually(lambda: network.asked)
    await asyncio.wait_for(client.close(), 10)
    with pytest.raises(ClosedError, match="closed while it waited"):
        await asyncio.wait_for(opening, 10)
    assert "closed" in repr(client)


async def test_producer_stays_closed_when_it_is_closed_during_the_call_of_its_opening():
    """It may be opened again."""
    network = StartingNetwork(READY)
    answer, control = asyncio.Event(), network.control

    async def late_control(*arguments, **more):
        await answer.wait()
        return await control(*arguments, **more)

    network.control = late_control
    producer = Producer(ADDRESS, _environment=Environment(network=network))
    opening = asyncio.create_task(producer.__aenter__())
    await asyncio.sleep(0)
    closing = asyncio.create_task(producer.close())
    await asyncio.sleep(0)
    answer.set()
    with pytest.raises(ClosedError, match="closed while it was opened"):
        await asyncio.wait_for(opening, 10)
    await asyncio.wait_for(closing, 10)
    async with producer:
        assert "open" in repr(producer)


@pytest.mark.parametrize("wait_s", [-1, math.nan, math.inf, 86_401, "60", None, True])
def test_wait_is_refused_when_it_is_no_time(wait_s):
    """Each client says which values there are."""
    makers = [
        lambda: clients(StartingNetwork(READY), wait_s),
        lambda: Admin(ADDRESS, wait_s=wait_s),
        lambda: Consumer(ADDRESS, subject="s", group="g", wait_s=wait_s),
        lambda: QueueReader(ADDRESS, subject="s", wait_s=wait_s),
    ]
    for make in makers:
        with pytest.raises(ConfigError, match="wait_s must be seconds from 0 to 86400"):
            make()
