"""What every test may rely on."""

from __future__ import annotations

from keylane.rpc.program import allow_open_files

# Tests that end a broker as a kill does leave its files to the garbage collector.
allow_open_files()
