"""The whole system in virtual time: many seeds, the same run twice, the seeds that found something once."""

import os
from concurrent.futures import as_completed

import pytest

from sim.run import hunts, outcomes, pool, run_one

SEEDS = 300
FOUND_SOMETHING = {
    30: "a consumer that keeps its token did not follow its broker to a new address",
    67: "a lapsed lease was taken up again under a token that had been given back",
    88: "under one token, messages were handled again that had been handled before",
    139: "BEST_TRIED without another partition sent again under a new epoch, and was stored twice",
    145: "a cursor was told that had met a full disk and was not durable",
    445: "a message given up after a try without an answer was told as not done, and was stored",
    38: "a STRICT producer gave a message up when a broker's disk failed",
}
WORKERS = os.cpu_count() or 1


def _told(outcome) -> str:
    lines = outcome["findings"]["examples"] + outcome["problems"]
    return f"make sim SEED={outcome['seed']}\n" + "\n".join(lines[:8])


@pytest.mark.timeout(1_800)
def test_seeds_end_without_an_anomaly():
    """Whatever fails and comes back, order, durability and exclusivity hold, and everything drains."""
    bad = [_told(one) for one in outcomes(0, SEEDS, WORKERS) if one["violations"]]
    assert not bad, "\n\n".join(bad)


@pytest.mark.timeout(1_200)
def test_the_same_seed_is_the_same_run_in_another_process():
    """Alone or after others, in this process or that one: the same trace, to the last event."""
    seeds = [3, 12, 67, 145]
    traces: list[dict[int, str]] = []
    for order in (seeds, seeds[::-1]):
        with pool(1) as executor:
            done = [executor.submit(run_one, seed) for seed in order]
            traces.append({one.result()["seed"]: one.result()["trace"] for one in done})
    assert traces[0] == traces[1]
    assert len(set(traces[0].values())) == len(seeds)


@pytest.mark.timeout(1_200)
def test_what_was_found_once_stays_mended():
    """Each of these seeds showed a real fault; none does now."""
    with pool(WORKERS) as executor:
        done = as_completed([executor.submit(run_one, seed) for seed in FOUND_SOMETHING])
        bad = [_told(one.result()) for one in done if one.result()["violations"]]
    assert not bad, "\n\n".join(bad)


SAMPLE = (
    "no_token_check",
    "ack_before_fsync",
    "token_reused",
    "lanes_ignore_keys",
    "key_hashed_anew",
)


@pytest.mark.timeout(1_200)
def test_a_sample_of_mutants_is_caught():
    """Bugs put in on purpose are found within a few seeds; `make sim MUTANTS=1` hunts all of them."""
    missed = [one["mutant"] for one in hunts(list(SAMPLE), 60, WORKERS) if not one["caught"]]
    assert not missed
