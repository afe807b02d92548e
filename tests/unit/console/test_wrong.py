from keylane.admin import Cause, Explanation
from keylane.console.views.wrong import sentences, wrong_causes


def explanation(*codes: str, group: str = "g") -> Explanation:
    causes = tuple(Cause(code=code, text=code, step="look") for code in codes)
    return Explanation(subject="s", group=group, key=None, causes=causes)


def test_lag_that_falls_is_nothing_wrong():
    given = explanation("behind")
    assert wrong_causes(given, stands=False) == []
    assert len(wrong_causes(given, stands=True)) == 1


def test_group_that_has_acked_everything_has_nothing_wrong():
    assert wrong_causes(explanation("all_acked", "nothing_stored"), stands=True) == []


def test_sentences_begin_with_what_holds_everything_up():
    found = sentences(
        [
            (explanation("behind"), True),
            (explanation("parked"), True),
            (explanation("no_consumer", group="h"), False),
        ]
    )
    assert [each.text for each in found] == ["no_consumer", "parked", "behind"]
    assert found[0].about == "h on s"
    assert found[0].href == "/console/subjects/s/groups/h"
