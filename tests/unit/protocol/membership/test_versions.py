"""Which versions work together, and when a cluster has a new one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.protocol.errors import InvalidRequestError, Reason
from keylane.protocol.membership.versions import (
    FIRST_RELEASE,
    OWN,
    VERSION,
    MemberVersion,
    Version,
    check_client,
    check_member,
    check_server,
    decide_cluster_version,
    members_holding_back,
    parse_version,
)
from support.raising import raises

minors = st.integers(0, 50)


@pytest.mark.parametrize("text", ["0.1.0", "0.1", "0.1.9+local", "0.1.0rc1", "0.1-dev"])
def test_version_is_read_from_every_usual_form(text: str) -> None:
    assert parse_version(text) == Version(0, 1)


@pytest.mark.parametrize(
    "text", ["", "1", "a.b", "0.1 0", "-1.0", "0.1\n", "9999999.1", "0.1." + "x" * 50]
)
def test_version_is_refused_when_it_is_none(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="not a version"):
        parse_version(text)


@given(client=minors, server=minors)
def test_client_and_server_agree_on_who_is_too_old(client: int, server: int) -> None:
    """
    Both sides decide the same: one minor version apart works, and the older one is to be upgraded.

    0.2 is the first release, so it does not work with 0.1.
    """
    told = f"0.{client}.3", f"0.{server}.0"
    expected = None
    if server - client > (1 if client >= 2 else 0):
        expected = Reason.CLIENT_TOO_OLD
    elif client - server > (1 if server >= 2 else 0):
        expected = Reason.SERVER_TOO_OLD
    for check in (lambda: check_client(*told), lambda: check_server(told[1], told[0])):
        if expected is None:
            check()
            continue
        with raises(expected, match="upgrade the " + expected.name[:6].lower()) as caught:
            check()
        assert (caught.value.client, caught.value.server) == told


def test_client_and_server_of_before_the_first_release_are_refused() -> None:
    with raises(Reason.CLIENT_TOO_OLD, match=r"client is keylane .* upgrade the client"):
        check_client("0.1.0", "0.2.0")
    with raises(Reason.SERVER_TOO_OLD, match=r"server 0.* upgrade the server"):
        check_server("0.1.0", "0.2.0")
    with raises(Reason.MEMBER_TOO_OLD, match=r"broker g1 is keylane 0\.1"):
        check_member("0.1.0", FIRST_RELEASE, "broker g1")


def test_client_of_another_major_version_is_refused() -> None:
    with raises(Reason.CLIENT_TOO_OLD):
        check_client("0.9.0", "1.0.0")
    with raises(Reason.SERVER_TOO_OLD):
        check_client("1.0.0", "0.9.0")


@given(st.lists(minors, min_size=1), minors)
def test_cluster_has_the_version_of_its_oldest_member_and_never_falls(
    told: list[int], at: int
) -> None:
    cluster = Version(0, at)
    members = [MemberVersion(f"m{number}", f"0.{minor}.1") for number, minor in enumerate(told)]
    raised = decide_cluster_version(cluster, members)
    assert raised == Version(0, max(at, min(told)))
    assert decide_cluster_version(raised, members) == raised


def test_member_that_tells_no_version_keeps_the_cluster_where_it_is() -> None:
    members = [MemberVersion("broker g1", "0.2.0"), MemberVersion("broker g2", "")]
    assert decide_cluster_version(Version(0, 1), members) == Version(0, 1)
    assert members_holding_back(Version(0, 1), members) == ["broker g2"]
    assert decide_cluster_version(Version(0, 1), []) == Version(0, 1)


def test_member_that_skips_a_version_or_is_left_behind_is_refused() -> None:
    for told in ("0.3.0", "0.4.7"):
        check_member(told, Version(0, 3), "broker g1")
    with raises(
        Reason.UPGRADE_SKIPPED, match=r"broker g1 is keylane 0\.5.*version after 0\.3 first"
    ):
        check_member("0.5.0", Version(0, 3), "broker g1")
    with raises(Reason.UPGRADE_SKIPPED):
        check_member("1.0.0", Version(0, 3), "broker g1")
    with raises(Reason.MEMBER_TOO_OLD, match=r"0\.2.* at 0\.3 already"):
        check_member("0.2.9", Version(0, 3), "broker g1")


def test_version_of_this_program_is_parsed() -> None:
    assert parse_version(VERSION) == OWN
