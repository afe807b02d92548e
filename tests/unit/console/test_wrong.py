import pytest

from keylane.admin import Cause, Explanation, PartitionReport
from keylane.console.views.wrong import sentences, wrong_causes
from keylane.protocol.routing import PartitionState


def explanation(*codes: str, group: str = "g") -> Explanation:
    causes = tuple(Cause(code=code, text=code, step="look") for code in codes)
    return Explanation(subject="s", group=group, key=None, causes=causes)


def test_lag_of_a_group_that_is_not_stuck_is_nothing_wrong():
    given = explanation("behind")
    assert wrong_causes(given, is_stuck=False) == []
    assert len(wrong_causes(given, is_stuck=True)) == 1


def test_cause_that_passes_in_a_healthy_group_is_wrong_when_the_group_is_stuck():
    given = explanation("no_owner", "not_read")
    assert sentences([(given, False)], {}) == []
    assert [each.text for each in sentences([(given, True)], {})] == ["no_owner", "not_read"]
    assert len(wrong_causes(given, is_stuck=False)) == 2, "the page of the group tells them"


def test_group_that_has_acked_everything_has_nothing_wrong():
    assert wrong_causes(explanation("all_acked", "nothing_stored"), is_stuck=True) == []


def test_scheduled_messages_are_wrong_only_when_they_are_late():
    assert wrong_causes(explanation("scheduled"), is_stuck=True) == []
    assert len(wrong_causes(explanation("scheduled_late"), is_stuck=False)) == 1


def test_sentences_begin_with_what_holds_everything_up():
    found = sentences(
        [
            (explanation("behind"), True),
            (explanation("parked"), True),
            (explanation("no_consumer", group="h"), False),
        ],
        {},
    )
    assert [each.text for each in found] == ["no_consumer", "parked", "behind"]
    assert found[0].about == "h on s"
    assert found[0].href == "/console/subjects/s/groups/h"


# ── brokers ───────────────────────────────────────────────────────────────────────────────────────
def unheard(code: str) -> Explanation:
    """Partitions 1 and 2 are on a broker that is not heard."""
    cause = Cause(code=code, text=code, step="look", partitions=(1, 2))
    return Explanation(subject="s", group="g", key=None, causes=(cause,))


def reports(*numbers: int) -> list[PartitionReport]:
    return [
        PartitionReport(
            partition_id=number,
            subject="s",
            state=PartitionState.OPEN,
            first_offset=0,
            next_offset=0,
            groups=(),
        )
        for number in numbers
    ]


def test_silent_broker_is_not_named_for_each_group():
    assert sentences([(unheard("broker_silent"), True)], {"g1": "late"}) == []


@pytest.mark.parametrize("code", ["broker_silent", "broker_hangs", "broker_gone"])
def test_broker_that_was_not_heard_is_wrong_until_it_tells_of_its_partitions(code: str):
    given = unheard(code)
    assert [each.code for each in wrong_causes(given, is_stuck=True, heard=(1, 3))] == [code]
    assert wrong_causes(given, is_stuck=True, heard=(1, 2, 3)) == []


def test_first_page_names_a_broker_that_hangs_until_it_answers():
    given = [(unheard("broker_hangs"), True)]
    named = [each.text for each in sentences(given, {"g1": reports(3), "g2": "late"})]
    assert named == ["broker_hangs"]
    assert sentences(given, {"g1": "late", "g2": reports(1, 2)}) == [], "another one is late"
    assert sentences(given, {"g1": reports(3)}) == [], "it is silent now, and named as such"
