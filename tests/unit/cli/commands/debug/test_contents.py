"""What a debug bundle takes, and what it leaves out."""

from __future__ import annotations

import json
import re

import pytest
from msgspec.structs import replace

from keylane.cli.commands.debug.contents import (
    Contents,
    file_name,
    is_secret,
    log_lines,
    parked_without_values,
    status_without_values,
    variables_without_secrets,
)
from keylane.protocol.control import GroupStatus, PartitionStatus
from keylane.protocol.parked import FailingMessage, Failure, ParkedView, ParkState
from keylane.protocol.routing import PartitionState
from keylane.protocol.text import key_digest

SECRET = "kl_recognisable"


def test_contents_mask_secrets_and_passwords_of_urls_in_names_and_values():
    contents = Contents([SECRET], salt=b"s")
    text = f"cannot open postgresql://u:pw@db/x with {SECRET}"
    contents.add("a.json", "a", {SECRET: [text, {"b": (text,)}]})
    contents.add("b.txt", "b", f"{text}\n{text}")
    contents.miss("c", text)
    everything = b"".join(contents.parts.values()).decode() + contents.missing[0].reason
    assert SECRET not in everything
    assert "pw" not in everything
    assert everything.count("postgresql://u:***@db/x with ***") == 5


def test_contents_leave_out_a_part_for_which_there_is_no_room_and_say_so():
    contents = Contents(salt=b"s", bytes_max=100)
    contents.add("large.txt", "large", "x" * 200)
    contents.add("small.txt", "small", "x")
    assert [*contents.parts] == ["small.txt"]
    assert contents.missing[0].what == "large.txt"
    assert "no room" in contents.missing[0].reason
    contents.add_listing("It has no values.", made_at="now")
    listing = json.loads(contents.parts["contents.json"])
    assert [each["name"] for each in listing["entries"]] == ["small.txt"]
    assert [each["what"] for each in listing["missing"]] == ["large.txt"]


def test_status_keeps_the_kind_of_an_error_and_not_its_text():
    failing = FailingMessage(
        offset=7,
        key_digest="key digest 00",
        since_ms=1,
        attempts=2,
        kind="ValueError",
        text=SECRET,
        client="c",
        at_ms=3,
    )
    group = GroupStatus(group="g", token=1, cursor=7, acked_above=0, lag=3, failing=failing)
    status = PartitionStatus(
        partition_id=1,
        subject="orders",
        name="p",
        state=PartitionState.OPEN,
        first_offset=0,
        next_offset=10,
        groups=(group,),
    )
    kept = status_without_values(status).groups[0].failing
    assert kept is not None
    assert (kept.kind, kept.text, kept.offset) == ("ValueError", "", 7)
    several = replace(failing, others=(failing,), others_count=1)
    status = replace(status, groups=(replace(status.groups[0], failing=several),))
    assert SECRET not in repr(status_without_values(status))


def test_parked_key_is_a_digest():
    view = ParkedView(
        key_hex=SECRET.encode().hex(),
        state=ParkState.PARKED,
        messages=2,
        since_ms=1,
        failure=Failure("ValueError", SECRET, "c", 1, 3),
        first_source=1,
        first_offset=9,
    )
    kept = parked_without_values(view)
    assert str(kept["key"]).startswith("key digest ")
    assert SECRET not in str(kept)
    assert SECRET.encode().hex() not in str(kept)
    assert kept["failure"]["kind"] == "ValueError"


def test_digests_of_keys_are_salted_anew_for_each_bundle():
    """A key has one digest in a bundle, in values and in the texts of a log, and another one in the
    next: nobody who guesses it can tell.
    """

    def digests(salt: bytes) -> set[str]:
        contents = Contents(salt=salt)
        contents.add("a.json", "a", {"key": key_digest(b"customer-7")})
        contents.add("b.log", "b", f"cannot store {key_digest(b'customer-7')}: full")
        texts = b"".join(contents.parts.values()).decode()
        assert key_digest(b"customer-7") not in texts
        return {*re.findall("salted key digest [0-9a-f]{16}", texts)}

    first, second = digests(b"one"), digests(b"two")
    assert (len(first), len(second), len(first | second)) == (1, 1, 2)


def test_variables_are_those_of_keylane_without_secrets():
    kept = variables_without_secrets(
        {
            "KEYLANE_TOKEN": SECRET,
            "KEYLANE_TOKEN_FILE": "/etc/t",
            "KEYLANE_META": "a:1",
            "HOME": SECRET,
        }
    )
    assert kept == {
        "KEYLANE_META": "a:1",
        "KEYLANE_TOKEN": "***",
        "KEYLANE_TOKEN_FILE": "/etc/t",
    }


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("admin_token_hash", True),
        ("broker_token_hashes", True),
        ("cluster_token_file", False),
        ("log_level", False),
    ],
)
def test_settings_with_hashes_of_tokens_are_secret(name, secret):
    assert is_secret(name) is secret


def test_log_lines_are_those_of_servers_without_tracebacks():
    server = {"time": "t", "level": "ERROR", "logger": "keylane.broker", "program": "broker"}
    lines = [
        json.dumps(server | {"message": f"retention\n{SECRET}", "error": SECRET}),
        json.dumps(server | {"logger": "shop", "message": SECRET}),
        json.dumps({"logger": "keylane.consumer", "message": SECRET}),
        f"2026-01-01 ERROR keylane.broker {SECRET}",
        f'["{SECRET}"]',
    ]
    taken, others = log_lines(lines)
    assert [json.loads(each)["message"] for each in taken] == ["retention"]
    assert others == 4
    assert SECRET not in "".join(taken)


def test_file_names_have_no_separators():
    assert file_name("[::1]:7000") == "___1__7000"
    assert file_name("../x") == ".._x"
