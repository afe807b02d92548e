"""Holds `linearizable.py` against Porcupine: `python cross_check.py [COUNT]`. Needs Go; a tool for
developers.

Histories that are too long for trying every order are judged by both; any difference is printed,
and is exit status 1.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from histories import NO_HOLDER, random_history  # noqa: E402 - the path comes first
from leases import step_lease  # noqa: E402
from linearizable import is_linearizable  # noqa: E402


def main() -> int:
    """Judge COUNT random histories of 5 to 20 calls twice."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 5_000
    rng = random.Random(2)
    histories = [random_history(rng, rng.choice((5, 10, 15, 20))) for _ in range(count)]
    lines = "\n".join(
        json.dumps([[invoked, returned, *call] for invoked, returned, call in history])
        for history in histories
    )
    done = subprocess.run(
        ["go", "run", "."], cwd=HERE, input=lines, capture_output=True, text=True, check=True
    )
    told = [line == "true" for line in done.stdout.split()]
    ours = [is_linearizable(history, NO_HOLDER, step_lease) for history in histories]
    differing = [index for index in range(count) if told[index] != ours[index]]
    for index in differing[:5]:
        print(f"Porcupine says {told[index]}: {histories[index]}")
    print(json.dumps({"histories": count, "linearizable": sum(ours), "differing": len(differing)}))
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
