"""The commands that steps name are accepted by the command line, with all that they are given."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from msgspec.structs import replace

from keylane.admin.views import BrokerList
from keylane.admin.why import causes, servers
from keylane.admin.why.facts import Facts
from keylane.cli.main import app
from keylane.protocol.control import GivenUpPartition, GroupMember
from keylane.protocol.groups import GroupSettings
from keylane.protocol.membership.views import RefusedBroker
from keylane.protocol.operations import OperationKind, OperationState, OperationView
from keylane.protocol.parked import ParkState
from keylane.protocol.progress import PendingReset, ResetTo
from keylane.protocol.routing import PartitionState
from keylane.protocol.scheduled.receipt import ScheduledPage, ScheduledView
from keylane.protocol.why import Cause
from support.why_facts import (
    FAILING,
    WHOLE,
    broker,
    facts,
    health,
    newest,
    parked_key,
    partition,
    progress,
    read,
    status,
)

COMMAND = re.compile(r"(keylane [^;]+?)(?= shows |, or |;|$)")
NAMING = re.compile(r'code="(\w+)",(?:(?!code=).)*?keylane ', re.DOTALL)
"""A code in a source whose cause names a command."""


def of_group(given: Facts, **changes: object) -> Facts:
    return replace(given, group=replace(given.group, **changes))


def settings(**changes: object) -> GroupSettings:
    return GroupSettings(subject="orders", group="billing", **changes)


MEMBER = GroupMember(client="vm:1", partitions=1, heard_ms=9, expires_in_ms=9_000, suspended=True)
DONE = facts(WHOLE, progress_of=(read(1),))
BEHIND = facts(WHOLE, progress_of=(progress(1, holder="s1"),))
PARKED = parked_key(b"a", 1_000, "no")
DEAD = replace(PARKED, key=None, state=ParkState.DEAD)
SCHEDULED = ScheduledView(
    scheduled_id="1",
    subject="orders",
    broker_group="g1",
    deliver_at_ms=1_000,
    size_bytes=1,
    due=False,
)
OPERATION = OperationView(
    operation_id=1,
    subject="orders",
    kind=OperationKind.RESIZE,
    state=OperationState.PLAN,
    sealed=(),
    children=(),
    problem="it waits",
)
ASKED = (
    DONE,
    BEHIND,
    of_group(DONE, settings=settings(suspended=True)),
    of_group(
        DONE, settings=settings(suspended_clients=("vm:1", "it's b")), members=(MEMBER, MEMBER)
    ),
    of_group(DONE, reset=PendingReset(to=ResetTo.LATEST, begun=False)),
    of_group(DONE, sessions=0, partitions=(read(1, token=0),)),
    of_group(DONE, given_up=(GivenUpPartition(partition_id=1, name="p1", broker_group="g1"),)),
    of_group(BEHIND, partitions=(progress(1, failing=FAILING),)),
    of_group(BEHIND, partitions=(progress(1, owner=None, session=None),)),
    of_group(BEHIND, partitions=(progress(1, lag=None),)),
    of_group(BEHIND, partitions=(progress(1, removed_unread=1),)),
    facts(WHOLE, progress_of=(progress(1),), statuses={1: status(1)}),
    of_group(
        BEHIND,
        partitions=(progress(1, owner=None, session=None),),
        settings=settings(unstarted=(1,)),
    ),
    replace(DONE, brokers=(broker(available=False),)),
    *(
        replace(DONE, brokers=(broker(available=False, folders_wanted=2, **known),))
        for known in ({}, {"copies": ("c1",)}, {"promoted": "c1"})
    ),
    replace(DONE, brokers=(broker(),), silent={"g1": "is silent"}, accepts={"g1": False}),
    replace(DONE, brokers=(broker(writable=False),)),
    replace(
        DONE,
        brokers=(broker(),),
        health={"g1": health(ready=False, reason="waits", waits_for_copies="waits")},
    ),
    replace(DONE, health={"g1": health(damage=["partition 1 has lost its offsets"])}),
    replace(DONE, statuses={1: status(1, limited_by="bytes", limited_ms=9)}),
    replace(DONE, operations=(OPERATION,)),
    replace(DONE, scheduled=(ScheduledPage(broker_group="g1", count=1, messages=[SCHEDULED]),)),
    replace(DONE, parked=(PARKED,)),
    replace(DONE, parked=(DEAD,)),
    *(
        replace(DONE, parked=(replace(PARKED, key=key), DEAD), key=key, newest={1: newest(7)})
        for key in (b"customer-7", b"two words", b"\xff", b"-n")
    ),
    replace(DONE, key=b"a", newest={1: newest(7, acked=True)}),
    facts(
        partition(1, 0, 1024),
        partition(2, 0, 1024, 1),
        progress_of=(progress(1, state=PartitionState.SEALED), progress(2)),
    ),
)


def all_causes() -> list[Cause]:
    refused = RefusedBroker(broker_group="g1", address="h:1", problem="two folders", advice="")
    few = broker(folders=1, folders_wanted=2)
    older = broker(quarantine="the database fell back")
    listed = servers.server_causes(BrokerList(brokers=[few, older], refused=[refused]))
    return [cause for asked in ASKED for cause in causes.explain(asked).causes] + [
        cause for _, cause in listed
    ]


COMMANDS = sorted({command for cause in all_causes() for command in COMMAND.findall(cause.step)})


def test_every_cause_that_names_a_command_is_among_those_that_are_tried():
    named = {
        code
        for module in (causes, servers)
        for code in NAMING.findall(Path(module.__file__).read_text())
    }
    assert len(named) > 15
    assert named <= {cause.code for cause in all_causes()}


@pytest.mark.parametrize("text", COMMANDS)
def test_step_is_accepted_by_the_command_line(text: str):
    words = shlex.split(text)[1:]
    command: click.Command = app
    context = command.make_context("keylane", [], resilient_parsing=True)
    while isinstance(command, click.Group):
        subcommand = command.get_command(context, words[0])
        assert subcommand is not None, f"no command {words[0]!r} in {text!r}"
        command, words = subcommand, words[1:]
        context = command.make_context(command.name, [], parent=context, resilient_parsing=True)
    if words == ["--help"]:
        return
    command.make_context(command.name, words, parent=context.parent)


def test_step_selects_what_is_to_be_handled_again():
    """The parser cannot tell that `redrive` refuses to run without a selection."""
    redrives = [each for each in COMMANDS if each.startswith("keylane parked redrive ")]
    assert "keylane parked redrive orders billing --all-keys" in redrives
    assert "keylane parked redrive orders billing --key customer-7" in redrives
    assert "keylane parked redrive orders billing --key-hex ff" in redrives
    assert all(each.count(" --") == 1 for each in redrives)


def test_step_names_the_clients_that_are_suspended():
    resumes = [each for each in COMMANDS if " --client " in each]
    assert [shlex.split(each)[-1] for each in resumes] == ["it's b", "vm:1"]
