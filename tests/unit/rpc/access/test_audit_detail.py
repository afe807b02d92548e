"""The details of calls in the audit log, besides subject and group."""

from __future__ import annotations

from keylane.protocol.control import AcceptFolder
from keylane.protocol.endpoints import CREATE_GROUP, DELETE_GROUP, JOIN
from keylane.protocol.http.access import TEXT_CHARS_MAX, NoteAudit
from keylane.protocol.http.bodies import check_no_nul, encode_json
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.progress import ResetGroup, ResetTo
from keylane.rpc.access.audit import is_audited, record_event
from keylane.rpc.access.audit_events import call_detail
from keylane.rpc.access.caller import AccessTarget


def test_detail_says_that_a_loss_is_accepted_and_what_is_a_dry_run():
    """An auditor can distinguish a call that gave up data from one that looked at a plan."""
    lose = Reshape(kind=OperationKind.EVACUATE, broker_group="g2", accept_loss=True)
    accepts = "evacuate g2, accepts the loss of what only it has"
    assert call_detail(lose, {}) == accepts
    would = Reshape(kind=OperationKind.EVACUATE, broker_group="g2", accept_loss=True, dry_run=True)
    assert call_detail(would, {}) == f"dry run: {accepts}"
    left = Reshape(kind=OperationKind.EVACUATE, broker_group="g2", without_source=True)
    assert call_detail(left, {}) == "evacuate g2, without its source"
    assert call_detail(Reshape(kind=OperationKind.RESIZE, subject="s"), {}) == "resize"


def test_detail_says_dry_run_of_every_call_that_has_one():
    """A reset, and an older copy of a data folder that would be accepted, too."""
    assert (
        call_detail(ResetGroup(to=ResetTo.EARLIEST, dry_run=True), {})
        == "dry run: reset to earliest"
    )
    assert call_detail(ResetGroup(to=ResetTo.EARLIEST), {}) == "reset to earliest"
    assert call_detail(AcceptFolder(dry_run=True), {}) == "dry run"
    assert call_detail(AcceptFolder(), {}) == ""


def test_event_has_no_character_that_a_database_refuses_when_a_refused_name_had_one() -> None:
    event = record_event(
        at_ms=1,
        who="jwt:a\0b",
        remote="10.0.0.7",
        action="GET /v1/subjects/{subject}/messages",
        target=AccessTarget("x\0" * 150, "\ud800\n"),
        detail="key\0",
    )
    check_no_nul("POST /v1/access/audit", encode_json(NoteAudit(events=[event])), {})
    assert event.who == r"jwt:a\x00b"
    assert event.group == r"\ud800\n"
    assert len(event.subject) == TEXT_CHARS_MAX


def test_audit_has_groups_when_they_are_made_and_deleted() -> None:
    """Members that join, which is no change, come too often."""
    assert is_audited(CREATE_GROUP)
    assert is_audited(DELETE_GROUP)
    assert not is_audited(JOIN)
