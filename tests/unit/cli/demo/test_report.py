"""The verdict names everything that is off, and its last line is the result with exactly the
promised keys.
"""

import io
import json
import re
import time

import msgspec
import pytest
from rich.console import Console

from keylane.checker.findings import ANOMALIES, Findings
from keylane.cli.demo.report import (
    BarScreen,
    LineScreen,
    Result,
    Verdict,
    find_problems,
    is_same_table,
    open_screen,
    show_verdict,
)
from keylane.cli.options import OutputFormat

GOOD = Result(
    sent=6,
    stored=6,
    handled=6,
    redelivered=1,
    lost=0,
    order_violations=0,
    stale_acks=0,
    failover_seconds=2.2,
    spark_rows=6,
    spark_matches_csv=True,
    seconds=9.5,
)
KEYS = [
    "sent",
    "stored",
    "handled",
    "redelivered",
    "lost",
    "order_violations",
    "stale_acks",
    "failover_seconds",
    "spark_rows",
    "spark_matches_csv",
    "seconds",
]


def problems(result=GOOD, findings=None, failed=0):
    return find_problems(
        result, findings or Findings(), rows=6, failover_limit_s=3.0, failed=failed
    )


def test_report_of_a_good_run_has_no_problem():
    """A good run has no problem; redelivery is none."""
    assert problems() == ()


@pytest.mark.parametrize(
    "change",
    [
        {"sent": 5},
        {"stored": 5},
        {"handled": 5},
        {"failover_seconds": 3.1},
        {"spark_rows": 7},
        {"spark_matches_csv": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_number_matters(change):
    """Each number that differs from what it must be is one problem."""
    assert len(problems(msgspec.structs.replace(GOOD, **change))) == 1


@pytest.mark.parametrize("anomaly", ANOMALIES)
def test_each_anomaly_matters(anomaly):
    """Each kind of anomaly is a problem, told by its name."""
    findings = Findings()
    findings.note(anomaly, "somewhere", count=3)
    assert problems(findings=findings) == (f"3 x {anomaly}",)


def test_given_up_messages_matter():
    """Messages that the producer gave up are a problem."""
    assert len(problems(failed=1)) == 1


@pytest.mark.parametrize(
    ("actual", "same"),
    [
        ({"AA": (2, 1.5), "B6": (1, None)}, True),
        ({"AA": (2, 1.5 + 1e-12), "B6": (1, None)}, True),
        ({"AA": (2, 1.6), "B6": (1, None)}, False),
        ({"AA": (3, 1.5), "B6": (1, None)}, False),
        ({"AA": (2, 1.5), "B6": (1, 0.0)}, False),
        ({"AA": (2, None), "B6": (1, None)}, False),
        ({"AA": (2, 1.5)}, False),
    ],
)
def test_tables_are_the_same_but_for_the_last_bits_of_a_mean(actual, same):
    """Two tables are the same if carriers, flights and means are, but for the last bits of a
    mean.
    """
    assert is_same_table(actual, {"AA": (2, 1.5), "B6": (1, None)}) is same


@pytest.mark.parametrize("form", [OutputFormat.TABLE, OutputFormat.JSON], ids=str)
def test_last_line_is_a_json_object_with_the_promised_keys(form, capsys):
    """The last line is one JSON object with the promised keys in their order."""
    verdict = Verdict(
        result=GOOD,
        findings=Findings(),
        carriers={"AA": (2, 1.5), "B6": (1, None)},
        failover_limit_s=3.0,
        retries=2,
        problems=("something [is] off",),
    )
    show_verdict(form, verdict, note="everything is left")
    out, errors = capsys.readouterr()
    assert errors == "everything is left\n"
    assert list(json.loads(out.splitlines()[-1])) == KEYS
    assert (len(out.splitlines()) == 1) is (form is OutputFormat.JSON)
    assert ("OFF: something [is] off" in out) is (form is OutputFormat.TABLE)


def test_lines_are_few():
    """Without a terminal, progress is four lines, however often it is reported."""
    told = []
    lines = LineScreen(1_000, told.append)
    for handled in range(1_100):
        lines.progress(handled, handled)
    assert len(told) == 4


class Terminal(io.StringIO):
    """A terminal that is one string."""

    def isatty(self) -> bool:
        return True


def test_terminal_moves_while_something_is_at_work():
    """What takes its time has a line of its own with a clock that runs, though all bars are full;
    then it is told.
    """
    screen = Terminal()
    bars = BarScreen(10, Console(file=screen, force_terminal=True, width=80))
    bars.progress(10, 10)
    try:
        with bars.time_step("Spark reads"):
            clocks = set()
            deadline = time.monotonic() + 30
            while len(clocks) < 3:
                assert time.monotonic() < deadline
                clocks = set(re.findall(r"Spark reads.*?(\d:\d\d:\d\d)", screen.getvalue()))
                time.sleep(0.05)
    finally:
        bars.close()
    assert re.search(r"Spark reads: done, \d+\.\d s", screen.getvalue())


def test_lines_say_when_something_is_at_work():
    """Without a terminal, what takes its time is told when it begins and when it has ended, not
    when it failed.
    """
    told = []
    lines = LineScreen(10, told.append)
    with lines.time_step("checking"):
        assert told[-1].endswith("checking …")
    assert "checking: done, " in told[-1]
    with pytest.raises(ValueError, match="no"), lines.time_step("again"):
        raise ValueError("no")
    assert told[-1].endswith("again …")


def test_programs_are_told_nothing(capsys):
    """For programs there is nothing but the result."""
    screen = open_screen(OutputFormat.JSON, 10)
    with screen.time_step("checking"):
        screen.say("a step")
        screen.progress(5, 5)
    screen.close()
    assert capsys.readouterr() == ("", "")
