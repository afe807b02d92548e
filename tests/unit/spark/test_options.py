"""The options of the Spark reader: what is understood, and that all problems are told at once."""

from __future__ import annotations

import pytest

from keylane.arrow.schema import COLUMNS, COLUMNS_OF_SEVERAL
from keylane.arrow.selection import (
    EARLIEST,
    LATEST,
    CursorOf,
    Edge,
    ReadBound,
    ReadOptions,
    StoredAt,
)
from keylane.protocol.errors import ConfigError
from keylane.spark.options import NAMES, parse_options

NOW_MS = 1_800_000_000_000
LEAST = {"meta": "127.0.0.1:7000", "subject": "flights"}


def parsed(**more: str) -> ReadOptions:
    return parse_options(LEAST | more, now_ms=NOW_MS)


def test_two_options_are_enough():
    """The metaserver and the subject are required; all else has a default."""
    assert parsed() == ReadOptions(meta=("127.0.0.1:7000",), subjects=("flights",))
    assert parsed().columns == COLUMNS
    assert (parsed().start, parsed().end, parsed().batch_rows) == (EARLIEST, LATEST, 16_384)


def test_every_option_is_understood():
    """Each option, in any case and with blanks around it, arrives as its own type."""
    parsed = parse_options(
        {
            "META": "a:1, [::1]:2",
            "Subject": " flights ",
            "partitions": "3, 4",
            "Keys": "a, b",
            "failondataloss": "False",
            "MinPartitions": "8",
            "TASKBYTES": "1048576",
            "retryseconds": "0",
            "start": '{"3": 10}',
            "end": "LATEST",
            "columns": "offset , key",
            "BATCHROWS": "100",
            "gcfreeze": "FALSE",
        },
        now_ms=NOW_MS,
    )
    assert parsed == ReadOptions(
        meta=("a:1", "[::1]:2"),
        subjects=("flights",),
        partitions=frozenset({3, 4}),
        keys=frozenset({b"a", b"b"}),
        fail_on_data_loss=False,
        min_partitions=8,
        task_bytes=1 << 20,
        retry_s=0,
        start=ReadBound(Edge.EARLIEST, {3: 10}),
        end=LATEST,
        columns=("offset", "key"),
        batch_rows=100,
        gc_freeze=False,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("meta", value) for value in ("nowhere", ":7000", "a:", "a:0", "a:65536", "a:-1")],
        *[
            ("subject", value)
            for value in (
                "../x",
                "x" * 300,
                "a b",
                "\0",
                "a,",
                "a,a",
                ",".join(f"s{n}" for n in range(101)),
            )
        ],
        *[
            ("partitions", value)
            for value in ("a", "0", "-1", "3,", "1.5", "3;4", "٣", "9" * 5_000)
        ],
        *[
            (bound, value)
            for bound in ("start", "end")
            for value in (
                "yesterday",
                "1h",
                "2024-05-31",
                "2024-05-31T12:00:00",
                "2999-01-01T00:00:00Z",
                "group:",
                "group:a b",
                "{",
                "{}",
                "[]",
                "7",
                "null",
                '{"3": -1}',
                '{"3": 1.5}',
                '{"3": "1"}',
                '{"3": true}',
                '{"a": 1}',
                '{"3": 9223372036854775808}',
                '{"3": "soon"}',
                '{"3": null}',
                "[" * 100_000,
                '{"3": 5, "3": 6}',
                '{"3": 5, "03": 6}',
            )
        ],
        *[
            ("keys", value)
            for value in ("a,", "[]", "[1]", '["a"', '[{"base64": "x"}]', '[{"hex": "00"}]')
        ],
        *[("minPartitions", value) for value in ("0", "x", "100001")],
        *[("taskBytes", value) for value in ("0", "1000", "1M")],
        *[("retrySeconds", value) for value in ("-1", "3601", "1.5")],
        *[("failOnDataLoss", value) for value in ("no", "0")],
        *[("columns", value) for value in ("", "nothing", "offset,offset", "offset,", "Offset")],
        *[("batchRows", value) for value in ("0", "-1", "1000001", "many", "1e3", "9" * 99, "")],
        *[("gcFreeze", value) for value in ("yes", "1")],
        *[("fromCopies", value) for value in ("yes", "copies")],
    ],
    ids=lambda value: str(value)[:20],
)
def test_value_that_cannot_be_is_refused_by_its_name(name, value):
    """A bad value is a ConfigError that names the option and stays short."""
    with pytest.raises(ConfigError) as caught:
        parse_options(LEAST | {name: value}, now_ms=NOW_MS)
    assert caught.value.details.keys() == {name}
    assert len(str(caught.value)) < 600


