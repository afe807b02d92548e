"""Consumers are killed under each failure policy: a few of each group; `make proof` kills
hundreds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from proof.killed_consumers import GROUPS, kill_consumers

pytestmark = [pytest.mark.crash, pytest.mark.timeout(600)]

KILLS = 3


async def test_groups_keep_what_their_policies_promise_when_members_are_killed(tmp_path: Path):
    told = await kill_consumers(tmp_path, KILLS)
    judged = told["judge"]
    assert not judged["findings"], judged["examples"]
    assert all(told["killed"][group.name] >= KILLS for group in GROUPS)
    assert judged["stored"] >= judged["acked"] > 50
    assert sum(judged["interrupted"].values())
    assert not judged["parked"]
