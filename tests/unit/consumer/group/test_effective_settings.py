"""What a consumer is told of its group: the stored policy over its own, and the operators'
switches.
"""

from __future__ import annotations

import logging

import pytest
from msgspec.structs import replace

from keylane.consumer import ConsumerSettings, FailurePolicy
from keylane.consumer.group.effective_settings import (
    EffectiveSettings,
    effective_settings,
    stored_text,
)
from keylane.consumer.group.membership import Member
from keylane.protocol.backoff import Backoff
from keylane.protocol.control import Grants
from keylane.protocol.groups import GroupPolicy, OperatorSwitch
from keylane.protocol.routing import OrderStrategy

NOTHING = GroupPolicy()
PARK = GroupPolicy(on_failure=FailurePolicy.PARK, tries_max=3)


def effective(**own: object) -> EffectiveSettings:
    return EffectiveSettings(Member("s", "g", "c"), ConsumerSettings(**own))


def grants(
    policy: GroupPolicy = NOTHING, suspended_by: OperatorSwitch = OperatorSwitch.OFF
) -> Grants:
    return Grants(version=1, ttl_ms=1_000, grants=(), policy=policy, suspended_by=suspended_by)


def test_stored_fields_count_more_than_those_of_the_code():
    """Each by itself; what is not stored stays as the code says."""
    own = ConsumerSettings(on_failure="dead", tries_max=7, concurrency=3)
    assert effective_settings(own, GroupPolicy()) == own
    after = effective_settings(own, GroupPolicy(on_failure=FailurePolicy.PARK))
    assert (after.on_failure, after.tries_max, after.concurrency) == (FailurePolicy.PARK, 7, 3)
    paused = effective_settings(own, GroupPolicy(backoff_first_ms=1, backoff_max_ms=9))
    assert paused.handler_backoff == Backoff(first_ms=1, max_ms=9)
    assert paused.on_failure is FailurePolicy.DEAD


def test_policy_is_taken_once_and_let_go(caplog: pytest.LogCaptureFixture):
    """A heartbeat without a change says nothing; what is forgotten leaves the settings of the
    code.
    """
    caplog.set_level(logging.INFO, "keylane.consumer")
    member = effective(tries_max=7)
    own = member.settings
    assert not member.update(grants())
    assert member.update(grants(PARK))
    assert (member.settings.on_failure, member.settings.tries_max) == (FailurePolicy.PARK, 3)
    assert not member.update(grants(PARK))
    assert member.update(grants())
    assert member.settings == own
    of_opening, *of_changes = caplog.records
    assert "tries_max=7 has no effect" in of_opening.getMessage()
    assert len(of_changes) == 2


@pytest.mark.parametrize(
    ("own", "policy", "strategy", "warns"),
    [
        ({"tries_max": 2}, NOTHING, OrderStrategy.STRICT, True),
        ({"tries_max": 2, "on_failure": "block"}, NOTHING, OrderStrategy.BEST_TRIED, True),
        ({"tries_max": 2}, NOTHING, OrderStrategy.BEST_TRIED, False),
        ({"tries_max": 2, "on_failure": "dead"}, NOTHING, OrderStrategy.STRICT, False),
        ({"tries_max": 2}, PARK, OrderStrategy.STRICT, False),
        ({}, NOTHING, OrderStrategy.STRICT, False),
    ],
)
def test_log_warns_once_of_tries_that_nothing_limits(
    caplog: pytest.LogCaptureFixture,
    own: dict[str, object],
    policy: GroupPolicy,
    strategy: OrderStrategy,
    warns: bool,
):
    member = effective(**own)
    for _ in range(3):
        member.update(replace(grants(policy), order_strategy=strategy))
    told = [record for record in caplog.records if "has no effect" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.WARNING] * warns


@pytest.mark.parametrize(
    ("own", "level"),
    [({}, logging.INFO), ({"on_failure": "park"}, logging.INFO), ({"on_failure": "dead"}, 30)],
)
def test_log_warns_of_a_code_that_says_otherwise(
    caplog: pytest.LogCaptureFixture, own: dict[str, object], level: int
):
    """Defaults and the same policy are no contradiction."""
    caplog.set_level(logging.INFO, "keylane.consumer")
    effective(**own).update(grants(PARK))
    (record,) = caplog.records
    assert record.levelno == level
    assert ("instead of its own code, on_failure=dead" in record.getMessage()) == (
        level == logging.WARNING
    )


def test_switch_of_an_operator_is_named_with_its_command(caplog: pytest.LogCaptureFixture):
    """Until it is thrown back; once in the log for each change."""
    caplog.set_level(logging.INFO, "keylane.consumer")
    member = effective()
    assert member.waiting_for == ""
    for switch, command in (
        (OperatorSwitch.GROUP, "keylane group resume s g"),
        (OperatorSwitch.CLIENT, "keylane group resume s g --client c"),
    ):
        for _ in range(2):
            member.update(grants(suspended_by=switch))
        assert member.waiting_for.endswith(command)
    member.update(grants())
    assert member.waiting_for == ""
    assert len(caplog.records) == 3


def test_stored_policy_is_told_in_words():
    """Only the fields that are stored."""
    assert stored_text(PARK) == "on_failure=park, tries_max=3"
    assert "its own code" in stored_text(GroupPolicy())


@pytest.mark.parametrize(
    ("own", "stored", "strategy", "expected"),
    [
        ({}, None, "best_tried", "retry"),
        ({}, None, "strict", "block"),
        ({"on_failure": "block"}, None, "best_tried", "block"),
        ({}, "park", "best_tried", "park"),
        ({"consume_strategy": "shared"}, None, "best_tried", "block"),
        ({"ack": "before"}, None, "best_tried", "block"),
        ({}, "retry", "strict", "block"),
        ({"on_failure": "dead"}, "retry", "best_tried", "retry"),
    ],
)
def test_retry_is_the_default_of_exclusive_groups_of_best_tried_subjects(
    own: dict[str, str], stored: str | None, strategy: str, expected: str
):
    policy = GroupPolicy(on_failure=None if stored is None else FailurePolicy(stored))
    after = effective_settings(ConsumerSettings(**own), policy, OrderStrategy(strategy))
    assert after.failure_policy == expected
