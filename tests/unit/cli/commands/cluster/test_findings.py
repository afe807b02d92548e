"""What a cluster check tells: each thing that does not fit once, with advice; nothing where all
fits.
"""

import pytest

from keylane.cli.commands.cluster.findings import ServerReport, judge_reports

NOW_S = 1_800_000_000.0
DAY_S = 86_400.0
FINE = {
    "program": "broker",
    "address": "a.example:7100",
    "version": "1.2.0",
    "clock_difference_s": 0.4,
    "certificate_ends_s": NOW_S + 31 * DAY_S,
    "disk_bytes": 100,
    "disk_free_bytes": 10,
}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"certificate_ends_s": None, "clock_difference_s": None, "disk_bytes": None}, None),
        ({"clock_difference_s": -3600.0}, "its clock is 3600 s behind that of this host"),
        ({"clock_difference_s": 2.1}, "its clock is 2 s ahead of that of this host"),
        ({"certificate_ends_s": NOW_S + 29.6 * DAY_S}, "its certificate ends in 30 days"),
        ({"certificate_ends_s": NOW_S - DAY_S}, "its certificate has expired"),
        ({"insecure_network": True}, "insecure_network: other machines read and write without TLS"),
        ({"access_off": True}, "access = off: everybody who reaches it may do everything"),
        ({"disk_free_bytes": 9}, "9% of its disk is free"),
        ({"shared_machines": ("the copies a and b share m1",)}, "the copies a and b share m1"),
        ({"version": "1.1.0"}, "different versions of keylane: 1.1.0, 1.2.0; here 1.2.0"),
        ({"failure": "cannot reach it", "advice": "Start it."}, "cannot reach it"),
    ],
)
def test_finding_names_the_problem_and_the_advice(change, problem) -> None:
    report = ServerReport(**{**FINE, **change})
    findings = judge_reports([report], own_version="1.2.0", now_s=NOW_S)
    assert [finding.problem for finding in findings] == ([] if problem is None else [problem])
    assert all(finding.advice for finding in findings)
    assert len(report.row()) == 6


@pytest.mark.parametrize(
    ("difference_s", "shown"),
    [(-0.4, "within 1 s"), (0.6, "within 1 s"), (-2.3, "-2 s"), (3600.0, "+3600 s"), (None, None)],
)
def test_clock_is_shown_by_the_second_when_it_differs(difference_s, shown) -> None:
    """The answer's header has whole seconds: a server of the same host seemed to be off by
    tenths.
    """
    row = ServerReport(**{**FINE, "clock_difference_s": difference_s}).row()
    assert row[3] == shown
