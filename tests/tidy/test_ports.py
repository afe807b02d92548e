"""Ports of tests: two runs on one machine are never given the same one."""

from __future__ import annotations

import os

from support.ports import PER_PROCESS, free_port, own_range


def test_range_of_ports_has_one_process_until_it_ends():
    """Also of two processes that both are the first workers of their runs."""
    ours = free_port()
    first, holder = own_range()
    second, other = own_range()
    os.close(other)
    again, other = own_range()
    os.close(other)
    os.close(holder)
    assert abs(second - first) >= PER_PROCESS
    assert again == second, "its process has ended"
    assert not first <= ours < first + PER_PROCESS
