"""The shell of a partition: when it pulls, what it logs of failures, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from keylane.consumer import ConsumerSettings, session_shell
from keylane.consumer.session.events import MessagesHandled, WorkWanted
from keylane.errors import Reason
from keylane.protocol.errors import (
    FencedError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    VersionError,
)
from keylane.protocol.frames import (
    Ack,
    Acquire,
    Acquired,
    Batches,
    Pull,
    Read,
    Release,
    Released,
    Request,
)
from keylane.protocol.text import key_digest
from keylane.rpc.network import Call, Calling, OnAnswer, OnPart
from support.cluster import eventually
from support.pulling import (
    FAST,
    TOKEN,
    NotingOwner,
    PartitionChannel,
    ScriptedBroker,
    SuspectingBroker,
    opened,
    stored,
)

SETTINGS = ConsumerSettings(backoff=FAST, buffer_messages=4)


class OpenChannel:
    """Keeps its pulls until the test answers them; its broker answers other calls."""

    closed = False

    def __init__(self, broker: Any) -> None:
        self._others = PartitionChannel(broker)
        self.calls: list[tuple[Pull, Call]] = []

    def begin(
        self,
        request: Request,
        payload: bytes = b"",
        *,
        timeout_ms: int,
        on_answer: OnAnswer | None = None,
        on_part: OnPart | None = None,
    ) -> Calling:
        if not isinstance(request, Pull):
            return self._others.begin(
                request, payload, timeout_ms=timeout_ms, on_answer=on_answer, on_part=on_part
            )
        future = asyncio.get_running_loop().create_future()
        self.calls.append((request, Call(future, on_answer, type(request), timeout_ms, on_part)))
        return future

    def answer(self) -> None:
        """Answer the last pull with two messages."""
        pull, call = self.calls[-1]
        end = pull.offset + 2
        call.complete((Batches(0, 1_000, end, False), stored(pull.offset)))

    def send_part(self, offset: int) -> None:
        """Give the last pull two messages, behind which others follow."""
        _, call = self.calls[-1]
        assert call.deliver_part(
            Batches(0, offset + 2, offset + 2, False, more=True), stored(offset)
        )


class HeldBroker(ScriptedBroker):
    """Its pulls are answered by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.held = OpenChannel(self)
        self.acquired = 0

    @property
    def live_channel(self) -> Any:
        return self.held

    async def channel(self) -> Any:
        return self.held

    async def call(self, request: Request, payload: bytes = b"", *, wait_ms: int = 0):
        if isinstance(request, Acquire):
            self.acquired += 1
            return Acquired(0, (), 1_000, False), b""
        return await super().call(request, payload, wait_ms=wait_ms)


def offsets(owner: NotingOwner) -> list[int]:
    return [message.offset for message in owner.messages]


async def test_next_pull_is_sent_where_the_answer_arrives():
    """The pull behind what has arrived is under way before the event loop turns."""
    broker = HeldBroker()
    async with opened(broker, NotingOwner(), SETTINGS):
        await eventually(lambda: broker.held.calls)
        broker.held.answer()
        assert [pull.offset for pull, _ in broker.held.calls] == [0, 2]


async def test_pull_waits_for_handlers_when_the_buffer_is_full():
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(broker, owner, SETTINGS) as shell:
        await eventually(lambda: broker.held.calls)
        broker.held.answer()
        broker.held.answer()
        await asyncio.sleep(0.01)
        assert len(broker.held.calls) == 2
        assert shell.waiting_for == "handlers"
        owner.take(shell)
        await eventually(lambda: len(broker.held.calls) == 3)
        assert broker.held.calls[-1][0].offset == 4


async def test_answer_waits_while_the_partition_is_paused():
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(broker, owner, SETTINGS) as shell:
        await eventually(lambda: broker.held.calls)
        shell.gate.add("resume")
        broker.held.answer()
        owner.take(shell)
        assert offsets(owner) == []
        shell.gate.remove("resume")
        owner.take(shell)
        assert offsets(owner) == [0, 1]


async def test_answer_to_a_stopped_partition_is_left():
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(broker, owner, SETTINGS) as shell:
        await eventually(lambda: broker.held.calls)
        shell.stop()
        broker.held.answer()
        assert len(broker.held.calls) == 1
        assert shell.state.intake.held == 0