def test_options_name_all_problems_at_once():
    """Unknown, missing and impossible options are in one error."""
    with pytest.raises(ConfigError) as caught:
        parse_options(
            {"wholly": "other", "start": "soon", "path": "/x", "batchRows": "0"}, now_ms=NOW_MS
        )
    assert caught.value.details.keys() == {"wholly", "meta", "subject", "start", "batchRows"}
    assert "wholly: unknown; there are meta, subject" in caught.value.message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Subjects", "subject"),
        ("batchrow", "batchRows"),
        ("failOnDataloss_", "failOnDataLoss"),
        ("kafka.bootstrap.servers", "meta"),
        ("subscribe", "subject"),
        ("startingOffsets", "start"),
        ("endingTimestamp", "end"),
    ],
)
def test_unknown_option_gets_the_nearest_name_and_keeps_its_spelling(name, meant):
    """The name is told as it was given, and the one that was meant as it is written."""
    with pytest.raises(ConfigError) as caught:
        parsed(**{name: "1"})
    assert caught.value.details == {name: f"unknown; did you mean {meant}?"}


def test_unknown_column_gets_the_nearest_name():
    with pytest.raises(ConfigError, match=r"columns: no column 'Offset'; did you mean offset\?"):
        parsed(columns="Offset")
    with pytest.raises(ConfigError, match="no column 'topic'; there are subject, partition"):
        parsed(columns="topic")


def test_additions_of_spark_are_let_through():
    """Paths of loads and streams; of CREATE TABLE everything that is not repeated as `option.`."""
    for name in ("path", "paths", "checkpointLocation"):
        assert parsed(**{name: "/x"}) == parsed()
    table = LEAST | {
        "batchrows": "5",
        "provider": "keylane",
        "owner": "me",
        "comment": "c",
        "a": "b",
    }
    table |= {"option.meta": "m", "option.subject": "s", "option.batchrows": "5", "location": "/x"}
    assert parse_options(table, now_ms=NOW_MS) == parsed(batchRows="5")


def test_unknown_option_of_a_table_is_refused():
    with pytest.raises(ConfigError, match=r"batchrow: unknown; did you mean batchRows\?"):
        parsed(
            provider="keylane",
            batchrow="5",
            **{"option.batchrow": "5", "option.meta": "m", "option.subject": "s"},
        )


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("-1h", ReadBound(StoredAt(NOW_MS - 3_600_000))),
        ("2024-05-31T12:00:00Z", ReadBound(StoredAt(1_717_156_800_000))),
        ("group:billing", ReadBound(CursorOf("billing"))),
        (
            '{"3": 17, "4": "-1s", "5": "latest", "6": "group: a"}',
            ReadBound(
                Edge.EARLIEST,
                {3: 17, 4: StoredAt(NOW_MS - 1_000), 5: Edge.LATEST, 6: CursorOf("a")},
            ),
        ),
    ],
)
def test_start_is_a_time_a_group_or_offsets(text, bound):
    assert parsed(start=text).start == bound


def test_bare_offset_is_refused_with_the_way_to_write_it():
    with pytest.raises(ConfigError, match=r'start: an offset counts .*: \{"<partition id>": 17\}'):
        parsed(start="17")


@pytest.mark.parametrize("value", ["fail", "null"])
def test_bad_values_are_refused_without_a_schema(value):
    """They say what becomes of values that do not fit it."""
    with pytest.raises(ConfigError, match="badValues: needs jsonSchema"):
        parsed(badValues=value)
    assert parsed(badValues=value, jsonSchema="n INT").bad_values == value


def test_end_before_the_start_is_refused():
    with pytest.raises(ConfigError, match="end: before the start"):
        parsed(start="-1h", end="-2h")


def test_cuts_are_refused_where_order_is_needed():
    with pytest.raises(ConfigError) as caught:
        parsed(ordered="true", minPartitions="4", taskBytes="1048576")
    assert caught.value.details.keys() == {"minPartitions", "taskBytes"}
    assert parsed(ordered="false", minPartitions="4").min_partitions == 4


def test_group_that_follows_is_refused_when_only_some_keys_are_read():
    """Its cursors would pass the messages of the other keys, which no one has read."""
    with pytest.raises(ConfigError, match="commitGroup: its cursors would pass") as caught:
        parse_options(LEAST | {"keys": "a", "commitGroup": "spark"}, now_ms=NOW_MS)
    assert caught.value.details.keys() == {"commitGroup"}
    parse_options(LEAST | {"partitions": "3", "commitGroup": "spark"}, now_ms=NOW_MS)


def test_keys_may_be_bytes_and_have_commas():
    assert parsed(keys='["a,b", {"base64": "/w=="}]').keys == {b"a,b", b"\xff"}


def test_several_subjects_have_a_column_of_their_name():
    both = parsed(subject="flights, visits")
    assert (both.subjects, both.columns) == (("flights", "visits"), COLUMNS_OF_SEVERAL)
    assert parsed(subject="flights,visits", columns="value").columns == ("value",)


def test_every_option_is_drawn_in_the_docstring():
    """The table at the top of the module names each option."""
    from keylane.spark import options

    for name in NAMES:
        assert f"\n    {name} " in (options.__doc__ or "")


def test_start_behind_a_backfill_is_a_folder():
    """Of one subject, and no end."""
    assert parsed(start="manifest:/data/orders").start == ReadBound(0, manifest="/data/orders")
    for more in ({"start": "manifest:"}, {"end": "manifest:/d"}):
        with pytest.raises(ConfigError):
            parsed(**more)
    with pytest.raises(ConfigError, match="a backfill has one subject"):
        parse_options(LEAST | {"subject": "a,b", "start": "manifest:/d"}, now_ms=NOW_MS)
