"""What docs/PROOF.md says beyond the numbers that `make proof` counts."""

from __future__ import annotations

import json

from proof.document import document
from proof.run import DOCUMENT, SHARES
from sim.test_simulation import FOUND, SEEDS


def test_a_seed_that_ended_with_a_fault_is_replayed_by_the_tests() -> None:
    shares = [json.loads(line) for line in SHARES.read_text(encoding="utf-8").splitlines()]
    bad = {seed for share in shares for seed in share.get("simulation", {}).get("bad_seeds", ())}
    assert bad
    assert {seed for seed in bad if seed >= SEEDS} <= set(FOUND)


def test_the_document_is_the_one_that_the_shares_make() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(SHARES.read_text(encoding="utf-8"))