async def test_fence_is_raised_again_when_a_later_pull_fails():
    broker = HeldBroker()
    async with opened(broker, NotingOwner(), SETTINGS):
        await eventually(lambda: broker.held.calls)
        broker.held.answer()
        broker.held.calls[-1][1].fail(OutcomeUnknownError())
        await eventually(lambda: len(broker.held.calls) == 3)
        assert broker.acquired == 2
        assert broker.held.calls[-1][0].offset == 2


async def test_parts_of_an_answer_are_stored_without_another_pull():
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(broker, owner, SETTINGS) as shell:
        await eventually(lambda: broker.held.calls)
        broker.held.send_part(0)
        assert len(broker.held.calls) == 1
        owner.take(shell)
        assert offsets(owner) == [0, 1]


async def test_next_pull_begins_behind_the_last_part_of_an_answer():
    """The broker goes on by itself until then."""
    broker, owner = HeldBroker(), NotingOwner()
    settings = ConsumerSettings(backoff=FAST, buffer_messages=100)
    async with opened(broker, owner, settings) as shell:
        await eventually(lambda: broker.held.calls)
        broker.held.send_part(0)
        broker.held.send_part(2)
        assert len(broker.held.calls) == 1
        broker.held.calls[-1][1].complete((Batches(0, 6, 6, False), stored(4)))
        assert [pull.offset for pull, _ in broker.held.calls] == [0, 6]
        for _ in range(3):
            owner.take(shell)
        assert offsets(owner) == [*range(6)]


async def test_parts_that_come_while_the_partition_is_paused_are_not_passed_by():
    broker, owner = HeldBroker(), NotingOwner()
    settings = ConsumerSettings(backoff=FAST, buffer_messages=100)
    async with opened(broker, owner, settings) as shell:
        await eventually(lambda: broker.held.calls)
        shell.gate.add("resume")
        broker.held.send_part(0)
        broker.held.send_part(2)
        owner.take(shell)
        assert offsets(owner) == []
        shell.gate.remove("resume")
        owner.take(shell)
        owner.take(shell)
        assert offsets(owner) == [0, 1, 2, 3]


async def test_pull_waits_for_its_turn_when_many_pulls_wait_on_its_channel(
    monkeypatch: pytest.MonkeyPatch,
):
    """It is a call of the broker's client, which limits them; a call takes one answer, so it asks
    for one.
    """
    monkeypatch.setattr(session_shell, "CHAINS_MAX", 0)
    broker, owner = HeldBroker(), NotingOwner()
    async with opened(broker, owner, SETTINGS) as shell:
        await eventually(lambda: shell.state.intake.held)
        assert broker.held.calls == []
        pull = broker.asked(Pull)[0]
        assert (pull.offset, pull.answers_max) == (0, 1)


async def test_part_to_a_stopped_partition_is_left():
    broker = HeldBroker()
    async with opened(broker, NotingOwner(), SETTINGS) as shell:
        await eventually(lambda: broker.held.calls)
        shell.stop()
        broker.held.send_part(0)
        assert shell.state.intake.held == 0


async def test_pull_is_sent_to_the_new_address_when_the_old_broker_still_answers():
    """Its messages are there; the old one, as of a copy of the folder, would let the pull wait to
    its end.
    """
    old, new, owner = HeldBroker(), HeldBroker(), NotingOwner()
    new.address = "b:2"
    async with opened(old, owner, SETTINGS, others=(new,)) as shell:
        await eventually(lambda: old.held.calls)
        shell.renew(shell.state.tenure.until_ms, new.address)
        await eventually(lambda: new.held.calls)
        old.held.answer()
        assert shell.state.intake.held == 0
        new.held.answer()
        assert shell.state.intake.held == 2


async def test_pull_goes_on_when_the_lease_is_renewed_at_the_same_address():
    broker = HeldBroker()
    async with opened(broker, NotingOwner(), SETTINGS) as shell:
        await eventually(lambda: broker.held.calls)
        shell.renew(shell.state.tenure.until_ms, broker.address)
        await asyncio.sleep(0.01)
        assert len(broker.held.calls) == 1
        broker.held.answer()
        assert shell.state.intake.held == 2


