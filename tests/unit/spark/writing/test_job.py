"""Options of a write, and the check before a job is published."""

from __future__ import annotations

import pytest

from keylane.protocol.errors import ConfigError, Reason
from keylane.spark.writing.job import (
    TaskReport,
    WriteOptions,
    check_job,
    check_unused,
    parse_write_options,
    producer_id,
)
from support.raising import raises

GIVEN = {"meta": "127.0.0.1:7000", "subject": "flights"}


def test_options_are_read_in_any_case_and_spark_adds_its_own():
    """The defaults need the metaserver and the subject alone."""
    options = parse_write_options(
        {**GIVEN, "Partitions": "4", "TIMEOUTMS": "5", "path": "/x", "checkpointLocation": "/y"}
    )
    assert options == WriteOptions(
        meta=("127.0.0.1:7000",), subject="flights", partitions=4, timeout_ms=5
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("partitions", "0"),
        ("partitions", "x"),
        ("order", "maybe"),
        ("publish", "yes"),
        ("publish", "false"),
        ("timeoutMs", "-1"),
        ("hidden", "a b"),
        ("subject", ""),
        ("order", ""),
        ("publish", " "),
        ("partitions", ""),
        ("hidden", ""),
        ("timeoutMs", ""),
        ("tokenFile", ""),
        ("key", "value"),
        *[
            ("once", each)
            for each in (
                "",
                "landing",
                "landing/",
                "/7",
                "landing/x",
                "a b/1",
                "a/1/2",
                "a" * 99 + "/1",
            )
        ],
    ],
)
def test_option_that_cannot_be_is_named(name: str, value: str):
    """One error with everything that is wrong."""
    named = "hidden" if name == "publish" and value == "false" else name
    with pytest.raises(ConfigError, match=named):
        parse_write_options({**GIVEN, name: value})
    with pytest.raises(ConfigError, match=r"meta: required; subject: required"):
        parse_write_options({})


def test_job_has_the_name_and_the_number_of_its_batch():
    """A name of its own and a hidden subject of the options cannot be together; a number is one
    however it is written.
    """
    assert parse_write_options({**GIVEN, "once": "a-1.b/7"}).once == "a-1.b-7"
    assert parse_write_options({**GIVEN, "ONCE": "a-1.b/07"}).once == "a-1.b-7"
    for other in ({"hidden": "flights.new"}, {"publish": "true"}):
        with pytest.raises(ConfigError, match="hidden subject of its own"):
            parse_write_options({**GIVEN, "once": "a/7", **other})


def test_write_without_any_option_says_that_sql_hands_none_over():
    """Spark gives the writer of an INSERT its own options at most; one of ours shows that the
    caller can give them.
    """
    with pytest.raises(ConfigError, match=r"INSERT.*frame\.write\.format"):
        parse_write_options({"path": "/warehouse/orders"})
    with pytest.raises(ConfigError, match="subject: required") as caught:
        parse_write_options({"meta": "127.0.0.1:7000"})
    assert "INSERT" not in caught.value.message


def test_hidden_subject_that_another_job_has_filled_is_refused():
    """A job that fails deletes its hidden subject, so it may not begin in one with rows of
    another.
    """
    check_unused("flights.new", "flights", {1: 0, 2: 0})
    with pytest.raises(
        ConfigError, match=r"'flights\.new' has 7 messages of another job"
    ) as caught:
        check_unused("flights.new", "flights", {1: 3, 2: 4})
    assert "keylane subject publish flights.new flights" in caught.value.message


def test_id_of_a_task_is_the_same_for_each_attempt_and_of_no_other_task():
    """It fits the ids of producers."""
    ids = {producer_id("job", "a", task, path) for task in range(100) for path in range(100)}
    assert len(ids) == 10_000
    assert producer_id("job", "a", 1, 1) in ids
    assert all(0 < each < 1 << 63 for each in ids)


def test_job_has_as_many_messages_as_its_tasks_have_rows():
    """More are rows of an attempt that was another one; fewer are lost. A task without rows may
    say nothing.
    """
    reports = [TaskReport(task=0, rows={1: 5, 2: 1}), TaskReport(task=1, rows={2: 3}), None]
    assert check_job(reports, {1: 5, 2: 4}) == 9
    assert check_job([], {1: 0}) == 0
    for stored in ({1: 5, 2: 5}, {1: 5}, {1: 5, 2: 4, 3: 1}):
        with raises(Reason.ROWS_DIFFER):
            check_job(reports, stored)


def test_two_tasks_with_rows_of_one_key_are_refused():
    """They run at the same time. Tasks with other logical partitions of the source keep the order
    of each key.
    """
    first, second = (
        TaskReport(task=0, sources={"1": 0b0110}),
        TaskReport(task=1, sources={"1": 0b1000}),
    )
    assert check_job([first, second], {}) == 0
    with raises(Reason.ROW_ORDER):
        check_job([first, second, TaskReport(task=2, sources={"1": 0b1100})], {})
