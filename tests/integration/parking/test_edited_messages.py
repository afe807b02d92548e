"""A parked message gets another value in its place: through a killed broker, a resize and a move,
to its handler.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from integration.parking.test_crashes import crasher
from integration.parking.test_parked_keys import FAST
from integration.parking.test_poison_in_a_change import sealed_behind
from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.errors import (
    InvalidRequestError,
    MessageTooLargeError,
    NotFoundError,
    Reason,
)
from keylane.protocol.message import EDITED_PROPERTY
from support.cluster import Cluster, eventually
from support.raising import raises
from support.server_process import run_keylane


class Judge:
    """A handler that fails for values that are not numbers; remembers what it handled, by key."""

    def __init__(self) -> None:
        self.handled: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
        self.messages: list[Message] = []

    async def __call__(self, message: Message) -> None:
        self.handled[message.key].append((message.offset, int(message.value)))
        self.messages.append(message)


def consumer_of(cluster: Cluster, subject: str, judge: Judge, policy: str = "park") -> Consumer:
    return Consumer(
        cluster.meta,
        subject=subject,
        group="g",
        handler=judge,
        on_failure=policy,
        tries_max=2,
        settings=ConsumerSettings(handler_backoff=FAST, backoff=FAST),
    )


async def parked_count(admin: Admin, subject: str) -> int:
    return sum([view.messages async for view in admin.parked(subject, "g")])


async def parked_poison(cluster: Cluster, admin: Admin, subject: str) -> int:
    """A key whose first value is no number is parked with two more; returns the partition."""
    async with Producer(cluster.meta) as producer:
        for value in (b"poison", b"1", b"2"):
            receipt = await producer.send(subject, value, key=b"k", properties={"town": "Ulm"})
    async with consumer_of(cluster, subject, Judge()):
        while await parked_count(admin, subject) < 3:
            await asyncio.sleep(0.02)
    return receipt.partition_id


@pytest.mark.parametrize("change", ["none", "resize", "move"])
async def test_edited_message_is_handled_in_its_place(shared_cluster: Cluster, change: str):
    """In the order of its key, with the new value and a mark; its properties stay, and its original
    stays in the log.
    """
    subject = f"edited-{change}"
    route = await shared_cluster.create(subject, partitions=1)
    async with asyncio.timeout(60), Admin(shared_cluster.meta) as admin:
        partition_id = await parked_poison(shared_cluster, admin, subject)
        edited = await admin.edit_parked(subject, "g", partition_id, 0, value=b"40")
        assert (edited.message.value, edited.edited) == (b"40", True)
        if change != "none":
            await sealed_behind(admin, subject, change)
        judge = Judge()
        async with (
            consumer_of(shared_cluster, subject, judge),
            Producer(shared_cluster.meta) as producer,
        ):
            await producer.send(subject, b"3", key=b"k")
            while await parked_count(admin, subject) < 4:
                await asyncio.sleep(0.02)
            if change != "none":
                (view,) = [each async for each in admin.parked(subject, "g")]
                with pytest.raises(
                    NotFoundError, match=f"stored, such as offset 0 of partition {partition_id}"
                ):
                    await admin.edit_parked(subject, "g", view.partition_id, 60, value=b"41")
                again = await admin.edit_parked(subject, "g", partition_id, 0, value=b"41")
                assert again.message.value == b"41"
            shown = [each async for each in admin.parked_messages(subject, "g", b"k")]
            assert [each.edited for each in shown] == [True, False, False, False]
            await admin.redrive(subject, "g", key=b"k")
            await eventually(lambda: len(judge.handled[b"k"]) == 4)
        first, second = judge.messages[:2]
        value = 40 if change == "none" else 41
        assert [number for _, number in judge.handled[b"k"]] == [value, 1, 2, 3]
        assert (first.partition_id, first.offset, first.key) == (partition_id, 0, b"k")
        assert first.properties["town"] == "Ulm"
        assert str(first.properties[EDITED_PROPERTY]).startswith("20")
        assert EDITED_PROPERTY not in second.properties
    stored = await shared_cluster.log(route)
    assert stored[partition_id][0].value == b"poison"


async def test_edit_survives_a_killed_broker(tmp_path: Path):
    """It is durable when the call returns; a dead letter is edited in the same way."""
    with Cluster(tmp_path, brokers=1) as cluster:
        await cluster.create("orders", partitions=1)
        async with asyncio.timeout(60), Admin(cluster.meta) as admin:
            partition_id = await parked_poison(cluster, admin, "orders")
            await admin.edit_parked(
                "orders", "g", partition_id, 0, value=b"40", properties={"town": "Bonn"}
            )
            async with Producer(cluster.meta) as producer:
                dead = await producer.send("orders", b"dead", key=b"other")
            async with consumer_of(cluster, "orders", Judge(), "dead"):
                while await parked_count(admin, "orders") < 4:
                    await asyncio.sleep(0.02)
            await admin.edit_parked("orders", "g", partition_id, dead.offset, value=b"50")
            cluster.brokers[0].kill()
            cluster.brokers[0].restart()
            judge = Judge()
            async with consumer_of(cluster, "orders", judge):
                await eventually_redriven(admin)
                await eventually(lambda: len(judge.messages) == 4)
            assert [number for _, number in judge.handled[b"k"]] == [40, 1, 2]
            assert [number for _, number in judge.handled[b"other"]] == [50]
            (mended,) = [each for each in judge.messages if each.value == b"40"]
            assert mended.properties["town"] == "Bonn"


async def eventually_redriven(admin: Admin) -> None:
    """Redrive everything, once the broker answers again."""
    while True:
        try:
            await admin.redrive("orders", "g", all=True)
        except Exception:  # noqa: BLE001 - the broker is starting
            await asyncio.sleep(0.05)
        else:
            return


class Waiting(Judge):
    """A handler whose messages end when `go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, message: Message) -> None:
        self.has_begun.set()
        await self.go_on.wait()
        await super().__call__(message)


async def test_edit_and_skip_are_refused_while_a_message_that_may_end_its_process_is_handled(
    shared_cluster: Cluster, tmp_path: Path
):
    """A process ended with the redriven message: the next consumer has the key stay parked, and
    handles it.
    """
    subject, judge = "edited-again", Waiting()
    await shared_cluster.create(subject, partitions=1)
    async with (
        asyncio.timeout(60),
        Admin(shared_cluster.meta) as admin,
        Producer(shared_cluster.meta) as producer,
    ):
        for value in (b"poison", b"1"):
            await producer.send(subject, value, key=b"bad")
        async with consumer_of(shared_cluster, subject, Judge()):
            while await parked_count(admin, subject) < 2:
                await asyncio.sleep(0.02)
        await admin.edit_parked(subject, "g", key=b"bad", value=b"40")
        await admin.redrive(subject, "g", key=b"bad")
        with crasher(shared_cluster, subject, tmp_path / "handed", "one") as process:
            await eventually(lambda: process.poll() is not None)
        async with consumer_of(shared_cluster, subject, judge):
            await judge.has_begun.wait()
            with raises(Reason.PARKED_REDRIVEN):
                await admin.edit_parked(subject, "g", key=b"bad", value=b"41")
            with raises(Reason.PARKED_REDRIVEN):
                await admin.skip(subject, "g", key=b"bad")
            judge.go_on.set()
            while await parked_count(admin, subject):
                await asyncio.sleep(0.02)
    assert [value for _, value in judge.handled[b"bad"]] == [40, 1]


async def test_impossible_edit_is_refused_and_others_are_unharmed(shared_cluster: Cluster):
    """Too large for the subject, not parked, of another type: a typed error each; the key is
    redriven as it was.
    """
    subject = "edited-wrong"
    await shared_cluster.create(subject, partitions=1)
    async with asyncio.timeout(60), Admin(shared_cluster.meta) as admin:
        partition_id = await parked_poison(shared_cluster, admin, subject)
        where = (subject, "g", partition_id)
        for call, error in (
            (admin.edit_parked(*where, 0, value=bytes(1 << 20)), MessageTooLargeError),
            (admin.edit_parked(*where, 0, properties={"x": "y" * 70_000}), MessageTooLargeError),
            (admin.edit_parked(*where, 99, value=b"1"), Reason.PARKED_MESSAGE_UNKNOWN),
            (admin.edit_parked(*where, -1, value=b"1"), InvalidRequestError),
            (admin.edit_parked(*where, 0, value="text"), InvalidRequestError),  # type: ignore[arg-type]
            (admin.edit_parked(*where, 0), InvalidRequestError),
            (admin.parked_message(*where, 99), Reason.PARKED_MESSAGE_UNKNOWN),
        ):
            with raises(error):
                await call
        assert not (await admin.parked_message(*where, 0)).edited
        await admin.edit_parked(*where, 0, value=b"0")
        judge = Judge()
        async with consumer_of(shared_cluster, subject, judge):
            await admin.redrive(subject, "g", all=True)
            await eventually(lambda: [n for _, n in judge.handled[b"k"]] == [0, 1, 2])
        with raises(Reason.PARKED_MESSAGE_UNKNOWN):
            await admin.edit_parked(*where, 0, value=b"1")


async def test_command_edits_from_a_file_and_in_an_editor(
    shared_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The editor gets the present value; what it leaves as it is changes nothing."""
    subject = "edited-command"
    await shared_cluster.create(subject, partitions=1)
    script = tmp_path / "editor.py"
    script.write_text(
        "import pathlib, sys\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "path.write_text(path.read_text().replace('poison', '7') + '\\n')\n"
    )
    monkeypatch.setenv("EDITOR", f"{sys.executable} {script}")
    monkeypatch.delenv("VISUAL", raising=False)
    new = tmp_path / "value"
    new.write_bytes(b"8")

    async def keylane(*words: str, status: int = 0) -> str:
        done = await asyncio.to_thread(
            run_keylane, "parked", *words, "--meta", shared_cluster.meta, "-o", "json"
        )
        assert done.returncode == status, done.stderr
        return done.stderr if status else done.stdout

    async with asyncio.timeout(60), Admin(shared_cluster.meta) as admin:
        partition_id = await parked_poison(shared_cluster, admin, subject)
        place = (subject, "g", "--partition", str(partition_id), "--offset", "0")
        edited = json.loads(await keylane("edit", *place, "--editor"))
        assert (edited["value"], edited["properties"]["town"]) == ("7", "Ulm")
        assert "not changed" in await keylane("edit", *place, "--editor")
        edited = json.loads(
            await keylane("edit", *place, "--value-file", str(new), "--header", "town=Bonn")
        )
        assert (edited["value"], edited["properties"]["town"]) == ("8", "Bonn")
        shown = await keylane("show", subject, "g", "--key", "k", "--first", "1")
        assert json.loads(shown)["value"] == "8"
        assert "ConfigError" in await keylane("edit", *place, status=1)
        assert "ConfigError" in await keylane("edit", *place, "--value", "1", "--editor", status=1)
        nowhere = str(tmp_path / "nowhere")
        assert "InputError" in await keylane("edit", *place, "--value-file", nowhere, status=1)
        assert json.loads(await keylane("retry", subject, "g", "--key", "k"))["redriven"]


async def test_commands_of_dead_letters(shared_cluster: Cluster):
    """`keylane dead` list, show, retry and skip."""
    subject = "dead-commands"
    await shared_cluster.create(subject, partitions=1)

    async def keylane(*words: str) -> str:
        done = await asyncio.to_thread(
            run_keylane, "dead", *words, "--meta", shared_cluster.meta, "-o", "json"
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    judge = Judge()
    async with (
        asyncio.timeout(60),
        Admin(shared_cluster.meta) as admin,
        Producer(shared_cluster.meta) as producer,
    ):
        for value in (b"bad", b"worse", b"1"):
            receipt = await producer.send(subject, value, key=b"k")
        async with consumer_of(shared_cluster, subject, judge, "dead"):
            await eventually(lambda: [n for _, n in judge.handled[b"k"]] == [1])
            while await parked_count(admin, subject) < 2:
                await asyncio.sleep(0.02)
            listed = json.loads(await keylane("list", subject, "g"))
            assert [(each["dead"], each["messages"]) for each in listed] == [(True, 1)] * 2
            told = sorted(each["failure"]["text"] for each in listed)
            assert ("b'bad'" in told[0], "b'worse'" in told[1]) == (True, True)
            shown = (await keylane("show", subject, "g")).splitlines()
            assert [json.loads(line)["value"] for line in shown] == ["bad", "worse"]
            await keylane("skip", subject, "g", "--yes")
            place = ("--partition", str(receipt.partition_id), "--offset", "1")
            await keylane("edit", subject, "g", *place, "--value", "2")
            assert json.loads(await keylane("retry", subject, "g", "--yes"))["redriven"]
            await eventually(lambda: [n for _, n in judge.handled[b"k"]] == [1, 2])
