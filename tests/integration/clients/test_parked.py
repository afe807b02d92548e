"""Parked messages as an operator sees them, with real brokers: listed, shown, redriven and
skipped.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re

import pytest
from msgspec.structs import replace

from keylane import Admin, InvalidRequestError, Producer, SubjectUnknownError
from keylane.admin import ParkedKeyView, ParkedMessage, ParkState
from keylane.errors import ConflictError, GroupUnknownError, PartitionUnknownError, Reason
from keylane.protocol.clock import SystemClock
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.parked import Failure, Park, ParkedKeyRow
from support.cluster import Cluster
from support.parked.raw_owner import FAILURE, RawOwner
from support.raising import raises
from support.server_process import run_keylane
from support.terminal import CTRL_C, at_terminal

KEYS = (b"a", b"b", b"\xff\x00")


async def sent(
    cluster: Cluster, subject: str, *, partitions: int = 2
) -> dict[bytes, list[tuple[int, int]]]:
    """Twelve messages of three keys, and three without one; where those of each key are."""
    with contextlib.suppress(ConflictError):
        await cluster.create(subject, partitions=partitions)
    places: dict[bytes, list[tuple[int, int]]] = {key: [] for key in (*KEYS, b"")}
    async with Producer(cluster.meta) as producer:
        for number in range(15):
            key = (*KEYS, *KEYS, *KEYS, *KEYS, b"", b"", b"")[number]
            receipt = await producer.send(subject, b"value %d" % number, key=key)
            places[key].append((receipt.partition_id, receipt.offset))
    return places


def ranges(places: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple((offset, offset + 1) for _, offset in places)


async def park(owner: RawOwner, places: dict[bytes, list[tuple[int, int]]], *keys: bytes) -> None:
    for key in keys:
        await owner.change(places[key][0][0], Park(key, ranges(places[key]), FAILURE))


async def keys_of(admin: Admin, subject: str, **asked: object) -> list[ParkedKeyView]:
    return [view async for view in admin.parked(subject, "g", **asked)]


async def test_parked_keys_are_listed_redriven_and_skipped(shared_cluster: Cluster):
    places = await sent(shared_cluster, "parked-calls")
    async with (
        asyncio.timeout(60),
        RawOwner(shared_cluster.meta, "parked-calls", "g") as owner,
        Admin(shared_cluster.meta) as admin,
    ):
        assert await keys_of(admin, "parked-calls") == []
        await park(owner, places, *KEYS)
        (number, offset), *_ = places[b""]
        await owner.change(number, Park(None, ((offset, offset + 1),), FAILURE))
        views = await keys_of(admin, "parked-calls")
        assert {view.key for view in views} == {*KEYS, None}
        (view,) = await keys_of(admin, "parked-calls", key=b"a")
        assert (view.state, view.messages, view.failure) == (ParkState.PARKED, 4, FAILURE)
        assert (view.first_source, view.first_offset) == places[b"a"][0]
        described = await admin.describe_group("parked-calls", "g")
        assert sum(partition.parked for partition in described.partitions) == 13

        messages = [each async for each in admin.parked_messages("parked-calls", "g", b"a")]
        assert [(each.partition_id, each.offset) for each in messages] == places[b"a"]
        assert [each.message.value for each in messages] == [b"value %d" % n for n in (0, 3, 6, 9)]
        two = [each async for each in admin.parked_messages("parked-calls", "g", b"a", first=2)]
        assert two == messages[:2]

        home = view.partition_id
        pull = asyncio.create_task(
            owner.pull(home, await end_of(admin, "parked-calls", home), wait_ms=20_000)
        )
        await asyncio.sleep(0.1)
        assert [each.key for each in await admin.redrive("parked-calls", "g", key=b"a")] == [b"a"]
        assert (await pull).parked_version > 1
        assert ParkedKeyRow(b"a", ParkState.REDRIVING, 4) in await owner.keys(home)
        assert await admin.redrive("parked-calls", "g", key=b"a") == []

        with raises(Reason.PARKED_REDRIVEN):
            await admin.skip("parked-calls", "g", home, b"a", first=1)
        await owner.change(home, Park(b"a", (), FAILURE))
        assert await admin.skip("parked-calls", "g", home, b"a", first=1) == 1
        assert await admin.skip("parked-calls", "g", home, b"a") == 3
        assert ParkedKeyRow(b"a", ParkState.REDRIVING, 0) in await owner.keys(home)
        assert await admin.skip("parked-calls", "g", number, None, first=9) == 1
        assert await keys_of(admin, "parked-calls", key=None) == []

        assert await admin.redrive("parked-calls", "g", older_than_ms=3_600_000) == []
        assert await admin.redrive("parked-calls", "g", error="KeyError") == []
        chosen = await admin.redrive("parked-calls", "g", error="ValueError", older_than_ms=0)
        assert {each.key for each in chosen} == {b"b", b"\xff\x00"}
        assert await admin.redrive("parked-calls", "g", all=True) == []


async def end_of(admin: Admin, subject: str, partition_id: int) -> int:
    partitions = (await admin.describe_subject(subject)).partitions
    (end,) = [each.next_offset for each in partitions if each.partition_id == partition_id]
    return end


async def test_many_parked_keys_are_read_by_the_page_and_counted(shared_cluster: Cluster):
    subject, keys = "parked-pages", 250
    await shared_cluster.create(subject, partitions=1)
    async with Producer(shared_cluster.meta) as producer:
        receipts = [await producer.send(subject, b"v", key=f"k{n}") for n in range(keys)]
    number = receipts[0].partition_id
    async with (
        asyncio.timeout(60),
        RawOwner(shared_cluster.meta, subject, "g") as owner,
        Admin(shared_cluster.meta) as admin,
    ):
        for each in range(keys):
            failure = replace(FAILURE, text=f"of k{each}", at_ms=each + 1)
            offset = receipts[each].offset
            await owner.change(number, Park(b"k%d" % each, ((offset, offset + 1),), failure))
        page = await admin.parked_page(subject, "g", number, first=10, count=20)
        assert [view.key for view in page.keys] == [b"k%d" % each for each in range(10, 30)]
        assert page.following == 30
        page = await admin.parked_page(subject, "g", number, first=240, count=20)
        assert (len(page.keys), page.following) == (10, None)
        (view,) = await keys_of(admin, subject, key=b"k249")
        assert view.failure.text == "of k249"
        (cause,) = [
            each for each in (await admin.why(subject, "g")).causes if each.code == "parked"
        ]
        assert cause.text.startswith("250 keys have been parked for ")
        assert cause.text.endswith("of k249")
        with raises(InvalidRequestError):
            await admin.parked_page(subject, "g", number, count=0)
        with raises(PartitionUnknownError):
            await admin.parked_page(subject, "g", 999_999)


async def test_messages_that_a_child_is_taking_over_are_waited_for(shared_cluster: Cluster):
    """The sealed parent has passed the key on, and no child has it yet: nothing says that it is not
    parked.
    """
    places = await sent(shared_cluster, "parked-passing", partitions=1)
    async with (
        asyncio.timeout(60),
        RawOwner(shared_cluster.meta, "parked-passing", "g") as owner,
        Admin(shared_cluster.meta) as admin,
    ):
        parent = places[b"a"][0][0]
        await park(owner, places, b"a")
        await owner.ack(parent, (0, 15))
        await shared_cluster.reshape(
            Reshape(kind=OperationKind.RESIZE, subject="parked-passing", partitions=2)
        )
        await drained(owner, parent)
        children = [child for child in await owner.granted() if child != parent]
        taken = [(child, await owner.take(parent, child)) for child in children]

        async def shown(key: bytes) -> list[ParkedMessage]:
            return [each async for each in admin.parked_messages("parked-passing", "g", key)]

        asked = asyncio.create_task(shown(b"a"))
        await asyncio.sleep(0.2)
        assert not asked.done()
        for child, adopted in taken:
            await owner.change(child, adopted)
        assert [(each.partition_id, each.offset) for each in await asked] == places[b"a"]
        with raises(Reason.PARKED_KEY_UNKNOWN):
            await shown(b"never parked")


async def test_messages_of_an_ancestor_are_read_from_its_broker(shared_cluster: Cluster):
    """A partition was moved: its child has adopted what was parked, by reference."""
    places = await sent(shared_cluster, "parked-moved", partitions=1)
    async with (
        asyncio.timeout(60),
        RawOwner(shared_cluster.meta, "parked-moved", "g") as owner,
        Admin(shared_cluster.meta) as admin,
    ):
        parent = places[b"a"][0][0]
        await park(owner, places, b"a", b"b")
        await owner.ack(parent, (0, 15))
        await shared_cluster.reshape(
            Reshape(kind=OperationKind.RESIZE, subject="parked-moved", partitions=2)
        )
        await drained(owner, parent)
        before = await keys_of(admin, "parked-moved")
        assert {view.partition_id for view in before} == {parent}
        for child in await owner.granted():
            if child != parent:
                await owner.adopt(parent, child)
        after = await keys_of(admin, "parked-moved")
        assert parent not in {view.partition_id for view in after}
        assert [
            (v.key, v.messages, v.first_source) for v in sorted(after, key=lambda v: v.key)
        ] == [
            (b"a", 4, parent),
            (b"b", 4, parent),
        ]
        messages = [each async for each in admin.parked_messages("parked-moved", "g", b"b")]
        assert [(each.partition_id, each.offset) for each in messages] == places[b"b"]
        assert [each.message.key for each in messages] == [b"b"] * 4
        described = await admin.describe_group("parked-moved", "g")
        assert sum(partition.parked for partition in described.partitions) == 8
        child = next(view.partition_id for view in after if view.key == b"b")
        assert await admin.skip("parked-moved", "g", child, b"b", first=3) == 3
        (left,) = await keys_of(admin, "parked-moved", key=b"b")
        assert (left.messages, left.first_offset) == (1, places[b"b"][3][1])
        with raises(Reason.PARKED_KEY_UNKNOWN):
            await admin.skip("parked-moved", "g", parent, b"b")


async def drained(owner: RawOwner, parent: int) -> None:
    """Tell the metaserver that the parent is drained, and wait for the children."""
    await owner.drained(parent)
    while set(await owner.granted()) <= {parent}:
        await asyncio.sleep(0.05)


async def test_wrong_questions_are_refused(shared_cluster: Cluster):
    places = await sent(shared_cluster, "parked-wrong")
    await shared_cluster.create("parked-other", partitions=1)
    async with (
        asyncio.timeout(60),
        RawOwner(shared_cluster.meta, "parked-wrong", "g") as owner,
        Admin(shared_cluster.meta) as admin,
    ):
        (other,) = (await admin.describe_subject("parked-other")).partitions
        with pytest.raises(GroupUnknownError):
            await keys_of(admin, "parked-other")
        with pytest.raises(SubjectUnknownError):
            await keys_of(admin, "parked-nowhere")
        await park(owner, places, b"a")
        home = places[b"a"][0][0]
        for call, error in (
            (admin.redrive("parked-wrong", "g"), InvalidRequestError),
            (admin.redrive("parked-wrong", "g", key=b"unknown"), Reason.PARKED_KEY_UNKNOWN),
            (admin.redrive("parked-wrong", "g", key=7), InvalidRequestError),
            (admin.redrive("parked-wrong", "g", older_than_ms=-1), InvalidRequestError),
            (admin.redrive("parked-wrong", "g", error=""), InvalidRequestError),
            (
                admin.redrive("parked-wrong", "g", partition_id=other.partition_id),
                PartitionUnknownError,
            ),
            (admin.skip("parked-wrong", "g", other.partition_id, b"a"), PartitionUnknownError),
            (admin.skip("parked-wrong", "g", home, b"unknown"), Reason.PARKED_KEY_UNKNOWN),
            (admin.skip("parked-wrong", "g", home, b"a", first=0), InvalidRequestError),
            (admin.skip("parked-wrong", "g", home, bytes(2_000)), InvalidRequestError),
            (admin.skip("parked-wrong", "g", "1", b"a"), InvalidRequestError),
        ):
            with raises(error):
                await call
        with raises(Reason.PARKED_KEY_UNKNOWN):
            [each async for each in admin.parked_messages("parked-wrong", "g", None)]
        (view,) = await keys_of(admin, "parked-wrong")
        assert (view.state, view.messages) == (ParkState.PARKED, 4)


def keylane(cluster: Cluster, *words: str, status: int = 0) -> str:
    """What a command prints; its errors if it fails."""
    done = run_keylane("parked", *words, "--meta", cluster.meta)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout


async def test_commands_show_redrive_and_skip(shared_cluster: Cluster):
    places = await sent(shared_cluster, "parked-commands")
    where = ("parked-commands", "g")
    async with asyncio.timeout(120), RawOwner(shared_cluster.meta, *where) as owner:
        await park(owner, places, *KEYS)
        number, offset = places[b""][0]
        await owner.change(number, Park(b"", ((offset, offset + 1),), FAILURE))
        table = keylane(shared_cluster, "list", *where)
        assert "12 messages of 3 keys, 1 message without a key parked" in table
        assert "ValueError: no such aircraft" in table
        listed = json.loads(
            keylane(shared_cluster, "list", *where, "--key-hex", "ff00", "-o", "json")
        )
        assert [(each["key_base64"], each["messages"], each["dead"]) for each in listed] == [
            ("/wA=", 4, False)
        ]
        described = run_keylane("group", "describe", *where, "--meta", shared_cluster.meta)
        assert "parked" in described.stdout
        shown = keylane(shared_cluster, "show", *where, "--key", "b", "--first", "2", "-o", "json")
        assert [json.loads(line)["value"] for line in shown.splitlines()] == ["value 1", "value 4"]

        refused = run_keylane("parked", "skip", *where, "--key", "b", "--meta", shared_cluster.meta)
        assert (refused.returncode, refused.stdout) == (1, "")  # nothing that sounds like a skip
        assert (
            "Skip 1 message of b, which no consumer of g will handle? This is not a terminal: pass "
            "--yes" in refused.stderr
        )
        assert "--yes" in keylane(shared_cluster, "redrive", *where, "--all-keys", status=1)
        for words in (("redrive", *where, "--all-keys"), ("skip", *where, "--key", "b")):
            with at_terminal("parked", *words, "--meta", shared_cluster.meta) as terminal:
                await asyncio.to_thread(terminal.wait_for, "[y/N]: ")
                terminal.press(CTRL_C)
                assert await asyncio.to_thread(terminal.end) == 130
        wrong = keylane(
            shared_cluster, "redrive", *where, "--all-keys", "--yes", "-o", "{wrong}", status=1
        )
        assert "the fields are {redriven.dead}" in wrong
        states = keylane(shared_cluster, "list", *where, "-o", "{key} {state}")
        assert {line.split()[0] for line in states.splitlines()} >= {"-", "a", "b"}
        assert {line.split()[1] for line in states.splitlines()} == {"parked"}
        skipped = keylane(shared_cluster, "skip", *where, "--key", "b", "--yes")
        assert "value 1" in skipped
        assert "1 message skipped" in skipped
        said = keylane(
            shared_cluster, "skip", *where, "--no-key", "--all-messages", "--yes", "-o", "json"
        )
        assert json.loads(said) == {"partition_ids": [number], "skipped": 1}
        said = keylane(shared_cluster, "redrive", *where, "--key", "b")
        assert "b: 3 messages redriven" in said
        busy = run_keylane(
            *("parked", "skip", *where, "--key", "b", "--yes", "--meta", shared_cluster.meta)
        )
        assert "to skip: 1 message of b" in busy.stdout
        assert "will handle" not in busy.stdout, "nothing is skipped"
        assert (busy.returncode, "BusyError" in busy.stderr) == (1, True)
        said = keylane(shared_cluster, "redrive", *where, "--error", "ValueError", "--yes")
        assert "8 messages of 2 keys redriven" in said
        assert "nothing to redrive" in keylane(
            shared_cluster, "redrive", *where, "--all-keys", "--yes"
        )
        refused = keylane(shared_cluster, "skip", *where, "--key", "unknown", "--yes", status=1)
        assert "PARKED_KEY_UNKNOWN" in refused
        assert "`keylane parked list parked-commands g`" in refused


async def test_dead_letters_without_a_key_are_found_by_commands_of_both_names(
    shared_cluster: Cluster,
):
    places = await sent(shared_cluster, "parked-keyless")
    where = ("parked-keyless", "g")
    async with asyncio.timeout(120), RawOwner(shared_cluster.meta, *where) as owner:
        for key in (b"", b"b"):
            number, offset = places[key][0]
            await owner.change(number, Park(None, ((offset, offset + 1),), FAILURE))
        for name in ("parked", "dead"):
            words = (name, "list", *where, "--no-key", "--meta", shared_cluster.meta)
            assert re.search(r"1 dead letter\s", run_keylane(*words).stdout)
        shown = keylane(shared_cluster, "show", *where, "--no-key", "-o", "json")
        assert json.loads(shown)["offset"] == places[b""][0][1]
        assert "--yes" in keylane(shared_cluster, "redrive", *where, "--no-key", status=1)
        said = keylane(shared_cluster, "redrive", *where, "--no-key", "--yes")
        assert "1 dead letter redriven" in said


async def test_dead_letters_are_chosen_by_key(shared_cluster: Cluster):
    places = await sent(shared_cluster, "dead-by-key", partitions=1)
    where = ("dead-by-key", "g")
    async with (
        asyncio.timeout(120),
        RawOwner(shared_cluster.meta, *where) as owner,
        Admin(shared_cluster.meta) as admin,
    ):
        number = places[b"a"][0][0]
        letters = places[b"a"][:3] + places[b"b"][:2]
        for command, empty in (("parked", "nothing is parked"), ("dead", "no dead letters")):
            listed = run_keylane(command, "list", *where, "--meta", shared_cluster.meta)
            assert listed.stdout == f"g on dead-by-key: {empty}\n"
        await owner.change(number, Park(None, ranges(sorted(letters)), FAILURE))
        await owner.change(number, Park(b"b", ranges(places[b"b"][2:]), FAILURE))
        (view,) = await keys_of(admin, "dead-by-key", key=b"a", dead=True)
        assert (view.key, view.messages, view.first_offset) == (None, 3, places[b"a"][0][1])
        dead = admin.parked_messages(*where, b"b", dead=True)
        assert [(each.partition_id, each.offset) async for each in dead] == places[b"b"][:2]
        parked = admin.parked_messages(*where, error="aircraft", dead=False)
        assert [(each.partition_id, each.offset) async for each in parked] == places[b"b"][2:]

        shown = run_keylane("dead", "show", *where, "--key", "b", "--meta", shared_cluster.meta)
        assert "value 1" in shown.stdout
        assert "value 0" not in shown.stdout
        assert "dead letters of b: 2 messages" in shown.stdout
        first = run_keylane(
            "dead", "show", *where, "--key", "b", "--first", "1", "--meta", shared_cluster.meta
        )
        assert "dead letters of b: the first 1 of 2 messages" in first.stdout
        assert await admin.skip(*where, key=b"b", dead=True, first=1) == 1
        assert await admin.skip(*where, key=b"b", dead=True) == 1
        with pytest.raises(InvalidRequestError):
            await admin.skip(*where)
        with raises(Reason.PARKED_KEY_UNKNOWN, match="key b of group 'g': nothing is parked"):
            await admin.skip(*where, key=b"b", dead=True)
        edited = await admin.edit_parked(*where, *places[b"a"][1], value=b"mended")
        assert edited.edited
        (redriven,) = await admin.redrive(*where, key=b"a", dead=True)
        assert redriven.messages == 3
        assert ParkedKeyRow(0, ParkState.REDRIVING, 3) in await owner.keys(number)
        (chosen,) = [v for v in await keys_of(admin, "dead-by-key", retrying=True) if v.tries == 0]
        assert (chosen.key, chosen.messages, chosen.is_dead) == (None, 3, False)


async def test_commands_choose_by_age_and_error(shared_cluster: Cluster):
    places = await sent(shared_cluster, "parked-chosen")
    where = ("parked-chosen", "g")
    async with asyncio.timeout(120), RawOwner(shared_cluster.meta, *where) as owner:
        await park(owner, places, b"a")
        other = Failure("KeyError", "town", "host-1:worker", 1_800_000_000_123, 5)
        await owner.change(places[b"b"][0][0], Park(b"b", ranges(places[b"b"]), other))
        shown = keylane(shared_cluster, "show", *where, "--error", "KeyError")
        assert "value 1" in shown
        assert "value 0" not in shown
        table = keylane(shared_cluster, "list", *where)
        assert "failed at" in table
        assert "No key" not in keylane(shared_cluster, "show", *where, "--older-than", "0")
        refused = keylane(shared_cluster, "show", *where, "--older-than", "1h", status=1)
        assert "PARKED_KEY_UNKNOWN" in refused
        assert "select messages" in keylane(shared_cluster, "show", *where, status=1)
        said = keylane(shared_cluster, "skip", *where, "--error", "town", "--all-messages", "--yes")
        assert "4 messages skipped" in said


TOWN = Failure("KeyError", "town", "host-1:worker", 1_800_000_000_123, 5)
LAST_TOWN = Failure("KeyError", "town", "host-1:worker", 1_800_000_000_999, 3)


async def failed(cluster: Cluster, owner: RawOwner, subject: str) -> list[int]:
    """Eight dead letters of three failures in turn, and three messages without a key of two; the
    dead letters' offsets.
    """
    places = await sent(cluster, subject, partitions=1)
    number = places[b"a"][0][0]
    assert number in await owner.granted()
    letters = sorted([offset for _, offset in places[b"a"] + places[b"b"]])
    for place, offset in enumerate(letters):
        failure = (FAILURE, TOWN, LAST_TOWN)[place % 3]
        await owner.change(number, Park(None, ((offset, offset + 1),), failure))
    keyless = ranges(places[b""])
    await owner.change(number, Park(b"", keyless[:1], FAILURE), Park(b"", keyless[1:], TOWN))
    return letters


async def test_dead_letters_are_told_each_with_its_own_failure(shared_cluster: Cluster):
    """Listed by error, shown one by one; also messages without a key."""
    where = ("dead-by-error", "g")
    await shared_cluster.create(where[0], partitions=1)
    async with (
        asyncio.timeout(120),
        RawOwner(shared_cluster.meta, *where) as owner,
        Admin(shared_cluster.meta) as admin,
    ):
        letters = await failed(shared_cluster, owner, where[0])
        views = await keys_of(admin, where[0], by_error=True)
        assert [(view.key, view.messages, view.failure) for view in views] == [
            (None, 5, LAST_TOWN),
            (None, 3, FAILURE),
            (b"", 2, TOWN),
            (b"", 1, FAILURE),
        ]
        (chosen,) = await keys_of(admin, where[0], dead=True, error="aircraft")
        assert (chosen.messages, chosen.failure, chosen.first_offset) == (3, FAILURE, letters[0])
        shown = [each async for each in admin.parked_messages(*where, dead=True, error="town")]
        assert [each.offset for each in shown] == [o for p, o in enumerate(letters) if p % 3]
        assert [each.failure for each in shown] == [TOWN, LAST_TOWN, TOWN, LAST_TOWN, TOWN]
        assert all(each.since_ms is not None for each in shown)
        table = run_keylane(
            "dead", "show", *where, "--error", "town", "--meta", shared_cluster.meta
        )
        assert table.stdout.count("KeyError: town") == 5
        assert "aircraft" not in table.stdout
        told = run_keylane(
            "dead", "show", *where, "--first", "1", "-o", "json", "--meta", shared_cluster.meta
        )
        assert json.loads(told.stdout)["failure"]["text"] == "no such aircraft"
        listed = run_keylane("dead", "list", *where, "--meta", shared_cluster.meta).stdout
        assert re.search(r"8 dead letters\s", listed)
        assert "KeyError: town" in listed
        assert "ValueError: no such aircraft" in listed


async def test_dead_letters_are_chosen_by_their_own_age_and_error(shared_cluster: Cluster):
    """Skipped and retried as chosen; those that are not chosen stay."""
    where = ("dead-chosen", "g")
    await shared_cluster.create(where[0], partitions=1)
    async with (
        asyncio.timeout(120),
        RawOwner(shared_cluster.meta, *where) as owner,
        Admin(shared_cluster.meta) as admin,
    ):
        await failed(shared_cluster, owner, where[0])
        (number,) = await owner.granted()
        shown = [each async for each in admin.parked_messages(*where, dead=True)]
        assert await keys_of(admin, where[0], dead=True, older_than_ms=3_600_000) == []
        middle_ms = shown[4].since_ms or 0
        older_ms = SystemClock().wall_ms() - middle_ms
        older = admin.parked_messages(*where, dead=True, older_than_ms=older_ms)
        chosen = [each.offset async for each in older]
        assert chosen[:5] == [each.offset for each in shown[:5]]

        assert await admin.skip(*where, dead=True, error="town", first=1) == 1
        said = keylane(
            shared_cluster, "skip", *where, "--no-key", "--error", "town", "--all-messages", "--yes"
        )
        assert "2 messages skipped" in said
        (redriven,) = await admin.redrive(*where, dead=True, error="town")
        assert (redriven.messages, redriven.failure) == (4, LAST_TOWN)
        keys = await owner.keys(number)
        assert ParkedKeyRow(0, ParkState.REDRIVING, 4) in keys
        assert ParkedKeyRow(None, ParkState.PARKED, 3) in keys
        left = [each.failure async for each in admin.parked_messages(*where, dead=True)]
        assert left == [FAILURE] * 3
        (again,) = await admin.redrive(*where, key=b"", error="aircraft")
        assert (again.key, again.messages) == (b"", 1)
        assert ParkedKeyRow(0, ParkState.REDRIVING, 5) in await owner.keys(number)


async def test_broker_of_a_partition_that_was_opened_meanwhile_is_asked_for(
    shared_cluster: Cluster,
):
    """A split may end between the look at partitions and the look at what is parked on them."""
    places = await sent(shared_cluster, "opened-since", partitions=1)
    where = ("opened-since", "g")
    async with (
        asyncio.timeout(120),
        RawOwner(shared_cluster.meta, *where) as owner,
        Admin(shared_cluster.meta) as admin,
    ):
        number = places[b"a"][0][0]
        await owner.change(number, Park(b"a", ranges(places[b"a"]), FAILURE))
        (view,) = [each async for each in admin.parked(*where)]
        (partition,) = await admin._fetch_partitions(*where, None)
        known = await admin._find_broker(*where, view, {number: partition})
        assert await admin._find_broker(*where, view, {}) is known
        with pytest.raises(PartitionUnknownError):
            await admin._find_broker(*where, replace(view, partition_id=number + 1_000), {})


async def test_message_is_edited_by_its_key(shared_cluster: Cluster):
    """The oldest of the key, parked or a dead letter; after a resize that of the parent."""
    places = await sent(shared_cluster, "edit-by-key", partitions=1)
    where = ("edit-by-key", "g")
    async with (
        asyncio.timeout(120),
        RawOwner(shared_cluster.meta, *where) as owner,
        Admin(shared_cluster.meta) as admin,
    ):
        number = places[b"a"][0][0]
        await owner.change(number, Park(b"a", ranges(places[b"a"][1:]), FAILURE))
        await owner.change(number, Park(None, ranges(places[b"b"]), FAILURE))
        edited = await admin.edit_parked(*where, key=b"a", value=b"mended")
        assert (edited.partition_id, edited.offset) == places[b"a"][1]
        assert (edited.message.value, edited.edited) == (b"mended", True)
        assert (await admin.parked_message(*where, key=b"a")).message.value == b"mended"
        dead = await admin.edit_parked(*where, key=b"b", dead=True, value=b"dead")
        assert (dead.partition_id, dead.offset) == places[b"b"][0]
        with raises(Reason.PARKED_KEY_UNKNOWN):
            await admin.edit_parked(*where, key=b"b", value=b"no")
        for wrong in (
            {"key": b"a", "offset": 1},
            {"key": b""},
            {},
            {"partition_id": number},
            {"key": 7},
        ):
            with pytest.raises(InvalidRequestError):
                await admin.edit_parked(*where, **wrong, value=b"no")

        said = keylane(shared_cluster, "edit", *where, "--key", "a", "--value", "again")
        assert "again" in said
        told = run_keylane(
            "dead",
            "edit",
            *where,
            "--key-hex",
            "62",
            "--value",
            "hex",
            "-o",
            "json",
            "--meta",
            shared_cluster.meta,
        )
        assert json.loads(told.stdout)["value"] == "hex"
        for words, error in (
            (("--key", "unknown"), "PARKED_KEY_UNKNOWN"),
            (("--key", "a", "--offset", "1"), "remove --offset"),
            ((), "identify the message"),
        ):
            refused = keylane(shared_cluster, "edit", *where, *words, "--value", "x", status=1)
            assert error in refused

        await owner.ack(number, (0, 15))
        await shared_cluster.reshape(
            Reshape(kind=OperationKind.RESIZE, subject="edit-by-key", partitions=2)
        )
        await drained(owner, number)
        for child in await owner.granted():
            if child != number:
                await owner.adopt(number, child)
        moved = await admin.edit_parked(*where, key=b"a", value=b"at the child")
        assert (moved.partition_id, moved.offset) == places[b"a"][1]
        (view,) = await keys_of(admin, "edit-by-key", key=b"a")
        assert view.partition_id != number


@pytest.mark.cluster(brokers=2)
async def test_parked_keys_of_other_brokers_are_listed_while_one_is_away(cluster: Cluster):
    """The list gave nothing, and what is missing is named now."""
    places = await sent(cluster, "away")
    homes = {key: places[key][0][0] for key in KEYS}
    assert len(set(homes.values())) == 2
    async with RawOwner(cluster.meta, "away", "g") as owner, Admin(cluster.meta) as admin:
        await park(owner, places, *KEYS)
        (gone,) = (
            each
            for each in (await admin.describe_subject("away")).partitions
            if each.partition_id == homes[KEYS[0]]
        )
        broker_of = {
            each.broker_group: each.address for each in (await admin.list_brokers()).brokers
        }
    (killed,) = (each for each in cluster.brokers if each.address == broker_of[gone.broker_group])
    await asyncio.to_thread(killed.kill)
    words = ("parked", "list", "away", "g", "--meta", cluster.meta, "--output", "json")
    done = await asyncio.to_thread(run_keylane, *words)
    listed = {
        base64.b64decode(each["key_base64"]) if "key_base64" in each else each["key"].encode()
        for each in json.loads(done.stdout)
    }
    assert listed == {key for key in KEYS if homes[key] != gone.partition_id}
    assert f"partition {gone.partition_id} is not read: " in done.stderr
    assert done.returncode == 1
    alone = await asyncio.to_thread(run_keylane, *words, "--partition", str(gone.partition_id))
    assert (alone.returncode, alone.stdout) == (1, "")
    away, there = KEYS[0], next(key for key in KEYS if homes[key] != gone.partition_id)
    for key in (away, there):
        chosen = ("--key-hex", key.hex(), "--first", "1", *words[4:])
        done = await asyncio.to_thread(run_keylane, "parked", "show", "away", "g", *chosen)
        shown = [json.loads(line)["value"] for line in done.stdout.splitlines()]
        assert shown == ([] if key == away else [f"value {KEYS.index(key)}"])
        assert f"partition {gone.partition_id} is not read: " in done.stderr
        assert done.returncode == 1
