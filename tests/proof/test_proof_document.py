"""Seeds that failed in a proof are replayed by the tests."""

from __future__ import annotations

import json
from typing import Any

from proof.document import SHARES, SIMULATED, document
from sim.test_simulation import FOUND, SEEDS


def test_seed_that_ended_with_a_fault_is_replayed_by_the_tests() -> None:
    shares = [json.loads(line) for line in SHARES.read_text(encoding="utf-8").splitlines()]
    bad = {
        seed
        for share in shares
        for part in SIMULATED
        for seed in share.get(part, {}).get("bad_seeds", ())
    }
    assert bad
    assert {seed for seed in bad if seed >= SEEDS} <= set(FOUND)


def test_row_of_kill_points_says_which_tests_were_run() -> None:
    share = {
        "date": "d",
        "version": "v",
        "machine": "m",
        "kills": {"of": "crash", "tests": 125, "failed": 0, "seconds": 60},
    }
    assert "| d | v | crash | 125 | 0 | 60 |" in document(json.dumps(share))


def test_row_of_killed_consumers_sums_up_the_groups() -> None:
    judge = {
        "stored": 100,
        "handled": 400,
        "interrupted": {"block-exclusive": 2, "park-shared": 3},
        "set_aside": {"block-exclusive": 0, "park-shared": 7},
        "findings": {"lost": 1},
    }
    consumers = {
        "kills": 50,
        "killed": {"block-exclusive": 50, "park-shared": 51},
        "judge": judge,
        "control_losses": 8,
        "control_inversions": 9,
        "seconds": 60,
    }
    share = {"date": "d", "version": "v", "machine": "m", "consumers": consumers}
    page = document(json.dumps(share))
    assert "| d | v | 50 | 101 | 5 | 100 | 400 | 7 | 1 | 8 | 9 | 60 |" in page
    assert "Kills of the latest run: block-exclusive 50, park-shared 51." in page


def _share(version: str, seeds: int, bad_seeds: list[int]) -> dict[str, Any]:
    return {
        "date": "d",
        "version": version,
        "machine": "m",
        "simulation": {
            "first": 0,
            "seeds": seeds,
            "faults": seeds,
            "events": seeds,
            "violations": len(bad_seeds),
            "with_users": 0,
            "bad_seeds": bad_seeds,
            "seconds": 1,
        },
    }


def test_page_has_rows_of_the_newest_version_and_a_line_of_the_earlier_ones() -> None:
    shares = [
        _share("v1", 10, [3, 4]),
        _share("v2", 20, [5]),
        _share("v3", 30, []),
        _share("v3", 40, []),
    ]

    page = document("\n".join(map(json.dumps, shares)))

    assert [line.split(" | ")[1] for line in page.splitlines() if line.startswith("| d |")] == [
        "v3",
        "v3",
    ]
    assert "On 2 earlier versions: 30 seeds, of which 3 ended with a fault." in page
    assert "in 70 simulated runs" in page
    assert "**Found**: 0 of the simulated runs" in page
