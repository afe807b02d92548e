"""What every test may rely on."""

from __future__ import annotations

import signal

from keylane.rpc.program import allow_open_files

# Tests that end a broker as a kill does leave its files to the garbage collector.
allow_open_files()

# Whoever runs the tests in the background may have SIGINT ignored, and children would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