async def test_pulls_that_keep_failing_are_told_once_and_are_a_warning_once(
    caplog: pytest.LogCaptureFixture,
):
    """A broker of another version refuses each: the consumer holds the partition, and gets
    nothing.
    """
    refused = VersionError(
        Reason.SERVER_TOO_OLD,
        "this client is too new for the server",
        client="0.9.0",
        server="0.1.0",
    )
    broker = ScriptedBroker(*[refused] * 12, batches=1)
    with caplog.at_level(logging.INFO, "keylane.consumer"):
        async with opened(broker, NotingOwner(), SETTINGS) as shell:
            await eventually(lambda: shell.state.intake.held == 2)
    told = [record.levelname for record in caplog.records if "too new" in record.message]
    assert told == ["INFO", "WARNING"]


async def test_fenced_partition_releases_nothing():
    """It is another owner's: its end is told once, and the pull lock is left alone."""
    broker, owner = ScriptedBroker(FencedError(current_token=TOKEN + 1)), NotingOwner()
    async with opened(broker, owner, SETTINGS) as shell:
        await eventually(lambda: owner.ended)
        assert shell.state.tenure.fence is not None
        shell.stop()
        await shell.hand_over(flush_ms=1_000)
        assert owner.ended == 1
    assert broker.asked(Release) == []


async def test_sealed_partition_is_told_once_its_last_message_is_acked():
    broker, owner = ScriptedBroker(batches=1), NotingOwner()
    broker.sealed = True
    async with opened(broker, owner, SETTINGS) as shell:
        await eventually(lambda: shell.state.intake.held == 2)
        assert not shell.state.is_drained
        owner.take(shell)
        await eventually(lambda: owner.drained)
        assert shell.state.is_drained
        assert broker.cursor == 2
        assert owner.drained == 1


async def test_message_that_ends_processes_is_named_in_the_log(caplog: pytest.LogCaptureFixture):
    broker, owner = SuspectingBroker((0, 7)), NotingOwner()
    async with opened(broker, owner, SETTINGS) as shell:
        await eventually(lambda: shell.state.intake.held)
        shell.feed(WorkWanted(1))
        await eventually(lambda: owner.messages)
        assert owner.messages[0].attempt == 8
        name = f"s partition 1 offset 0 in group g ({key_digest(owner.messages[0].key)})"
        shell.feed(MessagesHandled(owner.messages))
    assert f"{name}: the process of its consumer ended while it was handled, 7 times" in caplog.text


async def test_message_that_ended_two_processes_alone_is_said_to_be_set_aside(
    caplog: pytest.LogCaptureFixture,
):
    settings = ConsumerSettings(backoff=FAST, on_failure="dead")
    async with opened(SuspectingBroker((0, 2)), NotingOwner(), settings) as shell:
        await eventually(lambda: shell.state.intake.held)
        shell.feed(WorkWanted(1))
    assert "ended while it was handled, 2 times; it is set aside" in caplog.text


async def test_suspects_of_two_partitions_are_handed_out_one_after_the_other():
    """Else the end of a process would accuse one of each."""
    brokers = SuspectingBroker(), SuspectingBroker()
    owners = NotingOwner(), NotingOwner()
    owners[1].alone = owners[0].alone
    async with (
        opened(brokers[0], owners[0], SETTINGS) as first,
        opened(brokers[1], owners[1], SETTINGS) as second,
    ):
        await eventually(lambda: first.state.intake.held and second.state.intake.held)
        first.feed(WorkWanted(1))
        second.feed(WorkWanted(1))
        await eventually(lambda: offsets(owners[0]) == [0])
        await asyncio.sleep(0.02)
        assert (offsets(owners[1]), brokers[1].begun) == ([], [])
        first.feed(MessagesHandled(owners[0].messages))
        await eventually(lambda: offsets(owners[1]) == [0])
        second.feed(MessagesHandled(owners[1].messages))


