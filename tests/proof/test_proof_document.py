"""Seeds that failed in a proof are replayed by the tests."""

from __future__ import annotations

import json

from proof.run import SHARES
from sim.test_simulation import FOUND, SEEDS


def test_seed_that_ended_with_a_fault_is_replayed_by_the_tests() -> None:
    shares = [json.loads(line) for line in SHARES.read_text(encoding="utf-8").splitlines()]
    bad = {
        seed
        for share in shares
        for part in ("simulation", "features")
        for seed in share.get(part, {}).get("bad_seeds", ())
    }
    assert bad
    assert {seed for seed in bad if seed >= SEEDS} <= set(FOUND)
