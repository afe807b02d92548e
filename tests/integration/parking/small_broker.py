"""A broker whose groups may park two keys on a partition: a script of `test_full_parking.py`."""

from __future__ import annotations

import sys

from keylane.broker.__main__ import main
from keylane.broker.partition import park_checks

park_checks.PARKED_KEYS_MAX = 2

if __name__ == "__main__":
    sys.exit(main())
