"""The options of the Spark reader: what is understood, and that all problems are told at once."""

from __future__ import annotations

import pytest

from keylane.arrow.schema import COLUMNS
from keylane.arrow.selection import EARLIEST, LATEST, Edge, ReadBound, ReadOptions
from keylane.protocol.errors import ConfigError
from keylane.spark.options import NAMES, parse_options

LEAST = {"meta": "127.0.0.1:7000", "subject": "flights"}


def parsed(**more: str) -> ReadOptions:
    return parse_options(LEAST | more)


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
            "start": '{"3": 10}',
            "end": "LATEST",
            "columns": "offset , key",
            "BATCHROWS": "100",
            "gcfreeze": "FALSE",
        }
    )
    assert parsed == ReadOptions(
        meta=("a:1", "[::1]:2"),
        subjects=("flights",),
        partitions=frozenset({3, 4}),
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
        *[("subject", value) for value in ("../x", "x" * 300, "a b", "\0")],
        *[("partitions", value) for value in ("a", "0", "-1", "3,", "1.5", "3;4", "٣", "9" * 5_000)],
        *[
            (bound, value)
            for bound in ("start", "end")
            for value in (
                "yesterday", "{", "{}", "[]", "7", "null", '{"3": -1}', '{"3": 1.5}', '{"3": "1"}',
                '{"3": true}', '{"a": 1}', '{"3": 9223372036854775808}', '{"3": "latest"}',
                "[" * 100_000,
            )
        ],
        *[("columns", value) for value in ("", "nothing", "offset,offset", "offset,", "Offset")],
        *[("batchRows", value) for value in ("0", "-1", "1000001", "many", "1e3", "9" * 99, "")],
        *[("gcFreeze", value) for value in ("yes", "1")],
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_value_that_cannot_be_is_refused_by_its_name(name, value):
    """A bad value is a ConfigError that names the option and stays short."""
    with pytest.raises(ConfigError) as caught:
        parse_options(LEAST | {name: value})
    assert caught.value.details.keys() == {name}
    assert len(str(caught.value)) < 600


def test_options_name_all_problems_at_once():
    """Unknown, missing and impossible options are in one error."""
    with pytest.raises(ConfigError) as caught:
        parse_options({"subjects": "flights", "start": "soon", "path": "/x", "batchRows": "0"})
    assert caught.value.details.keys() == {
        "path",
        "subjects",
        "meta",
        "subject",
        "start",
        "batchRows",
    }
    assert "unknown; there are meta, subject" in caught.value.message


def test_every_option_is_drawn_in_the_docstring():
    """The table at the top of the module names each option."""
    from keylane.spark import options

    for name in NAMES:
        assert f"\n    {name} " in (options.__doc__ or "")
