"""How far the copy of a broker group is that moves, and how long it takes."""

from __future__ import annotations

from keylane.cli.commands.cluster.moving import CopyProgress


def test_progress_says_how_long_the_rest_takes_once_bytes_have_arrived() -> None:
    progress = CopyProgress("copying g2 to b")
    assert progress.text() == "copying g2 to b: waiting for its follower"
    progress.note(None, 100.0)
    assert progress.text() == "copying g2 to b: waiting for its follower"
    progress.note(3_000_000_000, 100.0)
    assert progress.text() == "copying g2 to b: 3.0 GB left"
    progress.note(2_000_000_000, 200.0)
    assert progress.text() == "copying g2 to b: 2.0 GB left, about 3 min"
    progress.note(0, 400.0)
    assert progress.text() == "copying g2 to b: 0 B left, about 0.0 s"


def test_progress_says_no_time_when_messages_arrive_faster_than_they_are_copied() -> None:
    progress = CopyProgress("copying g2 to b")
    progress.note(1_000, 1.0)
    progress.note(5_000, 2.0)
    assert progress.text() == "copying g2 to b: 5.0 kB left"
