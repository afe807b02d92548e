"""The measured parts of a broker's store, each to be run in a process of its own: `store_parts.py
PART FOLDER INDEX JSON`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from store_appends import append, commits
from store_fillings import many, restart
from store_reads import lookup, reading
from store_starts import fill, start

from keylane.broker.app import tune_interpreter

PARTS = {
    function.__name__: function
    for function in (append, commits, reading, many, restart, fill, start, lookup)
}


def main() -> None:
    part, folder, index, arguments = sys.argv[1:]
    tune_interpreter()  # as the program does
    Path(folder).mkdir(parents=True, exist_ok=True)
    print(json.dumps(asyncio.run(PARTS[part](folder, index, **json.loads(arguments)))))


if __name__ == "__main__":
    main()
