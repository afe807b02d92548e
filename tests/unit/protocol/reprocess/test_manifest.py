"""Manifests: their bytes, what they cover, and where live reading goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from keylane.errors import Reason
from keylane.protocol.groups import GroupStart, StartAt
from keylane.protocol.reprocess.manifest import (
    JobPiece,
    Manifest,
    SourceRange,
    build_group_start,
    cut_range,
    decode_manifest,
    encode_manifest,
    live_offsets,
    missing_pieces,
)
from support.raising import raises

GOLDEN = Path(__file__).parents[3] / "golden" / "manifest_v1.json"


def piece(partition_id: int, start: int, end: int) -> JobPiece:
    return JobPiece(
        partition_id=partition_id, start=start, end=end, rows=end - start, digest="d", file="f"
    )


MANIFEST = Manifest(
    job="clean",
    code="jobs:clean@0123456789abcdef",
    subject="orders",
    planned_at_ms=1_800_000_000_000,
    ranges=(
        SourceRange(partition_id=3, start=10, end=35, queue=1),
        SourceRange(partition_id=7, start=0, end=0, epoch=1),
    ),
    piece_rows=20,
    pieces=(piece(3, 10, 30), piece(3, 30, 35)),
)


def test_manifest_has_its_bytes_and_reads_back():
    assert encode_manifest(MANIFEST) == GOLDEN.read_bytes()
    assert decode_manifest(GOLDEN.read_bytes(), where="here") == MANIFEST


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"ranges": [{"partition_id": 1, "start": -1, "end": 2}]},
        {"ranges": [{"partition_id": 1, "start": 0, "end": 2}] * 2},
        {"piece_rows": 0},
        {"subject": None},
    ],
)
def test_manifest_is_refused_when_it_is_newer_or_impossible(change):
    data = json.loads(GOLDEN.read_text()) | change
    with raises(Reason.MANIFEST, match="here"):
        decode_manifest(json.dumps(data).encode(), where="here")
    with raises(Reason.MANIFEST):
        decode_manifest(b"\xff{", where="here")


def test_live_offsets_are_the_ends_when_every_piece_is_there():
    assert live_offsets(MANIFEST, where="here") == {3: 35, 7: 0}
    start = build_group_start(MANIFEST, subject="orders", where="here")
    assert start == GroupStart(at=StartAt.CURSORS, at_ms=1_800_000_000_000, cursors={3: 35, 7: 0})
    assert start.stored.cursors is None
    with raises(Reason.MANIFEST, match="of subject orders"):
        build_group_start(MANIFEST, subject="bills", where="here")
    with raises(Reason.MANIFEST, match=r"\[30, 35\) of partition 3"):
        live_offsets(replace(MANIFEST, pieces=MANIFEST.pieces[:1]), where="here")


@given(st.integers(0, 50), st.integers(0, 200), st.integers(1, 60), st.data())
def test_missing_pieces_and_done_ones_make_the_range(start, rows, piece_rows, data):
    whole = SourceRange(partition_id=1, start=start, end=start + rows)
    cuts = cut_range(whole, piece_rows)
    assert [each for cut in cuts for each in range(cut.start, cut.end)] == list(
        range(start, start + rows)
    )
    done = [each for each in cuts if data.draw(st.booleans())]
    manifest = replace(MANIFEST, ranges=(whole,), piece_rows=piece_rows)
    missing = missing_pieces(manifest, [piece(1, each.start, each.end) for each in done])
    assert sorted([*missing, *done], key=lambda each: each.start) == cuts
