"""Rights by pattern: what is not granted is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.protocol.access.rights import (
    AccessGrant,
    Rights,
    allows,
    check_allowed,
    check_grant,
    matches,
)
from keylane.protocol.errors import AccessDeniedError, InvalidRequestError


@pytest.mark.parametrize(
    ("pattern", "name", "means"),
    [
        ("a.*", "a.b", True),
        ("a.*", "ab", False),
        ("a.*", "a", False),
        ("a*", "ab", True),
        ("a", "a", True),
        ("a", "ab", False),
        ("*", "anything", True),
        ("*", "", True),
        ("a*", "", False),
    ],
)
def test_pattern_means_names_with_its_beginning(pattern: str, name: str, means: bool):
    assert matches(pattern, name) is means


@given(st.sampled_from(list(Rights)), st.text(), st.text())
def test_rights_are_refused_without_a_grant(right: Rights, subject: str, group: str):
    assert allows((), right, subject, group) is (right in (Rights.OPEN, Rights.KNOWN))


def test_right_of_a_group_is_no_right_on_the_whole_subject():
    grants = (AccessGrant(Rights.ADMINISTER, "a", "g"),)
    assert allows(grants, Rights.ADMINISTER, "a", "g")
    assert not allows(grants, Rights.ADMINISTER, "a")
    assert not allows(grants, Rights.ADMINISTER, "a", "h")


def test_refusal_says_what_to_ask_for():
    with pytest.raises(AccessDeniedError) as refused:
        check_allowed("shop", (), Rights.PRODUCE, "orders")
    assert refused.value.right == "produce"
    assert "keylane access grant shop produce --subject orders" in refused.value.message
    assert "in place of read" not in refused.value.message
    with pytest.raises(
        AccessDeniedError, match="--subject orders; or produce, or consume, in place"
    ):
        check_allowed("shop", (), Rights.ANY, "orders")


def test_refusal_of_a_hidden_subject_says_to_ask_for_all_of_its_target():
    """The name of one is made for one job: a grant of it helps no other job."""
    with pytest.raises(AccessDeniedError) as refused:
        check_allowed("spark", (), Rights.ADMINISTER, "orders.hidden-0f3a")
    asked = "keylane access grant spark administer --subject 'orders.hidden-*'"
    assert asked in refused.value.message
    assert refused.value.subject == "orders.hidden-0f3a"


@pytest.mark.parametrize(
    "grant",
    [
        AccessGrant(Rights.ANY),
        AccessGrant(Rights.OPEN),
        AccessGrant(Rights.PRODUCE, "a*b"),
        AccessGrant(Rights.PRODUCE, ""),
        AccessGrant(Rights.PRODUCE, "../x"),
        AccessGrant(Rights.PRODUCE, "a", "g"),
    ],
)
def test_grant_is_refused_when_it_cannot_be_one(grant: AccessGrant):
    with pytest.raises(InvalidRequestError):
        check_grant(grant)