async def test_turn_of_a_suspect_ends_when_its_partition_is_handed_over():
    brokers = SuspectingBroker(), SuspectingBroker()
    owners = NotingOwner(), NotingOwner()
    owners[1].alone = owners[0].alone
    async with opened(brokers[1], owners[1], SETTINGS) as second:
        async with opened(brokers[0], owners[0], SETTINGS) as first:
            await eventually(lambda: first.state.intake.held and second.state.intake.held)
            first.feed(WorkWanted(1))
            await eventually(lambda: owners[0].messages)
            second.feed(WorkWanted(1))
            first.stop()
            first.feed(MessagesHandled(owners[0].messages))
            await first.hand_over(flush_ms=1_000)
        await eventually(lambda: offsets(owners[1]) == [0])
        second.feed(MessagesHandled(owners[1].messages))


async def test_removed_messages_are_passed_counted_and_logged(caplog: pytest.LogCaptureFixture):
    broker, owner = ScriptedBroker(OffsetOutOfRangeError(first_offset=2), batches=2), NotingOwner()
    async with opened(broker, owner, SETTINGS) as shell:
        await eventually(lambda: shell.state.intake.held == 2)
        assert [pull.offset for pull in broker.asked(Pull)][:2] == [0, 2]
        assert shell.state.offsets.missed == 2
        assert not owner.ended
    assert "2 messages were removed before the group got them; it continues at" in caplog.text


async def test_messages_removed_before_a_broadcast_consumer_got_them_are_logged(
    caplog: pytest.LogCaptureFixture,
):
    class RemovingBroker(ScriptedBroker):
        async def call(self, request: Request, payload: bytes = b"", *, wait_ms: int = 0):
            self.requests.append(request)
            assert isinstance(request, Read)
            if request.offset == 0:
                raise OffsetOutOfRangeError(first_offset=2)
            await asyncio.Event().wait()

    broker, settings = RemovingBroker(), ConsumerSettings(broadcast=True)
    async with opened(broker, NotingOwner(), settings, group="") as shell:
        await eventually(lambda: len(broker.requests) == 2)
        assert (broker.requests[1].offset, shell.state.offsets.missed) == (2, 2)
    assert (
        "s partition 1: 2 messages were removed before a broadcast consumer got them" in caplog.text
    )


class FailingOwner(NotingOwner):
    """Keeps the errors that close the consumer."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)


async def test_consumer_fails_when_an_answer_to_acks_is_of_another_kind():
    """The error is not lost in the callback of the answer."""

    class OddBroker(ScriptedBroker):
        async def call(self, request: Request, payload: bytes = b"", *, wait_ms: int = 0):
            if isinstance(request, Ack):
                return Released(), b""
            return await super().call(request, payload, wait_ms=wait_ms)

    owner = FailingOwner()
    async with opened(OddBroker(), owner, SETTINGS) as shell:
        await eventually(lambda: shell.state.intake.held == 2)
        owner.take(shell)
        await eventually(lambda: owner.errors)
        assert isinstance(owner.errors[0], AssertionError)
        shell.abandon()


async def test_consumer_fails_when_its_workers_do_not_take_an_offer():
    """Neither is an error in what the answer of a pull leads to."""

    class FaultyOwner(FailingOwner):
        def offer(self, shell: Any) -> None:
            raise ValueError(shell.partition_id)

    broker, owner = HeldBroker(), FaultyOwner()
    async with opened(broker, owner, SETTINGS) as shell:
        await eventually(lambda: broker.held.calls)
        broker.held.answer()
        assert [type(error) for error in owner.errors] == [ValueError]
        shell.abandon()


async def test_acks_are_sent_when_there_is_no_channel_yet():
    broker, owner = ScriptedBroker(), NotingOwner()
    async with opened(broker, owner, SETTINGS) as shell:
        await eventually(lambda: shell.state.intake.held == 2)
        broker.is_connected = False
        owner.take(shell)
        await eventually(lambda: broker.cursor == 2)


async def test_abandoned_partition_runs_nothing_more():
    broker = HeldBroker()
    async with opened(broker, NotingOwner(), SETTINGS) as shell:
        await eventually(lambda: broker.held.calls)
        shell.abandon()
        await asyncio.sleep(0.01)
        assert not shell.calls._tasks
        assert broker.asked(Release) == []
