"""What a soak finds: messages that are lost or out of order, and figures that grow."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from soak.flatness import Sample, folder_bytes, trend, trends
from soak.records import judge
from soak.run import soak
from support.postgres import running_postgres


def test_trend_is_flat_when_a_figure_only_swings_and_not_when_it_grows() -> None:
    rng = random.Random(1)
    saw = [(float(at), 100 + at % 300 / 10 + rng.random()) for at in range(0, 3_600, 30)]
    assert trend(saw).is_flat
    grown = [(at, value * (1 + 0.1 * at / 3_600)) for at, value in saw]
    assert trend(grown).growth_per_hour == pytest.approx(0.1, abs=0.03)
    assert not trend(grown).is_flat
    once = [(at, value + 1_000 * (at == 1_800)) for at, value in saw]
    assert trend(once).growth_per_hour == pytest.approx(trend(saw).growth_per_hour, abs=0.01)


def test_trends_leave_out_what_a_restart_has_begun_again() -> None:
    samples = [Sample(float(at), 1 + (at > 90), 10**8, 20, 10**6) for at in range(100)]
    found = trends(samples)
    assert found["rss_bytes"] is None
    assert found["disk_bytes"] is not None
    assert found["disk_bytes"].is_flat
    assert trends(samples[:80])["rss_bytes"] is not None
    assert trends(samples[:5]) == dict.fromkeys(found)
    assert trends([]) == dict.fromkeys(found)


def test_verdict_names_what_is_lost_and_what_was_handled_after_a_later_one() -> None:
    acked = [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    handled = [(5, "a", 1), (1, "a", 0), (3, "a", 2), (4, "a", 0)]
    found = judge(acked, handled)
    assert (found.acked, found.handled, found.handled_again) == (4, 3, 1)
    assert found.lost == [("b", 0)]
    assert found.out_of_order == [("a", 1)]


def test_folder_size_counts_all_files_below_it(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file").write_bytes(b"x" * 100_000)
    assert 100_000 <= folder_bytes(tmp_path) < 150_000


@pytest.mark.crash
@pytest.mark.timeout(600)
async def test_soak_loses_nothing_when_it_is_short(tmp_path: Path) -> None:
    with running_postgres() as postgres:
        found = await soak(tmp_path, postgres, 30.0, seed=2, act_s=1.0)
    faults = {name: found[name] for name in ("lost", "out_of_order", "not_drained", "dead")}
    assert faults == {"lost": 0, "out_of_order": 0, "not_drained": [], "dead": []}, found
    assert found["acked"] > 100
    assert len(found["happened"]) > 4
