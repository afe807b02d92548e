"""Seeds that failed in a proof are replayed by the tests."""

from __future__ import annotations

import json

from proof.document import document
from proof.run import SHARES, SIMULATED
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
