"""An edited message has the value of its last confirmed edit, or of one whose outcome is unknown."""

from keylane.checker.edits import Edits

SLOT = (1, 5)


def test_message_has_the_value_of_its_last_edit():
    edits = Edits()
    assert edits.find_problem("g", SLOT, b"old", b"old") == ""
    edits.on_edited("g", *SLOT, b"new", done=False)
    edits.on_edited("g", *SLOT, b"new", done=True)
    assert edits.find_problem("g", SLOT, b"new", b"old") == ""
    assert "has stored b'new'" in edits.find_problem("g", SLOT, b"old", b"old")
    assert edits.find_problem("other", SLOT, b"old", b"old") == ""


def test_edit_of_unknown_outcome_counts_once_it_is_seen():
    edits = Edits()
    edits.on_edited("g", *SLOT, b"new", done=False)
    assert edits.find_problem("g", SLOT, b"old", b"old") == ""
    assert edits.find_problem("g", SLOT, b"new", b"old") == ""
    assert edits.find_problem("g", SLOT, b"old", b"old")


def test_value_that_no_operator_gave_is_told():
    edits = Edits()
    assert edits.find_problem("g", SLOT, b"x", b"old") == "where the log has another value"
    assert edits.find_problem("g", SLOT, b"x", None) == "where the log has another value"


def test_reset_may_have_forgotten_an_edit():
    edits = Edits()
    edits.on_edited("g", *SLOT, b"new", done=False)
    edits.on_edited("g", *SLOT, b"new", done=True)
    edits.on_reset("g")
    assert edits.find_problem("g", SLOT, b"old", b"old") == ""
    assert edits.find_problem("g", SLOT, b"new", b"old") == ""
