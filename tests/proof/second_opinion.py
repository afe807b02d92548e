"""Has the judge, a program that knows nothing of the product's code, look at the folder of a stage
that has ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

JUDGE = Path(__file__).resolve().parents[1] / "judge" / "judge.py"


def second_opinion(folder: Path) -> dict[str, Any]:
    """The judge's verdict: `stored`, `acked`, `handled`, `findings` by kind, `examples`."""
    command = [sys.executable, str(JUDGE), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    verdict: dict[str, Any] = json.loads(done.stdout)
    return verdict
