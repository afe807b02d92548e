"""`keylane broker copies`: what a metaserver and the broker know, joined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import pytest

from keylane.admin import CopySet, Health
from keylane.cli.commands.broker import copies as copies_module
from keylane.cli.commands.broker.copies import (
    CopiesView,
    CopyView,
    advice_lines,
    check_group,
    join_copies,
    rows_of,
    show_copies,
    title_of,
)
from keylane.cli.options import OutputFormat
from keylane.protocol.errors import ConfigError, NotSentError
from keylane.protocol.membership.views import BrokerView

A, B, C = "a" * 32, "b" * 32, "c" * 32


def view(
    members: tuple[str, ...],
    lags: Mapping[str, int],
    *,
    wanted: int = 2,
    least: int = 1,
    **changed: Any,
) -> CopiesView:
    stored = CopySet(wanted=wanted, least=least, members=members)
    details = {"copies": {copy_id: {"bytes_behind": lag} for copy_id, lag in lags.items()}}
    return join_copies("g1", stored, details, **changed)


def test_copies_of_the_set_are_shown_before_the_others():
    """Each under its full id, with what the broker says of it."""
    joined = view((C, B), {A: 4_096, C: 0}, wanted=3)
    assert joined.copies == (
        CopyView(copy_id=B, in_set=True, bytes_behind=None),
        CopyView(copy_id=C, in_set=True, bytes_behind=0),
        CopyView(copy_id=A, in_set=False, bytes_behind=4_096),
    )
    assert rows_of(joined) == [
        (B, "yes", "not heard lately", None, None),
        (C, "yes", "0", None, None),
        (A, "no", "4096", None, None),
    ]
    assert advice_lines(joined) == []


@pytest.mark.parametrize(
    ("members", "wanted", "title"),
    [
        ((), 1, "g1 is to have 1 data folder; acks wait for no copy"),
        ((), 2, "g1 is to have 2 data folders; acks wait for no copy"),
        ((A,), 2, "g1 is to have 2 data folders; acks wait for 1 copy"),
        ((A, B), 3, "g1 is to have 3 data folders; acks wait for 2 copies"),
    ],
)
def test_title_says_how_many_copies_acks_wait_for(members, wanted, title):
    assert title_of(view(members, {}, wanted=wanted)) == title


@pytest.mark.parametrize(
    ("members", "wanted", "missing"), [((), 2, "1 copy"), ((A,), 4, "2 copies")]
)
def test_command_says_what_to_look_at_when_acks_wait_for_fewer_copies_than_wanted(
    members, wanted, missing
):
    (line,) = advice_lines(view(members, {}, wanted=wanted))
    assert line.startswith(f"Acks wait for fewer copies than wanted: {missing} too few.")
    assert "--group g1 --follow true" in line
    assert "behind" in line


def test_command_says_that_nothing_is_acked_when_too_few_folders_have_everything():
    joined = view((), {}, wanted=3, least=2)
    assert title_of(joined) == (
        "g1 is to have 3 data folders, of which 2 must have a message; acks wait for no copy"
    )
    assert advice_lines(joined)[-1] == (
        "Nothing is acked until 2 data folders have everything. If fewer are to do: keylane broker "
        "copies g1 --wanted 3 --least 1"
    )
    assert len(advice_lines(view((A,), {}, wanted=3, least=2))) == 1


async def test_least_is_refused_when_nothing_else_is_set() -> None:
    with pytest.raises(ConfigError, match="--least goes with --wanted"):
        await show_copies("m:1", OutputFormat.JSON, group="g1", wanted=None, least=2)


def test_set_is_shown_alone_when_the_broker_does_not_answer():
    joined = view((A,), {}, problem="g1:1 refuses connections")
    assert rows_of(joined) == [(A, "yes", None, None, None)]
    line, advice = advice_lines(joined)
    assert line.endswith("only the set is shown: g1:1 refuses connections")
    assert "by itself if it runs with failover" in advice


def test_promoted_copy_is_named_until_a_broker_answers():
    stored = CopySet(wanted=1, term=1, promoted=A)
    _, line = advice_lines(join_copies("g1", stored, {}, "h:1 refuses connections"))
    assert line.startswith(f"The copy {A} was promoted. If no broker serves it yet")
    assert advice_lines(join_copies("g1", stored, {})) == []


def health(**details: Any) -> Health:
    return Health(program="broker", ready=True, details={"broker_group": "g1", **details})


def test_health_is_that_of_the_broker_of_the_group():
    assert check_group(health(copies={}), "g1", "h:1")["copies"] == {}
    with pytest.raises(NotSentError, match="one of group g2, not of g1"):
        check_group(health(broker_group="g2"), "g1", "h:1")


def test_copies_of_a_broker_of_an_older_version_are_shown_without_a_place():
    joined = join_copies("g1", CopySet(members=(A,)), {})
    assert joined.copies == (CopyView(copy_id=A, in_set=True),)
    assert title_of(joined).endswith("acks wait for 1 copy")


def test_command_says_why_a_copy_does_not_count_when_it_shares_a_machine():
    sentence = "the copy a is on the same machine as the broker (m1), so acks do not wait for it"
    place = {"machine": "m1", "zone": "a"}
    details = {"copies": {A: {"bytes_behind": 0, "shared_machine": sentence, **place}}, **place}
    refused = join_copies("g1", CopySet(wanted=2), details)
    assert title_of(refused).endswith("; the broker is on machine m1 in zone a")
    assert rows_of(refused) == [(A, "no", "0", "a", "m1")]
    said, advice, _ = advice_lines(refused)
    assert said == f"T{sentence[1:]}."
    assert advice.endswith("keylane broker copies g1 --allow-one-machine")


class FakeAdmin:
    """A metaserver that knows one broker group."""

    def __init__(self, _meta: str) -> None:
        self.stored = CopySet(members=(A,))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def copies(self, _group: str) -> CopySet:
        return self.stored

    async def set_copies(
        self,
        _group: str,
        wanted: int,
        *,
        least: int | None,
        may_share_machine: bool | None,
        end_quarantine: bool,
    ) -> CopySet:
        assert not end_quarantine
        return CopySet(
            wanted=wanted,
            least=least or 1,
            members=self.stored.members,
            may_share_machine=bool(may_share_machine),
        )

    async def list_brokers(self) -> Any:
        class Listed:
            brokers = (BrokerView(broker_group="g1", address="h:1", available=True, silent_ms=0),)

        return Listed


async def test_output_has_one_object_with_both_when_it_is_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fetch(address: str) -> Health:
        assert address == "h:1"
        return health(copies={A: {"bytes_behind": 0}, B: {"bytes_behind": 9}})

    monkeypatch.setattr(copies_module, "open_admin", FakeAdmin)
    monkeypatch.setattr(copies_module, "fetch_broker_health", fetch)
    await show_copies("m:1", OutputFormat.JSON, group="g1", wanted=3, allow_one_machine=True)
    (line,) = capsys.readouterr().out.splitlines()
    nowhere = '"machine":"","zone":""'
    assert line == (
        '{"broker_group":"g1","wanted":3,"least":1,"acks_wait_for":1,"copies":['
        f'{{"copy_id":"{A}","in_set":true,"bytes_behind":0,{nowhere},"shared_machine":""}},'
        f'{{"copy_id":"{B}","in_set":false,"bytes_behind":9,{nowhere},"shared_machine":""}}],'
        f'"promoted":"","term":0,"version":0,"may_share_machine":true,{nowhere},'
        '"quarantine":"","broker_problem":""}'
    )


async def test_table_says_that_the_broker_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fetch(_address: str) -> Health:
        raise NotSentError("h:1 refuses connections")

    monkeypatch.setattr(copies_module, "open_admin", FakeAdmin)
    monkeypatch.setattr(copies_module, "fetch_broker_health", fetch)
    await show_copies("m:1", OutputFormat.TABLE, group="g1", wanted=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "g1 is to have 2 data folders; acks wait for 1 copy"
    assert any(line.split() == [A, "yes", "-", "-", "-"] for line in lines)
    assert any(line.endswith("h:1 refuses connections") for line in lines)
